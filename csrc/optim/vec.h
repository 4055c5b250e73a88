/* Loops over flat arrays on the host: sums of the ranks' gradients, sums of squares, conversions.
 * Like AdamW: one body, several instruction sets, the same bits from each.
 * Threads: any, on disjoint outputs. Blocks: never. */
#ifndef SLIDE_OPTIM_VEC_H
#define SLIDE_OPTIM_VEC_H

#include <stdint.h>

#include "base/dtype.h"
#include "base/isa.h"

/* out = in[0] + in[1] + ... in that order, FP32; `in` are `count` >= 1 F32 or BF16 arrays of n.
 * `out` may be one of them when they are F32, and overlaps them in no other way. */
void slide_vec_sum(enum slide_isa isa, float *out, const void *const *in, int count,
                   enum slide_dtype dtype, uint64_t n);
/* Sum of squares in double, in SLIDE_VEC_LANES fixed partial sums, so that cutting at multiples of
 * SLIDE_VEC_LANES is the caller's only choice that shows. */
#define SLIDE_VEC_LANES 16
double slide_vec_squares(enum slide_isa isa, const float *in, uint64_t n);
/* out = in * scale; `out` may be `in`. */
void slide_vec_scale(enum slide_isa isa, float *out, const float *in, float scale, uint64_t n);
/* Element conversions among F32, BF16 (to nearest even) and F16 (to nearest even); from a type to
 * itself it is a copy. NaN stays NaN of that sign. The arrays don't overlap. */
void slide_vec_convert(enum slide_isa isa, void *out, enum slide_dtype to, const void *in,
                       enum slide_dtype from, uint64_t n);
/* FP32 <-> (hi, lo). The pair is exact for every bit pattern, NaN included. `hi` alone is the value
 * rounded to BF16: what rounds past the largest BF16 reads Inf, and a NaN may read Inf or zero when
 * its payload is not the processor's own (0x7fc00000, 0xffc00000). */
void slide_vec_split(enum slide_isa isa, uint16_t *hi, int16_t *lo, const float *in, uint64_t n);
void slide_vec_join(enum slide_isa isa, float *out, const uint16_t *hi, const int16_t *lo,
                    uint64_t n);

#endif
