/* AdamW (Loshchilov and Hutter 2019, as torch.optim.AdamW does it) over a range of the master
 * planes, in place:
 *     m = m + (1 - beta1) (g - m);  v = beta2 v + (1 - beta2) g g
 *     p = p (1 - lr wd);  p = p - (lr / bias1) m / (sqrt(v) / sqrt(bias2) + eps)
 * where bias_i = 1 - beta_i^step. Scalars are formed in double by slide_adamw_prepare and rounded
 * once to FP32. One body for every instruction set, without contraction: the same bits from each,
 * for any cut of the range. Subnormal numbers count as zero (ftz.h says why).
 * Threads: any, on disjoint ranges. Blocks: never. */
#ifndef SLIDE_OPTIM_ADAMW_H
#define SLIDE_OPTIM_ADAMW_H

#include <stdint.h>

#include "base/isa.h"

struct slide_adamw_hyper {
    double lr, beta1, beta2, eps, weight_decay;
    uint64_t step; /* 1 for the first update */
};

struct slide_adamw { /* FP32, what the loop uses */
    float beta2, one_minus_beta1, one_minus_beta2, eps, keep, step_size, inv_sqrt_bias2;
};

/* decay: 0 for tensors without weight decay (keep = 1). */
struct slide_adamw slide_adamw_prepare(const struct slide_adamw_hyper *hyper, int decay);

/* n parameters; grad is FP32; the arrays don't overlap. The split form updates (hi, lo), the other
 * FP32 masters. Returns the number of gradients in the range that were Inf or NaN (all are applied
 * all the same: the parameter becomes NaN; the sign and payload of a NaN are nobody's promise). */
uint64_t slide_adamw_split(enum slide_isa isa, const struct slide_adamw *a, uint16_t *hi,
                           int16_t *lo, float *m, float *v, const float *grad, uint64_t n);
uint64_t slide_adamw_f32(enum slide_isa isa, const struct slide_adamw *a, float *master, float *m,
                         float *v, const float *grad, uint64_t n);

#endif
