"""Writes rope_golden.h: inverse frequencies as transformers computes them, as FP32 bits.

python tests/c/make_rope_golden.py > tests/c/rope_golden.h
"""

import torch
import transformers
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

# head_dim, theta, kind, factor, low, high, original
CASES = [
    (2, 1e4, "default", 1.0, 0.0, 0.0, 0),
    (64, 1e4, "default", 1.0, 0.0, 0.0, 0),
    (96, 1e4, "default", 1.0, 0.0, 0.0, 0),
    (128, 5e5, "default", 1.0, 0.0, 0.0, 0),
    (128, 1e6, "default", 1.0, 0.0, 0.0, 0),
    (128, 1e9, "default", 1.0, 0.0, 0.0, 0),
    (18, 123456.7, "default", 1.0, 0.0, 0.0, 0),
    (64, 1e4, "linear", 4.0, 0.0, 0.0, 0),
    (80, 1e6, "linear", 2.3, 0.0, 0.0, 0),
    (128, 5e5, "llama3", 8.0, 1.0, 4.0, 8192),
    (64, 5e5, "llama3", 32.0, 1.0, 4.0, 8192),
    (16, 5e5, "llama3", 8.0, 1.0, 4.0, 32),
    (64, 1e4, "llama3", 2.7, 1.3, 3.9, 100),
]


def frequencies(case: tuple[int, float, str, float, float, float, int]) -> torch.Tensor:
    head_dim, theta, kind, factor, low, high, original = case
    rope: dict[str, object] = {"rope_type": kind, "rope_theta": theta}
    if kind != "default":
        rope["factor"] = factor
    if kind == "llama3":
        rope |= {
            "low_freq_factor": low,
            "high_freq_factor": high,
            "original_max_position_embeddings": original,
        }
    config = transformers.LlamaConfig(
        hidden_size=head_dim * 2,
        num_attention_heads=2,
        head_dim=head_dim,
        max_position_embeddings=131072,
        rope_parameters=rope,
    )
    if kind == "default":
        return LlamaRotaryEmbedding.compute_default_rope_parameters(config)[0]
    return ROPE_INIT_FUNCTIONS[kind](config)[0]


def main() -> None:
    print("/* Made by make_rope_golden.py with", end=" ")
    print(f"transformers {transformers.__version__}; do not edit. */")
    print("static const struct golden {\n    int head_dim;\n    double theta;")
    print("    enum slide_rope_kind kind;\n    double factor, low, high;")
    print("    int original;\n    uint32_t bits[64];\n} golden[] = {")
    for case in CASES:
        head_dim, theta, kind, factor, low, high, original = case
        print(
            f"    {{{head_dim}, {theta}, SLIDE_ROPE_{kind.upper()}, {factor}, {low}, {high},",
            end="",
        )
        print(f" {original},\n     {{", end="")
        bits = frequencies(case).view(torch.int32).tolist()
        lines = [bits[i : i + 8] for i in range(0, len(bits), 8)]
        print(",\n      ".join(", ".join(f"0x{b:08x}" for b in line) for line in lines), end="")
        print("}},")
    print("};")


if __name__ == "__main__":
    main()
