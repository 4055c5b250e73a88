/* The loops of vec.h: one body, compiled once an instruction set (see loop_isa.h for how it gives
 * the same bits from each). FP16 is converted with integers and one exact addition rather than by
 * F16C, so that base has the same code; all of these loops wait for memory anyway.
 * Called through the table of vec.c. */
#include "optim/vec_isa.h"

#include "base/dtype.h"
#include "optim/loop_isa.h"

/* ---- elements ---- */

/* which ? yes : no, without a branch around the floating-point operation that made one of them:
 * such a branch would keep the loop from being vectorised. */
INLINE uint32_t pick(int which, uint32_t yes, uint32_t no)
{
    return no ^ ((yes ^ no) & (0u - (uint32_t)which));
}

INLINE float from_f32(float x)
{
    return x;
}

INLINE float from_bf16(uint16_t x)
{
    return slide_bf16_to_f32(x);
}

/* Exponent and mantissa move into place; Inf and NaN need the exponent's rest, and a subnormal is
 * read as 2^-14 (1 + mantissa) less the 2^-14 that it hasn't. All exact. */
INLINE float from_f16(uint16_t x)
{
    uint32_t sign = (uint32_t)(x & 0x8000u) << 16, bits = (uint32_t)(x & 0x7fffu) << 13;
    uint32_t exponent = bits & 0x0f800000u;
    uint32_t normal = bits + (112u << 23), special = bits + (224u << 23);
    uint32_t small = bits_of(float_of(bits + (113u << 23)) - float_of(113u << 23));
    uint32_t out = pick(exponent == 0, small, normal);
    out = pick(exponent == 0x0f800000u, special, out);
    return float_of(out | sign);
}

INLINE float to_f32(float x)
{
    return x;
}

INLINE uint16_t to_bf16(float x)
{
    uint32_t bits = bits_of(x);
    uint32_t rounded = (bits + 0x7fffu + (bits >> 16 & 1)) >> 16, quiet = bits >> 16 | 0x40;
    return (uint16_t)((bits & 0x7fffffffu) > 0x7f800000u ? quiet : rounded);
}

/* A subnormal result is rounded by the addition of 0.5, whose last place is 2^-24, FP16's step. */
INLINE uint16_t to_f16(float x)
{
    uint32_t bits = bits_of(x), sign = bits >> 16 & 0x8000u, size = bits & 0x7fffffffu;
    uint32_t small = bits_of(float_of(size) + 0.5f) - 0x3f000000u;
    uint32_t normal = (size - (112u << 23) + 0xfffu + (size >> 13 & 1)) >> 13;
    uint32_t out = pick(size < 113u << 23, small, normal);
    out = pick(size >= 0x477ff000u, 0x7c00u, out); /* rounds to 65536 or is more */
    out = pick(size > 0x7f800000u, 0x7e00u | (size >> 13 & 0x3ffu), out);
    return (uint16_t)(out | sign);
}

/* ---- conversions ---- */

/* A loop over blocks, and the rest through padded ones. `out` and `in` don't overlap. */
#define CONVERT(name, to_type, to, from_type, from)                                                \
    INLINE void name##_block(to_type *restrict out, const from_type *restrict in)                  \
    {                                                                                              \
        for (int i = 0; i < BLOCK; i++)                                                            \
            out[i] = to(from(in[i]));                                                              \
    }                                                                                              \
    static void name(void *out, const void *in, uint64_t n)                                        \
    {                                                                                              \
        to_type *target = out;                                                                     \
        const from_type *source = in;                                                              \
        uint64_t i = 0;                                                                            \
        for (; n - i >= BLOCK; i += BLOCK) {                                                       \
            prefetch(source + i, BLOCK * sizeof *source);                                          \
            name##_block(target + i, source + i);                                                  \
        }                                                                                          \
        if (i < n) {                                                                               \
            to_type out_pad[BLOCK];                                                                \
            from_type in_pad[BLOCK] = {0};                                                         \
            memcpy(in_pad, source + i, (n - i) * sizeof *source);                                  \
            name##_block(out_pad, in_pad);                                                         \
            memcpy(target + i, out_pad, (n - i) * sizeof *target);                                 \
        }                                                                                          \
    }

CONVERT(f32_from_bf16, float, to_f32, uint16_t, from_bf16)
CONVERT(f32_from_f16, float, to_f32, uint16_t, from_f16)
CONVERT(bf16_from_f32, uint16_t, to_bf16, float, from_f32)
CONVERT(bf16_from_f16, uint16_t, to_bf16, uint16_t, from_f16)
CONVERT(f16_from_f32, uint16_t, to_f16, float, from_f32)
CONVERT(f16_from_bf16, uint16_t, to_f16, uint16_t, from_bf16)

/* ---- sums ---- */

#define SUM(name, type, from)                                                                      \
    INLINE void name##_first(float *restrict acc, const type *restrict in)                         \
    {                                                                                              \
        for (int i = 0; i < BLOCK; i++)                                                            \
            acc[i] = from(in[i]);                                                                  \
    }                                                                                              \
    INLINE void name##_next(float *restrict acc, const type *restrict in)                          \
    {                                                                                              \
        for (int i = 0; i < BLOCK; i++)                                                            \
            acc[i] += from(in[i]);                                                                 \
    }                                                                                              \
    /* A block is read from every array before it is written: `out` may be one of them. */         \
    static void name(float *out, const void *const *in, int count, uint64_t n)                     \
    {                                                                                              \
        float acc[BLOCK];                                                                          \
        type pad[BLOCK] = {0};                                                                     \
        uint64_t i = 0;                                                                            \
        for (; n - i >= BLOCK; i += BLOCK) {                                                       \
            for (int k = 0; k < count; k++) {                                                      \
                const type *from_k = (const type *)in[k] + i;                                      \
                prefetch(from_k, BLOCK * sizeof *from_k);                                          \
                if (k == 0)                                                                        \
                    name##_first(acc, from_k);                                                     \
                else                                                                               \
                    name##_next(acc, from_k);                                                      \
            }                                                                                      \
            memcpy(out + i, acc, sizeof acc);                                                      \
        }                                                                                          \
        if (i == n)                                                                                \
            return;                                                                                \
        for (int k = 0; k < count; k++) {                                                          \
            memcpy(pad, (const type *)in[k] + i, (n - i) * sizeof *pad);                           \
            if (k == 0)                                                                            \
                name##_first(acc, pad);                                                            \
            else                                                                                   \
                name##_next(acc, pad);                                                             \
        }                                                                                          \
        memcpy(out + i, acc, (n - i) * sizeof *out);                                               \
    }

SUM(sum_f32, float, from_f32)
SUM(sum_bf16, uint16_t, from_bf16)

/* A square is exact in double. Each lane adds its own, in order; a partial sum is loaded and stored
 * once a block, so that its latency is shared by the block's rows. */
INLINE void squares_block(double *restrict lane, const float *restrict in)
{
    for (int i = 0; i < SLIDE_VEC_LANES; i++) {
        double sum = lane[i];
        for (int row = 0; row < BLOCK; row += SLIDE_VEC_LANES)
            sum += (double)in[row + i] * (double)in[row + i];
        lane[i] = sum;
    }
}

static double squares(const float *in, uint64_t n)
{
    double lane[SLIDE_VEC_LANES] = {0}, sum = 0;
    uint64_t i = 0;
    for (; n - i >= BLOCK; i += BLOCK) {
        prefetch(in + i, 4 * BLOCK);
        squares_block(lane, in + i);
    }
    if (i < n) {
        float pad[BLOCK] = {0};
        memcpy(pad, in + i, (n - i) * sizeof *in);
        squares_block(lane, pad);
    }
    for (int k = 0; k < SLIDE_VEC_LANES; k++)
        sum += lane[k];
    return sum;
}

static void scale(float *out, const float *in, float factor, uint64_t n)
{
    for (uint64_t i = 0; i < n; i++)
        out[i] = in[i] * factor;
}

/* ---- master weights ---- */

INLINE void split_block(uint16_t *restrict hi, int16_t *restrict lo, const float *restrict in)
{
    for (int i = 0; i < BLOCK; i++) {
        uint32_t bits = bits_of(in[i]);
        hi[i] = slide_master_hi(bits);
        lo[i] = slide_master_lo(bits);
    }
}

static void split(uint16_t *hi, int16_t *lo, const float *in, uint64_t n)
{
    uint64_t i = 0;
    for (; n - i >= BLOCK; i += BLOCK) {
        prefetch(in + i, 4 * BLOCK);
        split_block(hi + i, lo + i, in + i);
    }
    if (i < n) {
        uint16_t hi_pad[BLOCK];
        int16_t lo_pad[BLOCK];
        float pad[BLOCK] = {0};
        memcpy(pad, in + i, (n - i) * sizeof *in);
        split_block(hi_pad, lo_pad, pad);
        memcpy(hi + i, hi_pad, (n - i) * sizeof *hi);
        memcpy(lo + i, lo_pad, (n - i) * sizeof *lo);
    }
}

INLINE void join_block(float *restrict out, const uint16_t *restrict hi, const int16_t *restrict lo)
{
    for (int i = 0; i < BLOCK; i++)
        out[i] = float_of(slide_master_bits(hi[i], lo[i]));
}

static void join(float *out, const uint16_t *hi, const int16_t *lo, uint64_t n)
{
    uint64_t i = 0;
    for (; n - i >= BLOCK; i += BLOCK) {
        prefetch(hi + i, 2 * BLOCK);
        prefetch(lo + i, 2 * BLOCK);
        join_block(out + i, hi + i, lo + i);
    }
    if (i < n) {
        uint16_t hi_pad[BLOCK] = {0};
        int16_t lo_pad[BLOCK] = {0};
        float pad[BLOCK];
        memcpy(hi_pad, hi + i, (n - i) * sizeof *hi);
        memcpy(lo_pad, lo + i, (n - i) * sizeof *lo);
        join_block(pad, hi_pad, lo_pad);
        memcpy(out + i, pad, (n - i) * sizeof *out);
    }
}

const struct slide_vec_loops SLIDE_ISA_NAME(slide_vec_loops) = {
    .sum_f32 = sum_f32,
    .sum_bf16 = sum_bf16,
    .squares = squares,
    .scale = scale,
    .convert = {[SLIDE_F32] = {[SLIDE_BF16] = f32_from_bf16, [SLIDE_F16] = f32_from_f16},
                [SLIDE_BF16] = {[SLIDE_F32] = bf16_from_f32, [SLIDE_F16] = bf16_from_f16},
                [SLIDE_F16] = {[SLIDE_F32] = f16_from_f32, [SLIDE_BF16] = f16_from_bf16}},
    .split = split,
    .join = join,
};
