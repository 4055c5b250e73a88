/* AdamW: the scalars of a step, and the choice of the loop by instruction set. The loops stand in
 * adamw_isa.c; cutting a range into pieces and spreading them over threads is the caller's.
 * Called by train/ when a range's gradient is reduced, and by py/ for tests and benchmarks. */
#include "optim/adamw.h"

#include <math.h>

#include "optim/adamw_isa.h"
#include "optim/ftz.h"

static const struct slide_adamw_loops *loops(enum slide_isa isa)
{
#if defined(__x86_64__)
    static const struct slide_adamw_loops *const table[SLIDE_ISA_COUNT] = {
        [SLIDE_ISA_BASE] = &slide_adamw_loops_base,
        [SLIDE_ISA_AVX2] = &slide_adamw_loops_avx2,
        [SLIDE_ISA_AVX512] = &slide_adamw_loops_avx512,
    };
    return table[isa];
#else
    (void)isa; /* elsewhere only base exists, and its bits are the same */
    return &slide_adamw_loops_base;
#endif
}

struct slide_adamw slide_adamw_prepare(const struct slide_adamw_hyper *hyper, int decay)
{
    double step = (double)hyper->step;
    double bias1 = 1.0 - pow(hyper->beta1, step);
    double bias2 = 1.0 - pow(hyper->beta2, step);
    return (struct slide_adamw){
        .beta2 = (float)hyper->beta2,
        .one_minus_beta1 = (float)(1.0 - hyper->beta1),
        .one_minus_beta2 = (float)(1.0 - hyper->beta2),
        .eps = (float)hyper->eps,
        .keep = decay ? (float)(1.0 - hyper->lr * hyper->weight_decay) : 1.0f,
        .step_size = (float)(hyper->lr / bias1),
        .inv_sqrt_bias2 = (float)(1.0 / sqrt(bias2)),
    };
}

uint64_t slide_adamw_split(enum slide_isa isa, const struct slide_adamw *a, uint16_t *hi,
                           int16_t *lo, float *m, float *v, const float *grad, uint64_t n)
{
    uint64_t before = slide_ftz_enter();
    uint64_t bad = loops(isa)->split(a, hi, lo, m, v, grad, n);
    slide_ftz_leave(before);
    return bad;
}

uint64_t slide_adamw_f32(enum slide_isa isa, const struct slide_adamw *a, float *master, float *m,
                         float *v, const float *grad, uint64_t n)
{
    uint64_t before = slide_ftz_enter();
    uint64_t bad = loops(isa)->f32(a, master, m, v, grad, n);
    slide_ftz_leave(before);
    return bad;
}
