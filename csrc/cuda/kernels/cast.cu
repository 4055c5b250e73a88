/* One number format into another, or a copy. Bytes an element: F32 <-> BF16 6, F32 -> F32 8,
 * BF16 -> BF16 4, each byte once. A thread converts UNROLL groups of 8 numbers that lie a block
 * apart, all loaded before the first is stored. */
#include "cuda/kernels/common.cuh"

#define GROUP 8
#define UNROLL 2

template <class From, class To> INLINE void cast(const slide_cast_args &a)
{
    constexpr int size = vec<From>::size, PARTS = GROUP / size;
    const From *in = (const From *)a.in;
    To *out = (To *)a.out;
    int64_t thread = (int64_t)blockIdx.x * blockDim.x + threadIdx.x;
    int64_t threads = (int64_t)gridDim.x * blockDim.x, done = 0;
    if (aligned16(in) && aligned16(out)) {
        int64_t groups = a.n / GROUP, step = threads * UNROLL;
        int64_t first = (int64_t)blockIdx.x * blockDim.x * UNROLL + threadIdx.x;
        for (int64_t i = first; i < groups; i += step) {
            piece<From, size> raw[UNROLL][PARTS];
#pragma unroll
            for (int u = 0; u < UNROLL; u++)
                if (i + u * blockDim.x < groups)
#pragma unroll
                    for (int k = 0; k < PARTS; k++)
                        raw[u][k] = load_piece<size>(in + (i + u * blockDim.x) * GROUP + k * size);
#pragma unroll
            for (int u = 0; u < UNROLL; u++)
                if (i + u * blockDim.x < groups) {
                    float x[GROUP];
#pragma unroll
                    for (int k = 0; k < GROUP; k++)
                        x[k] = get(raw[u][k / size], k % size);
                    store_f32s(out + (i + u * blockDim.x) * GROUP, x);
                }
        }
        done = groups * GROUP;
    }
    for (int64_t i = done + thread; i < a.n; i += threads)
        out[i] = from_f32<To>(as_f32(in[i]));
}

ENTRY slide_k_cast_f32_bf16(slide_cast_args a)
{
    cast<float, bf16>(a);
}

ENTRY slide_k_cast_bf16_f32(slide_cast_args a)
{
    cast<bf16, float>(a);
}

ENTRY slide_k_cast_f32_f32(slide_cast_args a)
{
    cast<float, float>(a);
}

ENTRY slide_k_cast_bf16_bf16(slide_cast_args a)
{
    cast<bf16, bf16>(a);
}
