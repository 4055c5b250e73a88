/* AdamW and the STREAM triad on NumPy arrays, for tests and benchmarks: the very loops that
 * training runs, on a pool of any size, cut anywhere. */
#include <string.h>

#include "optim/adamw.h"
#include "py/py.h"

#define CHUNK (64 * 1024)

struct adamw_work {
    struct slide_adamw hyper;
    enum slide_isa isa;
    void *plane[4]; /* hi lo m v, or master m v */
    const float *grad;
    uint64_t n, chunk;
    bool split;
    _Atomic uint64_t bad;
};

static void adamw_piece(void *ctx, int64_t i, int worker)
{
    struct adamw_work *w = ctx;
    uint64_t at = (uint64_t)i * w->chunk, n = w->n - at < w->chunk ? w->n - at : w->chunk;
    uint64_t bad;
    (void)worker;
    if (w->split)
        bad = slide_adamw_split(w->isa, &w->hyper, (uint16_t *)w->plane[0] + at,
                                (int16_t *)w->plane[1] + at, (float *)w->plane[2] + at,
                                (float *)w->plane[3] + at, w->grad + at, n);
    else
        bad =
            slide_adamw_f32(w->isa, &w->hyper, (float *)w->plane[0] + at, (float *)w->plane[1] + at,
                            (float *)w->plane[2] + at, w->grad + at, n);
    w->bad += bad;
}

/* Runs `piece` over n elements in chunks on a pool of its own. */
static int run(struct slide_py_state *state, int threads, uint64_t n, uint64_t chunk,
               void (*piece)(void *, int64_t, int), void *ctx)
{
    struct slide_err err = SLIDE_ERR_INIT;
    struct slide_pool *pool = slide_pool_new(threads, NULL, 0, &err);
    if (!pool) {
        slide_py_raise(state, &err);
        return -1;
    }
    Py_BEGIN_ALLOW_THREADS;
    slide_pool_for(pool, (int64_t)((n + chunk - 1) / chunk), piece, ctx);
    slide_pool_free(pool);
    Py_END_ALLOW_THREADS;
    return 0;
}

static int borrow_planes(PyObject *planes, struct adamw_work *w)
{
    static const enum slide_py_kind split[] = {SLIDE_PY_U16, SLIDE_PY_I16, SLIDE_PY_F32,
                                               SLIDE_PY_F32};
    static const char *const split_names[] = {"hi", "lo", "m", "v"};
    static const char *const plain_names[] = {"master", "m", "v"};
    Py_ssize_t n = PySequence_Fast_GET_SIZE(planes);
    if (n != 3 && n != 4) {
        PyErr_Format(PyExc_ValueError, "planes: (hi, lo, m, v) or (master, m, v), not %zd arrays",
                     n);
        return -1;
    }
    w->split = n == 4;
    for (Py_ssize_t i = 0; i < n; i++) {
        struct slide_py_array array;
        if (slide_py_borrow(PySequence_Fast_GET_ITEM(planes, i),
                            w->split ? split_names[i] : plain_names[i],
                            w->split ? split[i] : SLIDE_PY_F32, 1, true, &array))
            return -1;
        if ((uint64_t)array.count != w->n) {
            PyErr_SetString(PyExc_ValueError, "planes and grad have different lengths");
            return -1;
        }
        w->plane[i] = array.data;
    }
    return 0;
}

static int read_isa(const char *name, enum slide_isa *isa, struct slide_py_state *state)
{
    struct slide_err err = SLIDE_ERR_INIT;
    *isa = slide_isa_get();
    if (!*name)
        return 0;
    if (slide_isa_parse(name, isa, &err)) {
        slide_py_raise(state, &err);
        return -1;
    }
    if (*isa > slide_isa_best()) {
        PyErr_Format(PyExc_ValueError, "isa: this CPU has no %s", name);
        return -1;
    }
    return 0;
}

PyObject *slide_py_adamw(PyObject *module, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"planes",       "grad", "lr",  "beta1",   "beta2", "epsilon",
                            "weight_decay", "step", "isa", "threads", "chunk", NULL};
    struct slide_py_state *state = slide_py_state_of(module);
    struct slide_adamw_hyper hyper;
    struct adamw_work w = {0};
    PyObject *list, *grad;
    const char *isa = "";
    unsigned long long step, chunk = 0;
    int threads = 1;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "OO$dddddK|siK:adamw", names, &list, &grad,
                                     &hyper.lr, &hyper.beta1, &hyper.beta2, &hyper.eps,
                                     &hyper.weight_decay, &step, &isa, &threads, &chunk))
        return NULL;
    hyper.step = step;
    if (step < 1 || threads < 1 || threads > 4096) {
        PyErr_Format(PyExc_ValueError, "step is %llu (>= 1), threads %d (1 to 4096)", step,
                     threads);
        return NULL;
    }
    struct slide_py_array array;
    if (slide_py_borrow(grad, "grad", SLIDE_PY_F32, 1, false, &array) ||
        read_isa(isa, &w.isa, state))
        return NULL;
    PyObject *planes = PySequence_Fast(list, "planes: a sequence of arrays is wanted");
    if (!planes)
        return NULL;
    w.grad = array.data;
    w.n = (uint64_t)array.count;
    w.chunk = chunk ? chunk : CHUNK;
    w.hyper = slide_adamw_prepare(&hyper, 1);
    int failed = borrow_planes(planes, &w) || run(state, threads, w.n, w.chunk, adamw_piece, &w);
    Py_DECREF(planes);
    return failed ? NULL : PyLong_FromUnsignedLongLong(w.bad);
}

struct triad_work {
    float *a;
    const float *b, *c;
    uint64_t n;
};

/* Ordinary stores: a line of `a` is read before it is written. */
static void triad_piece(void *ctx, int64_t i, int worker)
{
    typedef float v16 __attribute__((vector_size(64)));
    struct triad_work *w = ctx;
    uint64_t at = (uint64_t)i * CHUNK, end = w->n - at < CHUNK ? w->n : at + CHUNK;
    (void)worker;
    for (; at + 16 <= end; at += 16) {
        v16 b, c;
        memcpy(&b, w->b + at, sizeof b);
        memcpy(&c, w->c + at, sizeof c);
        b = b + 3.0f * c;
        memcpy(w->a + at, &b, sizeof b);
    }
    for (; at < end; at++)
        w->a[at] = w->b[at] + 3.0f * w->c[at];
}

PyObject *slide_py_triad(PyObject *module, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"a", "b", "c", "threads", NULL};
    PyObject *a, *b, *c;
    struct slide_py_array x, y, z;
    int threads = 1;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "OOO|i:triad", names, &a, &b, &c, &threads) ||
        slide_py_borrow(a, "a", SLIDE_PY_F32, 1, true, &x) ||
        slide_py_borrow(b, "b", SLIDE_PY_F32, 1, false, &y) ||
        slide_py_borrow(c, "c", SLIDE_PY_F32, 1, false, &z))
        return NULL;
    if (x.count != y.count || x.count != z.count || threads < 1 || threads > 4096) {
        PyErr_SetString(PyExc_ValueError, "a, b and c of one length, 1 to 4096 threads");
        return NULL;
    }
    struct triad_work w = {x.data, y.data, z.data, (uint64_t)x.count};
    if (run(slide_py_state_of(module), threads, w.n, CHUNK, triad_piece, &w))
        return NULL;
    Py_RETURN_NONE;
}
