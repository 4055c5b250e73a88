/* Llama 3, 3.1, 3.2, 3.3 (model_type "llama", which many others use too): pre-norm blocks of
 * grouped-query attention and SwiGLU. The tables here are also those of Mistral and Qwen2, and in
 * part of Qwen3 (llama_graph.h). Read by everything that asks what a unit holds or runs, through
 * slide_model_table. */
#include "model/llama_graph.h"

#define NONE SLIDE_NO_VALUE

enum { IN, OUT }; /* of every unit */

/* ---- embedding ---- */

const struct slide_weight slide_llama_embed_weight[] = {
    {.name = "embed",
     .cols = SLIDE_DIM_HIDDEN,
     .decay = true,
     .parts = 1,
     .part = {{"embed_tokens.weight", SLIDE_DIM_VOCAB}}},
};

const struct slide_value slide_llama_embed_value[] = {
    [IN] = {"ids", SLIDE_DIM_ONE, true},
    [OUT] = {"x_out", SLIDE_DIM_HIDDEN, false},
};

const struct slide_op slide_llama_embed_op[] = {
    {SLIDE_OP_EMBED, .in = IN, .out = OUT, .res = NONE, .w = 0, .b = -1},
};

/* ---- block ---- */

enum { W_QKV, W_O, W_GATE_UP, W_DOWN, B_QKV, B_O, B_GATE_UP, B_DOWN, G_ATTN, G_MLP };

const struct slide_weight slide_llama_block_weight[] = {
    [W_QKV] = SLIDE_WEIGHT_QKV,
    [W_O] = SLIDE_WEIGHT_O,
    [W_GATE_UP] = SLIDE_WEIGHT_GATE_UP,
    [W_DOWN] = SLIDE_WEIGHT_DOWN,
    [B_QKV] = SLIDE_WEIGHT_QKV_BIAS,
    [B_O] = SLIDE_WEIGHT_O_BIAS,
    [B_GATE_UP] = SLIDE_WEIGHT_GATE_UP_BIAS,
    [B_DOWN] = SLIDE_WEIGHT_DOWN_BIAS,
    [G_ATTN] = SLIDE_WEIGHT_NORM("attn_norm", "layers.%d.input_layernorm.weight", SLIDE_DIM_HIDDEN),
    [G_MLP] = SLIDE_WEIGHT_NORM("mlp_norm", "layers.%d.post_attention_layernorm.weight",
                                SLIDE_DIM_HIDDEN),
};

enum { H1 = OUT + 1, QKV, O, X1, H2, GU, A };

const struct slide_value slide_llama_block_value[] = {
    [IN] = {"x_in", SLIDE_DIM_HIDDEN, true},
    [OUT] = {"x_out", SLIDE_DIM_HIDDEN, false}, /* the next unit keeps it, as its input */
    [H1] = {"h1", SLIDE_DIM_HIDDEN, true},
    [QKV] = {"qkv", SLIDE_DIM_QKV, true}, /* after the rotation, which backward undoes on dqkv */
    [O] = {"o", SLIDE_DIM_Q, true},
    [X1] = {"x1", SLIDE_DIM_HIDDEN, true},
    [H2] = {"h2", SLIDE_DIM_HIDDEN, true},
    [GU] = {"gu", SLIDE_DIM_INTER2, true},
    [A] = {"a", SLIDE_DIM_INTER, true},
};

const struct slide_op slide_llama_block_op[] = {
    {SLIDE_OP_NORM, .in = IN, .out = H1, .res = NONE, .w = G_ATTN, .b = -1},
    {SLIDE_OP_LINEAR, .in = H1, .out = QKV, .res = NONE, .w = W_QKV, .b = B_QKV},
    {SLIDE_OP_ROPE, .in = QKV, .out = QKV, .res = NONE, .w = -1, .b = -1},
    {SLIDE_OP_ATTN, .in = QKV, .out = O, .res = NONE, .w = -1, .b = -1},
    {SLIDE_OP_LINEAR, .in = O, .out = X1, .res = IN, .w = W_O, .b = B_O},
    {SLIDE_OP_NORM, .in = X1, .out = H2, .res = NONE, .w = G_MLP, .b = -1},
    {SLIDE_OP_LINEAR, .in = H2, .out = GU, .res = NONE, .w = W_GATE_UP, .b = B_GATE_UP},
    {SLIDE_OP_SWIGLU, .in = GU, .out = A, .res = NONE, .w = -1, .b = -1},
    {SLIDE_OP_LINEAR, .in = A, .out = OUT, .res = X1, .w = W_DOWN, .b = B_DOWN},
};

/* ---- head ---- */

enum { W_HEAD, G_FINAL };

const struct slide_weight slide_llama_head_weight[] = {
    /* Tied: absent here, the loss reads the embedding's table (unit 0) instead. */
    [W_HEAD] = {.name = "lm_head",
                .cols = SLIDE_DIM_HIDDEN,
                .decay = true,
                .parts = 1,
                .part = {{"lm_head.weight", SLIDE_DIM_VOCAB}},
                .cond = SLIDE_IF_UNTIED},
    [G_FINAL] = SLIDE_WEIGHT_NORM("final_norm", "norm.weight", SLIDE_DIM_HIDDEN),
};

enum { H = OUT + 1 };

const struct slide_value slide_llama_head_value[] = {
    [IN] = {"x_in", SLIDE_DIM_HIDDEN, true},
    [OUT] = {"logits", SLIDE_DIM_VOCAB, false}, /* made in row chunks, never whole */
    [H] = {"h", SLIDE_DIM_HIDDEN, true},        /* the same: backward follows within the chunk */
};

const struct slide_op slide_llama_head_op[] = {
    {SLIDE_OP_NORM, .in = IN, .out = H, .res = NONE, .w = G_FINAL, .b = -1},
    {SLIDE_OP_LOSS, .in = H, .out = OUT, .res = NONE, .w = W_HEAD, .b = -1},
};

const struct slide_family slide_family_llama = {
    .model_type = "llama",
    .unit = {SLIDE_LLAMA_EMBED, SLIDE_LLAMA_BLOCK, SLIDE_LLAMA_HEAD},
};
