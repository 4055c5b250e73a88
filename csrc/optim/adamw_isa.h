/* What adamw_isa.c exports: its loops, once an instruction set. For adamw.c alone.
 * Threads: any, on disjoint ranges. Blocks: never. */
#ifndef SLIDE_OPTIM_ADAMW_ISA_H
#define SLIDE_OPTIM_ADAMW_ISA_H

#include "optim/adamw.h"

struct slide_adamw_loops {
    uint64_t (*split)(const struct slide_adamw *a, uint16_t *hi, int16_t *lo, float *m, float *v,
                      const float *grad, uint64_t n);
    uint64_t (*f32)(const struct slide_adamw *a, float *master, float *m, float *v,
                    const float *grad, uint64_t n);
};

extern const struct slide_adamw_loops slide_adamw_loops_base, slide_adamw_loops_avx2,
    slide_adamw_loops_avx512;

#endif
