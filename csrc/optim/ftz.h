/* Subnormals as zeros while AdamW runs. The first moment of a parameter that no gradient reaches
 * any more (a row of an unused token) shrinks by beta1 a step and is subnormal after some 700
 * steps; x86 then computes ten times slower, for numbers below 1.2e-38. Flushing them keeps the
 * bits equal over instruction sets, for all of them are governed by the same register. Threads:
 * each sets its own register. Blocks: never. */
#ifndef SLIDE_OPTIM_FTZ_H
#define SLIDE_OPTIM_FTZ_H

#include <stdint.h>

#if defined(__x86_64__)
#include <xmmintrin.h>

static inline uint64_t slide_ftz_enter(void)
{
    unsigned before = _mm_getcsr();
    _mm_setcsr(before | 0x8040u); /* flush results to zero, read subnormals as zero */
    return before;
}

static inline void slide_ftz_leave(uint64_t before)
{
    _mm_setcsr((unsigned)before);
}
#elif defined(__aarch64__)
static inline uint64_t slide_ftz_enter(void)
{
    uint64_t before;
    __asm__ volatile("mrs %0, fpcr" : "=r"(before));
    __asm__ volatile("msr fpcr, %0" : : "r"(before | (uint64_t)1 << 24));
    return before;
}

static inline void slide_ftz_leave(uint64_t before)
{
    __asm__ volatile("msr fpcr, %0" : : "r"(before));
}
#else
static inline uint64_t slide_ftz_enter(void)
{
    return 0;
}

static inline void slide_ftz_leave(uint64_t before)
{
    (void)before;
}
#endif

#endif
