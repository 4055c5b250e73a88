/* The hot loops of the CPU backend, a table an instruction set. cpu_kernels_isa.c and
 * cpu_math_isa.h make them; the bits are the same from each, for the loops are written in vectors
 * of 16 floats that a compiler lowers to what there is, and nothing is contracted. Threads: any, on
 * disjoint rows. Blocks: never. */
#ifndef SLIDE_CPU_CPU_ISA_H
#define SLIDE_CPU_CPU_ISA_H

#include <stdint.h>

#include "base/dtype.h"
#include "base/isa.h"
#include "device/kernel_args.h"

/* `act` is F32 or BF16; loops run over rows (tokens) [from, to) or elements [from, to). */
struct slide_cpu_loops {
    void (*rmsnorm_fwd)(enum slide_dtype act, const struct slide_rmsnorm_fwd_args *, int64_t from,
                        int64_t to);
    /* Rows of one SLIDE_NORM_BLOCK; `dw` [cols] is written, not added to. */
    void (*rmsnorm_bwd)(enum slide_dtype act, const struct slide_rmsnorm_bwd_args *, int64_t from,
                        int64_t to, float *dw);
    void (*rope)(enum slide_dtype act, const struct slide_rope_args *, int64_t from, int64_t to);
    void (*swiglu_fwd)(enum slide_dtype act, const struct slide_swiglu_fwd_args *, int64_t from,
                       int64_t to);
    void (*swiglu_bwd)(enum slide_dtype act, const struct slide_swiglu_bwd_args *, int64_t from,
                       int64_t to);
    void (*bias_bwd)(enum slide_dtype act, const struct slide_bias_bwd_args *, int64_t from,
                     int64_t to, float *db);
    /* Columns [from, to), all tokens in order. */
    void (*embed_bwd)(enum slide_dtype act, const struct slide_embed_bwd_args *, int64_t from,
                      int64_t to);
    void (*ce)(enum slide_dtype act, const struct slide_ce_args *, int64_t from, int64_t to);
    void (*cast)(const struct slide_cast_args *, int64_t from, int64_t to);
    void (*accumulate)(enum slide_dtype act, const struct slide_accumulate_args *, int64_t from,
                       int64_t to);
    /* out[i] = (or +=) in[i], FP32. */
    void (*add)(float *out, const float *in, int64_t n);
    /* Matrices between act and FP32: rows x cols, strides in elements. */
    void (*widen)(enum slide_dtype act, float *out, int64_t out_stride, const void *in,
                  int64_t in_stride, int64_t rows, int64_t cols);
    void (*narrow)(enum slide_dtype act, void *out, int64_t out_stride, const float *in,
                   int64_t in_stride, int64_t rows, int64_t cols);
    /* Attention, one query: s[0, n) raw scores -> probabilities, 0 outside [from, to); lse. */
    float (*softmax)(float *s, int64_t from, int64_t to, int64_t n, float scale);
    /* s -> p = exp(scale s - lse); dp -> scale p (dp - delta); both 0 outside [from, to). */
    void (*softmax_bwd)(float *s, float *dp, int64_t from, int64_t to, int64_t n, float scale,
                        float lse, float delta);
    float (*dot)(const float *a, const float *b, int64_t n);
};

const struct slide_cpu_loops *slide_cpu_loops_get(enum slide_isa isa);

extern const struct slide_cpu_loops slide_cpu_loops_base;
#if defined(__x86_64__)
extern const struct slide_cpu_loops slide_cpu_loops_avx2;
extern const struct slide_cpu_loops slide_cpu_loops_avx512;
#endif

#endif
