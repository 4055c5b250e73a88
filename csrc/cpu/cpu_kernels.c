/* The small kernels as commands: each cuts its rows by shape alone and runs the loops of the
 * instruction set on the device's pool. Sums over tokens go block by block, of SLIDE_NORM_BLOCK or
 * SLIDE_BIAS_BLOCK rows, and then over the blocks in order, so the number of threads changes no
 * bit. Called by the lane's thread. */
#include <math.h>
#include <string.h>

#include "cpu/cpu_inside.h"
#include "cpu/cpu_isa.h"

#define ROWS 16        /* tokens a piece */
#define ELEMENTS 65536 /* a piece of a flat loop */
#define COLUMNS 128    /* a piece of the embedding's gradient */

const struct slide_cpu_loops *slide_cpu_loops_get(enum slide_isa isa)
{
#if defined(__x86_64__)
    static const struct slide_cpu_loops *const table[SLIDE_ISA_COUNT] = {
        [SLIDE_ISA_BASE] = &slide_cpu_loops_base,
        [SLIDE_ISA_AVX2] = &slide_cpu_loops_avx2,
        [SLIDE_ISA_AVX512] = &slide_cpu_loops_avx512,
    };
    return table[isa];
#else
    (void)isa;
    return &slide_cpu_loops_base;
#endif
}

/* A kernel under way. */
struct work {
    const struct slide_cpu_loops *loops;
    enum slide_dtype act;
    const void *args;
    int64_t n, piece;
};

static void range(const struct work *w, int64_t i, int64_t *from, int64_t *to)
{
    *from = i * w->piece;
    *to = *from + w->piece < w->n ? *from + w->piece : w->n;
}

/* Runs `piece` over n rows in pieces of `size`. */
static int run(struct slide_lane *lane, const struct slide_cpu_launch *l, int64_t n, int64_t size,
               void (*piece)(void *, int64_t, int))
{
    struct work w = {slide_cpu_loops_get(lane->device->isa), l->act, l->args, n, size};
    int64_t pieces = (n + size - 1) / size;
    if (lane == lane->device->compute)
        slide_pool_for(lane->device->pool, pieces, piece, &w);
    else
        for (int64_t i = 0; i < pieces; i++)
            piece(&w, i, 0);
    return 0;
}

#define PIECE(name)                                                                                \
    static void name##_piece(void *ctx, int64_t i, int worker)                                     \
    {                                                                                              \
        const struct work *w = ctx;                                                                \
        const struct slide_##name##_args *a = w->args;                                             \
        int64_t from, to;                                                                          \
        (void)worker;                                                                              \
        range(w, i, &from, &to);                                                                   \
        w->loops->name(w->act, a, from, to);                                                       \
    }

PIECE(rmsnorm_fwd)
PIECE(rope)
PIECE(swiglu_fwd)
PIECE(swiglu_bwd)
PIECE(embed_bwd)
PIECE(ce)
PIECE(accumulate)

#define RUN(name, count, size)                                                                     \
    static int run_##name(struct slide_lane *lane, const void *args, struct slide_err *err)        \
    {                                                                                              \
        const struct slide_cpu_launch *l = args;                                                   \
        const struct slide_##name##_args *a = (const void *)l->args;                               \
        (void)err;                                                                                 \
        return run(lane, l, a->count, size, name##_piece);                                         \
    }

RUN(rmsnorm_fwd, n, ROWS)
RUN(rope, n, ROWS)
RUN(swiglu_fwd, n, ROWS)
RUN(swiglu_bwd, n, ROWS)
RUN(embed_bwd, cols, COLUMNS)
RUN(ce, n, 1)
RUN(accumulate, n, ELEMENTS)

static void cast_piece(void *ctx, int64_t i, int worker)
{
    const struct work *w = ctx;
    int64_t from, to;
    (void)worker;
    range(w, i, &from, &to);
    w->loops->cast(w->args, from, to);
}

RUN(cast, n, ELEMENTS)

static void nonfinite_piece(void *ctx, int64_t i, int worker)
{
    const struct work *w = ctx;
    const struct slide_nonfinite_args *a = w->args;
    int64_t from, to;
    int bad = 0;
    (void)worker;
    range(w, i, &from, &to);
    if (w->act == SLIDE_F32)
        for (int64_t k = from; k < to; k++)
            bad |= (slide_f32_bits(((const float *)a->x)[k]) & 0x7f800000u) == 0x7f800000u;
    else
        for (int64_t k = from; k < to; k++)
            bad |= (((const uint16_t *)a->x)[k] & 0x7f80u) == 0x7f80u;
    if (bad)
        __atomic_store_n(a->found, 1, __ATOMIC_RELAXED);
}

RUN(nonfinite, n, ELEMENTS)

static void rope_table_piece(void *ctx, int64_t i, int worker)
{
    const struct work *w = ctx;
    const struct slide_rope_table_args *a = w->args;
    int64_t from, to;
    (void)worker;
    range(w, i, &from, &to);
    for (int64_t t = from; t < to; t++) {
        for (int32_t c = 0; c < a->half; c++) {
            float angle = (float)a->positions[t] * a->inv_freq[c];
            float cosine = cosf(angle) * a->factor, sine = sinf(angle) * a->factor;
            if (w->act == SLIDE_BF16) {
                cosine = slide_bf16_to_f32(slide_f32_to_bf16(cosine));
                sine = slide_bf16_to_f32(slide_f32_to_bf16(sine));
            }
            a->cos[t * a->half + c] = cosine;
            a->sin[t * a->half + c] = sine;
        }
    }
}

RUN(rope_table, n, ROWS)

static void embed_fwd_piece(void *ctx, int64_t i, int worker)
{
    const struct work *w = ctx;
    const struct slide_embed_fwd_args *a = w->args;
    size_t row = (size_t)a->cols * slide_dtype_size(w->act);
    int64_t from, to;
    (void)worker;
    range(w, i, &from, &to);
    for (int64_t t = from; t < to; t++)
        memcpy((char *)a->out + (size_t)t * row, (const char *)a->table + (size_t)a->ids[t] * row,
               row);
}

RUN(embed_fwd, n, ROWS)

/* ---- sums over tokens: a partial sum a block, then the blocks in order ---- */

static void rmsnorm_bwd_piece(void *ctx, int64_t i, int worker)
{
    const struct work *w = ctx;
    const struct slide_rmsnorm_bwd_args *a = w->args;
    int64_t from, to;
    (void)worker;
    range(w, i, &from, &to);
    w->loops->rmsnorm_bwd(w->act, a, from, to, a->scratch + i * a->cols);
}

static void bias_bwd_piece(void *ctx, int64_t i, int worker)
{
    const struct work *w = ctx;
    const struct slide_bias_bwd_args *a = w->args;
    int64_t from, to;
    (void)worker;
    range(w, i, &from, &to);
    w->loops->bias_bwd(w->act, a, from, to, a->scratch + i * a->cols);
}

struct sum_work {
    const struct slide_cpu_loops *loops;
    float *sum;
    const float *scratch;
    int64_t blocks, cols, piece;
};

static void sum_piece(void *ctx, int64_t i, int worker)
{
    const struct sum_work *w = ctx;
    int64_t from = i * w->piece, n = w->cols - from < w->piece ? w->cols - from : w->piece;
    (void)worker;
    for (int64_t b = 0; b < w->blocks; b++)
        w->loops->add(w->sum + from, w->scratch + b * w->cols + from, n);
}

/* In pieces of about ELEMENTS additions: most sums are so short that waking a thread takes longer.
 */
static void add_blocks(struct slide_lane *lane, float *sum, const float *scratch, int64_t blocks,
                       int32_t cols)
{
    int64_t piece = ELEMENTS / (blocks + 1) > COLUMNS ? ELEMENTS / (blocks + 1) : COLUMNS;
    struct sum_work w = {slide_cpu_loops_get(lane->device->isa), sum, scratch, blocks, cols, piece};
    slide_pool_for(lane->device->pool, (cols + piece - 1) / piece, sum_piece, &w);
}

static int run_rmsnorm_bwd(struct slide_lane *lane, const void *args, struct slide_err *err)
{
    const struct slide_cpu_launch *l = args;
    const struct slide_rmsnorm_bwd_args *a = (const void *)l->args;
    (void)err;
    run(lane, l, a->n, SLIDE_NORM_BLOCK, rmsnorm_bwd_piece);
    add_blocks(lane, a->dw, a->scratch, (a->n + SLIDE_NORM_BLOCK - 1) / SLIDE_NORM_BLOCK, a->cols);
    return 0;
}

static int run_bias_bwd(struct slide_lane *lane, const void *args, struct slide_err *err)
{
    const struct slide_cpu_launch *l = args;
    const struct slide_bias_bwd_args *a = (const void *)l->args;
    (void)err;
    run(lane, l, a->n, SLIDE_BIAS_BLOCK, bias_bwd_piece);
    add_blocks(lane, a->db, a->scratch, (a->n + SLIDE_BIAS_BLOCK - 1) / SLIDE_BIAS_BLOCK, a->cols);
    return 0;
}

slide_cpu_run_fn *slide_cpu_kernel_run(enum slide_kernel kernel)
{
    static slide_cpu_run_fn *const table[SLIDE_KERNEL_COUNT] = {
#define X(name) [SLIDE_KERNEL_##name] = run_##name,
#include "device/kernels.def"
#undef X
    };
    return (unsigned)kernel < SLIDE_KERNEL_COUNT ? table[kernel] : NULL;
}
