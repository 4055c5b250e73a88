/* What the files that are compiled once an instruction set share: names with the set's suffix, the
 * block that every loop works in, and the prefetch ahead of it.
 *
 * The loops are plain C over blocks of a constant number of elements, which the compiler turns into
 * SSE2, AVX2 or AVX-512. Each element sees the same IEEE operations in the same order whatever the
 * width: there is no contraction (-ffp-contract=off), no reassociation, and division and square
 * root are the correctly rounded ones. The rest of a range, shorter than a block, is copied to a
 * padded block and goes through the very same code.
 * Threads: any. Blocks: never. */
#ifndef SLIDE_OPTIM_LOOP_ISA_H
#define SLIDE_OPTIM_LOOP_ISA_H

#include <stdint.h>
#include <string.h>

#ifndef SLIDE_ISA_SUFFIX
#error "compile with -DSLIDE_ISA_SUFFIX=base, avx2 or avx512"
#endif
#ifndef __NO_MATH_ERRNO__
#error "compile with -fno-math-errno: a square root that sets errno is not vectorised"
#endif
#ifdef __FAST_MATH__
#error "-ffast-math changes results"
#endif

#define SLIDE_ISA_PASTE2(name, suffix) name##_##suffix
#define SLIDE_ISA_PASTE(name, suffix) SLIDE_ISA_PASTE2(name, suffix)
#define SLIDE_ISA_NAME(name) SLIDE_ISA_PASTE(name, SLIDE_ISA_SUFFIX)

#define BLOCK 64   /* elements: 4 cache lines of FP32 */
#define AHEAD 1024 /* bytes, of each stream */

#define INLINE static inline __attribute__((always_inline))

/* Asks for the `bytes` that lie AHEAD of p. Past the end of a range this is harmless: a prefetch
 * never faults. The address is formed as an integer since it may lie outside the array. */
INLINE void prefetch(const void *p, unsigned bytes)
{
    for (unsigned i = 0; i < bytes; i += 64)
        __builtin_prefetch((const void *)((uintptr_t)p + AHEAD + i), 0, 3);
}

INLINE uint32_t bits_of(float x)
{
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    return bits;
}

INLINE float float_of(uint32_t bits)
{
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

#endif
