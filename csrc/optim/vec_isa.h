/* What vec_isa.c exports: its loops, once an instruction set. For vec.c alone.
 * Threads: any, on disjoint outputs. Blocks: never. */
#ifndef SLIDE_OPTIM_VEC_ISA_H
#define SLIDE_OPTIM_VEC_ISA_H

#include "optim/vec.h"

typedef void slide_vec_convert_loop(void *out, const void *in, uint64_t n);

struct slide_vec_loops {
    void (*sum_f32)(float *out, const void *const *in, int count, uint64_t n);
    void (*sum_bf16)(float *out, const void *const *in, int count, uint64_t n);
    double (*squares)(const float *in, uint64_t n);
    void (*scale)(float *out, const float *in, float scale, uint64_t n);
    slide_vec_convert_loop *convert[SLIDE_DTYPE_COUNT][SLIDE_DTYPE_COUNT]; /* [to][from] */
    void (*split)(uint16_t *hi, int16_t *lo, const float *in, uint64_t n);
    void (*join)(float *out, const uint16_t *hi, const int16_t *lo, uint64_t n);
};

extern const struct slide_vec_loops slide_vec_loops_base, slide_vec_loops_avx2,
    slide_vec_loops_avx512;

#endif
