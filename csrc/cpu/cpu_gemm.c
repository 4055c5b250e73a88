/* GEMM: the product is cut into tiles of out by shape alone, each an sgemm of one thread. FP32
 * operands are read where they are; BF16 ones are widened into the worker's scratch, tile by tile
 * and K_BLOCK products at a time, and the tile of out is rounded once on its way back. `add` and
 * `bias` are put into the tile first and the products added to them. A small out with a long sum
 * has too few tiles, so its sum is cut as well: partial sums in the device's scratch, then added in
 * order. Called by the lane's thread. */
#include <string.h>

#include "cpu/cpu_inside.h"
#include "cpu/cpu_isa.h"

#define EDGE 1024      /* longest side of a tile */
#define EDGE_MIN 96    /* shorter ones only where the matrix is */
#define STEP 16        /* sides are multiples of it, but for the last */
#define TILES_MAX 256  /* more only where EDGE asks for them */
#define THREADS_MAX 16 /* that a cut is weighed for */
#define SIDE_COST 16   /* see below */
#define SUM_COST 16
#define K_BLOCK 1024
#define SPLITS_MAX 16
#define SPLIT_MIN 2048          /* products of a partial sum */
#define SPLIT_FLOATS (4u << 20) /* of all partial sums */
#define SUM_ROWS 16             /* rows that are added up at a time */

enum { ROW_MAJOR = 101, NO_TRANS = 111, TRANS = 112 };

struct cut {
    int32_t size, count;
};

struct grid {
    struct cut rows, cols, depth; /* depth: of the k products */
};

/* The side in `count` pieces or a few less, for they are multiples of STEP. */
static struct cut cut_side(int32_t n, int32_t count)
{
    int32_t size = ((n + count - 1) / count + STEP - 1) / STEP * STEP;
    return (struct cut){size, (n + size - 1) / size};
}

static int32_t pieces(int32_t n, int32_t edge)
{
    return n <= edge ? 1 : (n + edge - 1) / edge;
}

/* The time of 1, 2, 4, .. threads, each times their number, so that it is the share of the machine
 * that is lost that counts: how many there are must not matter. A tile of m x n takes as long as
 * m n + SIDE_COST (m + n) products: a BLAS copies each operand into its own order first. A partial
 * sum is written once and read once, at SUM_COST products an element. */
static int64_t cost(const struct grid *g, int64_t m, int64_t n)
{
    int64_t high = g->rows.size, wide = g->cols.size, deep = g->depth.size;
    int64_t tiles = (int64_t)g->rows.count * g->cols.count * g->depth.count;
    int64_t tile = (high * wide + SIDE_COST * (high + wide)) * deep, time = 0;
    int64_t sum = g->depth.count > 1 ? SUM_COST * m * n * (g->depth.count + 1) : 0;
    for (int64_t threads = 1; threads <= THREADS_MAX; threads *= 2)
        time += (tiles + threads - 1) / threads * threads * tile + sum;
    return time;
}

static bool may_split(int64_t m, int64_t n, int64_t k, int splits)
{
    return splits == 1 || (k / splits >= SPLIT_MIN && m * n * splits <= SPLIT_FLOATS);
}

static struct grid cut_product(int32_t m, int32_t n, int32_t k)
{
    struct grid best = {{0, 0}, {0, 0}, {0, 0}};
    int64_t least = INT64_MAX;
    int32_t r0 = pieces(m, EDGE), c0 = pieces(n, EDGE);
    for (int32_t r = r0; r <= pieces(m, 2 * EDGE_MIN) * 2 - 1; r++) {
        for (int32_t c = c0; c <= pieces(n, 2 * EDGE_MIN) * 2 - 1; c++) {
            if ((int64_t)r * c > TILES_MAX && (r > r0 || c > c0))
                break;
            for (int splits = 1; splits <= SPLITS_MAX && may_split(m, n, k, splits); splits *= 2) {
                struct cut whole = {k, 1};
                struct grid g = {cut_side(m, r), cut_side(n, c),
                                 splits > 1 ? cut_side(k, splits) : whole};
                int64_t time = cost(&g, m, n);
                if (time < least) {
                    least = time;
                    best = g;
                }
            }
        }
    }
    return best;
}

struct gemm_work {
    const struct slide_gemm *g;
    struct slide_device *device;
    const struct slide_cpu_loops *loops;
    struct grid grid;
    float *sums; /* [depth.count, m, n], where the sum is cut */
    slide_word failed;
};

/* A part of an operand, FP32, either in place or widened to `scratch`. */
struct operand {
    const float *p;
    int ld;
};

/* `n` rows or columns from `outer` on and `k` products from `inner` on. Stored [n, k] or, with
 * `trans`, [k, n]. */
static struct operand operand(const struct gemm_work *w, const void *base, int64_t ld, bool trans,
                              int64_t outer, int64_t n, int64_t inner, int64_t k, float *scratch)
{
    int64_t offset = trans ? inner * ld + outer : outer * ld + inner;
    if (w->g->in_type == SLIDE_F32)
        return (struct operand){(const float *)base + offset, (int)ld};
    int64_t rows = trans ? k : n, cols = trans ? n : k;
    w->loops->widen(SLIDE_BF16, scratch, cols, (const uint16_t *)base + offset, ld, rows, cols);
    return (struct operand){scratch, (int)cols};
}

/* What the product is added to. */
static void start_tile(const struct gemm_work *w, float *c, int64_t ldc, int64_t row, int64_t col,
                       int64_t m, int64_t n)
{
    const struct slide_gemm *g = w->g;
    int64_t offset = row * g->ldo + col;
    size_t size = slide_dtype_size(g->out_type);
    if (g->add) {
        const void *add = (const char *)g->add + (size_t)offset * size;
        if (add != c)
            w->loops->widen(g->out_type, c, ldc, add, g->ldo, m, n);
    } else {
        for (int64_t r = 0; r < m; r++)
            memset(c + r * ldc, 0, (size_t)n * sizeof *c);
    }
    if (g->bias) {
        const void *bias = (const char *)g->bias + (size_t)col * slide_dtype_size(g->in_type);
        float wide[EDGE + STEP];
        w->loops->widen(g->in_type, wide, n, bias, n, 1, n);
        for (int64_t r = 0; r < m; r++)
            w->loops->add(c + r * ldc, wide, n);
    }
}

static void tile(void *ctx, int64_t i, int worker)
{
    struct gemm_work *w = ctx;
    const struct slide_gemm *g = w->g;
    struct cut rows = w->grid.rows, cols = w->grid.cols;
    int64_t tiles = (int64_t)rows.count * cols.count, piece = i / tiles;
    int64_t row = i % tiles / cols.count * rows.size, col = i % cols.count * cols.size;
    int64_t m = g->m - row < rows.size ? g->m - row : rows.size;
    int64_t n = g->n - col < cols.size ? g->n - col : cols.size;
    int64_t from = piece * w->grid.depth.size, end = from + w->grid.depth.size;
    int64_t to = g->k < end ? g->k : end;
    bool wide_in = g->in_type != SLIDE_F32, wide_out = g->out_type != SLIDE_F32 && !w->sums;
    int64_t block = wide_in && to - from > K_BLOCK ? K_BLOCK : to - from;
    float *scratch = NULL;
    size_t a_room = wide_in ? (size_t)(m * block) : 0;
    size_t b_room = wide_in ? (size_t)(n * block) : 0;
    size_t c_room = wide_out ? (size_t)(m * n) : 0;
    if (a_room + b_room + c_room) {
        scratch = slide_cpu_scratch(w->device, worker, a_room + b_room + c_room);
        if (!scratch) {
            slide_word_set(&w->failed, 1);
            return;
        }
    }
    float *c = wide_out ? scratch + a_room + b_room : (float *)g->out + row * g->ldo + col;
    int64_t ldc = wide_out ? n : g->ldo;
    if (w->sums) {
        c = w->sums + (piece * g->m + row) * g->n + col;
        ldc = g->n;
    }
    bool started = !w->sums && (g->add || g->bias || !g->k);
    if (started)
        start_tile(w, c, ldc, row, col, m, n);
    for (int64_t at = from; at < to; at += block) {
        int64_t k = to - at < block ? to - at : block;
        struct operand a = operand(w, g->a, g->lda, g->trans_a, row, m, at, k, scratch);
        /* b is stored [k, n], or [n, k] when transposed: the other way round than a. */
        struct operand b = operand(w, g->b, g->ldb, !g->trans_b, col, n, at, k, scratch + a_room);
        float beta = started || at > from ? 1.0f : 0.0f;
        w->device->sgemm(ROW_MAJOR, g->trans_a ? TRANS : NO_TRANS, g->trans_b ? TRANS : NO_TRANS,
                         (int)m, (int)n, (int)k, 1.0f, a.p, a.ld, b.p, b.ld, beta, c, (int)ldc);
    }
    if (wide_out)
        w->loops->narrow(SLIDE_BF16, (uint16_t *)g->out + row * g->ldo + col, g->ldo, c, ldc, m, n);
}

/* Adds the partial sums of SUM_ROWS rows of a column of tiles. */
static void sum_rows(void *ctx, int64_t i, int worker)
{
    struct gemm_work *w = ctx;
    const struct slide_gemm *g = w->g;
    struct cut cols = w->grid.cols;
    int64_t row = i / cols.count * SUM_ROWS, col = i % cols.count * cols.size;
    int64_t m = g->m - row < SUM_ROWS ? g->m - row : SUM_ROWS;
    int64_t n = g->n - col < cols.size ? g->n - col : cols.size;
    bool wide_out = g->out_type != SLIDE_F32;
    float *c = wide_out ? slide_cpu_scratch(w->device, worker, (size_t)(m * n))
                        : (float *)g->out + row * g->ldo + col;
    if (!c) {
        slide_word_set(&w->failed, 1);
        return;
    }
    int64_t ldc = wide_out ? n : g->ldo;
    start_tile(w, c, ldc, row, col, m, n);
    for (int64_t r = 0; r < m; r++)
        for (int64_t p = 0; p < w->grid.depth.count; p++)
            w->loops->add(c + r * ldc, w->sums + (p * g->m + row + r) * g->n + col, n);
    if (wide_out)
        w->loops->narrow(SLIDE_BF16, (uint16_t *)g->out + row * g->ldo + col, g->ldo, c, ldc, m, n);
}

int slide_cpu_gemm_run(struct slide_lane *lane, const void *args, struct slide_err *err)
{
    const struct slide_gemm *g = args;
    if (g->m < 1 || g->n < 1)
        return 0;
    struct gemm_work w = {.g = g,
                          .device = lane->device,
                          .loops = slide_cpu_loops_get(lane->device->isa),
                          .grid = cut_product(g->m, g->n, g->k)};
    int64_t splits = w.grid.depth.count, cols = w.grid.cols.count;
    if (splits > 1) {
        size_t floats = (size_t)g->m * (size_t)g->n * (size_t)splits;
        w.sums = slide_cpu_scratch(lane->device, lane->device->options.threads, floats);
        if (!w.sums)
            goto none;
    }
    slide_pool_for(lane->device->pool, w.grid.rows.count * cols * splits, tile, &w);
    if (splits > 1 && !slide_word_get(&w.failed))
        slide_pool_for(lane->device->pool, (g->m + SUM_ROWS - 1) / SUM_ROWS * cols, sum_rows, &w);
    if (!slide_word_get(&w.failed))
        return 0;
none:
    return slide_err_set(err, SLIDE_EMEM, "host: no scratch memory for gemm %d x %d x %d", g->m,
                         g->n, g->k);
}
