"""What slidedp knows about the keys of config.json: class defaults by family, and the keys that
change the maths without being implemented. Tables for `config.py`."""

import re
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Family:
    """Class defaults of a family, and what of the optional keys it knows."""

    vocab_size: int
    intermediate_size: int
    num_kv_heads: int | None  # None: num_attention_heads
    max_position_embeddings: int
    head_dim: int | None  # None: hidden_size / num_attention_heads
    attention_bias: bool  # the key exists: biases on q, k, v and o
    mlp_bias: bool  # the key exists
    window: str  # "none", "always" (Mistral), "switch" (use_sliding_window)
    # Keys with other harmless values than those of NEUTRAL.
    neutral: Mapping[str, tuple[object, ...]]
    qkv_bias: bool = False  # without a key


FAMILIES: dict[str, Family] = {
    "llama": Family(
        vocab_size=32000,
        intermediate_size=11008,
        num_kv_heads=None,
        max_position_embeddings=2048,
        head_dim=None,
        attention_bias=True,
        mlp_bias=True,
        window="none",
        neutral={"sliding_window": (), "use_sliding_window": (False,)},
    ),
    "mistral": Family(
        vocab_size=32000,
        intermediate_size=14336,
        num_kv_heads=8,
        max_position_embeddings=4096 * 32,
        head_dim=None,
        attention_bias=False,
        mlp_bias=False,
        window="always",
        neutral={},
    ),
    "qwen2": Family(
        vocab_size=151936,
        intermediate_size=22016,
        num_kv_heads=32,
        max_position_embeddings=32768,
        head_dim=None,
        attention_bias=False,
        mlp_bias=False,
        window="switch",
        # q, k and v always have biases, whatever the config says.
        neutral={"attention_bias": (True,), "qkv_bias": (True,)},
        qkv_bias=True,
    ),
    "qwen3": Family(
        vocab_size=151936,
        intermediate_size=22016,
        num_kv_heads=32,
        max_position_embeddings=32768,
        head_dim=128,
        attention_bias=True,
        mlp_bias=False,
        window="switch",
        neutral=dict.fromkeys(
            ["qk_norm", "use_qk_norm", "qk_layernorm", "use_qk_layernorm"], (True,)
        ),
    ),
}

# Keys that change the maths and are not implemented, with the values (besides null) at which they
# don't. Other keys that this module does not read are harmless or unknown, and pass.
NEUTRAL: dict[str, tuple[object, ...]] = {
    **dict.fromkeys(
        [
            "quantization_config",
            "compression_config",
            "attention_multiplier",
            "attention_scale",
            "attn_scale",
            "softmax_scale",
            "query_pre_attn_scalar",
            "scale_depth",
            "dim_model_base",
            "rotary_dim",
            "rotary_emb_base",
            "rope_local_base_freq",
            "attention_chunk_size",
            "attention_window",
            "attn_window_size",
            "sliding_window_pattern",
            "sliding_window_size",
            "global_attn_every_n_layers",
            "full_attention_interval",
            "q_lora_rank",
            "kv_lora_rank",
            "v_head_dim",
            "qk_nope_head_dim",
            "qk_rope_head_dim",
            "global_head_dim",
            "num_global_key_value_heads",
            "text_config",
        ],
        (),
    ),
    **dict.fromkeys(
        [
            "scale_attn_by_inverse_layer_idx",
            "attn_temperature_tuning",
            "scale_embedding",
            "scale_embeddings",
            "normalize_embedding",
            "use_mup",
            "use_layer_scale",
            "qk_norm",
            "use_qk_norm",
            "qk_layernorm",
            "use_qk_layernorm",
            "post_norm",
            "use_post_norm",
            "sandwich_norm",
            "apply_residual_connection_post_layernorm",
            "zero_centered_gamma",
            "layernorm_zero_centered_gamma",
            "rms_norm_add_unit_offset",
            "attention_bias",
            "attention_out_bias",
            "qkv_bias",
            "o_bias",
            "use_bias",
            "use_qkv_bias",
            "mlp_bias",
            "lm_head_bias",
            "add_bias_kv",
            "rope_interleave",
            "rope_interleaved",
            "alibi",
            "use_alibi",
            "bidirectional",
            "use_bidirectional_attention",
            "use_attention_sink",
            "use_attention_sinks",
            "attn_output_gate",
            "gated_attention",
            "parallel_attn",
            "parallel_residual",
            "use_parallel_residual",
            "add_cross_attention",
            "is_encoder_decoder",
            "enable_moe_block",
        ],
        (False,),
    ),
    **dict.fromkeys(
        ["scale_attn_weights", "use_rope", "is_causal", "causal"],
        (True,),
    ),
    **dict.fromkeys(
        [
            "logits_scaling",
            "logit_scale",
            "embed_scale",
            "embedding_scale",
            "scale_emb",
            "partial_rotary_factor",
            "rotary_pct",
            "rotary_percent",
            "rotary_emb_fraction",
            "rope_ratio",
            "pretraining_tp",
        ],
        (1,),
    ),
    **dict.fromkeys(
        [
            "layer_scale_init_value",
            "no_rope_layer_interval",
            "num_kv_shared_layers",
            "hidden_size_per_layer_input",
            "num_experts_per_tok",
        ],
        (0,),
    ),
    **dict.fromkeys(
        ["no_rope_layers", "cross_attention_layers", "block_configs"],
        ([],),
    ),
    "hidden_activation": ("silu", "swish"),
    "activation_function": ("silu", "swish"),
    "position_embedding_type": ("rope", "rotary"),
    "per_layer_config": ({},),
}
NEUTRAL_PATTERNS: tuple[tuple[re.Pattern[str], tuple[object, ...]], ...] = (
    (re.compile(r"[a-z_]*soft_?cap(ping)?"), (False,)),
    (re.compile(r"[a-z_]*_multipliers?"), (1,)),
    (re.compile(r"(num|n)_(local_|routed_|shared_)?experts"), (0,)),
    # `classifier_dropout` belongs to a head that language modelling doesn't have.
    (re.compile(r"(?!classifier_)[a-z_]*(dropout(_prob)?|pdrop|layerdrop|drop_path_rate)"), (0,)),
)
