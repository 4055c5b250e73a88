/* Gradient of a bias: sums over tokens, and the sum of partial sums that the norms share.
 * dy is read once (BF16 2 bytes an element, F32 4). A block sums SLIDE_BIAS_BLOCK tokens of 32
 * vectors of columns: each warp every eighth token, then the warps in order. The partial sums, 4
 * bytes for 64 elements, go through the L2 cache to sum_blocks. */
#include "cuda/kernels/common.cuh"

#define WARPS 8
#define IN_FLIGHT 8
#define SLICES 32 /* of the blocks, in sum_blocks */

template <class T, int V>
INLINE void bias_bwd(const slide_bias_bwd_args &a, float (*part)[WARP * 8])
{
    constexpr int W = vec<T>::size;
    int64_t first = (int64_t)blockIdx.x * SLIDE_BIAS_BLOCK;
    int64_t end = first + SLIDE_BIAS_BLOCK < a.n ? first + SLIDE_BIAS_BLOCK : a.n;
    int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    for (int g = 0; g < W / V; g++) {
        int64_t c = (int64_t)blockIdx.y * WARP * W + (g * WARP + lane) * V;
        float sum[V] = {};
        if (c < a.cols)
            for (int64_t t = first + warp; t < end; t += WARPS * IN_FLIGHT) {
                piece<T, V> x[IN_FLIGHT];
#pragma unroll
                for (int k = 0; k < IN_FLIGHT; k++)
                    if (t + k * WARPS < end)
                        x[k] = load_piece<V>((const T *)a.dy + (t + k * WARPS) * a.stride + c);
#pragma unroll
                for (int k = 0; k < IN_FLIGHT; k++)
                    if (t + k * WARPS < end)
#pragma unroll
                        for (int j = 0; j < V; j++)
                            sum[j] += get(x[k], j);
            }
#pragma unroll
        for (int j = 0; j < V; j++)
            part[warp][(g * WARP + lane) * V + j] = sum[j];
    }
    __syncthreads();
    int64_t c = (int64_t)blockIdx.y * WARP * W + threadIdx.x;
    if (threadIdx.x < WARP * W && c < a.cols) {
        float sum = 0;
#pragma unroll
        for (int w = 0; w < WARPS; w++)
            sum += part[w][threadIdx.x];
        a.scratch[blockIdx.x * (int64_t)a.cols + c] = sum;
    }
}

template <class T> INLINE void bias_bwd_any(const slide_bias_bwd_args &a)
{
    __shared__ float part[WARPS][WARP * 8];
    constexpr int V = vec<T>::size;
    if (aligned16(a.dy) && a.stride % V == 0 && a.cols % V == 0)
        bias_bwd<T, V>(a, part);
    else
        bias_bwd<T, 1>(a, part);
}

ENTRY __launch_bounds__(WARPS *WARP) slide_k_bias_bwd_f32(slide_bias_bwd_args a)
{
    bias_bwd_any<float>(a);
}

ENTRY __launch_bounds__(WARPS *WARP) slide_k_bias_bwd_bf16(slide_bias_bwd_args a)
{
    bias_bwd_any<bf16>(a);
}

/* db += the rows of scratch, of which there are a.n. A block has 32 columns; a warp sums a slice of
 * the rows, then the slices are added in order, and db last. */
ENTRY __launch_bounds__(SLICES *WARP) slide_k_sum_blocks(slide_bias_bwd_args a)
{
    __shared__ float part[SLICES][WARP];
    int lane = threadIdx.x % WARP, slice = threadIdx.x / WARP;
    int64_t c = (int64_t)blockIdx.x * WARP + lane, rows = (a.n + SLICES - 1) / SLICES;
    int64_t end = (slice + 1) * rows < a.n ? (slice + 1) * rows : a.n;
    float sum = 0;
    if (c < a.cols)
#pragma unroll 8
        for (int64_t b = slice * rows; b < end; b++)
            sum += a.scratch[b * a.cols + c];
    part[slice][lane] = sum;
    __syncthreads();
    if (slice == 0 && c < a.cols) {
        sum = 0;
#pragma unroll 8
        for (int s = 0; s < SLICES; s++)
            sum += part[s][lane];
        a.db[c] += sum;
    }
}
