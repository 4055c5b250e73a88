/* The small kernels: from the arguments to entry and grid. Grids are cut by shape and alignment
 * alone, never by the GPU, so that every GPU sums in the same order. The kernels loop over what a
 * grid leaves out, so the numbers here are for speed, but where a comment says otherwise.
 * Called by the backend's launch (cuda_device.c). */
#include <limits.h>

#include "cuda/cuda_inside.h"

#define WARP 32
#define EMBED_CLASSES 256     /* of ids, a power of two: embed.cu */
#define EMBED_SPANS 4         /* as there */
#define SHORT_BWD_THREADS 512 /* as in norm.cu */

struct launch {
    struct slide_lane *lane;
    enum slide_dtype act;
    struct slide_err *err;
};

/* Elements of 16 bytes. */
static int64_t vec_size(enum slide_dtype act)
{
    return 16 / (int64_t)slide_dtype_size(act);
}

static int64_t over(int64_t n, int64_t size)
{
    return (n + size - 1) / size;
}

/* Threads for so much work, in whole warps, from `least` to `most`. */
static unsigned threads_for(int64_t work, int64_t least, int64_t most)
{
    int64_t threads = over(work, WARP) * WARP;
    return (unsigned)(threads < least ? least : threads > most ? most : threads);
}

static int start(const struct launch *l, enum slide_cuda_entry entry, int64_t x, int64_t y,
                 unsigned threads, const void *args)
{
    if (x > INT_MAX || y > 65535)
        return slide_err_set(l->err, SLIDE_EINVAL,
                             "a kernel of %lld x %lld blocks, CUDA has no "
                             "more than 2147483647 x 65535",
                             (long long)x, (long long)y);
    struct slide_cuda_grid grid = {(unsigned)x, (unsigned)y, 1, threads, 0};
    return slide_cuda_start(l->lane, entry, &grid, args, l->err);
}

/* The entry for the launch's act. */
#define BY_ACT(l, name)                                                                            \
    ((l)->act == SLIDE_F32 ? SLIDE_ENTRY_slide_k_##name##_f32 : SLIDE_ENTRY_slide_k_##name##_bf16)

static int launch_rope_table(const struct launch *l, const struct slide_rope_table_args *a)
{
    return start(l, BY_ACT(l, rope_table), over(a->n * a->half, 256), 1, 256, a);
}

/* Blocks of a row of `vecs` vectors when a block takes `piece` of them and every row has its own,
 * as the kernel wants it: a multiple of n. Fewer where the grid would be too large. */
static int64_t row_blocks(int64_t n, int64_t vecs, int64_t piece)
{
    int64_t each = over(vecs, piece);
    return n * each > INT_MAX ? n : n * each;
}

static int launch_embed_fwd(const struct launch *l, const struct slide_embed_fwd_args *a)
{
    int64_t vecs = over(a->cols, vec_size(l->act));
    unsigned threads = threads_for(over(vecs, 4), WARP, 256);
    return start(l, BY_ACT(l, embed_fwd), row_blocks(a->n, vecs, 4 * threads), 1, threads, a);
}

static int launch_embed_bwd(const struct launch *l, const struct slide_embed_bwd_args *a)
{
    /* The columns decide the grid's y: no block loops over them. */
    int64_t group = EMBED_SPANS * WARP * vec_size(l->act);
    return start(l, BY_ACT(l, embed_bwd), EMBED_CLASSES, over(a->cols, group), 256, a);
}

static int launch_swiglu_fwd(const struct launch *l, const struct slide_swiglu_fwd_args *a)
{
    int64_t vecs = over(a->cols, vec_size(l->act));
    unsigned threads = threads_for(over(vecs, 2), WARP, 256);
    return start(l, BY_ACT(l, swiglu_fwd), row_blocks(a->n, vecs, 2 * threads), 1, threads, a);
}

static int launch_swiglu_bwd(const struct launch *l, const struct slide_swiglu_bwd_args *a)
{
    int64_t vecs = over(a->cols, vec_size(l->act));
    unsigned threads = threads_for(over(vecs, 2), WARP, 256);
    return start(l, BY_ACT(l, swiglu_bwd), row_blocks(a->n, vecs, 2 * threads), 1, threads, a);
}

static int launch_rope(const struct launch *l, const struct slide_rope_args *a)
{
    int64_t items = over(a->heads, 4) * over(a->half, vec_size(l->act));
    if (a->half < 1 || a->heads < 1)
        return 0;
    return start(l, BY_ACT(l, rope), items < 256 ? over(a->n, 256 / items) : a->n, 1, 256, a);
}

static int launch_cast(const struct launch *l, const struct slide_cast_args *a)
{
    static const enum slide_cuda_entry entry[2][2] = {
        {SLIDE_ENTRY_slide_k_cast_f32_f32, SLIDE_ENTRY_slide_k_cast_f32_bf16},
        {SLIDE_ENTRY_slide_k_cast_bf16_f32, SLIDE_ENTRY_slide_k_cast_bf16_bf16}};
    int64_t blocks = over(a->n, 256 * 16), most = 1 << 20;
    return start(l, entry[a->from == SLIDE_BF16][a->to == SLIDE_BF16],
                 blocks < most ? blocks : most, 1, 256, a);
}

static int launch_accumulate(const struct launch *l, const struct slide_accumulate_args *a)
{
    int64_t blocks = over(a->n, 256 * 8), most = 1 << 20;
    return start(l, BY_ACT(l, accumulate), blocks < most ? blocks : most, 1, 256, a);
}

static int launch_ce(const struct launch *l, const struct slide_ce_args *a)
{
    return start(l, BY_ACT(l, ce), a->n, 1, 1024, a);
}

/* sum += the rows of scratch. */
static int sum_blocks(const struct launch *l, float *sum, float *scratch, int64_t blocks,
                      int32_t cols)
{
    struct slide_bias_bwd_args a = {.db = sum, .scratch = scratch, .n = blocks, .cols = cols};
    return start(l, SLIDE_ENTRY_slide_k_sum_blocks, over(cols, WARP), 1, 1024, &a);
}

static int launch_bias_bwd(const struct launch *l, const struct slide_bias_bwd_args *a)
{
    int64_t blocks = over(a->n, SLIDE_BIAS_BLOCK);
    if (start(l, BY_ACT(l, bias_bwd), blocks, over(a->cols, WARP * vec_size(l->act)), 256, a))
        return -1;
    return sum_blocks(l, a->db, a->scratch, blocks, a->cols);
}

/* ---- norms ---- */

/* Lanes of a warp that share a short row: norm.cu. */
static int64_t team_lanes(int64_t vecs)
{
    int64_t lanes = WARP;
    while (lanes > 1 && lanes / 2 >= vecs)
        lanes /= 2;
    return lanes;
}

static int rows_fit(const struct launch *l, int64_t n, int32_t groups)
{
    if (n <= INT_MAX / groups)
        return 0;
    return slide_err_set(l->err, SLIDE_EINVAL, "%lld x %d vectors to norm, at most 2147483647",
                         (long long)n, groups);
}

static int launch_rmsnorm_fwd(const struct launch *l, const struct slide_rmsnorm_fwd_args *a)
{
    int64_t vecs = over(a->cols, vec_size(l->act)), rows = a->n * a->groups;
    if (rows_fit(l, a->n, a->groups))
        return -1;
    if (vecs <= WARP)
        return start(l, BY_ACT(l, rmsnorm_fwd_short), over(rows, 4 * 256 / team_lanes(vecs)), 1,
                     256, a);
    return start(l, BY_ACT(l, rmsnorm_fwd), rows, 1, threads_for(over(vecs, 4), 64, 1024), a);
}

static bool aligned16(const void *p)
{
    return ((uintptr_t)p & 15) == 0;
}

static int launch_rmsnorm_bwd(const struct launch *l, const struct slide_rmsnorm_bwd_args *a)
{
    int64_t v = vec_size(l->act), vecs = a->cols / v, blocks = over(a->n, SLIDE_NORM_BLOCK);
    enum slide_cuda_entry entry = BY_ACT(l, rmsnorm_bwd_again);
    unsigned threads = threads_for(a->cols, WARP, 512);
    /* The other entries take nothing else. */
    bool whole = aligned16(a->x) && aligned16(a->dy) && aligned16(a->dx) && aligned16(a->w) &&
                 aligned16(a->scratch) && a->cols % v == 0 && a->x_stride % v == 0 &&
                 a->dy_stride % v == 0 && a->dx_stride % v == 0;
    if (rows_fit(l, a->n, a->groups))
        return -1;
    if (whole && vecs <= WARP) {
        entry = BY_ACT(l, rmsnorm_bwd_short);
        threads = SHORT_BWD_THREADS;
    } else if (whole && vecs <= 512) {
        entry = BY_ACT(l, rmsnorm_bwd);
        threads = threads_for(vecs, WARP, 512);
    } else if (whole && vecs <= 2048) {
        entry = BY_ACT(l, rmsnorm_bwd_wide);
        threads = threads_for(over(vecs, 2), WARP, 1024);
    }
    if (start(l, entry, blocks, 1, threads, a))
        return -1;
    return sum_blocks(l, a->dw, a->scratch, blocks, a->cols);
}

static int launch_nonfinite(const struct launch *l, const struct slide_nonfinite_args *a)
{
    int64_t blocks = over(a->n, 256 * 8), most = 4096;
    return start(l, BY_ACT(l, nonfinite), blocks < most ? blocks : most, 1, 256, a);
}

int slide_cuda_launch(struct slide_lane *lane, enum slide_kernel kernel, enum slide_dtype act,
                      const void *args, size_t bytes, struct slide_err *err)
{
    const struct launch l = {lane, act, err};
    (void)bytes;
    switch (kernel) {
#define X(name)                                                                                    \
    case SLIDE_KERNEL_##name: {                                                                    \
        const struct slide_##name##_args *a = args;                                                \
        return a->n > 0 ? launch_##name(&l, a) : 0;                                                \
    }
#include "device/kernels.def"
#undef X
    default:
        return slide_err_set(err, SLIDE_ESTATE, "no CUDA kernel %d", (int)kernel);
    }
}
