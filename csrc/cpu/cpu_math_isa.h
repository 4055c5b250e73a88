/* Vectors of 16 floats for the hot loops: loads and stores of FP32 and BF16 with tails, sums in a
 * fixed order, exp. Included by *_isa.c files only, once an instruction set.
 * Threads: plain functions. Blocks: never. */
#ifndef SLIDE_CPU_CPU_MATH_ISA_H
#define SLIDE_CPU_CPU_MATH_ISA_H

#include <stdint.h>
#include <string.h>

#include "base/dtype.h"

#define LANES 16
#define INLINE static inline __attribute__((always_inline))

typedef float v16 __attribute__((vector_size(64)));
typedef uint32_t u16x32 __attribute__((vector_size(64)));
typedef int32_t i16x32 __attribute__((vector_size(64)));
typedef uint16_t u16x16 __attribute__((vector_size(32)));

INLINE v16 splat(float x)
{
    return (v16){x, x, x, x, x, x, x, x, x, x, x, x, x, x, x, x};
}

INLINE v16 load_f32(const float *p)
{
    v16 x;
    memcpy(&x, p, sizeof x);
    return x;
}

INLINE v16 widen_bf16(u16x16 x)
{
    return (v16)(__builtin_convertvector(x, u16x32) << 16);
}

/* Nearest even; NaN stays NaN. */
INLINE u16x16 narrow_bf16(v16 x)
{
    u16x32 bits = (u16x32)x;
    u16x32 rounded = (bits + 0x7fffu + (bits >> 16 & 1)) >> 16;
    u16x32 nan = (u16x32)((bits & 0x7fffffffu) > 0x7f800000u);
    u16x32 quiet = bits >> 16 | 0x40;
    return __builtin_convertvector((nan & quiet) | (~nan & rounded), u16x16);
}

/* Element i of an act array on: 16 of them, or n < 16 with zeros behind. */
INLINE v16 load(const void *p, int64_t i, int64_t n, enum slide_dtype act)
{
    if (act == SLIDE_F32) {
        const float *f = (const float *)p + i;
        if (n >= LANES)
            return load_f32(f);
        v16 x = splat(0);
        memcpy(&x, f, (size_t)n * sizeof *f);
        return x;
    }
    const uint16_t *h = (const uint16_t *)p + i;
    u16x16 x = {0};
    if (n >= LANES)
        memcpy(&x, h, sizeof x);
    else
        memcpy(&x, h, (size_t)n * sizeof *h);
    return widen_bf16(x);
}

INLINE void store(void *p, int64_t i, int64_t n, v16 x, enum slide_dtype act)
{
    size_t count = n >= LANES ? LANES : (size_t)n;
    if (act == SLIDE_F32) {
        if (n >= LANES)
            memcpy((float *)p + i, &x, sizeof x);
        else
            memcpy((float *)p + i, &x, count * sizeof(float));
        return;
    }
    u16x16 h = narrow_bf16(x);
    if (n >= LANES)
        memcpy((uint16_t *)p + i, &h, sizeof h);
    else
        memcpy((uint16_t *)p + i, &h, count * sizeof(uint16_t));
}

/* x as it would be after a store to and a load from an act array. */
INLINE v16 round_act(v16 x, enum slide_dtype act)
{
    return act == SLIDE_F32 ? x : widen_bf16(narrow_bf16(x));
}

/* Sum of the lanes, always in this tree. */
INLINE float sum_lanes(v16 x)
{
    float t[LANES];
    memcpy(t, &x, sizeof t);
    for (int half = LANES / 2; half > 0; half /= 2)
        for (int i = 0; i < half; i++)
            t[i] += t[i + half];
    return t[0];
}

INLINE float max_lanes(v16 x)
{
    float t[LANES];
    memcpy(t, &x, sizeof t);
    for (int i = 1; i < LANES; i++)
        t[0] = t[i] > t[0] ? t[i] : t[0];
    return t[0];
}

INLINE v16 pick(i16x32 mask, v16 yes, v16 no)
{
    return (v16)(((i16x32)yes & mask) | ((i16x32)no & ~mask));
}

INLINE v16 max16(v16 a, v16 b)
{
    return pick(a > b, a, b);
}

/* Lanes below n get x, the others `fill`. */
INLINE v16 mask_tail(v16 x, int64_t n, float fill)
{
    if (n >= LANES)
        return x;
    const i16x32 lane = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    return pick(lane < (int32_t)n, x, splat(fill));
}

/* e^x within 2 units in the last place: x = k ln2 + r, |r| <= ln2 / 2, a polynomial for e^r (its
 * Taylor series to r^7, error below 1e-9 there), 2^k by the exponent's bits. 0 below -87.3, where
 * the result would be subnormal; +Inf above 88.7; NaN stays. */
INLINE v16 exp16(v16 x)
{
    const v16 magic = splat(12582912.0f); /* 1.5 * 2^23: adding it rounds to an integer */
    v16 low = splat(-87.33654f), high = splat(88.72283f);
    v16 y = pick(x < low, low, pick(x > high, high, x));
    v16 k = (y * splat(1.44269504088896341f) + magic) - magic;
    v16 r = y - k * splat(0.693359375f);
    r = r - k * splat(-2.12194440e-4f);
    v16 p = splat(1.9841270e-4f);
    p = p * r + splat(1.3888889e-3f);
    p = p * r + splat(8.3333333e-3f);
    p = p * r + splat(4.1666667e-2f);
    p = p * r + splat(1.6666667e-1f);
    p = p * r + splat(0.5f);
    p = p * r * r + r + splat(1.0f);
    i16x32 e = __builtin_convertvector(k, i16x32);
    /* k may be 128: two factors. */
    i16x32 half = e >> 1, rest = e - half;
    p = p * (v16)((half + 127) << 23) * (v16)((rest + 127) << 23);
    p = pick(x < low, splat(0), p);
    p = pick(x > high, splat(__builtin_inff()), p);
    return pick(x == x, p, x);
}

#endif
