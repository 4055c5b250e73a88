/* Attention. Queries go in blocks: scores of a block against all keys that any of its queries sees
 * are one sgemm, softmax is exact, row by row, and the block's output is another sgemm. A task of
 * forward is a block of a head of a row. Backward makes the probabilities again from the scores and
 * lse; a task is a head of a row, or a part of its queries where heads and rows are few. Tasks that
 * share a kv head leave partial dk and dv in the workspace, which a second loop adds in order. FP32
 * q, k, v are read where they lie; BF16 ones are widened into the worker's part of the workspace.
 * Called by the lane's thread. */
#include <math.h>
#include <string.h>

#include "cpu/cpu_inside.h"
#include "cpu/cpu_isa.h"

#define BLOCK 64 /* queries */
#define TASKS 48 /* of backward; fewer only if PARTS_MAX, PARTS_FLOATS or the blocks say so */
#define PARTS_MAX 4
#define PARTS_FLOATS (8u << 20) /* of partial dk and dv, where queries are in parts */

enum { ROW_MAJOR = 101, NO_TRANS = 111, TRANS = 112 };

struct attn_work {
    const struct slide_attn *a;
    const struct slide_cpu_loops *loops;
    slide_cpu_sgemm_fn *sgemm;
    size_t room;   /* floats of workspace a worker */
    int64_t parts; /* of a head's queries in backward */
    float *sums;   /* [rows, heads, parts, 2 (dk, dv), seq, head_dim]; NULL: tasks share nothing */
};

/* The worker's memory: scores, their gradients, what BF16 needs in FP32, and dk and dv unless they
 * are partial sums. */
static size_t worker_floats(const struct slide_attn *a)
{
    size_t seq = (size_t)a->seq, d = (size_t)a->head_dim;
    return 2 * BLOCK * seq + (a->heads > a->kv_heads ? 2 : 4) * seq * d + 4 * BLOCK * d;
}

/* Of the partial dk and dv with one part a head. */
static size_t partial_floats(const struct slide_attn *a)
{
    return 2 * (size_t)a->rows * (size_t)a->seq * (size_t)a->heads * (size_t)a->head_dim;
}

/* By the shape alone, so the number of threads changes no bit. */
static int64_t parts_of(const struct slide_attn *a)
{
    int64_t tasks = (int64_t)a->rows * a->heads, blocks = (a->seq + BLOCK - 1) / BLOCK;
    int64_t room = (int64_t)(PARTS_FLOATS / (partial_floats(a) + 1));
    int64_t parts = tasks ? (TASKS + tasks - 1) / tasks : 1;
    parts = parts < PARTS_MAX ? parts : PARTS_MAX;
    parts = parts < blocks ? parts : blocks;
    parts = parts < room ? parts : room;
    return parts > 1 ? parts : 1;
}

/* For all shapes of no more tokens and no longer rows: more or fewer rows may have more parts. */
size_t slide_cpu_attn_workspace(struct slide_device *device, const struct slide_attn *attn)
{
    size_t one = partial_floats(attn), most = PARTS_MAX * one;
    most = most < PARTS_FLOATS ? most : PARTS_FLOATS;
    if (attn->heads > attn->kv_heads && most < one)
        most = one;
    return (worker_floats(attn) * (size_t)device->options.threads + most) * sizeof(float);
}

struct memory {
    float *s, *dp;           /* [BLOCK, seq] */
    float *k, *v;            /* [seq, d] */
    float *q, *o, *d_o, *dq; /* [BLOCK, d] */
    float *dk, *dv;          /* [seq, d], where each kv head has one head */
};

static struct memory memory_of(const struct attn_work *w, int worker)
{
    size_t seq = (size_t)w->a->seq, d = (size_t)w->a->head_dim;
    float *p = (float *)w->a->workspace + (size_t)worker * w->room;
    struct memory m = {.s = p, .dp = p + BLOCK * seq};
    p += 2 * BLOCK * seq;
    m.k = p;
    m.v = p + seq * d;
    p += 2 * seq * d;
    m.q = p;
    m.o = p + BLOCK * d;
    m.d_o = p + 2 * BLOCK * d;
    m.dq = p + 3 * BLOCK * d;
    p += 4 * BLOCK * d;
    m.dk = p;
    m.dv = p + seq * d;
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

/* Raw scores of a block against its keys, k from the first one on: s[n, to - from]. */
static void scores(const struct attn_work *w, const struct block *b, struct view q, struct view k,
                   float *s)
{
    int keys = (int)(b->to - b->from);
    w->sgemm(ROW_MAJOR, NO_TRANS, TRANS, (int)b->n, keys, w->a->head_dim, 1.0f, q.p, q.ld, k.p,
             k.ld, 0.0f, s, keys);
}

static void fwd_task(void *ctx, int64_t task, int worker)
{
    const struct attn_work *w = ctx;
    const struct slide_attn *a = w->a;
    struct memory m = memory_of(w, worker);
    /* The last blocks see the most keys: they go first. */
    int64_t last = (a->seq - 1) / BLOCK, all = (int64_t)a->rows * a->heads;
    int64_t i0 = (last - task / all) * BLOCK, row = task % all / a->heads, h = task % a->heads;
    int64_t d = a->head_dim, kv = h / (a->heads / a->kv_heads), token = row * a->seq;
    const int32_t *first = a->first + token;
    float *lse = a->lse + (row * a->heads + h) * a->seq;
    struct block b = block_at(a, first, i0);
    int keys = (int)(b.to - b.from);
    int64_t kv_at = (token + b.from) * a->kv_stride + kv * d;
    struct view k = view(w, a->k, kv_at, a->kv_stride, keys, m.k);
    struct view v = view(w, a->v, kv_at, a->kv_stride, keys, m.v);
    struct view q = view(w, a->q, (token + i0) * a->q_stride + h * d, a->q_stride, b.n, m.q);
    scores(w, &b, q, k, m.s);
    for (int64_t i = 0; i < b.n; i++)
        lse[i0 + i] = w->loops->softmax(m.s + i * keys, first[i0 + i] - b.from, i0 + i + 1 - b.from,
                                        keys, a->scale);
    w->sgemm(ROW_MAJOR, NO_TRANS, NO_TRANS, (int)b.n, (int)d, keys, 1.0f, m.s, keys, v.p, v.ld,
             0.0f, m.o, (int)d);
    put(w, a->o, (token + i0) * a->o_stride + h * d, a->o_stride, m.o, b.n);
}

/* The first block of a part of `blocks`: each part sees about as many keys. */
static int64_t part_begins(int64_t blocks, int64_t part, int64_t parts)
{
    return (int64_t)((double)blocks * sqrt((double)part / (double)parts) + 0.5);
}

static void bwd_task(void *ctx, int64_t task, int worker)
{
    const struct attn_work *w = ctx;
    const struct slide_attn *a = w->a;
    struct memory m = memory_of(w, worker);
    int64_t part = task % w->parts, head = task / w->parts; /* of all rows */
    int64_t row = head / a->heads, h = head % a->heads, d = a->head_dim;
    int64_t kv = h / (a->heads / a->kv_heads), token = row * a->seq;
    int64_t blocks = (a->seq + BLOCK - 1) / BLOCK;
    int64_t begin = part_begins(blocks, part, w->parts) * BLOCK;
    int64_t end = part_begins(blocks, part + 1, w->parts) * BLOCK;
    end = end < a->seq ? end : a->seq;
    const int32_t *first = a->first + token;
    int64_t kv_at = token * a->kv_stride + kv * d;
    struct view k = view(w, a->k, kv_at, a->kv_stride, end, m.k);
    struct view v = view(w, a->v, kv_at, a->kv_stride, end, m.v);
    float *dk = w->sums ? w->sums + task * 2 * a->seq * d : m.dk;
    float *dv = w->sums ? dk + a->seq * d : m.dv;
    memset(dk, 0, (size_t)(end * d) * sizeof *dk);
    memset(dv, 0, (size_t)(end * d) * sizeof *dv);
    const float *lse = a->lse + (row * a->heads + h) * a->seq;
    for (int64_t i0 = begin; i0 < end; i0 += BLOCK) {
        struct block b = block_at(a, first, i0);
        int keys = (int)(b.to - b.from), n = (int)b.n, hd = (int)d;
        int64_t at = (token + i0) * a->o_stride + h * d;
        struct view q = view(w, a->q, (token + i0) * a->q_stride + h * d, a->q_stride, b.n, m.q);
        struct view o = view(w, a->o, at, a->o_stride, b.n, m.o);
        struct view g = view(w, a->d_o, at, a->o_stride, b.n, m.d_o);
        struct view seen_k = {k.p + b.from * k.ld, k.ld}, seen_v = {v.p + b.from * v.ld, v.ld};
        scores(w, &b, q, seen_k, m.s);
        scores(w, &b, g, seen_v, m.dp); /* dP = dO Vt */
        for (int64_t i = 0; i < b.n; i++) {
            float delta = w->loops->dot(g.p + i * g.ld, o.p + i * o.ld, d);
            w->loops->softmax_bwd(m.s + i * keys, m.dp + i * keys, first[i0 + i] - b.from,
                                  i0 + i + 1 - b.from, keys, a->scale, lse[i0 + i], delta);
        }
        w->sgemm(ROW_MAJOR, NO_TRANS, NO_TRANS, n, hd, keys, 1.0f, m.dp, keys, seen_k.p, k.ld, 0.0f,
                 m.dq, hd);
        put(w, a->dq, (token + i0) * a->dq_stride + h * d, a->dq_stride, m.dq, b.n);
        w->sgemm(ROW_MAJOR, TRANS, NO_TRANS, keys, hd, n, 1.0f, m.dp, keys, q.p, q.ld, 1.0f,
                 dk + b.from * d, hd);
        w->sgemm(ROW_MAJOR, TRANS, NO_TRANS, keys, hd, n, 1.0f, m.s, keys, g.p, g.ld, 1.0f,
                 dv + b.from * d, hd);
    }
    if (w->sums)
        return;
    int64_t dkv_at = token * a->dkv_stride + kv * d;
    put(w, a->dk, dkv_at, a->dkv_stride, dk, a->seq);
    put(w, a->dv, dkv_at, a->dkv_stride, dv, a->seq);
}

/* dk or dv of BLOCK keys of a kv head of a row: the sum over the heads of its group, part by part,
 * into the first one's place. */
static void sum_task(void *ctx, int64_t task, int worker)
{
    (void)worker;
    const struct attn_work *w = ctx;
    const struct slide_attn *a = w->a;
    int64_t blocks = (a->seq + BLOCK - 1) / BLOCK, d = a->head_dim, which = task % 2;
    int64_t key = task / 2 % blocks * BLOCK, kv = task / 2 / blocks; /* of all rows */
    int64_t keys = a->seq - key < BLOCK ? a->seq - key : BLOCK;
    int64_t group = a->heads / a->kv_heads * w->parts, size = a->seq * d;
    float *sum = NULL, *from = w->sums + (kv * group * 2 + which) * size + key * d;
    for (int64_t i = 0; i < group; i++, from += 2 * size) {
        if (part_begins(blocks, i % w->parts + 1, w->parts) * BLOCK <= key)
            continue; /* its queries come before these keys: not even zeroed */
        if (sum)
            w->loops->add(sum, from, keys * d);
        else
            sum = from;
    }
    int64_t at = (kv / a->kv_heads * a->seq + key) * a->dkv_stride + kv % a->kv_heads * d;
    put(w, which ? a->dv : a->dk, at, a->dkv_stride, sum, keys);
}

static struct attn_work work_of(struct slide_lane *lane, const struct slide_attn *a)
{
    return (struct attn_work){.a = a,
                              .loops = slide_cpu_loops_get(lane->device->isa),
                              .sgemm = lane->device->sgemm,
                              .room = worker_floats(a)};
}

int slide_cpu_attn_fwd_run(struct slide_lane *lane, const void *args, struct slide_err *err)
{
    const struct slide_attn *a = args;
    (void)err;
    struct attn_work w = work_of(lane, a);
    int64_t blocks = ((int64_t)a->seq + BLOCK - 1) / BLOCK;
    slide_pool_for(lane->device->pool, blocks * a->rows * a->heads, fwd_task, &w);
    return 0;
}

int slide_cpu_attn_bwd_run(struct slide_lane *lane, const void *args, struct slide_err *err)
{
    const struct slide_attn *a = args;
    (void)err;
    struct attn_work w = work_of(lane, a);
    int64_t blocks = ((int64_t)a->seq + BLOCK - 1) / BLOCK;
    w.parts = parts_of(a);
    if (a->heads > a->kv_heads || w.parts > 1)
        w.sums = (float *)a->workspace + (size_t)lane->device->options.threads * w.room;
    slide_pool_for(lane->device->pool, (int64_t)a->rows * a->heads * w.parts, bwd_task, &w);
    if (w.sums)
        slide_pool_for(lane->device->pool, 2 * blocks * a->rows * a->kv_heads, sum_task, &w);
    return 0;
}
