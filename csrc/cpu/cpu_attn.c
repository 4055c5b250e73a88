/* Attention. A task is a kv head of a row with the query heads of its group, so dk and dv are
 * summed within one task, in a fixed order. Queries go in blocks: scores of a block against all
 * keys that any of its queries sees are one sgemm, softmax is exact, row by row, and the block's
 * output is another sgemm. Backward makes the probabilities again from the scores and lse. FP32 q,
 * k, v are read where they lie; BF16 ones are widened into the worker's part of the workspace.
 * Called by the lane's thread. */
#include <string.h>

#include "cpu/cpu_inside.h"
#include "cpu/cpu_isa.h"

#define BLOCK 64 /* queries */

enum { ROW_MAJOR = 101, NO_TRANS = 111, TRANS = 112 };

struct attn_work {
    const struct slide_attn *a;
    const struct slide_cpu_loops *loops;
    slide_cpu_sgemm_fn *sgemm;
    size_t room; /* floats of workspace a worker */
};

/* The worker's memory: scores, their gradients, and what BF16 needs in FP32. */
static size_t worker_floats(const struct slide_attn *a)
{
    size_t seq = (size_t)a->seq, d = (size_t)a->head_dim;
    return 2 * BLOCK * seq + 4 * seq * d + 4 * BLOCK * d;
}

size_t slide_cpu_attn_workspace(struct slide_device *device, const struct slide_attn *attn)
{
    return worker_floats(attn) * sizeof(float) * (size_t)device->options.threads;
}

struct memory {
    float *s, *dp;           /* [BLOCK, seq] */
    float *k, *v, *dk, *dv;  /* [seq, d] */
    float *q, *o, *d_o, *dq; /* [BLOCK, d] */
};

static struct memory memory_of(const struct attn_work *w, int worker)
{
    size_t seq = (size_t)w->a->seq, d = (size_t)w->a->head_dim;
    float *p = (float *)w->a->workspace + (size_t)worker * w->room;
    struct memory m = {.s = p, .dp = p + BLOCK * seq};
    p += 2 * BLOCK * seq;
    m.k = p;
    m.v = p + seq * d;
    m.dk = p + 2 * seq * d;
    m.dv = p + 3 * seq * d;
    p += 4 * seq * d;
    m.q = p;
    m.o = p + BLOCK * d;
    m.d_o = p + 2 * BLOCK * d;
    m.dq = p + 3 * BLOCK * d;
    return m;
}

struct view {
    const float *p;
    int ld;
};

/* `rows` vectors of head_dim at element `offset`, as FP32. */
static struct view view(const struct attn_work *w, const void *base, int64_t offset, int64_t stride,
                        int64_t rows, float *scratch)
{
    if (w->a->dtype == SLIDE_F32)
        return (struct view){(const float *)base + offset, (int)stride};
    w->loops->widen(SLIDE_BF16, scratch, w->a->head_dim, (const uint16_t *)base + offset, stride,
                    rows, w->a->head_dim);
    return (struct view){scratch, w->a->head_dim};
}

static void put(const struct attn_work *w, void *base, int64_t offset, int64_t stride,
                const float *from, int64_t rows)
{
    size_t size = slide_dtype_size(w->a->dtype);
    w->loops->narrow(w->a->dtype, (char *)base + (size_t)offset * size, stride, from,
                     w->a->head_dim, rows, w->a->head_dim);
}

/* A block of queries of a row: [i0, i0 + n), and the keys [from, to) that any of them sees. */
struct block {
    int64_t i0, n, from, to;
};

static struct block block_at(const struct slide_attn *a, const int32_t *first, int64_t i0)
{
    struct block b = {.i0 = i0, .n = a->seq - i0 < BLOCK ? a->seq - i0 : BLOCK};
    b.from = first[i0];
    for (int64_t i = 0; i < b.n; i++)
        b.from = first[i0 + i] < b.from ? first[i0 + i] : b.from;
    b.to = i0 + b.n;
    return b;
}

/* Raw scores of a block against its keys: s[n, to - from]. */
static void scores(const struct attn_work *w, const struct block *b, struct view q, struct view k,
                   float *s)
{
    int keys = (int)(b->to - b->from);
    w->sgemm(ROW_MAJOR, NO_TRANS, TRANS, (int)b->n, keys, w->a->head_dim, 1.0f, q.p, q.ld,
             k.p + b->from * k.ld, k.ld, 0.0f, s, keys);
}

static void fwd_task(void *ctx, int64_t task, int worker)
{
    const struct attn_work *w = ctx;
    const struct slide_attn *a = w->a;
    struct memory m = memory_of(w, worker);
    int64_t row = task / a->kv_heads, kv = task % a->kv_heads, d = a->head_dim;
    int64_t group = a->heads / a->kv_heads, token = row * a->seq;
    const int32_t *first = a->first + token;
    int64_t kv_at = token * a->kv_stride + kv * d;
    struct view k = view(w, a->k, kv_at, a->kv_stride, a->seq, m.k);
    struct view v = view(w, a->v, kv_at, a->kv_stride, a->seq, m.v);
    for (int64_t h = kv * group; h < (kv + 1) * group; h++) {
        float *lse = a->lse + (row * a->heads + h) * a->seq;
        for (int64_t i0 = 0; i0 < a->seq; i0 += BLOCK) {
            struct block b = block_at(a, first, i0);
            int keys = (int)(b.to - b.from);
            struct view q =
                view(w, a->q, (token + i0) * a->q_stride + h * d, a->q_stride, b.n, m.q);
            scores(w, &b, q, k, m.s);
            for (int64_t i = 0; i < b.n; i++)
                lse[i0 + i] = w->loops->softmax(m.s + i * keys, first[i0 + i] - b.from,
                                                i0 + i + 1 - b.from, keys, a->scale);
            w->sgemm(ROW_MAJOR, NO_TRANS, NO_TRANS, (int)b.n, (int)d, keys, 1.0f, m.s, keys,
                     v.p + b.from * v.ld, v.ld, 0.0f, m.o, (int)d);
            put(w, a->o, (token + i0) * a->o_stride + h * d, a->o_stride, m.o, b.n);
        }
    }
}

static void bwd_task(void *ctx, int64_t task, int worker)
{
    const struct attn_work *w = ctx;
    const struct slide_attn *a = w->a;
    struct memory m = memory_of(w, worker);
    int64_t row = task / a->kv_heads, kv = task % a->kv_heads, d = a->head_dim;
    int64_t group = a->heads / a->kv_heads, token = row * a->seq;
    const int32_t *first = a->first + token;
    int64_t kv_at = token * a->kv_stride + kv * d;
    struct view k = view(w, a->k, kv_at, a->kv_stride, a->seq, m.k);
    struct view v = view(w, a->v, kv_at, a->kv_stride, a->seq, m.v);
    memset(m.dk, 0, (size_t)(a->seq * d) * sizeof *m.dk);
    memset(m.dv, 0, (size_t)(a->seq * d) * sizeof *m.dv);
    for (int64_t h = kv * group; h < (kv + 1) * group; h++) {
        const float *lse = a->lse + (row * a->heads + h) * a->seq;
        for (int64_t i0 = 0; i0 < a->seq; i0 += BLOCK) {
            struct block b = block_at(a, first, i0);
            int keys = (int)(b.to - b.from), n = (int)b.n, hd = (int)d;
            int64_t at = (token + i0) * a->o_stride + h * d;
            struct view q =
                view(w, a->q, (token + i0) * a->q_stride + h * d, a->q_stride, b.n, m.q);
            struct view o = view(w, a->o, at, a->o_stride, b.n, m.o);
            struct view g = view(w, a->d_o, at, a->o_stride, b.n, m.d_o);
            scores(w, &b, q, k, m.s);
            scores(w, &b, g, v, m.dp); /* dP = dO Vt */
            for (int64_t i = 0; i < b.n; i++) {
                float delta = w->loops->dot(g.p + i * g.ld, o.p + i * o.ld, d);
                w->loops->softmax_bwd(m.s + i * keys, m.dp + i * keys, first[i0 + i] - b.from,
                                      i0 + i + 1 - b.from, keys, a->scale, lse[i0 + i], delta);
            }
            w->sgemm(ROW_MAJOR, NO_TRANS, NO_TRANS, n, hd, keys, 1.0f, m.dp, keys,
                     k.p + b.from * k.ld, k.ld, 0.0f, m.dq, hd);
            put(w, a->dq, (token + i0) * a->dq_stride + h * d, a->dq_stride, m.dq, b.n);
            w->sgemm(ROW_MAJOR, TRANS, NO_TRANS, keys, hd, n, 1.0f, m.dp, keys, q.p, q.ld, 1.0f,
                     m.dk + b.from * d, hd);
            w->sgemm(ROW_MAJOR, TRANS, NO_TRANS, keys, hd, n, 1.0f, m.s, keys, g.p, g.ld, 1.0f,
                     m.dv + b.from * d, hd);
        }
    }
    int64_t dkv_at = token * a->dkv_stride + kv * d;
    put(w, a->dk, dkv_at, a->dkv_stride, m.dk, a->seq);
    put(w, a->dv, dkv_at, a->dkv_stride, m.dv, a->seq);
}

static int run(struct slide_lane *lane, const struct slide_attn *a,
               void (*task)(void *, int64_t, int))
{
    struct attn_work w = {a, slide_cpu_loops_get(lane->device->isa), lane->device->sgemm,
                          worker_floats(a)};
    slide_pool_for(lane->device->pool, (int64_t)a->rows * a->kv_heads, task, &w);
    return 0;
}

int slide_cpu_attn_fwd_run(struct slide_lane *lane, const void *args, struct slide_err *err)
{
    (void)err;
    return run(lane, args, fwd_task);
}

int slide_cpu_attn_bwd_run(struct slide_lane *lane, const void *args, struct slide_err *err)
{
    (void)err;
    return run(lane, args, bwd_task);
}
