/* Attention in FP32: for tests, for parity runs and for GPUs used without BF16, so plain and exact
 * (no TF32), but with the same shape as the BF16 kernels: blocks of rows kept, blocks of columns
 * passing by, nothing quadratic in memory, dk/dv and dq in launches of their own without atomics.
 * Eight lanes of one warp share EACH rows: lane t has the columns t, t + 8, ... of the scores and
 * the float4s t, t + 8, ... of the result. With 4 rows each, 64 FMA of the scores read 8 float4
 * (32 cycles of shared memory to 16 of FMA), and those of the result fewer: half of the FMA rate
 * is the most to expect, a quarter for heads of 512.
 * Called by cuda_flash.c; delta stands in flash_bwd.cu. */
#include "cuda/kernels/flash_tile.cuh"

#define LANES SLIDE_FLASH_F32_LANES

/* Tokens [from, from + rows) to a tile; zeros past seq and past head_dim, up to `wide`. */
template <int SIZE>
INLINE void load(float *tile, const flash_from<float> &f, int from, int rows, int seq, int wide)
{
    constexpr int ld = SLIDE_FLASH_F32_LD(SIZE);
    const float *base = f.at + (int64_t)from * f.stride;
    int t = threadIdx.x % LANES;
    for (int r = threadIdx.x / LANES; r < rows; r += blockDim.x / LANES)
        for (int d = 4 * t; d < wide; d += 4 * LANES) {
            vec<float> x = {{0, 0, 0, 0}};
            const float *p = base + r * f.stride + d;
            if (from + r < seq && f.vectors && d < f.head_dim) {
                x = load_vec(p);
            } else if (from + r < seq) {
#pragma unroll
                for (int e = 0; e < 4; e++)
                    x.at[e] = d + e < f.head_dim ? p[e] : 0.0f;
            }
            store_vec(tile + r * ld + d, x);
        }
}

/* s[m][n] = own[m] . tile[t + 8 n]; `own` are this thread's EACH rows. */
template <int SIZE, int EACH, int N>
INLINE void scores(float (&s)[EACH][N], const float *own, const float *tile, int wide)
{
    constexpr int ld = SLIDE_FLASH_F32_LD(SIZE);
    const float *mine = tile + threadIdx.x % LANES * ld;
#pragma unroll
    for (int m = 0; m < EACH; m++)
#pragma unroll
        for (int n = 0; n < N; n++)
            s[m][n] = 0;
    for (int d = 0; d < wide; d += 4) {
        vec<float> x[EACH];
#pragma unroll
        for (int m = 0; m < EACH; m++)
            x[m] = load_vec(own + m * ld + d);
#pragma unroll
        for (int n = 0; n < N; n++) {
            vec<float> y = load_vec(mine + n * LANES * ld + d);
#pragma unroll
            for (int m = 0; m < EACH; m++)
#pragma unroll
                for (int e = 0; e < 4; e++)
                    s[m][n] += x[m].at[e] * y.at[e];
        }
    }
}

/* out += p tile: p has COLS numbers a row, shared among the row's lanes. */
template <int SIZE, int COLS, int EACH>
INLINE void apply(float (&out)[EACH][SIZE / 32][4], const float *p, const float *tile, int wide)
{
    constexpr int ld = SLIDE_FLASH_F32_LD(SIZE);
    const float *mine = tile + threadIdx.x % LANES * 4;
    for (int c = 0; c < COLS; c++) {
        float by[EACH];
#pragma unroll
        for (int m = 0; m < EACH; m++)
            by[m] = p[m * (COLS + 4) + c];
#pragma unroll
        for (int n = 0; n < SIZE / 32; n++)
            if (n * 32 < wide) {
                vec<float> y = load_vec(mine + c * ld + n * 32);
#pragma unroll
                for (int m = 0; m < EACH; m++)
#pragma unroll
                    for (int e = 0; e < 4; e++)
                        out[m][n][e] += by[m] * y.at[e];
            }
    }
}

/* The lanes of a row show their numbers to each other. */
template <int EACH, int N> INLINE void show(float *p, const float (&s)[EACH][N])
{
    __syncwarp();
#pragma unroll
    for (int m = 0; m < EACH; m++)
#pragma unroll
        for (int n = 0; n < N; n++)
            p[m * (N * LANES + 4) + threadIdx.x % LANES + n * LANES] = s[m][n];
    __syncwarp();
}

template <int EACH, int D> INLINE void clear(float (&out)[EACH][D][4])
{
#pragma unroll
    for (int m = 0; m < EACH; m++)
#pragma unroll
        for (int n = 0; n < D; n++)
#pragma unroll
            for (int e = 0; e < 4; e++)
                out[m][n][e] = 0;
}

/* `to`: this token's vector. */
template <int D> INLINE void store(float *to, int head_dim, const float (&out)[D][4], float by)
{
    bool vectors = aligned16(to) && head_dim % 4 == 0;
#pragma unroll
    for (int n = 0; n < D; n++) {
        int d = n * 32 + threadIdx.x % LANES * 4;
        vec<float> x;
#pragma unroll
        for (int e = 0; e < 4; e++)
            x.at[e] = out[n][e] * by;
        if (vectors && d < head_dim) {
            store_vec(to + d, x);
        } else {
#pragma unroll
            for (int e = 0; e < 4; e++)
                if (d + e < head_dim)
                    to[d + e] = x.at[e];
        }
    }
}

INLINE int wide_of(const slide_attn &a)
{
    return (a.head_dim + 31) / 32 * 32;
}

template <int SIZE, int ROWS, int COLS, int EACH> INLINE void flash_fwd(const slide_attn &a)
{
    constexpr int ld = SLIDE_FLASH_F32_LD(SIZE), N = COLS / LANES;
    SHARED_DYNAMIC(float, q_tile);
    float *tile = q_tile + ROWS * ld;
    int row = blockIdx.x / a.heads, head = blockIdx.x % a.heads;
    int kv_head = head / (a.heads / a.kv_heads), wide = wide_of(a);
    int i0 = (int)(gridDim.y - 1 - blockIdx.y) * ROWS, r = threadIdx.x / LANES * EACH;
    int t = threadIdx.x % LANES;
    float *p = tile + COLS * ld + r * (COLS + 4);
    const int32_t *first = a.first + (int64_t)row * a.seq;
    flash_from<float> k = flash_from_of<float>(a, a.k, a.kv_stride, row, kv_head);
    flash_from<float> v = flash_from_of<float>(a, a.v, a.kv_stride, row, kv_head);
    int last = min(i0 + ROWS, a.seq);
    int from = flash_bounds_of(first + i0, last - i0).least;
    load<SIZE>(q_tile, flash_from_of<float>(a, a.q, a.q_stride, row, head), i0, ROWS, a.seq, wide);

    float out[EACH][SIZE / 32][4], most[EACH], sum[EACH];
    int least[EACH];
    clear(out);
#pragma unroll
    for (int m = 0; m < EACH; m++) {
        most[m] = -INFINITY;
        sum[m] = 0;
        least[m] = first[min(i0 + r + m, a.seq - 1)];
    }
    for (int j0 = from; j0 < last; j0 += COLS) {
        float s[EACH][N];
        __syncthreads();
        load<SIZE>(tile, k, j0, COLS, a.seq, wide);
        __syncthreads();
        scores<SIZE>(s, q_tile + r * ld, tile, wide);
#pragma unroll
        for (int m = 0; m < EACH; m++) {
            float now = most[m];
#pragma unroll
            for (int n = 0; n < N; n++) {
                int j = j0 + t + n * LANES;
                s[m][n] = j >= least[m] && j <= i0 + r + m ? s[m][n] * a.scale : -INFINITY;
                now = fmaxf(now, s[m][n]);
            }
#pragma unroll
            for (int lanes = LANES / 2; lanes; lanes /= 2)
                now = fmaxf(now, __shfl_xor_sync(0xffffffffu, now, lanes));
            float shift = now == -INFINITY ? 0.0f : now; /* nothing seen yet */
            float fix = exp2f((most[m] - shift) * LOG2E);
            most[m] = now;
            sum[m] *= fix;
#pragma unroll
            for (int n = 0; n < N; n++) {
                s[m][n] = exp2f((s[m][n] - shift) * LOG2E);
                sum[m] += s[m][n];
            }
#pragma unroll
            for (int n = 0; n < SIZE / 32; n++)
#pragma unroll
                for (int e = 0; e < 4; e++)
                    out[m][n][e] *= fix;
        }
        show(p, s);
        __syncthreads();
        load<SIZE>(tile, v, j0, COLS, a.seq, wide);
        __syncthreads();
        apply<SIZE, COLS>(out, p, tile, wide);
    }
    float *lse = a.lse + ((int64_t)row * a.heads + head) * a.seq;
#pragma unroll
    for (int m = 0; m < EACH; m++) {
        int64_t i = i0 + r + m;
#pragma unroll
        for (int lanes = LANES / 2; lanes; lanes /= 2)
            sum[m] += __shfl_xor_sync(0xffffffffu, sum[m], lanes);
        if (i >= a.seq)
            continue;
        if (t == 0)
            lse[i] = most[m] + logf(sum[m]);
        store((float *)a.o + ((int64_t)row * a.seq + i) * a.o_stride + (int64_t)head * a.head_dim,
              a.head_dim, out[m], 1.0f / sum[m]);
    }
}

template <int SIZE, int ROWS, int COLS, int EACH> INLINE void flash_dq(const slide_flash_args &f)
{
    constexpr int ld = SLIDE_FLASH_F32_LD(SIZE), N = COLS / LANES;
    const slide_attn &a = f.a;
    SHARED_DYNAMIC(float, q_tile);
    float *g_tile = q_tile + ROWS * ld, *tile = g_tile + ROWS * ld;
    int row = blockIdx.x / a.heads, head = blockIdx.x % a.heads;
    int kv_head = head / (a.heads / a.kv_heads), wide = wide_of(a);
    int i0 = (int)(gridDim.y - 1 - blockIdx.y) * ROWS, r = threadIdx.x / LANES * EACH;
    int t = threadIdx.x % LANES;
    float *p = tile + COLS * ld + r * (COLS + 4);
    const int32_t *first = a.first + (int64_t)row * a.seq;
    flash_from<float> k = flash_from_of<float>(a, a.k, a.kv_stride, row, kv_head);
    flash_from<float> v = flash_from_of<float>(a, a.v, a.kv_stride, row, kv_head);
    int last = min(i0 + ROWS, a.seq);
    int from = flash_bounds_of(first + i0, last - i0).least;
    load<SIZE>(q_tile, flash_from_of<float>(a, a.q, a.q_stride, row, head), i0, ROWS, a.seq, wide);
    load<SIZE>(g_tile, flash_from_of<float>(a, a.d_o, a.o_stride, row, head), i0, ROWS, a.seq,
               wide);

    float dq[EACH][SIZE / 32][4], lse[EACH], delta[EACH];
    int least[EACH];
    clear(dq);
#pragma unroll
    for (int m = 0; m < EACH; m++) {
        int i = min(i0 + r + m, a.seq - 1);
        int64_t at = ((int64_t)row * a.heads + head) * a.seq + i;
        lse[m] = a.lse[at];
        delta[m] = f.delta[at];
        least[m] = first[i];
    }
    for (int j0 = from; j0 < last; j0 += COLS) {
        float s[EACH][N], dp[EACH][N];
        __syncthreads();
        load<SIZE>(tile, v, j0, COLS, a.seq, wide);
        __syncthreads();
        scores<SIZE>(dp, g_tile + r * ld, tile, wide);
        __syncthreads();
        load<SIZE>(tile, k, j0, COLS, a.seq, wide);
        __syncthreads();
        scores<SIZE>(s, q_tile + r * ld, tile, wide);
#pragma unroll
        for (int m = 0; m < EACH; m++)
#pragma unroll
            for (int n = 0; n < N; n++) {
                int i = i0 + r + m, j = j0 + t + n * LANES;
                bool seen = j >= least[m] && j <= i && i < a.seq;
                float x = exp2f((s[m][n] * a.scale - lse[m]) * LOG2E) * (dp[m][n] - delta[m]);
                s[m][n] = seen ? x : 0.0f;
            }
        show(p, s);
        apply<SIZE, COLS>(dq, p, tile, wide);
    }
#pragma unroll
    for (int m = 0; m < EACH; m++) {
        int64_t i = i0 + r + m;
        if (i < a.seq)
            store((float *)a.dq + ((int64_t)row * a.seq + i) * a.dq_stride +
                      (int64_t)head * a.head_dim,
                  a.head_dim, dq[m], a.scale);
    }
}

template <int SIZE, int ROWS, int COLS, int EACH> INLINE void flash_dkv(const slide_flash_args &f)
{
    constexpr int ld = SLIDE_FLASH_F32_LD(SIZE), N = COLS / LANES;
    const slide_attn &a = f.a;
    SHARED_DYNAMIC(float, k_tile);
    float *v_tile = k_tile + ROWS * ld, *tile = v_tile + ROWS * ld;
    int row = blockIdx.x / a.kv_heads, kv_head = blockIdx.x % a.kv_heads;
    int group = a.heads / a.kv_heads, wide = wide_of(a);
    int j0 = (int)blockIdx.y * ROWS, r = threadIdx.x / LANES * EACH, t = threadIdx.x % LANES;
    float *p = tile + COLS * ld + r * (COLS + 4);
    const int32_t *first = a.first + (int64_t)row * a.seq;
    int last = flash_last_of(first, min(j0 + ROWS, a.seq), a.seq);
    load<SIZE>(k_tile, flash_from_of<float>(a, a.k, a.kv_stride, row, kv_head), j0, ROWS, a.seq,
               wide);
    load<SIZE>(v_tile, flash_from_of<float>(a, a.v, a.kv_stride, row, kv_head), j0, ROWS, a.seq,
               wide);

    float dk[EACH][SIZE / 32][4], dv[EACH][SIZE / 32][4];
    clear(dk);
    clear(dv);
    for (int head = kv_head * group; head < (kv_head + 1) * group; head++) {
        flash_from<float> q = flash_from_of<float>(a, a.q, a.q_stride, row, head);
        flash_from<float> g = flash_from_of<float>(a, a.d_o, a.o_stride, row, head);
        int64_t at = ((int64_t)row * a.heads + head) * a.seq;
        for (int i0 = j0; i0 < last; i0 += COLS) {
            float s[EACH][N], dp[EACH][N];
            __syncthreads();
            load<SIZE>(tile, q, i0, COLS, a.seq, wide);
            __syncthreads();
            scores<SIZE>(s, k_tile + r * ld, tile, wide);
#pragma unroll
            for (int n = 0; n < N; n++) {
                int i = i0 + t + n * LANES, real = min(i, a.seq - 1), least = first[real];
                float lse = a.lse[at + real];
#pragma unroll
                for (int m = 0; m < EACH; m++) {
                    int j = j0 + r + m;
                    bool seen = i < a.seq && j <= i && least <= j;
                    s[m][n] = seen ? exp2f((s[m][n] * a.scale - lse) * LOG2E) : 0.0f;
                }
            }
            show(p, s);
            __syncthreads();
            load<SIZE>(tile, g, i0, COLS, a.seq, wide);
            __syncthreads();
            apply<SIZE, COLS>(dv, p, tile, wide);
            scores<SIZE>(dp, v_tile + r * ld, tile, wide);
#pragma unroll
            for (int n = 0; n < N; n++) {
                float delta = f.delta[at + min(i0 + t + n * LANES, a.seq - 1)];
#pragma unroll
                for (int m = 0; m < EACH; m++)
                    s[m][n] *= dp[m][n] - delta;
            }
            show(p, s);
            __syncthreads();
            load<SIZE>(tile, q, i0, COLS, a.seq, wide);
            __syncthreads();
            apply<SIZE, COLS>(dk, p, tile, wide);
        }
    }
#pragma unroll
    for (int m = 0; m < EACH; m++) {
        int64_t j = j0 + r + m;
        if (j >= a.seq)
            continue;
        int64_t to = ((int64_t)row * a.seq + j) * a.dkv_stride + (int64_t)kv_head * a.head_dim;
        store((float *)a.dk + to, a.head_dim, dk[m], a.scale);
        store((float *)a.dv + to, a.head_dim, dv[m], 1.0f);
    }
}

#define X(size, rows, cols, each)                                                                  \
    ENTRY __launch_bounds__(SLIDE_FLASH_F32_THREADS(rows, each))                                   \
        slide_k_flash_fwd_f32_##size(slide_flash_args f)                                           \
    {                                                                                              \
        flash_fwd<size, rows, cols, each>(f.a);                                                    \
    }                                                                                              \
    ENTRY __launch_bounds__(SLIDE_FLASH_F32_THREADS(rows, each))                                   \
        slide_k_flash_dkv_f32_##size(slide_flash_args f)                                           \
    {                                                                                              \
        flash_dkv<size, rows, cols, each>(f);                                                      \
    }                                                                                              \
    ENTRY __launch_bounds__(SLIDE_FLASH_F32_THREADS(rows, each))                                   \
        slide_k_flash_dq_f32_##size(slide_flash_args f)                                            \
    {                                                                                              \
        flash_dq<size, rows, cols, each>(f);                                                       \
    }
SLIDE_FLASH_F32(X)
#undef X
