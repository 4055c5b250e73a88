/* Qwen2 and Qwen2.5 (model_type "qwen2"): Llama's graph and names; q, k and v always have biases
 * and o never, which config.json has no key for, so the reader of the config sets it. Layers from
 * max_window_layers on may slide. Read through slide_model_table. */
#include "model/llama_graph.h"

const struct slide_family slide_family_qwen2 = {
    .model_type = "qwen2",
    .unit = {SLIDE_LLAMA_EMBED, SLIDE_LLAMA_BLOCK, SLIDE_LLAMA_HEAD},
};
