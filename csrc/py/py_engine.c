/* Engine: a rank as a Python object. Each method checks its arguments with the GIL, gives it up for
 * the call into train/, and takes it back for the result. While a call runs the engine is busy: a
 * second Python thread gets an error, not a crash. train/ asks poll_signals about every 50 ms,
 * which takes the GIL for a moment and lets Python's signal handlers run; what they raise stays
 * pending in this thread, ends the call, and is what comes out of it.
 * After a fork the child's copy refuses to work and frees nothing: its threads are the parent's. */
#include <string.h>
#include <unistd.h>

#include "py/py.h"
#include "state/layout.h"

struct engine {
    PyObject_HEAD struct slide_train *train; /* NULL: closed, or not open yet */
    pid_t pid;
    bool busy;
    int32_t vocab;
    int world;
    PyObject *progress; /* of the load or store under way */
};

/* ---- signals and progress, called without the GIL from the thread of the call ---- */

static int poll_signals(void *arg, struct slide_err *err)
{
    (void)arg;
    PyGILState_STATE gil = PyGILState_Ensure();
    if (!PyErr_Occurred())
        PyErr_CheckSignals(); /* nothing, unless this is Python's main thread */
    PyObject *raised = PyErr_Occurred();
    if (raised) /* what other ranks read; here the exception itself comes out */
        slide_err_set(err, SLIDE_EINTR, "interrupted: %s", ((PyTypeObject *)raised)->tp_name);
    PyGILState_Release(gil);
    return raised ? -1 : 0;
}

static int tell_progress(void *arg, uint64_t done, uint64_t total, struct slide_err *err)
{
    struct engine *self = arg;
    PyGILState_STATE gil = PyGILState_Ensure();
    PyObject *result = PyObject_CallFunction(self->progress, "KK", (unsigned long long)done,
                                             (unsigned long long)total);
    PyObject *raised = PyErr_Occurred();
    if (!result)
        slide_err_set(err, SLIDE_EINTR, "the progress function raised %s",
                      raised ? ((PyTypeObject *)raised)->tp_name : "nothing");
    Py_XDECREF(result);
    PyGILState_Release(gil);
    return result ? 0 : -1;
}

/* ---- the frame of a call ---- */

static struct slide_py_state *state_of(struct engine *self)
{
    return PyType_GetModuleState(Py_TYPE(self));
}

/* -1 with an exception unless the engine can take a call now; then it is busy until end(). */
static int begin(struct engine *self)
{
    if (!self->train) {
        PyErr_SetString(PyExc_RuntimeError, "the engine is closed");
        return -1;
    }
    if (self->pid != getpid()) {
        PyErr_Format(PyExc_RuntimeError,
                     "the engine belongs to process %d, of which this one is a fork",
                     (int)self->pid);
        return -1;
    }
    if (self->busy) {
        PyErr_SetString(PyExc_RuntimeError,
                        "the engine is busy: another call on it has not returned yet");
        return -1;
    }
    self->busy = true;
    return 0;
}

/* Ends what begin() began. -1 when the call failed, or when a signal handler raised though it
 * didn't. */
static int end(struct engine *self, int failed, const struct slide_err *err)
{
    self->busy = false;
    if (failed)
        slide_py_raise(state_of(self), err);
    return PyErr_Occurred() ? -1 : 0;
}

#define WITHOUT_GIL(failed, call)                                                                  \
    do {                                                                                           \
        Py_BEGIN_ALLOW_THREADS;                                                                    \
        failed = (call);                                                                           \
        Py_END_ALLOW_THREADS;                                                                      \
    } while (0)

/* ---- life ---- */

static PyObject *engine_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"spec", NULL};
    PyObject *dict;
    struct slide_train_spec spec;
    struct slide_err err = SLIDE_ERR_INIT;
    struct engine *self = NULL;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O:Engine", names, &dict))
        return NULL;
    PyObject *keep = PyList_New(0);
    if (!keep || slide_py_spec(dict, &spec, keep))
        goto out;
    self = (struct engine *)type->tp_alloc(type, 0);
    if (!self)
        goto out;
    self->pid = getpid();
    self->vocab = spec.config.vocab;
    self->world = spec.world;
    spec.poll = poll_signals;
    int failed;
    struct slide_train *train = NULL;
    WITHOUT_GIL(failed, slide_train_open(&train, &spec, &err));
    self->train = train;
    if (end(self, failed, &err))
        Py_CLEAR(self);
out:
    Py_XDECREF(keep);
    return (PyObject *)self;
}

static void close_train(struct engine *self)
{
    struct slide_train *train = self->train;
    self->train = NULL; /* before the GIL goes: nobody finds it any more */
    if (!train || self->pid != getpid())
        return;
    Py_BEGIN_ALLOW_THREADS;
    slide_train_close(train);
    Py_END_ALLOW_THREADS;
}

static PyObject *engine_close(struct engine *self, PyObject *ignored)
{
    (void)ignored;
    if (self->train && self->pid == getpid()) {
        if (begin(self))
            return NULL;
        close_train(self);
        self->busy = false;
        if (PyErr_Occurred()) /* a signal, while threads were joined */
            return NULL;
    }
    self->train = NULL;
    Py_RETURN_NONE;
}

static int engine_traverse(struct engine *self, visitproc visit, void *arg)
{
    Py_VISIT(Py_TYPE(self));
    Py_VISIT(self->progress);
    return 0;
}

static int engine_clear(struct engine *self)
{
    Py_CLEAR(self->progress);
    return 0;
}

static void engine_dealloc(struct engine *self)
{
    PyTypeObject *type = Py_TYPE(self);
    PyObject_GC_UnTrack(self);
    if (self->train) {
        /* An exception may be on its way up; what runs while the GIL is gone must not find it. */
#if PY_VERSION_HEX >= 0x030c0000
        PyObject *raised = PyErr_GetRaisedException();
        close_train(self);
        PyErr_SetRaisedException(raised);
#else
        PyObject *class, *value, *traceback;
        PyErr_Fetch(&class, &value, &traceback);
        close_train(self);
        PyErr_Restore(class, value, traceback);
#endif
    }
    engine_clear(self);
    type->tp_free(self);
    Py_DECREF(type);
}

/* ---- weights in and out ---- */

typedef int move_fn(struct slide_train *, const struct slide_part *, int, slide_progress_fn *,
                    void *, struct slide_err *);

static PyObject *move(struct engine *self, PyObject *args, PyObject *kwargs, move_fn *function)
{
    static char *names[] = {"parts", "progress", NULL};
    PyObject *list, *progress = Py_None;
    struct slide_err err = SLIDE_ERR_INIT;
    struct slide_part *part = NULL;
    int count, failed = -1;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O|O", names, &list, &progress))
        return NULL;
    if (progress != Py_None && !PyCallable_Check(progress)) {
        PyErr_Format(PyExc_TypeError, "progress: a callable or None is wanted, not %.100s",
                     Py_TYPE(progress)->tp_name);
        return NULL;
    }
    PyObject *keep = PyList_New(0);
    if (!keep || !(part = slide_py_parts(list, &count, keep)) || begin(self))
        goto out;
    self->progress = Py_NewRef(progress);
    WITHOUT_GIL(failed, function(self->train, part, count,
                                 progress == Py_None ? NULL : tell_progress, self, &err));
    Py_CLEAR(self->progress);
    failed = end(self, failed, &err);
out:
    PyMem_Free(part);
    Py_XDECREF(keep);
    return failed ? NULL : Py_NewRef(Py_None);
}

static PyObject *engine_load(struct engine *self, PyObject *args, PyObject *kwargs)
{
    return move(self, args, kwargs, slide_train_load);
}

static PyObject *engine_store(struct engine *self, PyObject *args, PyObject *kwargs)
{
    return move(self, args, kwargs, slide_train_store);
}

static PyObject *engine_init(struct engine *self, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"seed", "std", NULL};
    PyObject *seed_object, *std_object;
    uint64_t seed;
    double std;
    struct slide_err err = SLIDE_ERR_INIT;
    int failed;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "OO:init", names, &seed_object, &std_object) ||
        slide_py_uint64(seed_object, "seed", &seed) || slide_py_float(std_object, "std", &std))
        return NULL;
    if (std < 0) {
        PyErr_Format(PyExc_ValueError, "std: %S is negative", std_object);
        return NULL;
    }
    if (begin(self))
        return NULL;
    WITHOUT_GIL(failed, slide_train_init(self->train, seed, std, &err));
    return end(self, failed, &err) ? NULL : Py_NewRef(Py_None);
}

/* ---- passes ---- */

static PyObject *step_result(const struct slide_step_out *out)
{
    return Py_BuildValue(
        "{sd sK sK sN sK si sd sd sd sK}", "loss", out->loss, "targets",
        (unsigned long long)out->targets, "tokens", (unsigned long long)out->tokens, "skipped",
        PyBool_FromLong(out->skipped), "nonfinite", (unsigned long long)out->nonfinite,
        "nonfinite_unit", out->nonfinite_unit, "grad_norm", out->grad_norm, "seconds", out->seconds,
        "exposed_update_seconds", out->exposed, "step", (unsigned long long)out->step);
}

static PyObject *engine_step(struct engine *self, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"batches", "lr", NULL};
    PyObject *list, *lr_object, *result = NULL;
    double lr;
    int count, failed;
    struct slide_batch *batch = NULL;
    struct slide_step_out out;
    struct slide_err err = SLIDE_ERR_INIT;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "OO:step", names, &list, &lr_object) ||
        slide_py_float(lr_object, "lr", &lr))
        return NULL;
    PyObject *keep = PyList_New(0);
    if (!keep || !(batch = slide_py_batches(list, &count, keep)) || begin(self))
        goto out;
    WITHOUT_GIL(failed, slide_train_step(self->train, batch, count, lr, &out, &err));
    if (!end(self, failed, &err))
        result = step_result(&out);
out:
    PyMem_Free(batch);
    Py_XDECREF(keep);
    return result;
}

static PyObject *engine_flush(struct engine *self, PyObject *ignored)
{
    (void)ignored;
    struct slide_err err = SLIDE_ERR_INIT;
    int failed;
    if (begin(self))
        return NULL;
    WITHOUT_GIL(failed, slide_train_flush(self->train, &err));
    return end(self, failed, &err) ? NULL : Py_NewRef(Py_None);
}

static PyObject *engine_evaluate(struct engine *self, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"batches", NULL};
    PyObject *list, *result = NULL;
    int count, failed;
    double loss;
    uint64_t targets;
    struct slide_batch *batch = NULL;
    struct slide_err err = SLIDE_ERR_INIT;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O:evaluate", names, &list))
        return NULL;
    PyObject *keep = PyList_New(0);
    if (!keep || !(batch = slide_py_batches(list, &count, keep)) || begin(self))
        goto out;
    WITHOUT_GIL(failed, slide_train_evaluate(self->train, batch, count, &loss, &targets, &err));
    if (!end(self, failed, &err))
        result = Py_BuildValue("dK", loss, (unsigned long long)targets);
out:
    PyMem_Free(batch);
    Py_XDECREF(keep);
    return result;
}

static PyObject *engine_logits(struct engine *self, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"batch", NULL};
    PyObject *dict, *array = NULL;
    struct slide_batch batch;
    struct slide_err err = SLIDE_ERR_INIT;
    float *data;
    int failed = -1;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O:logits", names, &dict))
        return NULL;
    PyObject *keep = PyList_New(0);
    if (!keep || slide_py_batch(dict, "batch", &batch, keep) || begin(self))
        goto out;
    const Py_ssize_t shape[3] = {batch.rows, batch.seq, self->vocab};
    array = slide_py_new_f32(3, shape, &data); /* refuses what does not fit */
    if (array)
        WITHOUT_GIL(failed, slide_train_logits(self->train, &batch, data, &err));
    if (end(self, failed, &err))
        Py_CLEAR(array);
out:
    Py_XDECREF(keep);
    return array;
}

/* ---- reading the state ---- */

static PyObject *engine_tensor(struct engine *self, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"name", "what", NULL};
    PyObject *name_object, *what_object, *array = NULL;
    const char *name, *what;
    struct slide_place place;
    struct slide_err err = SLIDE_ERR_INIT;
    float *data;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "OO:tensor", names, &name_object,
                                     &what_object) ||
        slide_py_str(name_object, "name", &name) || slide_py_str(what_object, "what", &what) ||
        begin(self))
        return NULL;
    int failed = slide_train_find(self->train, name, &place, &err);
    if (!failed) {
        const Py_ssize_t shape[2] = {place.rows, place.cols};
        array = slide_py_new_f32(place.cols == 1 ? 1 : 2, shape, &data);
        failed = -1;
        if (array)
            WITHOUT_GIL(failed, slide_train_tensor(self->train, name, what, data, &err));
    }
    if (end(self, failed, &err))
        Py_CLEAR(array);
    return array;
}

static PyObject *describe(const char *name, const struct slide_place *place)
{
    PyObject *decay = place->decay ? Py_True : Py_False;
    long long rows = place->rows, cols = place->cols;
    return cols == 1 ? Py_BuildValue("s(L)O", name, rows, decay)
                     : Py_BuildValue("s(LL)O", name, rows, cols, decay);
}

static PyObject *engine_tensors(struct engine *self, PyObject *ignored)
{
    (void)ignored;
    char name[160];
    struct slide_place place;
    if (begin(self))
        return NULL;
    PyObject *list = PyList_New(0);
    for (int i = 0; list && slide_train_name(self->train, i, name, sizeof name, &place); i++) {
        PyObject *entry = describe(name, &place);
        if (!entry || PyList_Append(list, entry))
            Py_CLEAR(list);
        Py_XDECREF(entry);
    }
    self->busy = false;
    return list;
}

static PyObject *engine_plan(struct engine *self, PyObject *ignored)
{
    (void)ignored;
    int items;
    if (begin(self))
        return NULL;
    const struct slide_plan_item *plan = slide_train_plan(self->train, &items);
    PyObject *dict = PyDict_New();
    for (int i = 0; dict && i < items; i++) {
        double number = plan[i].value;
        bool whole = number == (double)(long long)number;
        PyObject *value = plan[i].text ? slide_py_text(plan[i].text)
                          : whole      ? PyLong_FromDouble(number)
                                       : PyFloat_FromDouble(number);
        if (!value || PyDict_SetItemString(dict, plan[i].name, value))
            Py_CLEAR(dict);
        Py_XDECREF(value);
    }
    self->busy = false;
    return dict;
}

/* ---- among ranks ---- */

#define GATHER_MAX 16

static PyObject *rows_of(const double *all, int rows, Py_ssize_t cols)
{
    PyObject *list = PyList_New(rows);
    for (int r = 0; list && r < rows; r++) {
        PyObject *row = PyList_New(cols);
        for (Py_ssize_t i = 0; row && i < cols; i++) {
            PyObject *value = PyFloat_FromDouble(all[r * cols + i]);
            if (value)
                PyList_SET_ITEM(row, i, value);
            else
                Py_CLEAR(row);
        }
        if (row)
            PyList_SET_ITEM(list, r, row);
        else
            Py_CLEAR(list);
    }
    return list;
}

static PyObject *engine_gather(struct engine *self, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"values", "kind", NULL};
    PyObject *values, *result = NULL;
    const char *kind = "gather";
    double own[GATHER_MAX], *all = NULL;
    struct slide_err err = SLIDE_ERR_INIT;
    int failed;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O|s:gather", names, &values, &kind))
        return NULL;
    PyObject *tuple = PySequence_Tuple(values);
    if (!tuple)
        return NULL;
    Py_ssize_t n = PyTuple_GET_SIZE(tuple);
    if (n > GATHER_MAX) {
        PyErr_Format(PyExc_ValueError, "values: %zd of them, at most %d", n, GATHER_MAX);
        goto out;
    }
    for (Py_ssize_t i = 0; i < n; i++) {
        own[i] = PyFloat_AsDouble(PyTuple_GET_ITEM(tuple, i)); /* Inf and NaN may pass */
        if (own[i] == -1.0 && PyErr_Occurred())
            goto out;
    }
    all = PyMem_Calloc((size_t)self->world * (size_t)n + 1, sizeof *all);
    if (!all) {
        PyErr_NoMemory();
        goto out;
    }
    if (begin(self))
        goto out;
    WITHOUT_GIL(failed, slide_train_gather(self->train, kind, own, (int)n, all, &err));
    if (!end(self, failed, &err))
        result = rows_of(all, self->world, n);
out:
    PyMem_Free(all);
    Py_DECREF(tuple);
    return result;
}

/* With the GIL all the time, so that no close() comes between; it only sets words and wakes. */
static PyObject *engine_device_calls(struct engine *self, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"fail_at", NULL};
    PyObject *object = NULL;
    long long n = 0;
    uint64_t calls = 0, allocs = 0;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "|O:device_calls", names, &object) ||
        (object && slide_py_int(object, "fail_at", 0, INT64_MAX, &n)) || begin(self))
        return NULL;
    slide_train_device_counts(self->train, &calls, &allocs);
    slide_train_device_fail_at(self->train, (uint64_t)n);
    struct slide_err err = SLIDE_ERR_INIT;
    if (end(self, 0, &err))
        return NULL;
    return Py_BuildValue("KK", (unsigned long long)calls, (unsigned long long)allocs);
}

static PyObject *engine_abort(struct engine *self, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"message", NULL};
    PyObject *message;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "U:abort", names, &message))
        return NULL;
    PyObject *bytes = PyUnicode_AsEncodedString(message, "utf-8", "backslashreplace");
    if (!bytes)
        return NULL;
    if (self->train && self->pid == getpid())
        slide_train_abort(self->train, PyBytes_AS_STRING(bytes));
    Py_DECREF(bytes);
    Py_RETURN_NONE;
}

/* ---- the type ---- */

#define METHOD(name, signature, doc)                                                               \
    {#name, (PyCFunction)(void (*)(void))engine_##name, METH_VARARGS | METH_KEYWORDS,              \
     #name "($self, " signature ")\n--\n\n" doc}
#define METHOD0(name, doc)                                                                         \
    {#name, (PyCFunction)(void (*)(void))engine_##name, METH_NOARGS, #name "($self)\n--\n\n" doc}

static PyMethodDef engine_methods[] = {
    METHOD(load, "parts, progress=None", "Reads this rank's slices of the parts. Collective."),
    METHOD(store, "parts, progress=None", "Writes this rank's slices of the parts. Collective."),
    METHOD(init, "seed, std", "Fresh weights. Collective."),
    METHOD(step, "batches, lr", "One optimizer step over the micro-batches. Collective."),
    METHOD0(flush, "Until the updates of all steps are done, on all ranks."),
    METHOD(evaluate, "batches", "(sum of the loss, valid targets) of this rank."),
    METHOD(logits, "batch", "FP32 [B, T, V]."),
    METHOD(tensor, "name, what", "A tensor's master, exp_avg, exp_avg_sq or grad as FP32."),
    METHOD0(tensors, "(name, shape, decays) of each tensor."),
    METHOD(gather, "values, kind='gather'", "The values of every rank. Collective."),
    METHOD(abort, "message", "Ends every rank's waits with this message as the cause."),
    METHOD(device_calls, "fail_at=0",
           "(calls, allocations) so far; the fail_at-th next call fails."),
    METHOD0(plan, "What was planned: bytes by name and so on."),
    METHOD0(close, "Gives everything back. A second time it does nothing."),
    {NULL, NULL, 0, NULL},
};

static PyType_Slot engine_slots[] = {
    {Py_tp_doc, "Engine(spec)\n--\n\n"
                "One rank of a training: device, share of the host state, schedule."},
    {Py_tp_new, engine_new},
    {Py_tp_dealloc, engine_dealloc},
    {Py_tp_traverse, engine_traverse},
    {Py_tp_clear, engine_clear},
    {Py_tp_methods, engine_methods},
    {0, NULL},
};

PyType_Spec slide_py_engine_spec = {
    .name = "slidedp._slidedp.Engine",
    .basicsize = sizeof(struct engine),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_IMMUTABLETYPE,
    .slots = engine_slots,
};
