/* Number formats, and the split of an FP32 master weight into the `hi` and `lo` planes.
 * Threads: any. Blocks: never. */
#ifndef SLIDE_BASE_DTYPE_H
#define SLIDE_BASE_DTYPE_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>

enum slide_dtype { SLIDE_F32, SLIDE_BF16, SLIDE_F16, SLIDE_I32, SLIDE_DTYPE_COUNT };

static inline size_t slide_dtype_size(enum slide_dtype dtype)
{
    return dtype == SLIDE_F32 || dtype == SLIDE_I32 ? 4 : 2;
}

static inline uint32_t slide_f32_bits(float x)
{
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    return bits;
}

static inline float slide_f32_from_bits(uint32_t bits)
{
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

static inline float slide_bf16_to_f32(uint16_t x)
{
    return slide_f32_from_bits((uint32_t)x << 16);
}

/* Round to nearest, ties to even; NaN stays NaN. What activations and gradients use. */
static inline uint16_t slide_f32_to_bf16(float x)
{
    uint32_t bits = slide_f32_bits(x);
    if ((bits & 0x7fffffffu) > 0x7f800000u)
        return (uint16_t)(bits >> 16 | 0x40);
    return (uint16_t)((bits + 0x7fffu + (bits >> 16 & 1)) >> 16);
}

float slide_f16_to_f32(uint16_t x); /* exact, subnormals included */
uint16_t slide_f32_to_f16(float x); /* round to nearest, ties to even */

/* Master weights: hi is the master rounded to nearest, ties away from zero; lo is what that took
 * away. (hi, lo) is the master bit for bit, for every finite value. */
static inline uint16_t slide_master_hi(uint32_t bits)
{
    return (uint16_t)((bits + 0x8000u) >> 16);
}

static inline int16_t slide_master_lo(uint32_t bits)
{
    return (int16_t)(uint16_t)(bits - ((uint32_t)slide_master_hi(bits) << 16));
}

static inline uint32_t slide_master_bits(uint16_t hi, int16_t lo)
{
    return ((uint32_t)hi << 16) + (uint32_t)(int32_t)lo;
}

#endif
