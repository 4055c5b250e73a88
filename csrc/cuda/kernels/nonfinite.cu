/* Whether there is an Inf or NaN among n numbers: for finding where the first one comes from, so
 * plain. Each number is read once, 4 or 2 bytes. Whoever finds one writes the same 1. */
#include "cuda/kernels/common.cuh"

template <class T> INLINE void nonfinite(const slide_nonfinite_args &a)
{
    int64_t step = (int64_t)gridDim.x * blockDim.x;
    bool bad = false;
    for (int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x; i < a.n; i += step)
        bad |= (__float_as_uint(as_f32(((const T *)a.x)[i])) & 0x7f800000u) == 0x7f800000u;
    if (bad)
        *a.found = 1;
}

ENTRY slide_k_nonfinite_f32(slide_nonfinite_args a)
{
    nonfinite<float>(a);
}

ENTRY slide_k_nonfinite_bf16(slide_nonfinite_args a)
{
    nonfinite<bf16>(a);
}
