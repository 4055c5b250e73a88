/* Models are data. A family is a table of weights and a table of ops for each kind of unit; the
 * layout, the loader, the memory plan, FLOPs, forward, backward, recompute and save read the same
 * tables. A new dense family is a file without functions.
 * Threads: read-only after slide_model_init. Blocks: never. */
#ifndef SLIDE_MODEL_MODEL_H
#define SLIDE_MODEL_MODEL_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/err.h"

enum slide_rope_kind { SLIDE_ROPE_DEFAULT, SLIDE_ROPE_LINEAR, SLIDE_ROPE_LLAMA3 };

/* What config.json says, after the shim has read both spellings of it. */
struct slide_config {
    char model_type[32];
    int32_t hidden, layers, heads, kv_heads, head_dim, inter, vocab;
    double rms_eps;
    int32_t tied;
    int32_t padding_idx; /* token whose embedding row gets no gradient from lookups; -1: none */
    int32_t qkv_bias, o_bias, mlp_bias;
    int32_t sliding_window; /* W keys including self, for the layers that slide; 0: none */
    uint8_t *layer_slides;  /* [layers]; NULL: all layers slide iff sliding_window > 0 */
    enum slide_rope_kind rope;
    double rope_theta, rope_factor, rope_low, rope_high;
    int32_t rope_original; /* original_max_position_embeddings */
};

/* Dimensions that tables use instead of numbers. */
enum slide_dim {
    SLIDE_DIM_ONE,
    SLIDE_DIM_HIDDEN,
    SLIDE_DIM_VOCAB,
    SLIDE_DIM_HEAD, /* head_dim */
    SLIDE_DIM_Q,    /* heads * head_dim */
    SLIDE_DIM_KV,   /* kv_heads * head_dim */
    SLIDE_DIM_QKV,  /* Q + 2 KV */
    SLIDE_DIM_INTER,
    SLIDE_DIM_INTER2, /* 2 * inter */
    SLIDE_DIM_COUNT
};

enum slide_cond { /* when a weight or an op exists */
                  SLIDE_ALWAYS,
                  SLIDE_IF_QKV_BIAS,
                  SLIDE_IF_O_BIAS,
                  SLIDE_IF_MLP_BIAS,
                  SLIDE_IF_UNTIED
};

enum slide_unit_kind { SLIDE_UNIT_EMBED, SLIDE_UNIT_BLOCK, SLIDE_UNIT_HEAD, SLIDE_UNIT_KINDS };

/* A tensor in memory. Tensors of the checkpoint that are fused into one are its parts, stacked by
 * rows in the order given. */
#define SLIDE_PARTS_MAX 3
struct slide_weight {
    const char *name; /* short, for messages: "qkv" */
    struct {
        const char *name; /* in the checkpoint, without "model.": "layers.%d.mlp.up_proj.weight" */
        enum slide_dim rows;
    } part[SLIDE_PARTS_MAX];
    int parts;
    enum slide_dim cols; /* SLIDE_DIM_ONE: a vector */
    bool decay;          /* weight decay applies (Hugging Face's name rule) */
    enum slide_cond cond;
};

enum slide_op_kind {
    SLIDE_OP_EMBED,  /* out = table[ids]                       w: table */
    SLIDE_OP_NORM,   /* out = rmsnorm(in), aux = rstd           w: gain */
    SLIDE_OP_LINEAR, /* out = in W^T (+ b) (+ res)              w: W, b */
    SLIDE_OP_QKNORM, /* out = in with q and k heads normed      w: q gain, w2: k gain; aux rstd */
    SLIDE_OP_ROPE,   /* in place on the q and k parts of in (out == in) */
    SLIDE_OP_ATTN,   /* out = attention(in = qkv), aux = lse */
    SLIDE_OP_SWIGLU, /* out = silu(gate) * up */
    SLIDE_OP_LOSS,   /* logits = in W^T in row chunks, loss, gradient   w: W */
    SLIDE_OP_KINDS
};

/* Values that ops read and write. SLIDE_X_IN and SLIDE_X_OUT are the unit's boundary. A family uses
 * as many of the inner ones as it needs; `width` gives the elements a token. */
#define SLIDE_VALUES_MAX 12
#define SLIDE_NO_VALUE (-1)
struct slide_value {
    const char *name;
    enum slide_dim width;
    bool keep; /* backward reads it: kept, or made again by recompute */
};

struct slide_op {
    enum slide_op_kind kind;
    int in, out, res; /* values; res: residual added by LINEAR, or SLIDE_NO_VALUE */
    int w, b;         /* weights of the unit (index into its table), -1: none. QKNORM: w q, b k */
};

struct slide_unit_table {
    const struct slide_weight *weight;
    int weights;
    const struct slide_value *value; /* [0] is the unit's input, [1] its output */
    int values;
    const struct slide_op *op;
    int ops;
};

struct slide_family {
    const char *model_type;
    struct slide_unit_table unit[SLIDE_UNIT_KINDS];
};

/* All families, NULL-terminated; and by model_type (NULL and an error that lists them). */
extern const struct slide_family *const slide_families[];
const struct slide_family *slide_family_find(const char *model_type, struct slide_err *err);

/* A family with a config: everything about shapes is asked here, nowhere else. */
struct slide_model {
    const struct slide_family *family;
    struct slide_config config;
    int units; /* layers + 2 */
};

/* Checks the config (ranges, products, divisibility) and copies it. */
int slide_model_init(struct slide_model *model, const struct slide_config *config,
                     struct slide_err *err);
void slide_model_fini(struct slide_model *model);

enum slide_unit_kind slide_model_kind(const struct slide_model *model, int unit);
const struct slide_unit_table *slide_model_table(const struct slide_model *model, int unit);
int32_t slide_model_dim(const struct slide_model *model, enum slide_dim dim);
bool slide_model_has(const struct slide_model *model, enum slide_cond cond);
int32_t slide_model_window(const struct slide_model *model, int unit); /* 0: none */
/* Rows of a weight with all its parts; cols through slide_model_dim. */
int64_t slide_model_rows(const struct slide_model *model, const struct slide_weight *weight);
/* inv_freq[head_dim / 2], FP32, as transformers computes them. */
void slide_model_rope(const struct slide_model *model, float *inv_freq);

/* ---- ops.c: what an op costs and keeps ---- */
/* What of a block's activations waits for its backward. Its input always does, on the device or,
 * SLIDE_ACT_OFFLOAD, in host memory. */
enum slide_activations {
    SLIDE_ACT_RECOMPUTE, /* nothing else: the inside is made again */
    SLIDE_ACT_SELECTIVE, /* what matrix products and attention made; the cheap rest is made again */
    SLIDE_ACT_KEEP,      /* everything */
    SLIDE_ACT_OFFLOAD,   /* as RECOMPUTE */
    SLIDE_ACT_COUNT
};
const char *slide_activations_name(enum slide_activations policy); /* "recompute" */
/* Whether a value of a block stays; and whether the backward runs an op again to make its output.
 */
bool slide_value_stays(const struct slide_model *model, int unit, int value,
                       enum slide_activations policy);
bool slide_op_repeats(const struct slide_model *model, int unit, int op,
                      enum slide_activations policy);
/* Elements a token of an op's auxiliary FP32 output (rstd, lse), 0: none. */
int64_t slide_op_aux(const struct slide_model *model, const struct slide_op *op);
/* FLOPs of the unit's forward for one row of `seq` tokens (2 a multiply-add, causal attention
 * halved); backward of the matrix products is twice that. */
double slide_unit_flops(const struct slide_model *model, int unit, int32_t seq);
/* A recompute runs ops [0, end): those from `end` on make only the unit's output. */
int slide_unit_recompute_end(const struct slide_model *model, int unit);

#endif
