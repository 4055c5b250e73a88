/* kernel(): one small kernel, GEMM or attention of a backend on NumPy arrays, on a device that is
 * opened for the call; where device memory isn't host memory, arrays are copied there and back. It
 * exists for the tests that compare kernels with NumPy and PyTorch.
 * A kernel is a table of its struct's fields, so that a dict becomes the struct, and a check of the
 * array sizes and indices, so that a wrong test gets an error instead of a crash. A line that is
 * new in kernels.def does not compile before its table and check stand here. */
#include <string.h>

#include "device/device.h"
#include "py/py.h"

/* What an array holds. */
enum element { ACT, F32, I32, FROM, TO, GEMM_IN, GEMM_OUT };
/* How an array is used. */
enum mode { IN, OUT, MAYBE };

union args {
#define X(name) struct slide_##name##_args name;
#include "device/kernels.def"
#undef X
    struct slide_gemm gemm;
    struct slide_attn attn;
};

#define FIELDS_MAX 32

struct call {
    const struct kernel *kernel;
    enum slide_dtype act;
    int threads;
    const char *device; /* backend's name */
    union args args;
    Py_ssize_t have[FIELDS_MAX]; /* elements of the array of a field */
};

struct kernel {
    const char *name;
    const struct slide_py_field *field;
    size_t fields;
    int (*check)(struct call *c); /* -1 with an exception */
    int (*run)(struct slide_device *device, struct slide_lane *lane, struct call *c,
               struct slide_err *err);
};

/* ---- tables ---- */

static const char *const act_names[] = {"F32", "BF16", NULL};

#define ARRAY(type, name, what, use)                                                               \
    {#name, SLIDE_PY_OTHER, (use) != MAYBE, offsetof(type, name), 0, 0, NULL, what, use}
#define DIM(type, name)                                                                            \
    {#name, SLIDE_PY_INT32, true, offsetof(type, name), 1, INT32_MAX, NULL, 0, 0}
#define INT(type, name, least, most)                                                               \
    {#name, SLIDE_PY_INT32, true, offsetof(type, name), least, most, NULL, 0, 0}
#define MAYBE_INT(type, name)                                                                      \
    {#name, SLIDE_PY_INT32, false, offsetof(type, name), 0, INT32_MAX, NULL, 0, 0}
#define LENGTH(type, name)                                                                         \
    {#name, SLIDE_PY_INT64, true, offsetof(type, name), 1, INT32_MAX, NULL, 0, 0}
#define REAL(type, name) {#name, SLIDE_PY_FLOAT, true, offsetof(type, name), 0, 0, NULL, 0, 0}
#define DTYPE(type, name)                                                                          \
    {#name, SLIDE_PY_CHOICE, false, offsetof(type, name), 0, 0, act_names, 0, 0}

#define T struct slide_rope_table_args
static const struct slide_py_field rope_table_fields[] = {
    ARRAY(T, positions, I32, IN),
    ARRAY(T, inv_freq, F32, IN),
    ARRAY(T, cos, F32, OUT),
    ARRAY(T, sin, F32, OUT),
    LENGTH(T, n),
    DIM(T, half),
    REAL(T, factor),
};
#undef T
#define T struct slide_embed_fwd_args
static const struct slide_py_field embed_fwd_fields[] = {
    ARRAY(T, ids, I32, IN), ARRAY(T, table, ACT, IN), ARRAY(T, out, ACT, OUT), LENGTH(T, n),
    DIM(T, cols),
};
#undef T
#define T struct slide_embed_bwd_args
static const struct slide_py_field embed_bwd_fields[] = {
    ARRAY(T, ids, I32, IN), ARRAY(T, dout, ACT, IN), ARRAY(T, dtable, F32, OUT),  LENGTH(T, n),
    DIM(T, cols),           DIM(T, vocab),           INT(T, skip, -1, INT32_MAX),
};
#undef T
#define T struct slide_rmsnorm_fwd_args
static const struct slide_py_field rmsnorm_fwd_fields[] = {
    ARRAY(T, x, ACT, IN), ARRAY(T, w, ACT, IN), ARRAY(T, y, ACT, OUT), ARRAY(T, rstd, F32, OUT),
    LENGTH(T, n),         LENGTH(T, x_stride),  LENGTH(T, y_stride),   DIM(T, groups),
    DIM(T, cols),         REAL(T, eps),
};
#undef T
#define T struct slide_rmsnorm_bwd_args
static const struct slide_py_field rmsnorm_bwd_fields[] = {
    ARRAY(T, dy, ACT, IN),
    ARRAY(T, x, ACT, IN),
    ARRAY(T, w, ACT, IN),
    ARRAY(T, rstd, F32, IN),
    ARRAY(T, dx, ACT, OUT),
    ARRAY(T, dw, F32, OUT),
    ARRAY(T, scratch, F32, OUT),
    LENGTH(T, n),
    LENGTH(T, dy_stride),
    LENGTH(T, x_stride),
    LENGTH(T, dx_stride),
    DIM(T, groups),
    DIM(T, cols),
    INT(T, add, 0, 1),
};
#undef T
#define T struct slide_rope_args
static const struct slide_py_field rope_fields[] = {
    ARRAY(T, x, ACT, OUT), ARRAY(T, cos, F32, IN), ARRAY(T, sin, F32, IN),
    LENGTH(T, n),          LENGTH(T, stride),      DIM(T, heads),
    DIM(T, head_dim),      DIM(T, half),           INT(T, sign, -1, 1),
};
#undef T
#define T struct slide_swiglu_fwd_args
static const struct slide_py_field swiglu_fwd_fields[] = {
    ARRAY(T, gu, ACT, IN), ARRAY(T, out, ACT, OUT), LENGTH(T, n), DIM(T, cols)};
#undef T
#define T struct slide_swiglu_bwd_args
static const struct slide_py_field swiglu_bwd_fields[] = {
    ARRAY(T, gu, ACT, IN), ARRAY(T, dout, ACT, IN), ARRAY(T, dgu, ACT, OUT), LENGTH(T, n),
    DIM(T, cols)};
#undef T
#define T struct slide_bias_bwd_args
static const struct slide_py_field bias_bwd_fields[] = {
    ARRAY(T, dy, ACT, IN), ARRAY(T, db, F32, OUT), ARRAY(T, scratch, F32, OUT),
    LENGTH(T, n),          LENGTH(T, stride),      DIM(T, cols)};
#undef T
#define T struct slide_ce_args
static const struct slide_py_field ce_fields[] = {ARRAY(T, z, ACT, OUT),
                                                  ARRAY(T, labels, I32, IN),
                                                  ARRAY(T, loss, F32, OUT),
                                                  LENGTH(T, n),
                                                  DIM(T, vocab),
                                                  INT(T, grad, 0, 1),
                                                  REAL(T, scale)};
#undef T
#define T struct slide_cast_args
static const struct slide_py_field cast_fields[] = {ARRAY(T, in, FROM, IN), ARRAY(T, out, TO, OUT),
                                                    LENGTH(T, n), DTYPE(T, from), DTYPE(T, to)};
#undef T
#define T struct slide_accumulate_args
static const struct slide_py_field accumulate_fields[] = {
    ARRAY(T, in, ACT, IN), ARRAY(T, out, F32, OUT), LENGTH(T, n), INT(T, add, 0, 1)};
#undef T
#define T struct slide_nonfinite_args
static const struct slide_py_field nonfinite_fields[] = {ARRAY(T, x, ACT, IN),
                                                         ARRAY(T, found, I32, OUT), LENGTH(T, n)};
#undef T
#define T struct slide_gemm
static const struct slide_py_field gemm_fields[] = {
    ARRAY(T, a, GEMM_IN, IN),
    ARRAY(T, b, GEMM_IN, IN),
    ARRAY(T, out, GEMM_OUT, OUT),
    ARRAY(T, add, GEMM_OUT, MAYBE),
    ARRAY(T, bias, GEMM_IN, MAYBE),
    LENGTH(T, lda),
    LENGTH(T, ldb),
    LENGTH(T, ldo),
    DIM(T, m),
    DIM(T, n),
    DIM(T, k),
    INT(T, trans_a, 0, 1),
    INT(T, trans_b, 0, 1),
    DTYPE(T, in_type),
    DTYPE(T, out_type),
};
#undef T
#define T struct slide_attn
#define ATTN                                                                                       \
    DIM(T, rows), DIM(T, seq), DIM(T, heads), DIM(T, kv_heads), DIM(T, head_dim),                  \
        MAYBE_INT(T, window), MAYBE_INT(T, documents), REAL(T, scale), DTYPE(T, dtype),            \
        ARRAY(T, first, I32, IN), ARRAY(T, q, ACT, IN), ARRAY(T, k, ACT, IN),                      \
        ARRAY(T, v, ACT, IN), LENGTH(T, q_stride), LENGTH(T, kv_stride), LENGTH(T, o_stride)
static const struct slide_py_field attn_fwd_fields[] = {ATTN, ARRAY(T, o, ACT, OUT),
                                                        ARRAY(T, lse, F32, OUT)};
static const struct slide_py_field attn_bwd_fields[] = {
    ATTN,
    ARRAY(T, o, ACT, IN),
    ARRAY(T, lse, F32, IN),
    ARRAY(T, d_o, ACT, IN),
    ARRAY(T, dq, ACT, OUT),
    ARRAY(T, dk, ACT, OUT),
    ARRAY(T, dv, ACT, OUT),
    LENGTH(T, dq_stride),
    LENGTH(T, dkv_stride),
};
#undef T

/* ---- checks ---- */

/* Sizes are doubles: products of these numbers are exact where they could fit any array. */
static double span(double n, int64_t stride, double width)
{
    return (n - 1) * (double)stride + width;
}

static double blocks(int64_t n, int64_t size)
{
    return (double)((n + size - 1) / size);
}

static int need(const struct call *c, const char *key, double elements)
{
    size_t i = 0;
    while (strcmp(c->kernel->field[i].key, key))
        i++;
    if ((double)c->have[i] >= elements ||
        (c->kernel->field[i].mode == MAYBE && c->have[i] < 0)) /* not given */
        return 0;
    char text[32];
    PyOS_snprintf(text, sizeof text, "%.0f", elements);
    PyErr_Format(PyExc_ValueError, "%s: %s has %zd elements, %s are needed", c->kernel->name, key,
                 c->have[i], text);
    return -1;
}

static int check_that(const struct call *c, bool good, const char *what)
{
    if (good)
        return 0;
    PyErr_Format(PyExc_ValueError, "%s: %s", c->kernel->name, what);
    return -1;
}

static int check_ids(const struct call *c, const int32_t *ids, int64_t n, int64_t low, int64_t end)
{
    for (int64_t i = 0; i < n; i++)
        if (ids[i] < low || ids[i] >= end) {
            PyErr_Format(PyExc_ValueError, "%s: index %lld is %d, not in %lld to %lld",
                         c->kernel->name, (long long)i, ids[i], (long long)low, (long long)end - 1);
            return -1;
        }
    return 0;
}

static int check_rope_table(struct call *c)
{
    const struct slide_rope_table_args *a = &c->args.rope_table;
    const double n = (double)a->n;
    return need(c, "positions", n) || need(c, "inv_freq", a->half) || need(c, "cos", n * a->half) ||
                   need(c, "sin", n * a->half)
               ? -1
               : 0;
}

static int check_embed_fwd(struct call *c)
{
    const struct slide_embed_fwd_args *a = &c->args.embed_fwd;
    const double n = (double)a->n;
    int64_t vocab = 0;
    for (size_t i = 0; i < c->kernel->fields; i++)
        if (!strcmp(c->kernel->field[i].key, "table"))
            vocab = c->have[i] / a->cols;
    return need(c, "ids", n) || need(c, "out", n * a->cols) || check_ids(c, a->ids, a->n, 0, vocab)
               ? -1
               : 0;
}

static int check_embed_bwd(struct call *c)
{
    const struct slide_embed_bwd_args *a = &c->args.embed_bwd;
    const double n = (double)a->n;
    return need(c, "ids", n) || need(c, "dout", n * a->cols) ||
                   need(c, "dtable", (double)a->vocab * a->cols) ||
                   check_ids(c, a->ids, a->n, 0, a->vocab)
               ? -1
               : 0;
}

static int check_rmsnorm_fwd(struct call *c)
{
    const struct slide_rmsnorm_fwd_args *a = &c->args.rmsnorm_fwd;
    const double n = (double)a->n;
    double width = (double)a->groups * a->cols;
    return check_that(c, (double)a->x_stride >= width && (double)a->y_stride >= width,
                      "a stride is less than groups * cols") ||
                   need(c, "x", span(n, a->x_stride, width)) || need(c, "w", a->cols) ||
                   need(c, "y", span(n, a->y_stride, width)) || need(c, "rstd", n * a->groups)
               ? -1
               : 0;
}

static int check_rmsnorm_bwd(struct call *c)
{
    const struct slide_rmsnorm_bwd_args *a = &c->args.rmsnorm_bwd;
    const double n = (double)a->n;
    double width = (double)a->groups * a->cols;
    return check_that(c,
                      (double)a->x_stride >= width && (double)a->dy_stride >= width &&
                          (double)a->dx_stride >= width,
                      "a stride is less than groups * cols") ||
                   need(c, "dy", span(n, a->dy_stride, width)) ||
                   need(c, "x", span(n, a->x_stride, width)) || need(c, "w", a->cols) ||
                   need(c, "rstd", n * a->groups) || need(c, "dx", span(n, a->dx_stride, width)) ||
                   need(c, "dw", a->cols) ||
                   need(c, "scratch", blocks(a->n, SLIDE_NORM_BLOCK) * a->cols)
               ? -1
               : 0;
}

static int check_rope(struct call *c)
{
    const struct slide_rope_args *a = &c->args.rope;
    const double n = (double)a->n;
    double width = (double)a->heads * a->head_dim;
    return check_that(c, a->half <= a->head_dim / 2, "2 half is more than head_dim") ||
                   check_that(c, a->sign != 0, "sign is 1 or -1") ||
                   check_that(c, (double)a->stride >= width,
                              "the stride is less than heads * head_dim") ||
                   need(c, "x", span(n, a->stride, width)) || need(c, "cos", n * a->half) ||
                   need(c, "sin", n * a->half)
               ? -1
               : 0;
}

static int check_swiglu_fwd(struct call *c)
{
    const struct slide_swiglu_fwd_args *a = &c->args.swiglu_fwd;
    const double n = (double)a->n;
    return need(c, "gu", 2 * n * a->cols) || need(c, "out", n * a->cols) ? -1 : 0;
}

static int check_swiglu_bwd(struct call *c)
{
    const struct slide_swiglu_bwd_args *a = &c->args.swiglu_bwd;
    const double n = (double)a->n;
    return need(c, "gu", 2 * n * a->cols) || need(c, "dout", n * a->cols) ||
                   need(c, "dgu", 2 * n * a->cols)
               ? -1
               : 0;
}

static int check_bias_bwd(struct call *c)
{
    const struct slide_bias_bwd_args *a = &c->args.bias_bwd;
    const double n = (double)a->n;
    return check_that(c, a->stride >= a->cols, "the stride is less than cols") ||
                   need(c, "dy", span(n, a->stride, a->cols)) || need(c, "db", a->cols) ||
                   need(c, "scratch", blocks(a->n, SLIDE_BIAS_BLOCK) * a->cols)
               ? -1
               : 0;
}

static int check_ce(struct call *c)
{
    const struct slide_ce_args *a = &c->args.ce;
    const double n = (double)a->n;
    return need(c, "z", n * a->vocab) || need(c, "labels", n) || need(c, "loss", n) ||
                   check_ids(c, a->labels, a->n, INT32_MIN, a->vocab)
               ? -1
               : 0;
}

static int check_cast(struct call *c)
{
    const struct slide_cast_args *a = &c->args.cast;
    const double n = (double)a->n;
    return need(c, "in", n) || need(c, "out", n) ? -1 : 0;
}

static int check_accumulate(struct call *c)
{
    const struct slide_accumulate_args *a = &c->args.accumulate;
    const double n = (double)a->n;
    return need(c, "in", n) || need(c, "out", n) ? -1 : 0;
}

static int check_nonfinite(struct call *c)
{
    const struct slide_nonfinite_args *a = &c->args.nonfinite;
    return need(c, "x", (double)a->n) || need(c, "found", 1) ? -1 : 0;
}

static int check_gemm(struct call *c)
{
    const struct slide_gemm *g = &c->args.gemm;
    int32_t a_rows = g->trans_a ? g->k : g->m, a_cols = g->trans_a ? g->m : g->k;
    int32_t b_rows = g->trans_b ? g->n : g->k, b_cols = g->trans_b ? g->k : g->n;
    return check_that(c, g->in_type == c->act, "in_type is not dtype") ||
                   check_that(c, g->in_type == SLIDE_BF16 || g->out_type == SLIDE_F32,
                              "F32 has no BF16 output") ||
                   check_that(c, g->lda >= a_cols && g->ldb >= b_cols && g->ldo >= g->n,
                              "a leading dimension is less than the row") ||
                   need(c, "a", span(a_rows, g->lda, a_cols)) ||
                   need(c, "b", span(b_rows, g->ldb, b_cols)) ||
                   need(c, "out", span(g->m, g->ldo, g->n)) ||
                   need(c, "add", span(g->m, g->ldo, g->n)) || need(c, "bias", g->n)
               ? -1
               : 0;
}

static int check_attn(struct call *c)
{
    const struct slide_attn *a = &c->args.attn;
    double n = (double)a->rows * a->seq, q = (double)a->heads * a->head_dim;
    double kv = (double)a->kv_heads * a->head_dim;
    if (check_that(c, a->dtype == c->act, "two dtypes") ||
        check_that(c, a->heads % a->kv_heads == 0, "heads is no multiple of kv_heads") ||
        check_that(
            c, (double)a->q_stride >= q && (double)a->kv_stride >= kv && (double)a->o_stride >= q,
            "a stride is less than the heads of a token") ||
        need(c, "first", n) || need(c, "q", span(n, a->q_stride, q)) ||
        need(c, "k", span(n, a->kv_stride, kv)) || need(c, "v", span(n, a->kv_stride, kv)) ||
        need(c, "o", span(n, a->o_stride, q)) || need(c, "lse", n * a->heads))
        return -1;
    for (int64_t i = 0; i < (int64_t)a->rows * a->seq; i++)
        if (check_ids(c, a->first + i, 1, 0, i % a->seq + 1))
            return -1;
    return 0;
}

static int check_attn_bwd(struct call *c)
{
    const struct slide_attn *a = &c->args.attn;
    double n = (double)a->rows * a->seq, q = (double)a->heads * a->head_dim;
    double kv = (double)a->kv_heads * a->head_dim;
    return check_attn(c) ||
                   check_that(c, (double)a->dq_stride >= q && (double)a->dkv_stride >= kv,
                              "a gradient's stride is less than the heads of a token") ||
                   need(c, "d_o", span(n, a->o_stride, q)) ||
                   need(c, "dq", span(n, a->dq_stride, q)) ||
                   need(c, "dk", span(n, a->dkv_stride, kv)) ||
                   need(c, "dv", span(n, a->dkv_stride, kv))
               ? -1
               : 0;
}

/* ---- running ---- */

#define X(name)                                                                                    \
    static int run_##name(struct slide_device *device, struct slide_lane *lane, struct call *c,    \
                          struct slide_err *err)                                                   \
    {                                                                                              \
        (void)device;                                                                              \
        return slide_launch_##name(lane, c->act, &c->args.name, err);                              \
    }
#include "device/kernels.def"
#undef X

/* Waits before the workspace goes. */
static int finish(struct slide_device *device, struct slide_lane *lane, void *workspace, int failed,
                  struct slide_err *err)
{
    failed = failed || slide_lane_sync(lane, &(struct slide_waiter){0}, err);
    slide_device_free(device, workspace);
    return failed;
}

static int run_gemm(struct slide_device *device, struct slide_lane *lane, struct call *c,
                    struct slide_err *err)
{
    struct slide_gemm *gemm = &c->args.gemm;
    gemm->workspace_bytes = slide_gemm_workspace(device);
    if (!gemm->workspace_bytes)
        return slide_gemm(lane, gemm, err);
    gemm->workspace = slide_device_alloc(device, gemm->workspace_bytes, err);
    if (!gemm->workspace)
        return -1;
    return finish(device, lane, gemm->workspace, slide_gemm(lane, gemm, err), err);
}

static int run_attn(struct slide_device *device, struct slide_lane *lane, struct slide_attn *attn,
                    int (*run)(struct slide_lane *, const struct slide_attn *, struct slide_err *),
                    struct slide_err *err)
{
    attn->workspace_bytes = slide_attn_workspace(device, attn);
    attn->workspace = slide_device_alloc(device, attn->workspace_bytes, err);
    if (!attn->workspace)
        return -1;
    return finish(device, lane, attn->workspace, run(lane, attn, err), err);
}

static int run_attn_fwd(struct slide_device *device, struct slide_lane *lane, struct call *c,
                        struct slide_err *err)
{
    return run_attn(device, lane, &c->args.attn, slide_attn_fwd, err);
}

static int run_attn_bwd(struct slide_device *device, struct slide_lane *lane, struct call *c,
                        struct slide_err *err)
{
    return run_attn(device, lane, &c->args.attn, slide_attn_bwd, err);
}

/* ---- arrays on the device ---- */

static enum slide_dtype type_of(const struct call *c, int element)
{
    switch (element) {
    case FROM:
        return c->args.cast.from;
    case TO:
        return c->args.cast.to;
    case GEMM_IN:
        return c->args.gemm.in_type;
    case GEMM_OUT:
        return c->args.gemm.out_type;
    case F32:
        return SLIDE_F32;
    case I32:
        return SLIDE_I32;
    default:
        return c->act;
    }
}

/* Host memory of one or several arrays that overlap, and its copy. A copy begins at the same place
 * within 64 bytes as the original, so that a test decides about alignment. */
struct twin {
    unsigned char *host, *end;
    unsigned char *memory, *device;
    bool out;
};

struct twins {
    struct twin twin[FIELDS_MAX];
    int n;
};

/* Adds [host, end), joined with what it touches. */
static void add_twin(struct twins *t, unsigned char *host, unsigned char *end, bool out)
{
    struct twin all = {.host = host, .end = end, .out = out};
    int kept = 0;
    for (int i = 0; i < t->n; i++) {
        struct twin *one = &t->twin[i];
        if (one->host < all.end && all.host < one->end) {
            all.host = one->host < all.host ? one->host : all.host;
            all.end = one->end > all.end ? one->end : all.end;
            all.out |= one->out;
        } else {
            t->twin[kept++] = *one;
        }
    }
    t->twin[kept++] = all;
    t->n = kept;
}

static void **pointer(struct call *c, size_t field)
{
    return (void **)((char *)&c->args + c->kernel->field[field].offset);
}

static int move_in(struct twins *t, struct slide_device *device, struct slide_lane *lane,
                   struct call *c, struct slide_err *err)
{
    for (size_t i = 0; i < c->kernel->fields; i++) {
        const struct slide_py_field *f = &c->kernel->field[i];
        if (c->have[i] < 0)
            continue;
        unsigned char *host = *pointer(c, i);
        size_t bytes = (size_t)c->have[i] * slide_dtype_size(type_of(c, f->element));
        add_twin(t, host, host + bytes, f->mode == OUT);
    }
    for (int i = 0; i < t->n; i++) {
        struct twin *one = &t->twin[i];
        size_t bytes = (size_t)(one->end - one->host);
        one->memory = slide_device_alloc(device, bytes + 64, err);
        if (!one->memory)
            return -1;
        one->device = one->memory + (uintptr_t)one->host % 64;
        if (slide_copy(lane, one->device, one->host, bytes, SLIDE_COPY_H2D, err))
            return -1;
    }
    for (size_t i = 0; i < c->kernel->fields; i++) {
        if (c->have[i] < 0)
            continue;
        unsigned char *host = *pointer(c, i);
        for (int k = 0; k < t->n; k++) {
            const struct twin *one = &t->twin[k];
            if (host >= one->host && host < one->end) {
                *pointer(c, i) = one->device + (host - one->host);
                break;
            }
        }
    }
    return 0;
}

static int move_out(struct twins *t, struct slide_lane *lane, struct slide_err *err)
{
    for (int i = 0; i < t->n; i++) {
        struct twin *one = &t->twin[i];
        size_t bytes = (size_t)(one->end - one->host);
        if (one->out && slide_copy(lane, one->host, one->device, bytes, SLIDE_COPY_D2H, err))
            return -1;
    }
    return slide_lane_sync(lane, &(struct slide_waiter){0}, err);
}

static int run(struct call *c, struct slide_err *err)
{
    struct slide_device *device = NULL;
    struct slide_lane *lane = NULL;
    struct twins twins = {.n = 0};
    struct slide_device_options options = {.threads = c->threads};
    const struct slide_backend *backend = slide_backend_find(c->device, err);
    int failed = -1;
    if (!backend || slide_device_open(&device, backend, &options, err))
        return -1;
    bool apart = strcmp(c->device, "cpu");
    lane = slide_lane_open(device, SLIDE_LANE_COMPUTE, err);
    if (lane && (!apart || !move_in(&twins, device, lane, c, err)) &&
        !c->kernel->run(device, lane, c, err))
        failed = move_out(&twins, lane, err);
    if (lane)
        slide_lane_close(lane);
    for (int i = 0; i < twins.n; i++)
        slide_device_free(device, twins.twin[i].memory);
    slide_device_close(device);
    return failed;
}

/* ---- from Python ---- */

#define ENTRY(name, table, check) {#name, table, sizeof table / sizeof *table, check, run_##name}

static const struct kernel kernels[] = {
#define X(name) ENTRY(name, name##_fields, check_##name),
#include "device/kernels.def"
#undef X
    ENTRY(gemm, gemm_fields, check_gemm),
    ENTRY(attn_fwd, attn_fwd_fields, check_attn),
    ENTRY(attn_bwd, attn_bwd_fields, check_attn_bwd),
};

#define KERNELS (sizeof kernels / sizeof *kernels)

static int borrow_arrays(struct call *c, PyObject *dict, PyObject *keep)
{
    for (size_t i = 0; i < c->kernel->fields; i++) {
        const struct slide_py_field *f = &c->kernel->field[i];
        struct slide_py_array array;
        char what[64];
        c->have[i] = -1;
        if (f->kind != SLIDE_PY_OTHER)
            continue;
        PyObject *value = slide_py_item(dict, f->key, keep);
        if (!value && PyErr_Occurred())
            return -1;
        if (f->mode == MAYBE && (!value || value == Py_None))
            continue;
        enum slide_dtype type = type_of(c, f->element);
        enum slide_py_element element = type == SLIDE_F32   ? SLIDE_PY_F32
                                        : type == SLIDE_I32 ? SLIDE_PY_I32
                                                            : SLIDE_PY_U16;
        PyOS_snprintf(what, sizeof what, "%s: %s", c->kernel->name, f->key);
        if (slide_py_borrow(value, what, element, -1, f->mode == OUT, &array))
            return -1;
        c->have[i] = array.count;
        *(void **)((char *)&c->args + f->offset) = array.data;
    }
    return 0;
}

/* The kernel of that name; an error that lists all of them otherwise. */
static const struct kernel *find(PyObject *object)
{
    const char *name;
    char list[300] = "";
    if (slide_py_str(object, "name", &name))
        return NULL;
    for (size_t i = 0; i < KERNELS; i++) {
        if (!strcmp(kernels[i].name, name))
            return &kernels[i];
        size_t used = strlen(list);
        PyOS_snprintf(list + used, sizeof list - used, "%s%s", i ? ", " : "", kernels[i].name);
    }
    PyErr_Format(PyExc_ValueError, "name: there is no kernel %R; these are: %s", object, list);
    return NULL;
}

PyObject *slide_py_kernel(PyObject *module, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"name", "dtype", "args", "threads", "device", NULL};
    static const struct slide_py_field dtype_field = {
        .key = "dtype", .kind = SLIDE_PY_CHOICE, .choices = act_names};
    PyObject *name, *dtype, *dict, *threads_object = NULL, *where = NULL, *result = NULL;
    long long threads = 1;
    struct call c = {.device = "cpu"};
    struct slide_err err = SLIDE_ERR_INIT;
    int failed;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "OOO|OO:kernel", names, &name, &dtype, &dict,
                                     &threads_object, &where) ||
        !(c.kernel = find(name)) ||
        (threads_object &&
         slide_py_int(threads_object, "threads", 1, SLIDE_PY_THREADS_MAX, &threads)) ||
        (where && slide_py_str(where, "device", &c.device)))
        return NULL;
    c.threads = (int)threads;
    PyObject *keep = PyList_New(0);
    if (!keep || slide_py_value(&dtype_field, dtype, "dtype", &c.act, keep))
        goto out;
    if (c.kernel->check == check_gemm)
        c.args.gemm.in_type = c.args.gemm.out_type = c.act;
    else if (c.kernel->run == run_attn_fwd || c.kernel->run == run_attn_bwd)
        c.args.attn.dtype = c.act;
    if (slide_py_fields(dict, c.kernel->name, c.kernel->field, c.kernel->fields, &c.args, keep) ||
        borrow_arrays(&c, dict, keep) || c.kernel->check(&c))
        goto out;
    Py_BEGIN_ALLOW_THREADS;
    failed = run(&c, &err);
    Py_END_ALLOW_THREADS;
    result = failed ? slide_py_raise(slide_py_state_of(module), &err) : Py_NewRef(Py_None);
out:
    Py_XDECREF(keep);
    return result;
}
