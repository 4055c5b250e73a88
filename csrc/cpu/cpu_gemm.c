/* GEMM: the product is cut into tiles of out by shape alone, each an sgemm of one thread. FP32
 * operands are read where they are; BF16 ones are widened into the worker's scratch tile by tile,
 * and the tile of out is rounded once on its way back. `add` and `bias` are put into the tile first
 * and the product added to them. Called by the lane's thread. */
#include <string.h>

#include "cpu/cpu_inside.h"
#include "cpu/cpu_isa.h"

#define EDGE 640 /* longest side of a tile */
#define STEP 16  /* sides are multiples of it, but for the last */

enum { ROW_MAJOR = 101, NO_TRANS = 111, TRANS = 112 };

struct cut {
    int32_t size, count;
};

static struct cut cut_side(int32_t n)
{
    int32_t count = (n + EDGE - 1) / EDGE;
    int32_t size = ((n + count - 1) / count + STEP - 1) / STEP * STEP;
    return (struct cut){size, (n + size - 1) / size};
}

struct gemm_work {
    const struct slide_gemm *g;
    struct slide_device *device;
    const struct slide_cpu_loops *loops;
    struct cut rows, cols;
    slide_word failed;
};

/* A tile of an operand, FP32, either in place or widened to `scratch`. */
struct operand {
    const float *p;
    int ld;
};

static struct operand operand(const struct gemm_work *w, const void *base, int64_t ld, bool trans,
                              int64_t outer, int64_t n, int64_t k, float *scratch)
{
    /* Stored [n, k] or, transposed, [k, n]; the tile begins at `outer` in the n direction. */
    int64_t offset = trans ? outer : outer * ld;
    if (w->g->in_type == SLIDE_F32)
        return (struct operand){(const float *)base + offset, (int)ld};
    int64_t rows = trans ? k : n, cols = trans ? n : k;
    w->loops->widen(SLIDE_BF16, scratch, cols, (const uint16_t *)base + offset, ld, rows, cols);
    return (struct operand){scratch, (int)cols};
}

/* What the product is added to; 1 when there is something. */
static int start_tile(const struct gemm_work *w, float *c, int64_t ldc, int64_t row, int64_t col,
                      int64_t m, int64_t n)
{
    const struct slide_gemm *g = w->g;
    int64_t offset = row * g->ldo + col;
    size_t size = slide_dtype_size(g->out_type);
    if (!g->add && !g->bias)
        return 0;
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
    return 1;
}

static void tile(void *ctx, int64_t i, int worker)
{
    struct gemm_work *w = ctx;
    const struct slide_gemm *g = w->g;
    int64_t row = i / w->cols.count * w->rows.size, col = i % w->cols.count * w->cols.size;
    int64_t m = g->m - row < w->rows.size ? g->m - row : w->rows.size;
    int64_t n = g->n - col < w->cols.size ? g->n - col : w->cols.size;
    bool wide_in = g->in_type != SLIDE_F32, wide_out = g->out_type != SLIDE_F32;
    float *scratch = NULL;
    size_t a_room = wide_in ? (size_t)m * (size_t)g->k : 0;
    size_t b_room = wide_in ? (size_t)n * (size_t)g->k : 0;
    size_t c_room = wide_out ? (size_t)m * (size_t)n : 0;
    if (a_room + b_room + c_room) {
        scratch = slide_cpu_scratch(w->device, worker, a_room + b_room + c_room);
        if (!scratch) {
            slide_word_set(&w->failed, 1);
            return;
        }
    }
    float *c = wide_out ? scratch + a_room + b_room : (float *)g->out + row * g->ldo + col;
    int64_t ldc = wide_out ? n : g->ldo;
    struct operand a = operand(w, g->a, g->lda, g->trans_a, row, m, g->k, scratch);
    /* b is stored [k, n], or [n, k] when transposed: the other way round than a. */
    struct operand b = operand(w, g->b, g->ldb, !g->trans_b, col, n, g->k, scratch + a_room);
    int beta = start_tile(w, c, ldc, row, col, m, n);
    w->device->sgemm(ROW_MAJOR, g->trans_a ? TRANS : NO_TRANS, g->trans_b ? TRANS : NO_TRANS,
                     (int)m, (int)n, g->k, 1.0f, a.p, a.ld, b.p, b.ld, (float)beta, c, (int)ldc);
    if (wide_out)
        w->loops->narrow(SLIDE_BF16, (uint16_t *)g->out + row * g->ldo + col, g->ldo, c, ldc, m, n);
}

int slide_cpu_gemm_run(struct slide_lane *lane, const void *args, struct slide_err *err)
{
    const struct slide_gemm *g = args;
    struct gemm_work w = {.g = g,
                          .device = lane->device,
                          .loops = slide_cpu_loops_get(lane->device->isa),
                          .rows = cut_side(g->m),
                          .cols = cut_side(g->n)};
    slide_pool_for(lane->device->pool, (int64_t)w.rows.count * w.cols.count, tile, &w);
    if (slide_word_get(&w.failed))
        return slide_err_set(err, SLIDE_EMEM, "host: no scratch memory for gemm %d x %d x %d", g->m,
                             g->n, g->k);
    return 0;
}
