/* The loops of AdamW: one body, compiled once an instruction set (see loop_isa.h for how it gives
 * the same bits from each). The work is bound by memory, 28 bytes a parameter with an FP32
 * gradient, so all that counts is that every stream is read once, ahead of its use, and that the
 * arithmetic hides behind it. Called through the table of adamw.c. */
#include "optim/adamw_isa.h"
#include "base/dtype.h"
#include "optim/loop_isa.h"

/* One parameter: moments in place, the new master back. */
INLINE float update(const struct slide_adamw *a, float p, float *m, float *v, float g)
{
    *m = *m + a->one_minus_beta1 * (g - *m);
    *v = a->beta2 * *v + a->one_minus_beta2 * g * g;
    float denominator = __builtin_sqrtf(*v) * a->inv_sqrt_bias2 + a->eps;
    return p * a->keep - a->step_size * *m / denominator;
}

INLINE uint32_t nonfinite(float g)
{
    return (bits_of(g) & 0x7f800000u) == 0x7f800000u;
}

INLINE uint32_t split_block(const struct slide_adamw *restrict a, uint16_t *restrict hi,
                            int16_t *restrict lo, float *restrict m, float *restrict v,
                            const float *restrict grad)
{
    uint32_t bad = 0;
    for (int i = 0; i < BLOCK; i++) {
        float p = float_of(slide_master_bits(hi[i], lo[i]));
        float m1 = m[i], v1 = v[i];
        uint32_t bits = bits_of(update(a, p, &m1, &v1, grad[i]));
        hi[i] = slide_master_hi(bits);
        lo[i] = slide_master_lo(bits);
        m[i] = m1;
        v[i] = v1;
        bad += nonfinite(grad[i]);
    }
    return bad;
}

INLINE uint32_t f32_block(const struct slide_adamw *restrict a, float *restrict master,
                          float *restrict m, float *restrict v, const float *restrict grad)
{
    uint32_t bad = 0;
    for (int i = 0; i < BLOCK; i++) {
        float m1 = m[i], v1 = v[i];
        master[i] = update(a, master[i], &m1, &v1, grad[i]);
        m[i] = m1;
        v[i] = v1;
        bad += nonfinite(grad[i]);
    }
    return bad;
}

static uint64_t split(const struct slide_adamw *a, uint16_t *hi, int16_t *lo, float *m, float *v,
                      const float *grad, uint64_t n)
{
    const struct slide_adamw c = *a;
    uint64_t bad = 0, i = 0;
    for (; n - i >= BLOCK; i += BLOCK) {
        prefetch(hi + i, 2 * BLOCK);
        prefetch(lo + i, 2 * BLOCK);
        prefetch(m + i, 4 * BLOCK);
        prefetch(v + i, 4 * BLOCK);
        prefetch(grad + i, 4 * BLOCK);
        bad += split_block(&c, hi + i, lo + i, m + i, v + i, grad + i);
    }
    size_t rest = n - i;
    if (rest) {
        uint16_t hi_pad[BLOCK] = {0};
        int16_t lo_pad[BLOCK] = {0};
        float m_pad[BLOCK] = {0}, v_pad[BLOCK] = {0}, grad_pad[BLOCK] = {0};
        memcpy(hi_pad, hi + i, rest * sizeof *hi);
        memcpy(lo_pad, lo + i, rest * sizeof *lo);
        memcpy(m_pad, m + i, rest * sizeof *m);
        memcpy(v_pad, v + i, rest * sizeof *v);
        memcpy(grad_pad, grad + i, rest * sizeof *grad);
        bad += split_block(&c, hi_pad, lo_pad, m_pad, v_pad, grad_pad);
        memcpy(hi + i, hi_pad, rest * sizeof *hi);
        memcpy(lo + i, lo_pad, rest * sizeof *lo);
        memcpy(m + i, m_pad, rest * sizeof *m);
        memcpy(v + i, v_pad, rest * sizeof *v);
    }
    return bad;
}

static uint64_t f32(const struct slide_adamw *a, float *master, float *m, float *v,
                    const float *grad, uint64_t n)
{
    const struct slide_adamw c = *a;
    uint64_t bad = 0, i = 0;
    for (; n - i >= BLOCK; i += BLOCK) {
        prefetch(master + i, 4 * BLOCK);
        prefetch(m + i, 4 * BLOCK);
        prefetch(v + i, 4 * BLOCK);
        prefetch(grad + i, 4 * BLOCK);
        bad += f32_block(&c, master + i, m + i, v + i, grad + i);
    }
    size_t rest = n - i;
    if (rest) {
        float master_pad[BLOCK] = {0}, m_pad[BLOCK] = {0}, v_pad[BLOCK] = {0};
        float grad_pad[BLOCK] = {0};
        memcpy(master_pad, master + i, rest * sizeof *master);
        memcpy(m_pad, m + i, rest * sizeof *m);
        memcpy(v_pad, v + i, rest * sizeof *v);
        memcpy(grad_pad, grad + i, rest * sizeof *grad);
        bad += f32_block(&c, master_pad, m_pad, v_pad, grad_pad);
        memcpy(master + i, master_pad, rest * sizeof *master);
        memcpy(m + i, m_pad, rest * sizeof *m);
        memcpy(v + i, v_pad, rest * sizeof *v);
    }
    return bad;
}

const struct slide_adamw_loops SLIDE_ISA_NAME(slide_adamw_loops) = {.split = split, .f32 = f32};
