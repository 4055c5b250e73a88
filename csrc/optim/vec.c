/* Flat loops on the host: the choice of the loop by instruction set and type. The loops stand in
 * vec_isa.c; cutting an array into pieces and spreading them over threads is the caller's.
 * Called by the routes (sums of gradients), and by train/ for loading, saving and norms. */
#include "optim/vec.h"

#include <string.h>

#include "optim/vec_isa.h"

static const struct slide_vec_loops *loops(enum slide_isa isa)
{
#if defined(__x86_64__)
    static const struct slide_vec_loops *const table[SLIDE_ISA_COUNT] = {
        [SLIDE_ISA_BASE] = &slide_vec_loops_base,
        [SLIDE_ISA_AVX2] = &slide_vec_loops_avx2,
        [SLIDE_ISA_AVX512] = &slide_vec_loops_avx512,
    };
    return table[isa];
#else
    (void)isa; /* elsewhere only base exists, and its bits are the same */
    return &slide_vec_loops_base;
#endif
}

void slide_vec_sum(enum slide_isa isa, float *out, const void *const *in, int count,
                   enum slide_dtype dtype, uint64_t n)
{
    if (dtype == SLIDE_BF16)
        loops(isa)->sum_bf16(out, in, count, n);
    else
        loops(isa)->sum_f32(out, in, count, n);
}

double slide_vec_squares(enum slide_isa isa, const float *in, uint64_t n)
{
    return loops(isa)->squares(in, n);
}

void slide_vec_scale(enum slide_isa isa, float *out, const float *in, float scale, uint64_t n)
{
    loops(isa)->scale(out, in, scale, n);
}

void slide_vec_convert(enum slide_isa isa, void *out, enum slide_dtype to, const void *in,
                       enum slide_dtype from, uint64_t n)
{
    if (to == from)
        memmove(out, in, n * slide_dtype_size(to));
    else
        loops(isa)->convert[to][from](out, in, n);
}

void slide_vec_split(enum slide_isa isa, uint16_t *hi, int16_t *lo, const float *in, uint64_t n)
{
    loops(isa)->split(hi, lo, in, n);
}

void slide_vec_join(enum slide_isa isa, float *out, const uint16_t *hi, const int16_t *lo,
                    uint64_t n)
{
    loops(isa)->join(out, hi, lo, n);
}
