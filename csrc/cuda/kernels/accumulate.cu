/* out = in or out += in, FP32 sums of F32 or BF16 terms: the ranks' gradients in rank order. Bytes
 * an element: the term, 4 written, 4 more read when it adds. The term may lie in another GPU's
 * memory: each byte of it is read once, 16 at a time. */
#include "cuda/kernels/common.cuh"

#define GROUP 8

template <class T> INLINE void accumulate(const slide_accumulate_args &a)
{
    constexpr int size = vec<T>::size, PARTS = GROUP / size;
    const T *in = (const T *)a.in;
    int64_t thread = (int64_t)blockIdx.x * blockDim.x + threadIdx.x;
    int64_t threads = (int64_t)gridDim.x * blockDim.x, done = 0;
    if (aligned16(in) && aligned16(a.out)) {
        int64_t groups = a.n / GROUP;
        for (int64_t i = thread; i < groups; i += threads) {
            piece<T, size> raw[PARTS];
            piece<float, 4> old[2];
            float x[GROUP];
#pragma unroll
            for (int k = 0; k < PARTS; k++)
                raw[k] = load_piece<size>(in + i * GROUP + k * size);
            if (a.add)
#pragma unroll
                for (int k = 0; k < 2; k++)
                    old[k] = load_piece<4>(a.out + i * GROUP + k * 4);
#pragma unroll
            for (int k = 0; k < GROUP; k++) {
                float term = get(raw[k / size], k % size);
                x[k] = a.add ? get(old[k / 4], k % 4) + term : term;
            }
            store_f32s(a.out + i * GROUP, x);
        }
        done = groups * GROUP;
    }
    for (int64_t i = done + thread; i < a.n; i += threads) {
        float term = as_f32(in[i]);
        a.out[i] = a.add ? a.out[i] + term : term;
    }
}

ENTRY slide_k_accumulate_f32(slide_accumulate_args a)
{
    accumulate<float>(a);
}

ENTRY slide_k_accumulate_bf16(slide_accumulate_args a)
{
    accumulate<bf16>(a);
}
