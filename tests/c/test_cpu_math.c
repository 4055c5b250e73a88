/* GEMM and attention of the CPU backend against float64, in every transposition and type, with odd
 * sizes, windows and documents; the same bits from each instruction set and number of threads. */
#include "cpu_rig.h"

#define COUNT(array) (sizeof(array) / sizeof((array)[0]))

/* ---- GEMM ---- */

struct gemm_case {
    int32_t m, n, k;
    int trans_a, trans_b;
    enum slide_dtype in, out;
    int add; /* 0: none, 1: another matrix, 2: out itself */
    bool bias;
    int32_t pad; /* elements between the rows */
};

static double gemm_element(const struct gemm_case *c, const struct slide_gemm *g,
                           const void *before, int64_t i, int64_t j, double *size)
{
    double sum = 0;
    for (int64_t p = 0; p < c->k; p++) {
        double a = rig_get(c->in, g->a, c->trans_a ? p * g->lda + i : i * g->lda + p);
        double b = rig_get(c->in, g->b, c->trans_b ? j * g->ldb + p : p * g->ldb + j);
        sum += a * b;
        *size += fabs(a * b);
    }
    double add = c->add ? rig_get(c->out, c->add == 2 ? before : g->add, i * g->ldo + j) : 0;
    double bias = c->bias ? rig_get(c->in, g->bias, j) : 0;
    *size += fabs(add) + fabs(bias);
    return sum + add + bias;
}

static void gemm_run(struct rig *r, const struct gemm_case *c)
{
    int64_t a_rows = c->trans_a ? c->k : c->m, a_cols = c->trans_a ? c->m : c->k;
    int64_t b_rows = c->trans_b ? c->n : c->k, b_cols = c->trans_b ? c->k : c->n;
    struct slide_gemm g = {.m = c->m,
                           .n = c->n,
                           .k = c->k,
                           .trans_a = c->trans_a,
                           .trans_b = c->trans_b,
                           .in_type = c->in,
                           .out_type = c->out,
                           .lda = a_cols + c->pad,
                           .ldb = b_cols + c->pad,
                           .ldo = c->n + c->pad};
    size_t bytes = (size_t)(c->m * g.ldo) * slide_dtype_size(c->out);
    g.a = rig_array(r, c->in, a_rows * g.lda, 1);
    g.b = rig_array(r, c->in, b_rows * g.ldb, 1);
    void *before = rig_array(r, c->out, c->m * g.ldo, 3);
    g.out = rig_copy(r, before, bytes);
    g.add = c->add == 2 ? g.out : c->add ? rig_array(r, c->out, c->m * g.ldo, 3) : NULL;
    g.bias = c->bias ? rig_array(r, c->in, c->n, 3) : NULL;
    rig_done(r, slide_gemm(r->lane, &g, &r->err));
    rig_same(r, g.out, bytes);
    if (!r->first)
        return;
    struct rig_worst w = {0};
    int64_t spilt = 0;
    /* All elements of a small product; of a large one some in every row and column. */
    int64_t step = (int64_t)c->m * c->n * c->k > 3000000 ? 61 : 1;
    for (int64_t i = 0; i < c->m; i++) {
        for (int64_t j = i % step; j < c->n; j += step) {
            double size = 0, want = gemm_element(c, &g, before, i, j, &size);
            double got = rig_get(c->out, g.out, i * g.ldo + j);
            rig_compare(&w, c->out, i * g.ldo + j, got, want,
                        size * rig_tolerance[SLIDE_F32] / rig_tolerance[c->out]);
        }
        for (int64_t j = c->n; j < g.ldo; j++) /* between the rows */
            spilt +=
                rig_get(c->out, g.out, i * g.ldo + j) != rig_get(c->out, before, i * g.ldo + j);
    }
    CHECK_EQ(spilt, 0);
    RIG_JUDGE(&w, "gemm %d x %d x %d, trans %d %d, types %d %d, add %d, bias %d", c->m, c->n, c->k,
              c->trans_a, c->trans_b, c->in, c->out, c->add, c->bias);
}

static const enum slide_dtype types[][2] = {
    {SLIDE_F32, SLIDE_F32}, {SLIDE_BF16, SLIDE_BF16}, {SLIDE_BF16, SLIDE_F32}};

static void gemm_small_one(struct rig *r)
{
    static const int32_t sizes[][3] = {{1, 1, 1},    {1, 65, 17}, {65, 1, 7}, {7, 17, 1},
                                       {17, 64, 65}, {64, 7, 64}, {3, 5, 0},  {65, 65, 130}};
    for (int i = 0; i < (int)COUNT(sizes) * 3 * 4 * 6; i++, rig_drop(r)) {
        int way = i / (int)COUNT(sizes), size = i % (int)COUNT(sizes), type = way / 24;
        struct gemm_case c = {sizes[size][0], sizes[size][1],  sizes[size][2], way % 2,
                              way / 2 % 2,    types[type][0],  types[type][1], way / 4 % 3,
                              way / 12 % 2,   size % 2 ? 3 : 0};
        gemm_run(r, &c);
    }
}

static void gemm_small(void)
{
    every(gemm_small_one);
}

/* Several tiles, for BF16 more products than are widened at a time, and so many of few elements
 * that their sum is cut. */
static void gemm_tiles_one(struct rig *r)
{
    static const int32_t sizes[][3] = {
        {577, 643, 65}, {33, 1100, 1031}, {2049, 17, 19}, {37, 29, 8209}};
    for (int i = 0; i < (int)COUNT(sizes) * 3 * 4; i++, rig_drop(r)) {
        int way = i / (int)COUNT(sizes), size = i % (int)COUNT(sizes), type = way / 4;
        struct gemm_case c = {
            sizes[size][0],   sizes[size][1],
            sizes[size][2],   way % 2,
            way / 2 % 2,      types[type][0],
            types[type][1],   (way + size + type) % 3, /* not in step with the sizes */
            (way + type) % 2, size};
        gemm_run(r, &c);
    }
}

static void gemm_tiles(void)
{
    every(gemm_tiles_one);
}

/* ---- attention ---- */

struct attn_case {
    int32_t rows, seq, heads, kv_heads, head_dim, window;
    int32_t document; /* a new one about every so many tokens, 0: one */
};

static const struct attn_case attn_cases[] = {
    {1, 1, 1, 1, 8, 0, 0},   {2, 7, 4, 2, 6, 0, 0},     {1, 64, 3, 1, 16, 0, 0},
    {2, 65, 3, 3, 17, 0, 9}, {1, 130, 6, 2, 64, 17, 0}, {1, 131, 4, 1, 32, 31, 50},
    {3, 17, 2, 1, 7, 1, 0},  {1, 200, 2, 2, 16, 64, 7}, {3, 70, 17, 17, 8, 0, 0},
    {8, 66, 6, 3, 5, 0, 30}, /* in the last two, heads are too many to be cut into parts */
};

struct attn_data {
    struct slide_attn a;
    int32_t *first;
    void *qkv, *dqkv;
    int64_t tokens, width, q_width;
    size_t qkv_bytes, o_bytes, lse_bytes;
};

static void attn_make(struct rig *r, const struct attn_case *c, enum slide_dtype act,
                      struct attn_data *d)
{
    int64_t width = (c->heads + 2 * c->kv_heads) * c->head_dim;
    int64_t q_width = c->heads * c->head_dim, kv_width = c->kv_heads * c->head_dim;
    size_t size = slide_dtype_size(act);
    d->tokens = (int64_t)c->rows * c->seq;
    d->width = width;
    d->q_width = q_width;
    d->qkv_bytes = (size_t)(d->tokens * width) * size;
    d->o_bytes = (size_t)(d->tokens * q_width) * size;
    d->lse_bytes = (size_t)(d->tokens * c->heads) * 4;
    d->first = rig_new(r, (size_t)d->tokens * 4);
    for (int64_t t = 0; t < d->tokens; t++) {
        int32_t i = (int32_t)(t % c->seq);
        int32_t begin = i ? d->first[t - 1] : 0;
        if (i && c->document && !rig_below(r, c->document))
            begin = i;
        if (c->window && i - c->window + 1 > begin)
            begin = i - c->window + 1;
        d->first[t] = begin;
    }
    d->qkv = rig_array(r, act, d->tokens * width, 2);
    d->dqkv = rig_array(r, act, d->tokens * width, 1);
    d->a = (struct slide_attn){.dtype = act,
                               .rows = c->rows,
                               .seq = c->seq,
                               .heads = c->heads,
                               .kv_heads = c->kv_heads,
                               .head_dim = c->head_dim,
                               .window = c->window,
                               .scale = 1 / sqrtf((float)c->head_dim),
                               .first = d->first,
                               .q = d->qkv,
                               .k = (char *)d->qkv + (size_t)q_width * size,
                               .v = (char *)d->qkv + (size_t)(q_width + kv_width) * size,
                               .q_stride = width,
                               .kv_stride = width,
                               .o = rig_array(r, act, d->tokens * q_width, 1),
                               .o_stride = q_width,
                               .lse = rig_new(r, d->lse_bytes),
                               .d_o = rig_array(r, act, d->tokens * q_width, 1),
                               .dq = d->dqkv,
                               .dk = (char *)d->dqkv + (size_t)q_width * size,
                               .dv = (char *)d->dqkv + (size_t)(q_width + kv_width) * size,
                               .dq_stride = width,
                               .dkv_stride = width};
    d->a.workspace = rig_new(r, slide_attn_workspace(r->device, &d->a));
}

/* The same in float64, straight from the definition: o, lse, and into grad [tokens, width] the
 * gradients of q, k and v; the sizes of what was added up beside each. */
struct attn_wanted {
    double *o, *lse, *grad, *size;
};

static void attn_reference(const struct attn_data *d, struct attn_wanted *w)
{
    const struct slide_attn *a = &d->a;
    int64_t n = a->head_dim, group = a->heads / a->kv_heads;
    enum slide_dtype act = a->dtype;
    double *p = calloc((size_t)a->seq * 2, sizeof *p), *dp = p + a->seq;
    for (int64_t x = 0; x < d->tokens * a->heads; x++) {
        int64_t t = x / a->heads, h = x % a->heads, i = t % a->seq, row = t - i;
        int64_t k_col = d->q_width + h / group * n, v_col = k_col + a->kv_heads * n;
        double most = -INFINITY, sum = 0, delta = 0, *o = w->o + t * d->q_width + h * n;
        for (int64_t j = a->first[t]; j <= i; j++) {
            p[j] = dp[j] = 0;
            for (int64_t c = 0; c < n; c++) {
                p[j] += rig_get(act, d->qkv, t * d->width + h * n + c) *
                        rig_get(act, d->qkv, (row + j) * d->width + k_col + c) * (double)a->scale;
                dp[j] += rig_get(act, a->d_o, t * d->q_width + h * n + c) *
                         rig_get(act, d->qkv, (row + j) * d->width + v_col + c);
            }
            most = fmax(most, p[j]);
        }
        for (int64_t j = a->first[t]; j <= i; j++)
            sum += p[j] = exp(p[j] - most);
        w->lse[(row / a->seq * a->heads + h) * a->seq + i] = most + log(sum);
        for (int64_t j = a->first[t]; j <= i; j++) {
            p[j] /= sum;
            for (int64_t c = 0; c < n; c++)
                o[c] += p[j] * rig_get(act, d->qkv, (row + j) * d->width + v_col + c);
        }
        /* sum p dp, the way backward gets it: from the output, which BF16 has rounded. */
        for (int64_t c = 0; c < n; c++)
            delta += rig_get(act, a->d_o, t * d->q_width + h * n + c) *
                     rig_get(act, a->o, t * d->q_width + h * n + c);
        for (int64_t j = a->first[t]; j <= i; j++) {
            double ds = p[j] * (dp[j] - delta) * (double)a->scale;
            double size = p[j] * (fabs(dp[j]) + fabs(delta) + (double)n / 4) * (double)a->scale;
            for (int64_t c = 0; c < n; c++) {
                int64_t q_at = t * d->width + h * n + c, k_at = (row + j) * d->width + k_col + c;
                int64_t v_at = (row + j) * d->width + v_col + c;
                double pd = p[j] * rig_get(act, a->d_o, t * d->q_width + h * n + c);
                w->grad[q_at] += ds * rig_get(act, d->qkv, k_at);
                w->grad[k_at] += ds * rig_get(act, d->qkv, q_at);
                w->grad[v_at] += pd;
                w->size[q_at] += size * fabs(rig_get(act, d->qkv, k_at));
                w->size[k_at] += size * fabs(rig_get(act, d->qkv, q_at));
                w->size[v_at] += fabs(pd);
            }
        }
    }
    free(p);
}

static void attn_check(struct attn_data *d)
{
    int64_t outs = d->tokens * d->q_width, ins = d->tokens * d->width;
    double *all = calloc((size_t)(outs + d->tokens * d->a.heads + 2 * ins), sizeof *all);
    struct attn_wanted w = {all, all + outs, all + outs + d->tokens * d->a.heads, NULL};
    w.size = w.grad + ins;
    attn_reference(d, &w);
    struct rig_worst wo = {0}, wl = {0}, wg = {0};
    enum slide_dtype act = d->a.dtype;
    for (int64_t i = 0; i < outs; i++)
        rig_compare(&wo, act, i, rig_get(act, d->a.o, i), w.o[i], act == SLIDE_F32 ? 2 : 0.001);
    for (int64_t i = 0; i < d->tokens * d->a.heads; i++)
        rig_compare(&wl, SLIDE_F32, i, d->a.lse[i], w.lse[i], 1);
    for (int64_t i = 0; i < ins; i++)
        rig_compare(&wg, act, i, rig_get(act, d->dqkv, i), w.grad[i],
                    w.size[i] * rig_tolerance[SLIDE_F32] / rig_tolerance[act]);
    RIG_JUDGE(&wo, "attention of %d tokens, type %d", d->a.seq, act);
    RIG_JUDGE(&wl, "lse of %d tokens, type %d", d->a.seq, act);
    RIG_JUDGE(&wg, "attention gradients of %d tokens, type %d", d->a.seq, act);
    free(all);
}

static void attn_one(struct rig *r)
{
    for (size_t i = 0; i < COUNT(attn_cases) * COUNT(rig_acts); i++, rig_drop(r)) {
        struct attn_data d;
        attn_make(r, &attn_cases[i / 2], rig_acts[i % 2], &d);
        rig_done(r,
                 slide_attn_fwd(r->lane, &d.a, &r->err) || slide_attn_bwd(r->lane, &d.a, &r->err));
        rig_same(r, d.a.o, d.o_bytes);
        rig_same(r, d.a.lse, d.lse_bytes);
        rig_same(r, d.dqkv, d.qkv_bytes);
        if (r->first)
            attn_check(&d);
    }
}

static void attn(void)
{
    every(attn_one);
}

/* Scores of some hundreds: a softmax without the maximum taken away would overflow. */
static void attn_large_one(struct rig *r)
{
    static const struct attn_case c = {1, 33, 2, 1, 16, 0, 0};
    for (size_t i = 0; i < COUNT(rig_acts); i++, rig_drop(r)) {
        struct attn_data d;
        attn_make(r, &c, rig_acts[i], &d);
        d.a.scale = 20;
        rig_done(r, slide_attn_fwd(r->lane, &d.a, &r->err));
        rig_same(r, d.a.o, d.o_bytes);
        double most = 0;
        int64_t wrong = 0;
        for (int64_t x = 0; x < d.tokens * d.q_width; x++)
            wrong += !(fabs(rig_get(d.a.dtype, d.a.o, x)) <= 2);
        for (int64_t x = 0; x < d.tokens * d.a.heads; x++)
            most = fmax(most, fabs((double)d.a.lse[x]));
        CHECK_EQ(wrong, 0);
        CHECK(most > 100);
    }
}

static void attn_large(void)
{
    every(attn_large_one);
}

/* The workspace is asked for once; passes of no more tokens in no longer rows must do with it. */
static void attn_workspace_one(struct rig *r)
{
    for (int i = 0; i < 20000; i++) {
        int32_t kv_heads = 1 + rig_below(r, 8), heads = kv_heads * (1 + rig_below(r, 4));
        int32_t tokens = 1 + rig_below(r, 1 << rig_below(r, 16)), seq = 1 + rig_below(r, tokens);
        int32_t shorter = 1 + rig_below(r, seq);
        struct slide_attn most = {.rows = (tokens + seq - 1) / seq,
                                  .seq = seq,
                                  .heads = heads,
                                  .kv_heads = kv_heads,
                                  .head_dim = 8 * (1 + rig_below(r, 16))};
        struct slide_attn pass = most;
        pass.seq = shorter;
        pass.rows = 1 + rig_below(r, tokens / shorter);
        size_t room = slide_attn_workspace(r->device, &most);
        if (!CHECK(slide_attn_workspace(r->device, &pass) <= room))
            return;
    }
}

static void attn_workspace(void)
{
    every(attn_workspace_one);
}

TEST_MAIN(CASE(gemm_small), CASE(gemm_tiles), CASE(attn), CASE(attn_large), CASE(attn_workspace))
