/* Engine: a rank as a Python object. Each method checks its arguments with the GIL, gives it up for
 * the call into train/, and takes it back for the result. While a call runs the engine is busy: a
 * second Python thread gets an error, not a crash. train/ asks poll_signals about every 50 ms,
 * which takes the GIL for a moment and lets Python's signal handlers run. */
#include <string.h>

#include "base/mem.h"
#include "py/py.h"
#include "state/layout.h"

struct engine {
    PyObject_HEAD struct slide_train *train;
    bool busy;
    PyObject *progress; /* borrowed for a load or store */
};

/* ---- signals and progress, called without the GIL from the thread of the call ---- */

static int poll_signals(void *arg, struct slide_err *err)
{
    (void)arg;
    PyGILState_STATE gil = PyGILState_Ensure();
    int failed = PyErr_Occurred() || PyErr_CheckSignals();
    PyGILState_Release(gil);
    return failed ? slide_err_set(err, SLIDE_EINTR, "interrupted") : 0;
}

static int tell_progress(void *arg, uint64_t done, uint64_t total, struct slide_err *err)
{
    struct engine *self = arg;
    PyGILState_STATE gil = PyGILState_Ensure();
    PyObject *result = PyObject_CallFunction(self->progress, "KK", (unsigned long long)done,
                                             (unsigned long long)total);
    Py_XDECREF(result);
    PyGILState_Release(gil);
    return result ? 0 : slide_err_set(err, SLIDE_EINTR, "the progress function raised");
}

/* ---- the frame of a call ---- */

static struct slide_py_state *state_of(struct engine *self)
{
    return PyType_GetModuleState(Py_TYPE(self));
}

static int begin(struct engine *self)
{
    if (!self->train) {
        PyErr_SetString(PyExc_RuntimeError, "the engine is closed");
        return -1;
    }
    if (self->busy) {
        PyErr_SetString(PyExc_RuntimeError, "the engine is in use by another thread");
        return -1;
    }
    self->busy = true;
    return 0;
}

/* Runs a call of train/ without the GIL; `failed` is its result. */
#define WITHOUT_GIL(self, failed, call)                                                            \
    do {                                                                                           \
        Py_BEGIN_ALLOW_THREADS;                                                                    \
        failed = (call);                                                                           \
        Py_END_ALLOW_THREADS;                                                                      \
        (self)->busy = false;                                                                      \
    } while (0)

/* ---- life ---- */

static PyObject *engine_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"spec", NULL};
    PyObject *dict;
    struct slide_train_spec spec;
    struct slide_err err = SLIDE_ERR_INIT;
    uint8_t *slides;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O:Engine", names, &dict))
        return NULL;
    if (slide_py_spec(dict, &spec, &slides))
        return NULL;
    struct engine *self = (struct engine *)type->tp_alloc(type, 0);
    if (!self) {
        PyMem_Free(slides);
        return NULL;
    }
    spec.poll = poll_signals;
    int failed;
    WITHOUT_GIL(self, failed, slide_train_open(&self->train, &spec, &err));
    PyMem_Free(slides);
    if (failed) {
        slide_py_raise(state_of(self), &err);
        Py_DECREF(self);
        return NULL;
    }
    return (PyObject *)self;
}

static PyObject *engine_close(struct engine *self, PyObject *ignored)
{
    (void)ignored;
    if (!self->train)
        Py_RETURN_NONE;
    if (begin(self))
        return NULL;
    struct slide_train *train = self->train;
    self->train = NULL;
    Py_BEGIN_ALLOW_THREADS;
    slide_train_close(train);
    Py_END_ALLOW_THREADS;
    self->busy = false;
    Py_RETURN_NONE;
}

static int engine_traverse(PyObject *self, visitproc visit, void *arg)
{
    Py_VISIT(Py_TYPE(self));
    return 0;
}

static void engine_dealloc(struct engine *self)
{
    PyTypeObject *type = Py_TYPE(self);
    PyObject_GC_UnTrack(self);
    if (self->train) {
        Py_BEGIN_ALLOW_THREADS;
        slide_train_close(self->train);
        Py_END_ALLOW_THREADS;
    }
    type->tp_free(self);
    Py_DECREF(type);
}

/* ---- parts ---- */

static PyObject *item(PyObject *dict, const char *key, const char *what, Py_ssize_t i)
{
    PyObject *value = PyDict_Check(dict) ? PyDict_GetItemString(dict, key) : NULL;
    if (!value)
        PyErr_Format(PyExc_TypeError, "%s %zd has no '%s'", what, i, key);
    return value;
}

static int read_part(PyObject *dict, Py_ssize_t i, struct slide_part *part)
{
    PyObject *name = item(dict, "name", "part", i), *path = item(dict, "path", "part", i);
    PyObject *offset = item(dict, "offset", "part", i), *dtype = item(dict, "dtype", "part", i);
    PyObject *count = item(dict, "count", "part", i);
    long long at, elements;
    if (!name || !path || !offset || !dtype || !count || slide_py_text(name, "name", &part->name) ||
        slide_py_text(path, "path", &part->path) ||
        slide_py_int(offset, "offset", 0, INT64_MAX, &at) ||
        slide_py_int(count, "count", 0, INT64_MAX / 4, &elements) ||
        slide_py_dtype(dtype, "dtype", &part->dtype))
        return -1;
    part->offset = (uint64_t)at;
    part->count = (uint64_t)elements;
    return 0;
}

typedef int move_fn(struct slide_train *, const struct slide_part *, int, slide_progress_fn *,
                    void *, struct slide_err *);

static PyObject *move(struct engine *self, PyObject *args, PyObject *kwargs, move_fn *function)
{
    static char *names[] = {"parts", "progress", NULL};
    PyObject *list, *progress = Py_None;
    struct slide_err err = SLIDE_ERR_INIT;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O|O", names, &list, &progress))
        return NULL;
    PyObject *parts = PySequence_Fast(list, "parts: a sequence is wanted");
    if (!parts)
        return NULL;
    Py_ssize_t n = PySequence_Fast_GET_SIZE(parts);
    struct slide_part *part = PyMem_Calloc((size_t)n + 1, sizeof *part);
    PyObject *result = NULL;
    if (!part || n > INT32_MAX) {
        PyErr_NoMemory();
        goto out;
    }
    for (Py_ssize_t i = 0; i < n; i++)
        if (read_part(PySequence_Fast_GET_ITEM(parts, i), i, &part[i]))
            goto out;
    if (progress != Py_None && !PyCallable_Check(progress)) {
        PyErr_SetString(PyExc_TypeError, "progress: a callable or None is wanted");
        goto out;
    }
    if (begin(self))
        goto out;
    self->progress = progress;
    int failed;
    WITHOUT_GIL(self, failed,
                function(self->train, part, (int)n, progress == Py_None ? NULL : tell_progress,
                         self, &err));
    self->progress = NULL;
    result = failed ? slide_py_raise(state_of(self), &err) : Py_NewRef(Py_None);
out:
    PyMem_Free(part);
    Py_DECREF(parts);
    return result;
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
    unsigned long long seed;
    double std;
    struct slide_err err = SLIDE_ERR_INIT;
    int failed;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "Kd:init", names, &seed, &std) || begin(self))
        return NULL;
    WITHOUT_GIL(self, failed, slide_train_init(self->train, seed, std, &err));
    return failed ? slide_py_raise(state_of(self), &err) : Py_NewRef(Py_None);
}

/* ---- batches ---- */

static int read_batch(PyObject *dict, Py_ssize_t i, struct slide_batch *batch)
{
    static const char *const keys[] = {"input_ids", "labels", "positions", "first"};
    const int32_t **field[] = {&batch->ids, &batch->labels, &batch->positions, &batch->first};
    if (!PyDict_Check(dict)) {
        PyErr_Format(PyExc_TypeError, "micro-batch %zd is not a dict", i);
        return -1;
    }
    *batch = (struct slide_batch){0};
    for (int k = 0; k < 4; k++) {
        PyObject *value = PyDict_GetItemString(dict, keys[k]);
        struct slide_py_array array;
        if (!value && k > 0)
            continue;
        if (!value && !item(dict, keys[k], "micro-batch", i))
            return -1;
        if (slide_py_borrow(value, keys[k], SLIDE_PY_I32, 2, false, &array))
            return -1;
        if (k == 0 && (array.count == 0 || array.count > INT32_MAX)) {
            PyErr_Format(PyExc_ValueError, "micro-batch %zd: input_ids has %zd elements", i,
                         array.count);
            return -1;
        }
        if (k == 0) {
            batch->rows = (int32_t)array.shape[0];
            batch->seq = (int32_t)array.shape[1];
        } else if (array.shape[0] != batch->rows || array.shape[1] != batch->seq) {
            PyErr_Format(PyExc_ValueError,
                         "micro-batch %zd: %s is [%zd, %zd], input_ids is [%d, %d]", i, keys[k],
                         array.shape[0], array.shape[1], batch->rows, batch->seq);
            return -1;
        }
        *field[k] = array.data;
    }
    return 0;
}

/* The micro-batches of a sequence; its items are kept alive by `keep`. */
static struct slide_batch *read_batches(PyObject *list, PyObject **keep, int *count)
{
    *keep = PySequence_Fast(list, "batches: a sequence of dicts is wanted");
    if (!*keep)
        return NULL;
    Py_ssize_t n = PySequence_Fast_GET_SIZE(*keep);
    struct slide_batch *batch = n > 1 << 20 ? NULL : PyMem_Calloc((size_t)n + 1, sizeof *batch);
    if (!batch) {
        PyErr_NoMemory();
        goto fail;
    }
    for (Py_ssize_t i = 0; i < n; i++)
        if (read_batch(PySequence_Fast_GET_ITEM(*keep, i), i, &batch[i]))
            goto fail;
    *count = (int)n;
    return batch;
fail:
    PyMem_Free(batch);
    Py_CLEAR(*keep);
    return NULL;
}

static PyObject *engine_step(struct engine *self, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"batches", "lr", NULL};
    PyObject *list, *keep;
    double lr;
    int count, failed;
    struct slide_step_out out;
    struct slide_err err = SLIDE_ERR_INIT;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "Od:step", names, &list, &lr))
        return NULL;
    struct slide_batch *batch = read_batches(list, &keep, &count);
    if (!batch)
        return NULL;
    PyObject *result = NULL;
    if (begin(self))
        goto out;
    WITHOUT_GIL(self, failed, slide_train_step(self->train, batch, count, lr, &out, &err));
    if (failed)
        slide_py_raise(state_of(self), &err);
    else
        result = Py_BuildValue(
            "{sd sK sK sO sK si sd sd sd sK}", "loss", out.loss, "targets",
            (unsigned long long)out.targets, "tokens", (unsigned long long)out.tokens, "skipped",
            out.skipped ? Py_True : Py_False, "nonfinite", (unsigned long long)out.nonfinite,
            "nonfinite_unit", out.nonfinite_unit, "grad_norm", out.grad_norm, "seconds",
            out.seconds, "exposed_update_seconds", out.exposed, "step",
            (unsigned long long)out.step);
out:
    PyMem_Free(batch);
    Py_DECREF(keep);
    return result;
}

static PyObject *engine_evaluate(struct engine *self, PyObject *list)
{
    PyObject *keep;
    int count, failed;
    double loss;
    uint64_t targets;
    struct slide_err err = SLIDE_ERR_INIT;
    struct slide_batch *batch = read_batches(list, &keep, &count);
    if (!batch)
        return NULL;
    PyObject *result = NULL;
    if (begin(self))
        goto out;
    WITHOUT_GIL(self, failed,
                slide_train_evaluate(self->train, batch, count, &loss, &targets, &err));
    result = failed ? slide_py_raise(state_of(self), &err)
                    : Py_BuildValue("dK", loss, (unsigned long long)targets);
out:
    PyMem_Free(batch);
    Py_DECREF(keep);
    return result;
}

static PyObject *engine_logits(struct engine *self, PyObject *dict)
{
    struct slide_batch batch;
    struct slide_err err = SLIDE_ERR_INIT;
    float *data;
    int items, failed;
    if (read_batch(dict, 0, &batch) || begin(self))
        return NULL;
    self->busy = false;
    double vocab = 0;
    const struct slide_plan_item *plan = slide_train_plan(self->train, &items);
    for (int i = 0; i < items; i++)
        if (!strcmp(plan[i].name, "vocab"))
            vocab = plan[i].value;
    Py_ssize_t shape[3] = {batch.rows, batch.seq, (Py_ssize_t)vocab};
    PyObject *array = slide_py_new_f32(3, shape, &data);
    if (!array)
        return NULL;
    Py_INCREF(dict);
    self->busy = true;
    WITHOUT_GIL(self, failed, slide_train_logits(self->train, &batch, data, &err));
    Py_DECREF(dict);
    if (!failed)
        return array;
    Py_DECREF(array);
    return slide_py_raise(state_of(self), &err);
}

/* ---- reading the state ---- */

static PyObject *shape_of(const struct slide_place *place)
{
    return place->cols == 1 ? Py_BuildValue("(L)", (long long)place->rows)
                            : Py_BuildValue("(LL)", (long long)place->rows, (long long)place->cols);
}

static PyObject *engine_tensor(struct engine *self, PyObject *args)
{
    const char *name, *what;
    struct slide_place place;
    struct slide_err err = SLIDE_ERR_INIT;
    float *data;
    int failed;
    if (!PyArg_ParseTuple(args, "ss:tensor", &name, &what) || begin(self))
        return NULL;
    self->busy = false;
    if (slide_train_find(self->train, name, &place, &err))
        return slide_py_raise(state_of(self), &err);
    Py_ssize_t shape[2] = {place.rows, place.cols};
    PyObject *array = slide_py_new_f32(place.cols == 1 ? 1 : 2, shape, &data);
    if (!array)
        return NULL;
    self->busy = true;
    WITHOUT_GIL(self, failed, slide_train_tensor(self->train, name, what, data, &err));
    if (!failed)
        return array;
    Py_DECREF(array);
    return slide_py_raise(state_of(self), &err);
}

static PyObject *engine_tensors(struct engine *self, PyObject *ignored)
{
    (void)ignored;
    char name[160];
    struct slide_place place;
    if (begin(self))
        return NULL;
    self->busy = false;
    PyObject *list = PyList_New(0);
    for (int i = 0; list && slide_train_name(self->train, i, name, sizeof name, &place); i++) {
        PyObject *shape = shape_of(&place);
        PyObject *entry =
            shape ? Py_BuildValue("sNO", name, shape, place.decay ? Py_True : Py_False) : NULL;
        if (!entry || PyList_Append(list, entry))
            Py_CLEAR(list);
        Py_XDECREF(entry);
    }
    return list;
}

static PyObject *engine_gather(struct engine *self, PyObject *list)
{
    double own[16], *all = NULL;
    struct slide_err err = SLIDE_ERR_INIT;
    int items, failed, world = 1;
    PyObject *values = PySequence_Fast(list, "values: a sequence of floats is wanted");
    if (!values)
        return NULL;
    Py_ssize_t n = PySequence_Fast_GET_SIZE(values);
    PyObject *result = NULL;
    if (n > 16) {
        PyErr_Format(PyExc_ValueError, "gather of %zd values, at most 16", n);
        goto out;
    }
    for (Py_ssize_t i = 0; i < n; i++) {
        own[i] = PyFloat_AsDouble(PySequence_Fast_GET_ITEM(values, i));
        if (own[i] == -1.0 && PyErr_Occurred())
            goto out;
    }
    if (begin(self))
        goto out;
    const struct slide_plan_item *plan = slide_train_plan(self->train, &items);
    for (int i = 0; i < items; i++)
        if (!strcmp(plan[i].name, "world"))
            world = (int)plan[i].value;
    all = PyMem_Calloc((size_t)world * (size_t)n + 1, sizeof *all);
    if (!all) {
        self->busy = false;
        PyErr_NoMemory();
        goto out;
    }
    WITHOUT_GIL(self, failed, slide_train_gather(self->train, own, (int)n, all, &err));
    if (failed) {
        slide_py_raise(state_of(self), &err);
        goto out;
    }
    result = PyList_New(world);
    for (int r = 0; result && r < world; r++) {
        PyObject *row = PyList_New(n);
        for (Py_ssize_t i = 0; row && i < n; i++) {
            PyObject *value = PyFloat_FromDouble(all[r * n + i]);
            if (!value)
                Py_CLEAR(row);
            else
                PyList_SET_ITEM(row, i, value);
        }
        if (!row)
            Py_CLEAR(result);
        else
            PyList_SET_ITEM(result, r, row);
    }
out:
    PyMem_Free(all);
    Py_DECREF(values);
    return result;
}

static PyObject *engine_abort(struct engine *self, PyObject *text)
{
    const char *message;
    if (slide_py_text(text, "message", &message))
        return NULL;
    if (self->train)
        slide_train_abort(self->train, message);
    Py_RETURN_NONE;
}

static PyObject *engine_plan(struct engine *self, PyObject *ignored)
{
    (void)ignored;
    int items;
    if (begin(self))
        return NULL;
    const struct slide_plan_item *plan = slide_train_plan(self->train, &items);
    self->busy = false;
    PyObject *dict = PyDict_New();
    for (int i = 0; dict && i < items; i++) {
        PyObject *value =
            plan[i].text ? PyUnicode_FromString(plan[i].text) : PyLong_FromDouble(plan[i].value);
        if (!value || PyDict_SetItemString(dict, plan[i].name, value))
            Py_CLEAR(dict);
        Py_XDECREF(value);
    }
    return dict;
}

#define METHOD(name, flags, doc) {#name, (PyCFunction)(void (*)(void))engine_##name, flags, doc}

static PyMethodDef engine_methods[] = {
    METHOD(load, METH_VARARGS | METH_KEYWORDS, "Reads this rank's slices of the parts."),
    METHOD(store, METH_VARARGS | METH_KEYWORDS, "Writes this rank's slices of the parts."),
    METHOD(init, METH_VARARGS | METH_KEYWORDS, "Fresh weights."),
    METHOD(step, METH_VARARGS | METH_KEYWORDS, "One optimizer step over the micro-batches."),
    METHOD(evaluate, METH_O, "(sum of the loss, valid targets) of this rank."),
    METHOD(logits, METH_O, "FP32 [B, T, V]."),
    METHOD(tensor, METH_VARARGS, "A tensor's master, exp_avg, exp_avg_sq or grad as FP32."),
    METHOD(tensors, METH_NOARGS, "(name, shape, decays) of each tensor."),
    METHOD(gather, METH_O, "The values of every rank."),
    METHOD(abort, METH_O, "Ends every rank's waits with this message as the cause."),
    METHOD(plan, METH_NOARGS, "What was planned: bytes by name and so on."),
    METHOD(close, METH_NOARGS, "Gives everything back."),
    {NULL, NULL, 0, NULL},
};

static PyType_Slot engine_slots[] = {
    {Py_tp_doc, "One rank of a training: device, share of the host state, schedule."},
    {Py_tp_new, engine_new},
    {Py_tp_dealloc, engine_dealloc},
    {Py_tp_traverse, engine_traverse},
    {Py_tp_methods, engine_methods},
    {0, NULL},
};

PyType_Spec slide_py_engine_spec = {
    .name = "slidedp._slidedp.Engine",
    .basicsize = sizeof(struct engine),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_IMMUTABLETYPE,
    .slots = engine_slots,
};
