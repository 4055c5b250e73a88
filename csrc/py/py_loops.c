/* AdamW and the STREAM triad on NumPy arrays, for tests and benchmarks: the very loops that
 * training runs, on a pool of any size, cut anywhere. */
#include <stdatomic.h>
#include <unistd.h>

#include "optim/adamw.h"
#include "py/py.h"
#include "py/py_triad.h"

#define CHUNK (64 * 1024) /* elements */

/* ---- pools ---- */

/* A pool of the module's, which is nobody else's until pool_put: two Python threads never share
 * one. */
static struct slide_pool *pool_take(struct slide_py_state *state, int threads)
{
    for (int i = 0; i < SLIDE_PY_POOLS; i++) {
        struct slide_pool *pool = state->pool[i].pool;
        if (pool && state->pool[i].pid == getpid() && slide_pool_threads(pool) == threads) {
            state->pool[i].pool = NULL;
            return pool;
        }
    }
    struct slide_err err = SLIDE_ERR_INIT;
    struct slide_pool *pool = slide_pool_new(threads, NULL, 0, &err);
    if (!pool)
        slide_py_raise(state, &err);
    return pool;
}

/* Puts it first; the one that has been there longest goes. */
static void pool_put(struct slide_py_state *state, struct slide_pool *pool)
{
    int last = 0;
    while (last < SLIDE_PY_POOLS - 1 && state->pool[last].pool)
        last++;
    if (state->pool[last].pid == getpid())
        slide_pool_free(state->pool[last].pool);
    for (; last > 0; last--)
        state->pool[last] = state->pool[last - 1];
    state->pool[0].pool = pool;
    state->pool[0].pid = getpid();
}

void slide_py_pools_free(struct slide_py_state *state)
{
    for (int i = 0; i < SLIDE_PY_POOLS; i++) {
        if (state->pool[i].pid == getpid())
            slide_pool_free(state->pool[i].pool);
        state->pool[i].pool = NULL;
    }
}

/* Runs `piece` over n elements in chunks, without the GIL. */
static int run(PyObject *module, int threads, uint64_t n, uint64_t chunk,
               void (*piece)(void *, int64_t, int), void *ctx)
{
    struct slide_py_state *state = slide_py_state_of(module);
    struct slide_pool *pool = pool_take(state, threads);
    if (!pool)
        return -1;
    Py_BEGIN_ALLOW_THREADS;
    slide_pool_for(pool, (int64_t)(n / chunk + (n % chunk != 0)), piece, ctx);
    Py_END_ALLOW_THREADS;
    pool_put(state, pool);
    return 0;
}

/* ---- arguments ---- */

struct range {
    const char *name;
    uintptr_t from, to;
};

static struct range range_of(const char *name, const struct slide_py_array *array, size_t size)
{
    uintptr_t from = (uintptr_t)array->data;
    return (struct range){name, from, from + (size_t)array->count * size};
}

/* The loops are compiled for arrays that don't overlap. */
static int check_apart(const struct range *range, int count)
{
    for (int i = 0; i < count; i++)
        for (int k = 0; k < i; k++)
            if (range[i].from < range[k].to && range[k].from < range[i].to) {
                PyErr_Format(PyExc_ValueError, "%s and %s overlap", range[k].name, range[i].name);
                return -1;
            }
    return 0;
}

static int same_length(const char *name, Py_ssize_t count, const char *other, uint64_t n)
{
    if ((uint64_t)count == n)
        return 0;
    PyErr_Format(PyExc_ValueError, "%s has %zd elements, %s %llu", name, count, other,
                 (unsigned long long)n);
    return -1;
}

static int read_threads(PyObject *object, int *threads)
{
    long long value = 1;
    if (object && slide_py_int(object, "threads", 1, SLIDE_PY_THREADS_MAX, &value))
        return -1;
    *threads = (int)value;
    return 0;
}

static int read_isa(PyObject *module, PyObject *object, enum slide_isa *isa)
{
    const char *name = "";
    struct slide_err err = SLIDE_ERR_INIT;
    *isa = slide_isa_get();
    if (object && slide_py_str(object, "isa", &name))
        return -1;
    if (!*name)
        return 0;
    if (slide_isa_parse(name, isa, &err)) {
        slide_py_raise(slide_py_state_of(module), &err);
        return -1;
    }
    if (*isa > slide_isa_best()) {
        PyErr_Format(PyExc_ValueError, "isa: this machine has no %s, but %s", name,
                     slide_isa_name(slide_isa_best()));
        return -1;
    }
    return 0;
}

/* ---- adamw ---- */

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
    if (bad)
        atomic_fetch_add(&w->bad, bad);
}

static int borrow_planes(PyObject *planes, const struct slide_py_array *grad, struct adamw_work *w)
{
    static const enum slide_py_element split[] = {SLIDE_PY_U16, SLIDE_PY_I16, SLIDE_PY_F32,
                                                  SLIDE_PY_F32};
    static const char *const split_names[] = {"hi", "lo", "m", "v"};
    static const char *const plain_names[] = {"master", "m", "v"};
    struct range range[5] = {range_of("grad", grad, sizeof(float))};
    Py_ssize_t n = PyTuple_GET_SIZE(planes);
    if (n != 3 && n != 4) {
        PyErr_Format(PyExc_ValueError, "planes: (hi, lo, m, v) or (master, m, v), not %zd arrays",
                     n);
        return -1;
    }
    w->split = n == 4;
    w->grad = grad->data;
    w->n = (uint64_t)grad->count;
    for (Py_ssize_t i = 0; i < n; i++) {
        struct slide_py_array array;
        const char *name = w->split ? split_names[i] : plain_names[i];
        enum slide_py_element element = w->split ? split[i] : SLIDE_PY_F32;
        if (slide_py_borrow(PyTuple_GET_ITEM(planes, i), name, element, 1, true, &array) ||
            same_length(name, array.count, "grad", w->n))
            return -1;
        w->plane[i] = array.data;
        range[i + 1] = range_of(name, &array, element == SLIDE_PY_F32 ? 4 : 2);
    }
    return check_apart(range, (int)n + 1);
}

static int read_hyper(PyObject *const *value, struct slide_adamw_hyper *hyper)
{
    static const char *const names[] = {"lr", "beta1", "beta2", "epsilon", "weight_decay", "step"};
    double *const real[] = {&hyper->lr, &hyper->beta1, &hyper->beta2, &hyper->eps,
                            &hyper->weight_decay};
    for (int i = 0; i < 6; i++)
        if (!value[i]) {
            PyErr_Format(PyExc_TypeError, "adamw() needs the keyword argument '%s'", names[i]);
            return -1;
        }
    for (int i = 0; i < 5; i++) {
        if (slide_py_float(value[i], names[i], real[i]))
            return -1;
        bool beta = i == 1 || i == 2;
        if (!(*real[i] >= 0) || (beta && !(*real[i] < 1))) {
            PyErr_Format(PyExc_ValueError, "%s: %S is not %s", names[i], value[i],
                         beta ? "in [0, 1)" : "0 or more");
            return -1;
        }
    }
    long long step;
    if (slide_py_int(value[5], "step", 1, INT64_MAX, &step))
        return -1;
    hyper->step = (uint64_t)step;
    return 0;
}

PyObject *slide_py_adamw(PyObject *module, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"planes",       "grad", "lr",  "beta1",   "beta2", "epsilon",
                            "weight_decay", "step", "isa", "threads", "chunk", NULL};
    struct slide_adamw_hyper hyper;
    struct adamw_work w = {0};
    struct slide_py_array array;
    PyObject *sequence, *grad, *h[6] = {NULL}, *isa = NULL, *threads_object = NULL, *cut = NULL;
    long long chunk = 0;
    int threads;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "OO|$OOOOOOOOO:adamw", names, &sequence, &grad,
                                     &h[0], &h[1], &h[2], &h[3], &h[4], &h[5], &isa,
                                     &threads_object, &cut) ||
        read_hyper(h, &hyper) || read_isa(module, isa, &w.isa) ||
        read_threads(threads_object, &threads) ||
        (cut && slide_py_int(cut, "chunk", 0, INT64_MAX, &chunk)) ||
        slide_py_borrow(grad, "grad", SLIDE_PY_F32, 1, false, &array))
        return NULL;
    PyObject *planes = PySequence_Tuple(sequence);
    if (!planes)
        return NULL;
    w.chunk = chunk ? (uint64_t)chunk : CHUNK;
    w.hyper = slide_adamw_prepare(&hyper, 1);
    int failed =
        borrow_planes(planes, &array, &w) || run(module, threads, w.n, w.chunk, adamw_piece, &w);
    Py_DECREF(planes);
    return failed ? NULL : PyLong_FromUnsignedLongLong(atomic_load(&w.bad));
}

/* ---- triad ---- */

struct triad_work {
    slide_py_triad_loop *loop;
    float *a;
    const float *b, *c;
    uint64_t n;
};

static slide_py_triad_loop *triad_loop(enum slide_isa isa)
{
#if defined(__x86_64__)
    static slide_py_triad_loop *const table[SLIDE_ISA_COUNT] = {
        [SLIDE_ISA_BASE] = slide_py_triad_base,
        [SLIDE_ISA_AVX2] = slide_py_triad_avx2,
        [SLIDE_ISA_AVX512] = slide_py_triad_avx512,
    };
    return table[isa];
#else
    (void)isa;
    return slide_py_triad_base;
#endif
}

static void triad_piece(void *ctx, int64_t i, int worker)
{
    const struct triad_work *w = ctx;
    uint64_t at = (uint64_t)i * CHUNK;
    (void)worker;
    w->loop(w->a + at, w->b + at, w->c + at, w->n - at < CHUNK ? w->n - at : CHUNK);
}

PyObject *slide_py_triad(PyObject *module, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"a", "b", "c", "threads", NULL};
    PyObject *object[3], *threads_object = NULL;
    struct slide_py_array x[3];
    struct range range[3];
    int threads;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "OOO|O:triad", names, &object[0], &object[1],
                                     &object[2], &threads_object) ||
        read_threads(threads_object, &threads))
        return NULL;
    for (int i = 0; i < 3; i++) {
        if (slide_py_borrow(object[i], names[i], SLIDE_PY_F32, 1, i == 0, &x[i]) ||
            same_length(names[i], x[i].count, "a", (uint64_t)x[0].count))
            return NULL;
        range[i] = range_of(names[i], &x[i], sizeof(float));
    }
    if (check_apart(range, 2)) /* b and c may be one */
        return NULL;
    range[1] = range[2];
    if (check_apart(range, 2))
        return NULL;
    struct triad_work w = {triad_loop(slide_isa_get()), x[0].data, x[1].data, x[2].data,
                           (uint64_t)x[0].count};
    if (run(module, threads, w.n, CHUNK, triad_piece, &w))
        return NULL;
    Py_RETURN_NONE;
}
