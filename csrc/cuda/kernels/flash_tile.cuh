/* What the BF16 attention kernels have in common: which part of a row of tokens a block works on,
 * tiles in shared memory, and the two products. A "row" is what a warp keeps (a query; a key in
 * dk/dv), a "column" what passes by. Scores stay in registers: the C fragment of S = rows cols^T
 * is, rounded, the A fragment of the second product, so that P and dS never go through shared
 * memory. Called by flash_fwd.cu and flash_bwd.cu; flash_f32.cu uses the first part. */
#ifndef SLIDE_CUDA_KERNELS_FLASH_TILE_CUH
#define SLIDE_CUDA_KERNELS_FLASH_TILE_CUH

#include "cuda/flash_args.h"
#include "cuda/kernels/mma.cuh"

#define LOG2E 1.4426950408889634f
#define LN2 0.6931471805599453f
#define FLASH_THREADS (SLIDE_FLASH_WARPS * WARP)

/* Vectors of head_dim of one row and head, by token. `vectors`: 16 bytes at a time will do. */
template <class T> struct flash_from {
    const T *at;
    int64_t stride;
    int head_dim;
    bool vectors;
};

template <class T>
INLINE flash_from<T> flash_from_of(const slide_attn &a, const void *p, int64_t stride, int row,
                                   int head)
{
    const T *at = (const T *)p + (int64_t)row * a.seq * stride + (int64_t)head * a.head_dim;
    constexpr int size = vec<T>::size;
    return {at, stride, a.head_dim, aligned16(at) && stride % size == 0 && a.head_dim % size == 0};
}

/* The least and greatest first[] of `count` tokens, the same in all lanes of the warp. */
struct flash_bounds {
    int least, most;
};

INLINE flash_bounds flash_bounds_of(const int32_t *first, int count)
{
    int least = first[0], most = least;
    for (int i = threadIdx.x % WARP; i < count; i += WARP) {
        least = min(least, (int)first[i]);
        most = max(most, (int)first[i]);
    }
#pragma unroll
    for (int lane = WARP / 2; lane; lane /= 2) {
        least = min(least, __shfl_xor_sync(0xffffffffu, least, lane));
        most = max(most, __shfl_xor_sync(0xffffffffu, most, lane));
    }
    return {least, most};
}

/* One past the last query that sees any of the keys [from, to); at least to, for every query sees
 * itself. The same in all lanes of the warp. */
INLINE int flash_last_of(const int32_t *first, int to, int seq)
{
    int last = to;
    for (int i = to + (int)(threadIdx.x % WARP); i < seq; i += WARP)
        if (first[i] < to)
            last = i + 1;
#pragma unroll
    for (int lane = WARP / 2; lane; lane /= 2)
        last = max(last, __shfl_xor_sync(0xffffffffu, last, lane));
    return last;
}

/* Starts to bring tokens [from, from + ROWS) into a tile of row length SIZE + 8; zeros past `seq`
 * and past head_dim. Without vectors it's done when it returns (a barrier must follow either way).
 * A thread keeps its column and steps down the rows: one pointer, few registers. */
template <int ROWS, int SIZE>
INLINE void flash_load(bf16 *tile, const flash_from<bf16> &f, int from, int seq)
{
    constexpr int ld = SLIDE_FLASH_LD(SIZE), chunks = SIZE / 8;
    constexpr int lanes = chunks & -chunks; /* a row's threads: a power of 2 that divides */
    constexpr int down = FLASH_THREADS / lanes;
    const bf16 *base = f.at + (int64_t)from * f.stride;
    if (f.vectors) {
        int d = threadIdx.x % lanes * 8, top = threadIdx.x / lanes;
        const bf16 *p = base + top * f.stride + d;
        shared_at to = shared_of(tile + top * ld + d);
#pragma unroll
        for (int r = 0; r < ROWS; r += down) {
            if (ROWS % down && r + top >= ROWS)
                break;
#pragma unroll
            for (int c = 0; c < SIZE; c += lanes * 8)
                copy16_start(to + (r * ld + c) * 2, p + c,
                             from + r + top < seq && c + d < f.head_dim);
            p += down * f.stride;
        }
        return;
    }
    for (int e = threadIdx.x; e < ROWS * SIZE; e += FLASH_THREADS) {
        int row = e / SIZE, d = e % SIZE;
        bf16 x = {0};
        if (from + row < seq && d < f.head_dim)
            x = base[row * f.stride + d];
        tile[row * ld + d] = x;
    }
}

/* Where this lane's row of ldmatrix lies in a tile: of an A operand, of a B operand stored [n, k],
 * of a B operand stored [k, n]. */
template <int SIZE> INLINE shared_at flash_lane_a(const bf16 *tile, int row)
{
    int lane = threadIdx.x % WARP;
    return shared_of(tile + (row + lane % 16) * SLIDE_FLASH_LD(SIZE) + lane / 16 * 8);
}

template <int SIZE> INLINE shared_at flash_lane_bt(const bf16 *tile)
{
    int lane = threadIdx.x % WARP;
    return shared_of(tile + (lane / 16 * 8 + lane % 8) * SLIDE_FLASH_LD(SIZE) + lane / 8 % 2 * 8);
}

template <int SIZE> INLINE shared_at flash_lane_b(const bf16 *tile, int col)
{
    int lane = threadIdx.x % WARP;
    return shared_of(tile + lane % 16 * SLIDE_FLASH_LD(SIZE) + col + lane / 16 * 8);
}

/* s = a b^T over SIZE: a is the warp's 16 * TILES rows, b the 8 * N columns. UNROLL steps of the
 * inner loop: the compiler fetches ahead within them, in registers that dk, dv and dq can't spare.
 */
template <int SIZE, int UNROLL, int TILES, int N>
INLINE void flash_scores(float (&s)[TILES][N][4], shared_at a, shared_at b)
{
    constexpr int row16 = 16 * SLIDE_FLASH_LD(SIZE) * 2;
#pragma unroll
    for (int m = 0; m < TILES; m++)
#pragma unroll
        for (int n = 0; n < N; n++)
#pragma unroll
            for (int e = 0; e < 4; e++)
                s[m][n][e] = 0;
#pragma unroll UNROLL
    for (int k = 0; k < SIZE / 16; k++) {
        unsigned left[TILES][4], right[4];
#pragma unroll
        for (int m = 0; m < TILES; m++)
            ldmatrix(left[m], a + m * row16 + k * 32);
#pragma unroll
        for (int n = 0; n < N / 2; n++) {
            ldmatrix(right, b + n * row16 + k * 32);
#pragma unroll
            for (int m = 0; m < TILES; m++) {
                mma_bf16(s[m][2 * n], left[m], right[0], right[1]);
                mma_bf16(s[m][2 * n + 1], left[m], right[2], right[3]);
            }
        }
    }
}

/* Scores, rounded, as the A operand of the second product: 16 columns each. */
template <int TILES, int N>
INLINE void flash_pack(unsigned (&p)[TILES][N / 2][4], const float (&s)[TILES][N][4])
{
#pragma unroll
    for (int m = 0; m < TILES; m++)
#pragma unroll
        for (int k = 0; k < N / 2; k++) {
            p[m][k][0] = pack_bf16(s[m][2 * k][0], s[m][2 * k][1]);
            p[m][k][1] = pack_bf16(s[m][2 * k][2], s[m][2 * k][3]);
            p[m][k][2] = pack_bf16(s[m][2 * k + 1][0], s[m][2 * k + 1][1]);
            p[m][k][3] = pack_bf16(s[m][2 * k + 1][2], s[m][2 * k + 1][3]);
        }
}

/* out += p b: b is a tile [16 * K, 8 * D], from this warp's part of the head dimension on. */
template <int SIZE, int TILES, int K, int D>
INLINE void flash_apply(float (&out)[TILES][D][4], const unsigned (&p)[TILES][K][4], shared_at b)
{
    constexpr int row16 = 16 * SLIDE_FLASH_LD(SIZE) * 2;
#pragma unroll
    for (int k = 0; k < K; k++)
#pragma unroll
        for (int d = 0; d < D / 2; d++) {
            unsigned right[4];
            ldmatrix_trans(right, b + k * row16 + d * 32);
#pragma unroll
            for (int m = 0; m < TILES; m++) {
                mma_bf16(out[m][2 * d], p[m][k], right[0], right[1]);
                mma_bf16(out[m][2 * d + 1], p[m][k], right[2], right[3]);
            }
        }
}

template <int TILES, int D> INLINE void flash_clear(float (&out)[TILES][D][4])
{
#pragma unroll
    for (int m = 0; m < TILES; m++)
#pragma unroll
        for (int d = 0; d < D; d++)
#pragma unroll
            for (int e = 0; e < 4; e++)
                out[m][d][e] = 0;
}

template <int TILES> INLINE void flash_fill(float (&of_row)[TILES][2], float x)
{
#pragma unroll
    for (int m = 0; m < TILES; m++)
        of_row[m][0] = of_row[m][1] = x;
}

/* Writes out * factor as tokens [row, row + 16 * TILES) below `seq`, columns from `col` on below
 * head_dim. `to`: token 0 of this row and head. */
template <int TILES, int D>
INLINE void flash_store(void *to, int64_t stride, int head_dim, int row, int col, int seq,
                        const float (&out)[TILES][D][4], const float (&factor)[TILES][2])
{
    bf16 *base = (bf16 *)to;
    bool pairs = ((uintptr_t)base & 3) == 0 && stride % 2 == 0 && head_dim % 2 == 0;
    int g = threadIdx.x % WARP / 4, t = threadIdx.x % 4;
#pragma unroll
    for (int m = 0; m < TILES; m++)
#pragma unroll
        for (int half = 0; half < 2; half++) {
            int i = row + m * 16 + half * 8 + g;
            if (i >= seq)
                continue;
            bf16 *token = base + i * stride;
            float by = factor[m][half];
#pragma unroll
            for (int d = 0; d < D; d++) {
                int c = col + d * 8 + 2 * t;
                float x = out[m][d][2 * half] * by, y = out[m][d][2 * half + 1] * by;
                if (c >= head_dim)
                    continue;
                if (pairs) {
                    *(unsigned *)(void *)(token + c) = pack_bf16(x, y);
                } else {
                    token[c] = from_f32<bf16>(x);
                    if (c + 1 < head_dim)
                        token[c + 1] = from_f32<bf16>(y);
                }
            }
        }
}

#endif
