/* Qwen3 dense (model_type "qwen3"): Llama's graph with an RMSNorm on each q and k head before the
 * rotation. Its backward needs the raw q and k, so the normed ones are a value of their own; v is
 * in both. Embedding and head are Llama's. Read through slide_model_table. */
#include "model/llama_graph.h"

#define NONE SLIDE_NO_VALUE

enum { W_QKV, W_O, W_GATE_UP, W_DOWN, B_QKV, B_O, G_ATTN, G_Q, G_K, G_MLP };

static const struct slide_weight block_weight[] = {
    [W_QKV] = SLIDE_WEIGHT_QKV,
    [W_O] = SLIDE_WEIGHT_O,
    [W_GATE_UP] = SLIDE_WEIGHT_GATE_UP,
    [W_DOWN] = SLIDE_WEIGHT_DOWN,
    [B_QKV] = SLIDE_WEIGHT_QKV_BIAS,
    [B_O] = SLIDE_WEIGHT_O_BIAS,
    [G_ATTN] = SLIDE_WEIGHT_NORM("attn_norm", "layers.%d.input_layernorm.weight", SLIDE_DIM_HIDDEN),
    [G_Q] = SLIDE_WEIGHT_NORM("q_norm", "layers.%d.self_attn.q_norm.weight", SLIDE_DIM_HEAD),
    [G_K] = SLIDE_WEIGHT_NORM("k_norm", "layers.%d.self_attn.k_norm.weight", SLIDE_DIM_HEAD),
    [G_MLP] = SLIDE_WEIGHT_NORM("mlp_norm", "layers.%d.post_attention_layernorm.weight",
                                SLIDE_DIM_HIDDEN),
};

enum { IN, OUT, H1, QKV, QKVN, O, X1, H2, GU, A };

static const struct slide_value block_value[] = {
    [IN] = {"x_in", SLIDE_DIM_HIDDEN, true},
    [OUT] = {"x_out", SLIDE_DIM_HIDDEN, false}, /* the next unit keeps it, as its input */
    [H1] = {"h1", SLIDE_DIM_HIDDEN, true},
    [QKV] = {"qkv", SLIDE_DIM_QKV, true},   /* raw, for the backward of the q/k norm */
    [QKVN] = {"qkvn", SLIDE_DIM_QKV, true}, /* after norm and rotation, for attention's */
    [O] = {"o", SLIDE_DIM_Q, true},
    [X1] = {"x1", SLIDE_DIM_HIDDEN, true},
    [H2] = {"h2", SLIDE_DIM_HIDDEN, true},
    [GU] = {"gu", SLIDE_DIM_INTER2, true},
    [A] = {"a", SLIDE_DIM_INTER, true},
};

static const struct slide_op block_op[] = {
    {SLIDE_OP_NORM, .in = IN, .out = H1, .res = NONE, .w = G_ATTN, .b = -1},
    {SLIDE_OP_LINEAR, .in = H1, .out = QKV, .res = NONE, .w = W_QKV, .b = B_QKV},
    {SLIDE_OP_QKNORM, .in = QKV, .out = QKVN, .res = NONE, .w = G_Q, .b = G_K},
    {SLIDE_OP_ROPE, .in = QKVN, .out = QKVN, .res = NONE, .w = -1, .b = -1},
    {SLIDE_OP_ATTN, .in = QKVN, .out = O, .res = NONE, .w = -1, .b = -1},
    {SLIDE_OP_LINEAR, .in = O, .out = X1, .res = IN, .w = W_O, .b = B_O},
    {SLIDE_OP_NORM, .in = X1, .out = H2, .res = NONE, .w = G_MLP, .b = -1},
    {SLIDE_OP_LINEAR, .in = H2, .out = GU, .res = NONE, .w = W_GATE_UP, .b = -1},
    {SLIDE_OP_SWIGLU, .in = GU, .out = A, .res = NONE, .w = -1, .b = -1},
    {SLIDE_OP_LINEAR, .in = A, .out = OUT, .res = X1, .w = W_DOWN, .b = -1},
};

const struct slide_family slide_family_qwen3 = {
    .model_type = "qwen3",
    .unit = {SLIDE_LLAMA_EMBED, SLIDE_TABLE(block_weight, block_value, block_op), SLIDE_LLAMA_HEAD},
};
