/* Attention backward in BF16, in three launches and without atomics, so that the same inputs give
 * the same bits: delta = rowsum(d_o * o); dk and dv by blocks of keys; dq by blocks of queries.
 * Probabilities are made again from lse. dk/dv works on the transposed scores (rows are keys), for
 * then P^T and dS^T are A operands as they stand in registers; a block loops over the query heads
 * of its group in order, so grouped heads need no second sum. The second making of the scores costs
 * 7 products to the 5 of a backward that adds dq up by atomics: 7 n^2 d FLOP a head and row of n
 * tokens, causal, so at the same rate it takes 3.5 times the forward's time.
 *   dv = P^T d_o,  dS = P (d_o v^T - delta),  dq = scale dS k,  dk = scale dS^T q
 * Called by cuda_flash.c. */
#include "cuda/kernels/flash_tile.cuh"

/* A warp a (token, head); memory bound, heads side by side. */
template <class T> INLINE void delta(const slide_flash_args &f)
{
    const slide_attn &a = f.a;
    int64_t n = (int64_t)a.rows * a.seq * a.heads;
    int64_t at = (int64_t)blockIdx.x * SLIDE_FLASH_DELTA_WARPS + threadIdx.x / WARP;
    if (at >= n)
        return;
    int64_t token = at / a.heads;
    int head = (int)(at % a.heads), lane = threadIdx.x % WARP;
    int64_t offset = token * a.o_stride + (int64_t)head * a.head_dim;
    const T *x = (const T *)a.o + offset, *y = (const T *)a.d_o + offset;
    constexpr int size = vec<T>::size;
    float sum = 0;
    if (aligned16(x) && aligned16(y) && a.head_dim % size == 0) {
        for (int d = lane * size; d < a.head_dim; d += WARP * size) {
            vec<T> u = load_vec(x + d), w = load_vec(y + d);
#pragma unroll
            for (int e = 0; e < size; e++)
                sum += as_f32(u.at[e]) * as_f32(w.at[e]);
        }
    } else {
        for (int d = lane; d < a.head_dim; d += WARP)
            sum += as_f32(x[d]) * as_f32(y[d]);
    }
    sum = warp_sum(sum);
    if (lane == 0)
        f.delta[(token / a.seq * a.heads + head) * a.seq + token % a.seq] = sum;
}

/* What a column of dk/dv needs besides q and d_o, for COLS queries. */
template <int COLS> struct columns {
    float lse[COLS], delta[COLS];
    int32_t first[COLS];
};

/* Transposed scores to probabilities, 0 where forbidden. The warp's rows are keys from j0 on. */
template <int COLS, int TILES, int N>
INLINE void probabilities(float (&s)[TILES][N][4], const columns<COLS> &c, int j0, int i0,
                          float scale2, int seq)
{
    int lane = threadIdx.x % WARP, g = lane / 4, t = lane % 4, seen = 1;
    for (int i = lane; i < COLS; i += WARP)
        seen &= c.first[i] <= j0;
    bool whole = __all_sync(0xffffffffu, seen) && j0 + 16 * TILES <= i0 + 1 && i0 + COLS <= seq;
#pragma unroll
    for (int n = 0; n < N; n++)
#pragma unroll
        for (int e = 0; e < 2; e++) {
            int at = n * 8 + 2 * t + e, i = i0 + at;
            float lse2 = c.lse[at] * LOG2E;
            int least = c.first[at];
#pragma unroll
            for (int m = 0; m < TILES; m++)
#pragma unroll
                for (int half = 0; half < 2; half++) {
                    int j = j0 + m * 16 + half * 8 + g;
                    float &x = s[m][n][2 * half + e];
                    x = exp2_fast(x * scale2 - lse2);
                    if (!whole && (j > i || j < least || i >= seq))
                        x = 0;
                }
        }
}

template <int SIZE, int TILES, int COLS, int SPLIT> INLINE void flash_dkv(const slide_flash_args &f)
{
    constexpr int rows = SLIDE_FLASH_ROWS(TILES, SPLIT), ld = SLIDE_FLASH_LD(SIZE);
    constexpr int part = SIZE / SPLIT, N = COLS / 8;
    const slide_attn &a = f.a;
    SHARED_DYNAMIC(bf16, k_tile);
    bf16 *v_tile = k_tile + rows * ld, *g_tile = v_tile + rows * ld;
    bf16 *q_tile = g_tile + COLS * ld; /* two: Q is used first and last */
    columns<COLS> *columns_of = (columns<COLS> *)(void *)(q_tile + 2 * COLS * ld);

    int row = blockIdx.x / a.kv_heads, kv_head = blockIdx.x % a.kv_heads;
    int head = kv_head * (a.heads / a.kv_heads), end = head + a.heads / a.kv_heads;
    int j0 = (int)blockIdx.y * rows; /* the most queries see the first keys: those start first */
    int warp = threadIdx.x / WARP, t = threadIdx.x % 4;
    int own = warp / SPLIT * 16 * TILES, col = warp % SPLIT * part;
    const int32_t *first = a.first + (int64_t)row * a.seq;
    int last = flash_last_of(first, min(j0 + rows, a.seq), a.seq);
    int from = j0 / COLS * COLS;

    /* Fetches Q and what goes with it. `side`: which of the two. */
    auto load_q = [&](int head, int i0, int side) {
        flash_load<COLS, SIZE>(q_tile + side * COLS * ld,
                               flash_from_of<bf16>(a, a.q, a.q_stride, row, head), i0, a.seq);
        int64_t at = ((int64_t)row * a.heads + head) * a.seq + i0;
        int i = threadIdx.x;
        if (i < COLS) {
            columns<COLS> *to = columns_of + side;
            bool valid = i0 + i < a.seq;
            copy4_start(shared_of(to->lse + i), a.lse + at + i, valid);
            copy4_start(shared_of(to->delta + i), f.delta + at + i, valid);
            copy4_start(shared_of(to->first + i), first + i0 + i, valid);
        }
    };
    flash_load<rows, SIZE>(k_tile, flash_from_of<bf16>(a, a.k, a.kv_stride, row, kv_head), j0,
                           a.seq);
    flash_load<rows, SIZE>(v_tile, flash_from_of<bf16>(a, a.v, a.kv_stride, row, kv_head), j0,
                           a.seq);
    load_q(head, from, 0);

    float dk[TILES][part / 8][4], dv[TILES][part / 8][4];
    flash_clear(dk);
    flash_clear(dv);
    float scale2 = a.scale * LOG2E;
    for (int i0 = from, side = 0; head < end; side ^= 1) {
        int next = i0 + COLS < last ? i0 + COLS : from, next_head = head + (next == from);
        float s[TILES][N][4], dp[TILES][N][4];
        unsigned p[TILES][N / 2][4];
        const bf16 *q_now = q_tile + side * COLS * ld;
        const columns<COLS> *c = columns_of + side;
        copy_wait();
        __syncthreads(); /* Q is there, dO and the other Q free */
        flash_load<COLS, SIZE>(g_tile, flash_from_of<bf16>(a, a.d_o, a.o_stride, row, head), i0,
                               a.seq);
        bool mine = j0 + own < i0 + COLS; /* else none of these queries sees the warp's keys */
        if (mine) {
            flash_scores<SIZE, 2>(s, flash_lane_a<SIZE>(k_tile, own), flash_lane_bt<SIZE>(q_now));
            probabilities<COLS>(s, *c, j0 + own, i0, scale2, a.seq);
            flash_pack(p, s);
        }
        copy_wait();
        __syncthreads(); /* dO is there */
        if (next_head < end)
            load_q(next_head, next, side ^ 1);
        if (mine) {
            flash_apply<SIZE>(dv, p, flash_lane_b<SIZE>(g_tile, col));
            flash_scores<SIZE, 2>(dp, flash_lane_a<SIZE>(v_tile, own), flash_lane_bt<SIZE>(g_tile));
#pragma unroll
            for (int n = 0; n < N; n++)
#pragma unroll
                for (int e = 0; e < 4; e++) {
                    float delta_of = c->delta[n * 8 + 2 * t + e % 2];
#pragma unroll
                    for (int m = 0; m < TILES; m++)
                        s[m][n][e] *= dp[m][n][e] - delta_of;
                }
            flash_pack(p, s);
            flash_apply<SIZE>(dk, p, flash_lane_b<SIZE>(q_now, col));
        }
        i0 = next;
        head = next_head;
    }

    float scale[TILES][2], one[TILES][2];
    flash_fill(scale, a.scale);
    flash_fill(one, 1.0f);
    int64_t at = (int64_t)row * a.seq * a.dkv_stride + (int64_t)kv_head * a.head_dim;
    flash_store((bf16 *)a.dk + at, a.dkv_stride, a.head_dim, j0 + own, col, a.seq, dk, scale);
    flash_store((bf16 *)a.dv + at, a.dkv_stride, a.head_dim, j0 + own, col, a.seq, dv, one);
}

template <int SIZE, int TILES, int COLS, int SPLIT> INLINE void flash_dq(const slide_flash_args &f)
{
    constexpr int rows = SLIDE_FLASH_ROWS(TILES, SPLIT), ld = SLIDE_FLASH_LD(SIZE);
    constexpr int part = SIZE / SPLIT, N = COLS / 8;
    const slide_attn &a = f.a;
    SHARED_DYNAMIC(bf16, q_tile);
    bf16 *g_tile = q_tile + rows * ld, *k_tile = g_tile + rows * ld, *v_tile = k_tile + COLS * ld;
    float *lse = (float *)(void *)(v_tile + COLS * ld), *delta = lse + rows; /* no registers left */

    int row = blockIdx.x / a.heads, head = blockIdx.x % a.heads;
    int kv_head = head / (a.heads / a.kv_heads);
    int i0 = (int)(gridDim.y - 1 - blockIdx.y) * rows;
    int warp = threadIdx.x / WARP, g = threadIdx.x % WARP / 4, t = threadIdx.x % 4;
    int own = warp / SPLIT * 16 * TILES, col = warp % SPLIT * part;
    const int32_t *first = a.first + (int64_t)row * a.seq;
    flash_from<bf16> k = flash_from_of<bf16>(a, a.k, a.kv_stride, row, kv_head);
    flash_from<bf16> v = flash_from_of<bf16>(a, a.v, a.kv_stride, row, kv_head);
    int last = min(i0 + rows, a.seq);
    flash_bounds bounds = flash_bounds_of(first + i0, last - i0);
    int from = bounds.least / COLS * COLS;
    flash_load<rows, SIZE>(q_tile, flash_from_of<bf16>(a, a.q, a.q_stride, row, head), i0, a.seq);
    flash_load<rows, SIZE>(g_tile, flash_from_of<bf16>(a, a.d_o, a.o_stride, row, head), i0, a.seq);
    flash_load<COLS, SIZE>(v_tile, v, from, a.seq);

    int64_t at = ((int64_t)row * a.heads + head) * a.seq + i0;
    for (int i = threadIdx.x; i < rows; i += FLASH_THREADS) {
        copy4_start(shared_of(lse + i), a.lse + at + i, i0 + i < a.seq);
        copy4_start(shared_of(delta + i), f.delta + at + i, i0 + i < a.seq);
    }
    float dq[TILES][part / 8][4];
    flash_clear(dq);
    shared_at q_at = flash_lane_a<SIZE>(q_tile, own), g_at = flash_lane_a<SIZE>(g_tile, own);
    shared_at k_bt = flash_lane_bt<SIZE>(k_tile), v_bt = flash_lane_bt<SIZE>(v_tile);
    shared_at k_b = flash_lane_b<SIZE>(k_tile, col);
    float scale2 = a.scale * LOG2E;
    for (int j0 = from; j0 < last; j0 += COLS) {
        float s[TILES][N][4], dp[TILES][N][4];
        unsigned p[TILES][N / 2][4];
        copy_wait();
        __syncthreads(); /* V is there, K free */
        flash_load<COLS, SIZE>(k_tile, k, j0, a.seq);
        bool mine = j0 < i0 + own + 16 * TILES; /* else the warp's queries see none of these */
        if (mine)
            flash_scores<SIZE, 2>(dp, g_at, v_bt);
        copy_wait();
        __syncthreads(); /* K is there, V free */
        if (j0 + COLS < last)
            flash_load<COLS, SIZE>(v_tile, v, j0 + COLS, a.seq);
        if (!mine)
            continue;
        flash_scores<SIZE, 2>(s, q_at, k_bt);
        bool whole = j0 + COLS <= i0 + own + 1 && j0 >= bounds.most;
#pragma unroll
        for (int m = 0; m < TILES; m++)
#pragma unroll
            for (int half = 0; half < 2; half++) {
                int r = own + m * 16 + half * 8 + g, i = i0 + r;
                float lse2 = lse[r] * LOG2E, delta_of = delta[r];
                int least = whole ? 0 : first[min(i, a.seq - 1)];
#pragma unroll
                for (int n = 0; n < N; n++)
#pragma unroll
                    for (int e = 2 * half; e < 2 * half + 2; e++) {
                        int j = j0 + n * 8 + 2 * t + e % 2;
                        float x = exp2_fast(s[m][n][e] * scale2 - lse2);
                        if (!whole && (j > i || j < least))
                            x = 0;
                        s[m][n][e] = x * (dp[m][n][e] - delta_of);
                    }
            }
        flash_pack(p, s);
        flash_apply<SIZE>(dq, p, k_b);
    }
    bf16 *to = (bf16 *)a.dq + (int64_t)row * a.seq * a.dq_stride + (int64_t)head * a.head_dim;
    float scale[TILES][2];
    flash_fill(scale, a.scale);
    flash_store(to, a.dq_stride, a.head_dim, i0 + own, col, a.seq, dq, scale);
}

ENTRY slide_k_flash_delta_f32(slide_flash_args f)
{
    delta<float>(f);
}

ENTRY slide_k_flash_delta_bf16(slide_flash_args f)
{
    delta<bf16>(f);
}

#define X(size, t0, c0, s0, dkv_tiles, dkv_cols, dkv_split, dq_tiles, dq_cols, dq_split)           \
    ENTRY __launch_bounds__(FLASH_THREADS) slide_k_flash_dkv_bf16_##size(slide_flash_args f)       \
    {                                                                                              \
        flash_dkv<size, dkv_tiles, dkv_cols, dkv_split>(f);                                        \
    }                                                                                              \
    ENTRY __launch_bounds__(FLASH_THREADS) slide_k_flash_dq_bf16_##size(slide_flash_args f)        \
    {                                                                                              \
        flash_dq<size, dq_tiles, dq_cols, dq_split>(f);                                            \
    }
SLIDE_FLASH_BF16(X)
#undef X
