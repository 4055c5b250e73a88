"""A fresh checkpoint from a config.json: `slidedp init`. Matrices from a normal distribution with
the config's initializer_range, norm gains 1, biases 0; written tensor by tensor, in one file."""

import json
import shutil
import struct
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from slidedp.checkpoint import HEAD, SINGLE, TABLE, side_files
from slidedp.config import ModelConfig, read_config


def shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """The checkpoint's tensors by name, as transformers names and shapes them."""
    h, d = config.hidden_size, config.head_dim
    q, kv, inter = config.num_heads * d, config.num_kv_heads * d, config.intermediate_size
    result: dict[str, tuple[int, ...]] = {f"model.{TABLE}": (config.vocab_size, h)}
    for i in range(config.num_layers):
        at = f"model.layers.{i}."
        result[at + "input_layernorm.weight"] = (h,)
        for name, rows in (("q", q), ("k", kv), ("v", kv)):
            result[at + f"self_attn.{name}_proj.weight"] = (rows, h)
            if config.qkv_bias:
                result[at + f"self_attn.{name}_proj.bias"] = (rows,)
        result[at + "self_attn.o_proj.weight"] = (h, q)
        if config.o_bias:
            result[at + "self_attn.o_proj.bias"] = (h,)
        if config.model_type == "qwen3":
            result[at + "self_attn.q_norm.weight"] = (d,)
            result[at + "self_attn.k_norm.weight"] = (d,)
        result[at + "post_attention_layernorm.weight"] = (h,)
        for name, rows, cols in (("gate", inter, h), ("up", inter, h), ("down", h, inter)):
            result[at + f"mlp.{name}_proj.weight"] = (rows, cols)
            if config.mlp_bias:
                result[at + f"mlp.{name}_proj.bias"] = (rows,)
    result["model.norm.weight"] = (h,)
    if not config.tie_word_embeddings:
        result[HEAD] = (config.vocab_size, h)
    return result


def make_checkpoint(source: Path, folder: Path, dtype: str, seed: int) -> int:
    """Writes a folder that transformers and slidedp load. Returns the number of parameters.

    source: a config.json, or a folder with one, whose other small files come along. dtype:
    "bfloat16" | "float32". Raises FileExistsError when `folder` is there and not empty.
    """
    config = read_config(source)
    if folder.exists() and any(folder.iterdir()):
        raise FileExistsError(f"{folder} is not empty")
    folder.mkdir(parents=True, exist_ok=True)
    size = 2 if dtype == "bfloat16" else 4
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    at = 0
    wanted = shapes(config)
    for name, shape in wanted.items():
        nbytes = int(np.prod(shape, dtype=np.int64)) * size
        header[name] = {
            "dtype": "BF16" if size == 2 else "F32",
            "shape": list(shape),
            "data_offsets": [at, at + nbytes],
        }
        at += nbytes
    raw = json.dumps(header, separators=(",", ":")).encode()
    raw += b" " * (-len(raw) % 8)
    std = float(config.raw.get("initializer_range", 0.02))
    with open(folder / SINGLE, "wb") as file:
        file.write(struct.pack("<Q", len(raw)) + raw)
        for i, (name, shape) in enumerate(wanted.items()):
            file.write(_values(name, shape, np.random.Philox(key=[seed, i]), std, size))
    if source.is_dir():
        for path in side_files(source):
            shutil.copyfile(path, folder / path.name)
    else:
        shutil.copyfile(source, folder / "config.json")
    return at // size


def _values(
    name: str, shape: tuple[int, ...], bits: np.random.Philox, std: float, size: int
) -> bytes:
    values: NDArray[np.float32]
    if len(shape) == 2:
        values = np.random.Generator(bits).standard_normal(shape, dtype=np.float32) * np.float32(
            std
        )
    else:
        values = np.full(shape, 0 if name.endswith(".bias") else 1, np.float32)
    if size == 4:
        return values.tobytes()
    word = values.view(np.uint32)
    # To nearest, ties to even.
    return ((word + 0x7FFF + (word >> 16 & 1)) >> 16).astype("<u2").tobytes()
