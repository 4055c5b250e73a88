/* The small kernels' loops over rows, compiled once an instruction set (csrc/isa.flags). Everything
 * is computed in FP32; act (FP32 or BF16) is a constant in each instance, so one body serves both.
 * Called by cpu_kernels.c and cpu_attn.c through the tables at the end. */
#include <math.h>

#include "cpu/cpu_isa.h"
#include "cpu/cpu_math_isa.h"

/* The two instances of a body: its arguments with F32 and with BF16 as constants. */
#define BOTH(body, ...)                                                                            \
    do {                                                                                           \
        if (act == SLIDE_F32)                                                                      \
            body(SLIDE_F32, __VA_ARGS__);                                                          \
        else                                                                                       \
            body(SLIDE_BF16, __VA_ARGS__);                                                         \
    } while (0)

#define FOR16(c, n) for (int64_t c = 0; c < (n); c += LANES)

INLINE const void *at(const void *p, int64_t i, enum slide_dtype act)
{
    return (const char *)p + i * (act == SLIDE_F32 ? 4 : 2);
}

INLINE void *at_rw(void *p, int64_t i, enum slide_dtype act)
{
    return (char *)p + i * (act == SLIDE_F32 ? 4 : 2);
}

/* ---- norms ---- */

INLINE void rmsnorm_fwd_body(enum slide_dtype act, const struct slide_rmsnorm_fwd_args *a,
                             int64_t from, int64_t to)
{
    int64_t cols = a->cols;
    for (int64_t t = from; t < to; t++) {
        for (int32_t g = 0; g < a->groups; g++) {
            const void *x = at(a->x, t * a->x_stride + g * cols, act);
            void *y = at_rw(a->y, t * a->y_stride + g * cols, act);
            v16 squares = splat(0);
            FOR16(c, cols)
            {
                v16 v = load(x, c, cols - c, act);
                squares = squares + v * v;
            }
            float r = 1.0f / sqrtf(sum_lanes(squares) / (float)cols + a->eps);
            a->rstd[t * a->groups + g] = r;
            FOR16(c, cols)
            {
                v16 n = round_act(load(x, c, cols - c, act) * splat(r), act);
                store(y, c, cols - c, n * load(a->w, c, cols - c, act), act);
            }
        }
    }
}

static void rmsnorm_fwd(enum slide_dtype act, const struct slide_rmsnorm_fwd_args *a, int64_t from,
                        int64_t to)
{
    BOTH(rmsnorm_fwd_body, a, from, to);
}

INLINE void rmsnorm_bwd_body(enum slide_dtype act, const struct slide_rmsnorm_bwd_args *a,
                             int64_t from, int64_t to, float *dw)
{
    int64_t cols = a->cols;
    memset(dw, 0, (size_t)cols * sizeof *dw);
    for (int64_t t = from; t < to; t++) {
        for (int32_t g = 0; g < a->groups; g++) {
            const void *x = at(a->x, t * a->x_stride + g * cols, act);
            const void *dy = at(a->dy, t * a->dy_stride + g * cols, act);
            void *dx = at_rw(a->dx, t * a->dx_stride + g * cols, act);
            v16 r = splat(a->rstd[t * a->groups + g]), dots = splat(0);
            FOR16(c, cols)
            {
                int64_t n = cols - c;
                v16 d = load(dy, c, n, act), hat = load(x, c, n, act) * r;
                dots = dots + d * load(a->w, c, n, act) * hat;
                v16 sum = load(dw, c, n, SLIDE_F32) + d * round_act(hat, act);
                store(dw, c, n, sum, SLIDE_F32);
            }
            v16 mean = splat(sum_lanes(dots) / (float)cols);
            FOR16(c, cols)
            {
                int64_t n = cols - c;
                v16 hat = load(x, c, n, act) * r;
                v16 out = r * (load(dy, c, n, act) * load(a->w, c, n, act) - hat * mean);
                if (a->add)
                    out = out + load(dx, c, n, act);
                store(dx, c, n, out, act);
            }
        }
    }
}

static void rmsnorm_bwd(enum slide_dtype act, const struct slide_rmsnorm_bwd_args *a, int64_t from,
                        int64_t to, float *dw)
{
    BOTH(rmsnorm_bwd_body, a, from, to, dw);
}

INLINE void bias_bwd_body(enum slide_dtype act, const struct slide_bias_bwd_args *a, int64_t from,
                          int64_t to, float *db)
{
    int64_t cols = a->cols;
    memset(db, 0, (size_t)cols * sizeof *db);
    for (int64_t t = from; t < to; t++)
        FOR16(c, cols)
        {
            int64_t n = cols - c;
            v16 sum = load(db, c, n, SLIDE_F32) + load(at(a->dy, t * a->stride, act), c, n, act);
            store(db, c, n, sum, SLIDE_F32);
        }
}

static void bias_bwd(enum slide_dtype act, const struct slide_bias_bwd_args *a, int64_t from,
                     int64_t to, float *db)
{
    BOTH(bias_bwd_body, a, from, to, db);
}

/* ---- rotation ---- */

INLINE void rope_body(enum slide_dtype act, const struct slide_rope_args *a, int64_t from,
                      int64_t to)
{
    int64_t half = a->half;
    v16 sign = splat((float)a->sign);
    for (int64_t t = from; t < to; t++) {
        for (int32_t h = 0; h < a->heads; h++) {
            void *x = at_rw(a->x, t * a->stride + (int64_t)h * a->head_dim, act);
            FOR16(c, half)
            {
                int64_t n = half - c;
                v16 cosine = load(a->cos + t * half, c, n, SLIDE_F32);
                v16 sine = load(a->sin + t * half, c, n, SLIDE_F32) * sign;
                v16 low = load(x, c, n, act), high = load(x, half + c, n, act);
                store(x, c, n, low * cosine - high * sine, act);
                store(x, half + c, n, high * cosine + low * sine, act);
            }
        }
    }
}

static void rope(enum slide_dtype act, const struct slide_rope_args *a, int64_t from, int64_t to)
{
    BOTH(rope_body, a, from, to);
}

/* ---- SwiGLU ---- */

INLINE v16 sigmoid(v16 x)
{
    return splat(1) / (splat(1) + exp16(-x));
}

INLINE void swiglu_fwd_body(enum slide_dtype act, const struct slide_swiglu_fwd_args *a,
                            int64_t from, int64_t to)
{
    int64_t cols = a->cols;
    for (int64_t t = from; t < to; t++) {
        const void *gu = at(a->gu, t * 2 * cols, act);
        void *out = at_rw(a->out, t * cols, act);
        FOR16(c, cols)
        {
            int64_t n = cols - c;
            v16 g = load(gu, c, n, act), u = load(gu, cols + c, n, act);
            store(out, c, n, round_act(g / (splat(1) + exp16(-g)), act) * u, act);
        }
    }
}

static void swiglu_fwd(enum slide_dtype act, const struct slide_swiglu_fwd_args *a, int64_t from,
                       int64_t to)
{
    BOTH(swiglu_fwd_body, a, from, to);
}

INLINE void swiglu_bwd_body(enum slide_dtype act, const struct slide_swiglu_bwd_args *a,
                            int64_t from, int64_t to)
{
    int64_t cols = a->cols;
    for (int64_t t = from; t < to; t++) {
        const void *gu = at(a->gu, t * 2 * cols, act), *dout = at(a->dout, t * cols, act);
        void *dgu = at_rw(a->dgu, t * 2 * cols, act);
        FOR16(c, cols)
        {
            int64_t n = cols - c;
            v16 g = load(gu, c, n, act), u = load(gu, cols + c, n, act);
            v16 d = load(dout, c, n, act), s = sigmoid(g);
            store(dgu, c, n, d * u * s * (splat(1) + g * (splat(1) - s)), act);
            store(dgu, cols + c, n, d * (g * s), act);
        }
    }
}

static void swiglu_bwd(enum slide_dtype act, const struct slide_swiglu_bwd_args *a, int64_t from,
                       int64_t to)
{
    BOTH(swiglu_bwd_body, a, from, to);
}

/* ---- embedding, casts ---- */

INLINE void embed_bwd_body(enum slide_dtype act, const struct slide_embed_bwd_args *a, int64_t from,
                           int64_t to)
{
    for (int64_t t = 0; t < a->n; t++) {
        if (a->ids[t] == a->skip)
            continue;
        float *row = a->dtable + (int64_t)a->ids[t] * a->cols;
        for (int64_t c = from; c < to; c += LANES) {
            int64_t n = to - c;
            v16 sum = load(row, c, n, SLIDE_F32) + load(a->dout, t * a->cols + c, n, act);
            store(row, c, n, sum, SLIDE_F32);
        }
    }
}

static void embed_bwd(enum slide_dtype act, const struct slide_embed_bwd_args *a, int64_t from,
                      int64_t to)
{
    BOTH(embed_bwd_body, a, from, to);
}

static void cast(const struct slide_cast_args *a, int64_t from, int64_t to)
{
    enum slide_dtype in = a->from, out = a->to;
    for (int64_t i = from; i < to; i += LANES) {
        int64_t n = to - i;
        v16 x = in == SLIDE_F32 ? load(a->in, i, n, SLIDE_F32) : load(a->in, i, n, SLIDE_BF16);
        if (out == SLIDE_F32)
            store(a->out, i, n, x, SLIDE_F32);
        else
            store(a->out, i, n, x, SLIDE_BF16);
    }
}

INLINE void accumulate_body(enum slide_dtype act, const struct slide_accumulate_args *a,
                            int64_t from, int64_t to)
{
    for (int64_t i = from; i < to; i += LANES) {
        int64_t n = to - i;
        v16 x = load(a->in, i, n, act);
        store(a->out, i, n, a->add ? load(a->out, i, n, SLIDE_F32) + x : x, SLIDE_F32);
    }
}

static void accumulate(enum slide_dtype act, const struct slide_accumulate_args *a, int64_t from,
                       int64_t to)
{
    BOTH(accumulate_body, a, from, to);
}

static void add(float *out, const float *in, int64_t n)
{
    FOR16(i, n)
    store(out, i, n - i, load(out, i, n - i, SLIDE_F32) + load(in, i, n - i, SLIDE_F32), SLIDE_F32);
}

static void widen(enum slide_dtype act, float *out, int64_t out_stride, const void *in,
                  int64_t in_stride, int64_t rows, int64_t cols)
{
    for (int64_t r = 0; r < rows; r++)
        FOR16(c, cols)
        {
            int64_t n = cols - c;
            v16 x = act == SLIDE_F32 ? load(in, r * in_stride + c, n, SLIDE_F32)
                                     : load(in, r * in_stride + c, n, SLIDE_BF16);
            store(out, r * out_stride + c, n, x, SLIDE_F32);
        }
}

static void narrow(enum slide_dtype act, void *out, int64_t out_stride, const float *in,
                   int64_t in_stride, int64_t rows, int64_t cols)
{
    for (int64_t r = 0; r < rows; r++)
        FOR16(c, cols)
        {
            int64_t n = cols - c;
            v16 x = load(in, r * in_stride + c, n, SLIDE_F32);
            if (act == SLIDE_F32)
                store(out, r * out_stride + c, n, x, SLIDE_F32);
            else
                store(out, r * out_stride + c, n, x, SLIDE_BF16);
        }
}

/* ---- loss ---- */

#define SUM_BLOCK 1024 /* elements that are summed apart, so that 150,000 lose nothing */

INLINE void ce_body(enum slide_dtype act, const struct slide_ce_args *a, int64_t from, int64_t to)
{
    int64_t vocab = a->vocab;
    for (int64_t t = from; t < to; t++) {
        void *z = at_rw(a->z, t * vocab, act);
        int32_t label = a->labels[t];
        if (label < 0) {
            a->loss[t] = 0;
            if (a->grad)
                FOR16(c, vocab)
            store(z, c, vocab - c, splat(0), act);
            continue;
        }
        v16 top = splat(-__builtin_inff()), sum = splat(0);
        FOR16(c, vocab)
        top = max16(top, mask_tail(load(z, c, vocab - c, act), vocab - c, -__builtin_inff()));
        v16 most = splat(max_lanes(top));
        for (int64_t b = 0; b < vocab; b += SUM_BLOCK) {
            int64_t end = b + SUM_BLOCK < vocab ? b + SUM_BLOCK : vocab;
            v16 part = splat(0);
            for (int64_t c = b; c < end; c += LANES)
                part = part + mask_tail(exp16(load(z, c, end - c, act) - most), end - c, 0);
            sum = sum + part;
        }
        float total = sum_lanes(sum), hit;
        v16 one = load(z, label, 1, act);
        memcpy(&hit, &one, sizeof hit);
        a->loss[t] = logf(total) + max_lanes(most) - hit;
        if (!a->grad)
            continue;
        v16 scale = splat(a->scale), inverse = splat(1.0f / total);
        float own = (expf(hit - max_lanes(most)) / total - 1.0f) * a->scale;
        FOR16(c, vocab)
        {
            int64_t n = vocab - c;
            store(z, c, n, exp16(load(z, c, n, act) - most) * inverse * scale, act);
        }
        store(z, label, 1, splat(own), act);
    }
}

static void ce(enum slide_dtype act, const struct slide_ce_args *a, int64_t from, int64_t to)
{
    BOTH(ce_body, a, from, to);
}

/* ---- attention rows ---- */

static float softmax(float *s, int64_t from, int64_t to, int64_t n, float scale)
{
    v16 top = splat(-__builtin_inff()), sum = splat(0), factor = splat(scale);
    memset(s, 0, (size_t)from * sizeof *s);
    memset(s + to, 0, (size_t)(n - to) * sizeof *s);
    for (int64_t j = from; j < to; j += LANES)
        top = max16(top,
                    mask_tail(load(s, j, to - j, SLIDE_F32) * factor, to - j, -__builtin_inff()));
    float most = max_lanes(top);
    for (int64_t j = from; j < to; j += LANES) {
        int64_t left = to - j;
        v16 p = mask_tail(exp16(load(s, j, left, SLIDE_F32) * factor - splat(most)), left, 0);
        sum = sum + p;
        store(s, j, left, p, SLIDE_F32);
    }
    float total = sum_lanes(sum);
    v16 inverse = splat(1.0f / total);
    for (int64_t j = from; j < to; j += LANES)
        store(s, j, to - j, load(s, j, to - j, SLIDE_F32) * inverse, SLIDE_F32);
    return most + logf(total);
}

static void softmax_bwd(float *s, float *dp, int64_t from, int64_t to, int64_t n, float scale,
                        float lse, float delta)
{
    v16 factor = splat(scale);
    memset(s, 0, (size_t)from * sizeof *s);
    memset(dp, 0, (size_t)from * sizeof *dp);
    memset(s + to, 0, (size_t)(n - to) * sizeof *s);
    memset(dp + to, 0, (size_t)(n - to) * sizeof *dp);
    for (int64_t j = from; j < to; j += LANES) {
        int64_t left = to - j;
        v16 p = exp16(load(s, j, left, SLIDE_F32) * factor - splat(lse));
        v16 d = load(dp, j, left, SLIDE_F32);
        store(s, j, left, p, SLIDE_F32);
        store(dp, j, left, factor * p * (d - splat(delta)), SLIDE_F32);
    }
}

static float dot(const float *a, const float *b, int64_t n)
{
    v16 sum = splat(0);
    FOR16(i, n)
    sum = sum + load(a, i, n - i, SLIDE_F32) * load(b, i, n - i, SLIDE_F32);
    return sum_lanes(sum);
}

#define JOIN_(a, b) a##b
#define JOIN(a, b) JOIN_(a, b)

const struct slide_cpu_loops JOIN(slide_cpu_loops_, SLIDE_ISA_SUFFIX) = {
    .rmsnorm_fwd = rmsnorm_fwd,
    .rmsnorm_bwd = rmsnorm_bwd,
    .rope = rope,
    .swiglu_fwd = swiglu_fwd,
    .swiglu_bwd = swiglu_bwd,
    .bias_bwd = bias_bwd,
    .embed_bwd = embed_bwd,
    .ce = ce,
    .accumulate = accumulate,
    .cast = cast,
    .add = add,
    .widen = widen,
    .narrow = narrow,
    .softmax = softmax,
    .softmax_bwd = softmax_bwd,
    .dot = dot,
};
