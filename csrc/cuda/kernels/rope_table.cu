/* Angles of the rotation: a thread a (token, frequency). models.md 1.2; the product position *
 * inv_freq is rounded to FP32 before cos and sin, as in the reference. 8 bytes written an element,
 * so the time is that of the stores. */
#include "cuda/kernels/common.cuh"

template <class T> INLINE void rope_table(const slide_rope_table_args &a)
{
    int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= a.n * a.half)
        return;
    float angle = (float)a.positions[i / a.half] * a.inv_freq[i % a.half];
    a.cos[i] = round_to<T>(cosf(angle) * a.factor);
    a.sin[i] = round_to<T>(sinf(angle) * a.factor);
}

ENTRY slide_k_rope_table_f32(slide_rope_table_args a)
{
    rope_table<float>(a);
}

ENTRY slide_k_rope_table_bf16(slide_rope_table_args a)
{
    rope_table<bf16>(a);
}
