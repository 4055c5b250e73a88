"""Tiny models of every family, by transformers: each parameter is noise around its natural centre,
for the defaults (ones and zeros) hide most mistakes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

_TINY = {
    "vocab_size": 101,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5,
}
_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
# name: (class prefix, arguments over _TINY)
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama3": ("Llama", {"rope_parameters": _LLAMA3, "max_position_embeddings": 32768}),
    "llama-deep": ("Llama", {"num_hidden_layers": 6}),
    "llama-tied": ("Llama", {"tie_word_embeddings": True, "num_hidden_layers": 3}),
    "llama-linear": (
        "Llama",
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}},
    ),
    "llama-bias": (
        "Llama",
        {"attention_bias": True, "mlp_bias": True, "num_key_value_heads": 1, "pad_token_id": 3},
    ),
    "mistral-window": ("Mistral", {"sliding_window": 8}),
    "mistral-nemo": (
        "Mistral",
        {"hidden_size": 80, "head_dim": 16, "sliding_window": None},
    ),
    "qwen2": ("Qwen2", {"use_sliding_window": False, "tie_word_embeddings": True}),
    "qwen2-window": (
        "Qwen2",
        {
            "use_sliding_window": True,
            "max_window_layers": 1,
            "sliding_window": 8,
            "num_hidden_layers": 3,
        },
    ),
    "qwen3": ("Qwen3", {"hidden_size": 48, "head_dim": 16}),
    "qwen3-tied": ("Qwen3", {"hidden_size": 48, "head_dim": 16, "tie_word_embeddings": True}),
}


def make_model(case: str) -> Any:
    """The case's model in FP32, with seeded noise in every parameter."""
    import torch
    import transformers

    prefix, more = CASES[case]
    config = getattr(transformers, f"{prefix}Config")(**{**_TINY, **more})
    config._attn_implementation = "eager"
    model = getattr(transformers, f"{prefix}ForCausalLM")(config).float().eval()
    generator = torch.Generator().manual_seed(sum(map(ord, case)))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if "norm" in name:
                parameter.copy_(1 + 0.1 * noise)
            elif name.endswith("bias"):
                parameter.copy_(0.1 * noise)
            else:
                parameter.copy_(0.1 * noise)
    return model


class Checkpoints:
    """Folders of the cases, made when they are first asked for."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __call__(self, case: str) -> Path:
        path = self.folder / case
        if not path.exists():
            make_model(case).save_pretrained(path)
        return path
