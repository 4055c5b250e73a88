/* Attention forward in BF16: a block a (row, query head, block of queries), softmax online in FP32.
 * K and V have a buffer each and are fetched in turns: V while the scores are computed, the next K
 * while V is used, so that memory is hidden without a second buffer and two blocks share a
 * multiprocessor. Blocks with the most keys start first, and heads that share K and V are
 * neighbours.
 * Cost of causal attention over a row of n tokens: 2 n^2 d FLOP a head (4 n^2 d, halved by the
 * mask), 2 n (2 + 2 / group) d bytes. At n = 1024, d = 128, a group of 4: 268 MFLOP to 0.66 MB, 400
 * FLOP a byte, so tensor cores bound it; mma.sync reaches about 60 % of the 989 TFLOP/s of an H200.
 * A warp's k16 step of 32 rows by 16 columns is 4 mma (6.4 cycles at that rate, multiprocessor
 * wide) to 512 bytes of ldmatrix (4 cycles); the diagonal wastes half a tile of 32 queries by 64
 * keys a warp, 6 % at n = 1024. FlashAttention-2, of the same shape, does 261 TFLOP/s there; the
 * time has not been measured yet.
 * Called by cuda_flash.c. scale must be positive. */
#include "cuda/kernels/flash_tile.cuh"

/* Forbidden scores to -inf. `row`, `col`: of the warp's s[0][0]. */
template <int TILES, int N>
INLINE void mask(float (&s)[TILES][N][4], const int (&least)[TILES][2], int row, int col)
{
    int g = threadIdx.x % WARP / 4, t = threadIdx.x % 4;
#pragma unroll
    for (int m = 0; m < TILES; m++)
#pragma unroll
        for (int n = 0; n < N; n++)
#pragma unroll
            for (int e = 0; e < 4; e++) {
                int i = row + m * 16 + e / 2 * 8 + g, j = col + n * 8 + 2 * t + e % 2;
                if (j > i || j < least[m][e / 2])
                    s[m][n][e] = -INFINITY;
            }
}

/* Scores to exp2(score - most so far); the sums and the output so far are scaled to match. The sum
 * of a row stays parted among its four lanes. */
template <int TILES, int N, int D>
INLINE void softmax(float (&s)[TILES][N][4], float (&out)[TILES][D][4], float (&most)[TILES][2],
                    float (&sum)[TILES][2], float scale2)
{
#pragma unroll
    for (int m = 0; m < TILES; m++)
#pragma unroll
        for (int half = 0; half < 2; half++) {
            float old = most[m][half], now = old, total = 0;
#pragma unroll
            for (int n = 0; n < N; n++)
                now = fmaxf(now, fmaxf(s[m][n][2 * half], s[m][n][2 * half + 1]));
            now = fmaxf(now, __shfl_xor_sync(0xffffffffu, now, 1));
            now = fmaxf(now, __shfl_xor_sync(0xffffffffu, now, 2));
            most[m][half] = now;
            /* nothing seen yet: -inf - 0, not -inf - -inf */
            float shift = now == -INFINITY ? 0.0f : now * scale2;
            float fix = exp2_fast(old * scale2 - shift);
#pragma unroll
            for (int n = 0; n < N; n++)
#pragma unroll
                for (int e = 2 * half; e < 2 * half + 2; e++) {
                    s[m][n][e] = exp2_fast(s[m][n][e] * scale2 - shift);
                    total += s[m][n][e];
                }
            sum[m][half] = sum[m][half] * fix + total;
#pragma unroll
            for (int d = 0; d < D; d++) {
                out[m][d][2 * half] *= fix;
                out[m][d][2 * half + 1] *= fix;
            }
        }
}

template <int SIZE, int TILES, int COLS, int SPLIT> INLINE void flash_fwd(const slide_attn &a)
{
    constexpr int rows = SLIDE_FLASH_ROWS(TILES, SPLIT), ld = SLIDE_FLASH_LD(SIZE);
    constexpr int part = SIZE / SPLIT;
    SHARED_DYNAMIC(bf16, q_tile);
    bf16 *k_tile = q_tile + rows * ld, *v_tile = k_tile + COLS * ld;

    int row = blockIdx.x / a.heads, head = blockIdx.x % a.heads;
    int kv_head = head / (a.heads / a.kv_heads);
    int i0 = (int)(gridDim.y - 1 - blockIdx.y) * rows;
    int warp = threadIdx.x / WARP, g = threadIdx.x % WARP / 4, t = threadIdx.x % 4;
    int own = warp / SPLIT * 16 * TILES, col = warp % SPLIT * part;
    const int32_t *first = a.first + (int64_t)row * a.seq;

    flash_from<bf16> q = flash_from_of<bf16>(a, a.q, a.q_stride, row, head);
    flash_from<bf16> k = flash_from_of<bf16>(a, a.k, a.kv_stride, row, kv_head);
    flash_from<bf16> v = flash_from_of<bf16>(a, a.v, a.kv_stride, row, kv_head);
    int last = min(i0 + rows, a.seq);
    flash_bounds bounds = flash_bounds_of(first + i0, last - i0);
    int from = bounds.least / COLS * COLS;
    flash_load<rows, SIZE>(q_tile, q, i0, a.seq);
    flash_load<COLS, SIZE>(k_tile, k, from, a.seq);

    float out[TILES][part / 8][4], most[TILES][2], sum[TILES][2];
    int least[TILES][2];
    flash_clear(out);
#pragma unroll
    for (int m = 0; m < TILES; m++)
#pragma unroll
        for (int half = 0; half < 2; half++) {
            int i = i0 + own + m * 16 + half * 8 + g;
            least[m][half] = i < a.seq ? first[i] : 0;
            most[m][half] = -INFINITY;
            sum[m][half] = 0;
        }
    shared_at q_at = flash_lane_a<SIZE>(q_tile, own), k_at = flash_lane_bt<SIZE>(k_tile);
    shared_at v_at = flash_lane_b<SIZE>(v_tile, col);
    float scale2 = a.scale * LOG2E;

    for (int j0 = from; j0 < last; j0 += COLS) {
        float s[TILES][COLS / 8][4];
        unsigned p[TILES][COLS / 16][4];
        copy_wait();
        __syncthreads(); /* K is there, V free */
        flash_load<COLS, SIZE>(v_tile, v, j0, a.seq);
        bool mine = j0 < i0 + own + 16 * TILES; /* else the warp's queries see none of these */
        if (mine) {
            flash_scores<SIZE, SIZE / 16>(s, q_at, k_at);
            if (j0 + COLS > i0 + own + 1 || j0 < bounds.most)
                mask(s, least, i0 + own, j0);
            softmax(s, out, most, sum, scale2);
            flash_pack(p, s);
        }
        copy_wait();
        __syncthreads(); /* V is there, K free */
        if (j0 + COLS < last)
            flash_load<COLS, SIZE>(k_tile, k, j0 + COLS, a.seq);
        if (mine)
            flash_apply<SIZE>(out, p, v_at);
    }

    float inverse[TILES][2];
    float *lse = a.lse + ((int64_t)row * a.heads + head) * a.seq;
#pragma unroll
    for (int m = 0; m < TILES; m++)
#pragma unroll
        for (int half = 0; half < 2; half++) {
            int i = i0 + own + m * 16 + half * 8 + g;
            float total = sum[m][half];
            total += __shfl_xor_sync(0xffffffffu, total, 1);
            total += __shfl_xor_sync(0xffffffffu, total, 2);
            inverse[m][half] = 1.0f / total;
            if (i < a.seq && t == 0 && col == 0)
                lse[i] = most[m][half] * a.scale + logf(total);
        }
    bf16 *o = (bf16 *)a.o + (int64_t)row * a.seq * a.o_stride + (int64_t)head * a.head_dim;
    flash_store(o, a.o_stride, a.head_dim, i0 + own, col, a.seq, out, inverse);
}

#define X(size, tiles, cols, split, ...)                                                           \
    ENTRY __launch_bounds__(FLASH_THREADS) slide_k_flash_fwd_bf16_##size(slide_flash_args f)       \
    {                                                                                              \
        flash_fwd<size, tiles, cols, split>(f.a);                                                  \
    }
SLIDE_FLASH_BF16(X)
#undef X
