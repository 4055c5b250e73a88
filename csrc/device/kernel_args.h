/* Arguments of GEMM, attention and the small kernels, one POD each; shapes stand beside the
 * pointers. CUDA C reads this file as well. "act" is the launch's dtype (F32 or BF16); sums and
 * norms are formed in FP32. Every kernel is deterministic: the same inputs give the same bits,
 * whatever the number of threads.
 * Threads: plain data. Blocks: never. */
#ifndef SLIDE_DEVICE_KERNEL_ARGS_H
#define SLIDE_DEVICE_KERNEL_ARGS_H

#include <stdint.h>

#include "base/dtype.h"

/* cos/sin of position * inv_freq, the product, cos and sin in FP32; rounded to act precision (but
 * stored as FP32), times `factor` (1 but for YaRN). */
struct slide_rope_table_args {
    const int32_t *positions; /* [n] */
    const float *inv_freq;    /* [half] */
    float *cos, *sin;         /* [n, half] */
    int64_t n;
    int32_t half;
    float factor;
};

struct slide_embed_fwd_args {
    const int32_t *ids; /* [n], each in [0, vocab) */
    const void *table;  /* act [vocab, cols] */
    void *out;          /* act [n, cols] */
    int64_t n;
    int32_t cols;
};

/* dtable[ids[t]] += dout[t], in token order; token `skip` (-1: none) is left out. dtable is zeroed
 * by the caller. */
struct slide_embed_bwd_args {
    const int32_t *ids; /* [n] */
    const void *dout;   /* act [n, cols] */
    float *dtable;      /* [vocab, cols] */
    int64_t n;
    int32_t cols, vocab, skip;
};

/* y = w * act(x * r), r = 1 / sqrt(mean(x^2) + eps), over `groups` vectors of `cols` a token; the
 * token's vectors lie side by side at x + token * x_stride. A q/k norm is groups = heads,
 * cols = head_dim, in place in the qkv rows (y == x allowed). models.md 1.1 (a). */
struct slide_rmsnorm_fwd_args {
    const void *x; /* act, stride x_stride elements a token */
    const void *w; /* act [cols] */
    void *y;       /* act, stride y_stride */
    float *rstd;   /* [n, groups] */
    int64_t n, x_stride, y_stride;
    int32_t groups, cols;
    float eps;
};

/* dx = r * (g - xhat * mean(xhat * g)), g = dy * w, xhat = x * r; added to dx if `add`.
 * dw += sum over tokens and groups of dy * act(xhat), summed in FP32 in an order that depends on
 * the shape only: rows in blocks of SLIDE_NORM_BLOCK, then the blocks in order. `dx` may be `dy`.
 */
#define SLIDE_NORM_BLOCK 16
struct slide_rmsnorm_bwd_args {
    const void *dy;    /* act, stride dy_stride */
    const void *x;     /* act, stride x_stride: the input of the forward */
    const void *w;     /* act [cols] */
    const float *rstd; /* [n, groups] */
    void *dx;          /* act, stride dx_stride */
    float *dw;         /* [cols] */
    float *scratch;    /* [ceil(n / SLIDE_NORM_BLOCK), cols] */
    int64_t n, dy_stride, x_stride, dx_stride;
    int32_t groups, cols, add;
};

/* Rotates pairs (i, i + half) of `heads` vectors of `head_dim` a token, in place; half * 2 may be
 * less than head_dim (the rest passes). sign +1 forward, -1 backward. models.md 1.2. */
struct slide_rope_args {
    void *x;                /* act, stride elements a token */
    const float *cos, *sin; /* [n, half] */
    int64_t n, stride;
    int32_t heads, head_dim, half, sign;
};

/* out = silu(gate) * up; gate = gu[:, :cols], up = gu[:, cols:]. */
struct slide_swiglu_fwd_args {
    const void *gu; /* act [n, 2 * cols] */
    void *out;      /* act [n, cols] */
    int64_t n;
    int32_t cols;
};

struct slide_swiglu_bwd_args {
    const void *gu;   /* act [n, 2 * cols] */
    const void *dout; /* act [n, cols] */
    void *dgu;        /* act [n, 2 * cols]; may be gu */
    int64_t n;
    int32_t cols;
};

/* db[c] += sum over rows of dy[row, c]: blocks of SLIDE_BIAS_BLOCK rows, then the blocks in order.
 */
#define SLIDE_BIAS_BLOCK 64
struct slide_bias_bwd_args {
    const void *dy; /* act [n, cols], stride elements a row */
    float *db;      /* [cols] */
    float *scratch; /* [ceil(n / SLIDE_BIAS_BLOCK), cols] */
    int64_t n, stride;
    int32_t cols;
};

/* Softmax cross-entropy of a chunk of rows. loss[r] = logsumexp(z) - z[label], 0 where the label is
 * negative. With `grad`, z becomes (softmax(z) - onehot) * scale in place, 0 in unlabelled rows. */
struct slide_ce_args {
    void *z;               /* act [n, vocab] */
    const int32_t *labels; /* [n], < 0: no target */
    float *loss;           /* [n] */
    int64_t n;
    int32_t vocab, grad;
    float scale;
};

/* out = in in another format, n elements (F32 -> BF16 to nearest even, BF16 -> F32, or a copy). */
struct slide_cast_args {
    const void *in;
    void *out;
    int64_t n;
    enum slide_dtype from, to;
};

/* out = in, or out += in where `add`, in FP32. */
struct slide_accumulate_args {
    const void *in; /* act [n] */
    float *out;     /* [n] */
    int64_t n;
    int32_t add;
};

/* Sets *found to 1 where one of n numbers is Inf or NaN; else leaves it. */
struct slide_nonfinite_args {
    const void *x; /* act [n] */
    int32_t *found;
    int64_t n;
};

/* Row-major: out[m, n] = op(a)[m, k] op(b)[k, n] + add[m, n] + bias[n]. op is the transpose where
 * trans_* is set: a is stored [k, m] then, b [n, k]. ld*: elements between stored rows. Products
 * are summed in FP32 and rounded once, to out's type. `add` (out's type, ld ldo) may be `out`
 * itself. */
struct slide_gemm {
    const void *a, *b;
    void *out;
    const void *add;  /* NULL: none */
    const void *bias; /* in_type [n], NULL: none */
    int64_t lda, ldb, ldo;
    int32_t m, n, k;
    int32_t trans_a, trans_b;
    enum slide_dtype in_type, out_type; /* F32/F32, BF16/BF16, BF16/F32 */
    void *workspace;                    /* device memory for the call; NULL where bytes is 0 */
    size_t workspace_bytes;             /* slide_gemm_workspace, or less */
};

/* Softmax attention over packed rows: query i of a row sees keys j with first[i] <= j <= i, where
 * first[] already joins document border and sliding window. Head h reads kv head h / (heads /
 * kv_heads). q, k, v, o (and their gradients) are act [rows, seq, heads or kv_heads, head_dim] with
 * `*_stride` elements a token. dq, dk, dv are written, not added to. */
struct slide_attn {
    enum slide_dtype dtype;
    int32_t rows, seq, heads, kv_heads, head_dim;
    int32_t window;    /* W keys including self, 0: all; already in `first` */
    int32_t documents; /* 0: `first` is what the window alone gives */
    float scale;
    const int32_t *first; /* [rows, seq], index within the row */
    const void *q, *k, *v;
    int64_t q_stride, kv_stride;
    void *o;          /* forward: out; backward: in */
    int64_t o_stride; /* of o and d_o */
    float *lse;       /* [rows, heads, seq]: log-sum-exp of the scaled scores */
    const void *d_o;  /* backward only, as are the next */
    void *dq, *dk, *dv;
    int64_t dq_stride, dkv_stride;
    void *workspace;        /* device memory for the call */
    size_t workspace_bytes; /* slide_attn_workspace of a shape of at least so many tokens */
};

#endif
