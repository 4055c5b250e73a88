/* FP16 conversions in integer arithmetic, the same bits as the F16C instructions give: exact one
 * way, to nearest with ties to even the other, NaN made quiet. Not for hot loops.
 * Called by checkpoint loading and by the CPU backend. */
#include "dtype.h"

float slide_f16_to_f32(uint16_t x)
{
    uint32_t sign = (uint32_t)(x & 0x8000) << 16;
    uint32_t exponent = x >> 10 & 31;
    uint32_t mantissa = x & 0x3ff;

    if (exponent == 0) { /* zero or subnormal: mantissa * 2^-24, exact in FP32 */
        float magnitude = (float)mantissa * 0x1p-24f;
        return slide_f32_from_bits(slide_f32_bits(magnitude) | sign);
    }
    if (exponent == 31) /* infinity or NaN */
        return slide_f32_from_bits(sign | 0x7f800000u | (mantissa ? 0x400000u : 0) |
                                   mantissa << 13);
    return slide_f32_from_bits(sign | (exponent + 112) << 23 | mantissa << 13);
}

/* x / 2^shift to nearest, ties to even. */
static uint32_t shift_round(uint32_t x, uint32_t shift)
{
    uint32_t half = (1u << (shift - 1)) - 1;
    return (x + half + (x >> shift & 1)) >> shift;
}

uint16_t slide_f32_to_f16(float x)
{
    uint32_t bits = slide_f32_bits(x);
    uint32_t sign = bits >> 16 & 0x8000;
    uint32_t magnitude = bits & 0x7fffffffu;
    uint32_t exponent = magnitude >> 23;

    if (magnitude > 0x7f800000u)
        return (uint16_t)(sign | 0x7e00 | (magnitude >> 13 & 0x3ff));
    if (magnitude >= 0x477ff000u) /* 65520: half way between the largest FP16 and the next */
        return (uint16_t)(sign | 0x7c00);
    if (exponent < 102) /* below half of the smallest subnormal */
        return (uint16_t)sign;
    if (exponent < 113) /* subnormal: in units of 2^-24 */
        return (uint16_t)(sign | shift_round((magnitude & 0x7fffff) | 0x800000, 126 - exponent));
    return (uint16_t)(sign | shift_round(magnitude - (112u << 23), 13)); /* a carry is right too */
}
