/* Mistral 7B, Nemo, Small, Ministral 8B (model_type "mistral", also inside "mistral3"): Llama's
 * graph and names without biases. What differs is in the config: a head_dim of its own and, for
 * v0.1, a sliding window on every layer. Read through slide_model_table. */
#include "model/llama_graph.h"

const struct slide_family slide_family_mistral = {
    .model_type = "mistral",
    .unit = {SLIDE_LLAMA_EMBED, SLIDE_LLAMA_BLOCK, SLIDE_LLAMA_HEAD},
};
