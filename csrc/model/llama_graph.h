/* The graph that Llama, Mistral, Qwen2 and, but for its q/k norm, Qwen3 share. The tables stand in
 * family_llama.c; a family whose graph is the same names them with its own model_type, and the
 * conditions of weights (biases, tied head) do the rest.
 * Threads: read-only tables. Blocks: never. */
#ifndef SLIDE_MODEL_LLAMA_GRAPH_H
#define SLIDE_MODEL_LLAMA_GRAPH_H

#include "model/model.h"

extern const struct slide_weight slide_llama_embed_weight[1];
extern const struct slide_value slide_llama_embed_value[2];
extern const struct slide_op slide_llama_embed_op[1];

extern const struct slide_weight slide_llama_block_weight[10];
extern const struct slide_value slide_llama_block_value[9];
extern const struct slide_op slide_llama_block_op[9];

extern const struct slide_weight slide_llama_head_weight[2];
extern const struct slide_value slide_llama_head_value[3];
extern const struct slide_op slide_llama_head_op[2];

#define SLIDE_TABLE(w, v, o)                                                                       \
    {.weight = (w),                                                                                \
     .weights = (int)(sizeof(w) / sizeof *(w)),                                                    \
     .value = (v),                                                                                 \
     .values = (int)(sizeof(v) / sizeof *(v)),                                                     \
     .op = (o),                                                                                    \
     .ops = (int)(sizeof(o) / sizeof *(o))}

#define SLIDE_LLAMA_EMBED                                                                          \
    SLIDE_TABLE(slide_llama_embed_weight, slide_llama_embed_value, slide_llama_embed_op)
#define SLIDE_LLAMA_BLOCK                                                                          \
    SLIDE_TABLE(slide_llama_block_weight, slide_llama_block_value, slide_llama_block_op)
#define SLIDE_LLAMA_HEAD                                                                           \
    SLIDE_TABLE(slide_llama_head_weight, slide_llama_head_value, slide_llama_head_op)

/* Rows of weight tables that blocks of several families have. Matrices decay, biases and norm gains
 * do not (the Hugging Face Trainer's name rule); tables list the former first. */
#define SLIDE_WEIGHT_QKV                                                                           \
    {                                                                                              \
        .name = "qkv", .cols = SLIDE_DIM_HIDDEN, .decay = true, .parts = 3, .part = {              \
            {"layers.%d.self_attn.q_proj.weight", SLIDE_DIM_Q},                                    \
            {"layers.%d.self_attn.k_proj.weight", SLIDE_DIM_KV},                                   \
            {"layers.%d.self_attn.v_proj.weight", SLIDE_DIM_KV}                                    \
        }                                                                                          \
    }
#define SLIDE_WEIGHT_O                                                                             \
    {                                                                                              \
        .name = "o", .cols = SLIDE_DIM_Q, .decay = true, .parts = 1, .part = {                     \
            {"layers.%d.self_attn.o_proj.weight", SLIDE_DIM_HIDDEN}                                \
        }                                                                                          \
    }
#define SLIDE_WEIGHT_GATE_UP                                                                       \
    {                                                                                              \
        .name = "gate_up", .cols = SLIDE_DIM_HIDDEN, .decay = true, .parts = 2, .part = {          \
            {"layers.%d.mlp.gate_proj.weight", SLIDE_DIM_INTER},                                   \
            {"layers.%d.mlp.up_proj.weight", SLIDE_DIM_INTER}                                      \
        }                                                                                          \
    }
#define SLIDE_WEIGHT_DOWN                                                                          \
    {                                                                                              \
        .name = "down", .cols = SLIDE_DIM_INTER, .decay = true, .parts = 1, .part = {              \
            {"layers.%d.mlp.down_proj.weight", SLIDE_DIM_HIDDEN}                                   \
        }                                                                                          \
    }
#define SLIDE_WEIGHT_QKV_BIAS                                                                      \
    {                                                                                              \
        .name = "qkv_bias", .cols = SLIDE_DIM_ONE, .parts = 3, .cond = SLIDE_IF_QKV_BIAS,          \
        .part = {                                                                                  \
            {"layers.%d.self_attn.q_proj.bias", SLIDE_DIM_Q},                                      \
            {"layers.%d.self_attn.k_proj.bias", SLIDE_DIM_KV},                                     \
            {"layers.%d.self_attn.v_proj.bias", SLIDE_DIM_KV}                                      \
        }                                                                                          \
    }
#define SLIDE_WEIGHT_O_BIAS                                                                        \
    {                                                                                              \
        .name = "o_bias", .cols = SLIDE_DIM_ONE, .parts = 1, .cond = SLIDE_IF_O_BIAS, .part = {    \
            {"layers.%d.self_attn.o_proj.bias", SLIDE_DIM_HIDDEN}                                  \
        }                                                                                          \
    }
#define SLIDE_WEIGHT_GATE_UP_BIAS                                                                  \
    {                                                                                              \
        .name = "gate_up_bias", .cols = SLIDE_DIM_ONE, .parts = 2, .cond = SLIDE_IF_MLP_BIAS,      \
        .part = {                                                                                  \
            {"layers.%d.mlp.gate_proj.bias", SLIDE_DIM_INTER},                                     \
            {"layers.%d.mlp.up_proj.bias", SLIDE_DIM_INTER}                                        \
        }                                                                                          \
    }
#define SLIDE_WEIGHT_DOWN_BIAS                                                                     \
    {                                                                                              \
        .name = "down_bias", .cols = SLIDE_DIM_ONE, .parts = 1, .cond = SLIDE_IF_MLP_BIAS,         \
        .part = {                                                                                  \
            {"layers.%d.mlp.down_proj.bias", SLIDE_DIM_HIDDEN}                                     \
        }                                                                                          \
    }
#define SLIDE_WEIGHT_NORM(short_name, checkpoint, width)                                           \
    {                                                                                              \
        .name = (short_name), .cols = SLIDE_DIM_ONE, .parts = 1, .part = {                         \
            {(checkpoint), (width)}                                                                \
        }                                                                                          \
    }

#endif
