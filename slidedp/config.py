"""Reads a checkpoint's config.json, in the spellings of transformers 4.x and 5.x.

Everything that a config says about the maths is either carried out or refused by name; nothing is
ignored. Class defaults, and the difference between a key that is absent and one that is null, are
those of the transformers classes (`configuration_*.py`).
"""

import json
import math
import os
import reprlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from slidedp.config_keys import FAMILIES, NEUTRAL, NEUTRAL_PATTERNS, Family

# Families that the C core has tables for (csrc/model/family.c; a test compares them).
MODEL_TYPES = ("llama", "mistral", "qwen2", "qwen3")
# Wrappers whose `text_config` is one of these and whose other parts are carried through untouched.
WRAPPERS = ("mistral3",)
ROPE_TYPES = ("default", "linear", "llama3")
DTYPES = ("bfloat16", "float16", "float32")

_NO_QUANTIZATION = "quantized weights can't be trained; use the checkpoint's BF16 or FP32 files"
_INT32 = 2**31 - 1
_LAYERS_MAX = 65536  # as in csrc/model/family.c
_FLOAT32 = (2.0**-126, (2.0 - 2.0**-23) * 2.0**127)  # normal and positive


class ConfigError(ValueError):
    """A config.json that can't be used. The message names the file and the key, and what works."""


@dataclass(frozen=True)
class ModelConfig:
    """What a config.json says, checked, with the defaults of its family filled in."""

    model_type: str  # one of MODEL_TYPES: of text_config when there is one
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    rms_norm_eps: float
    tie_word_embeddings: bool
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    sliding_window: int | None  # keys that a token of a sliding layer sees, itself included
    layer_slides: list[bool] | None  # by layer; None: all slide if there is a sliding_window
    rope_type: str  # one of ROPE_TYPES
    rope_theta: float
    rope_factor: float  # 1 for "default"
    rope_low: float  # low_freq_factor; this and the next two are 0 unless "llama3"
    rope_high: float  # high_freq_factor
    rope_original: int  # original_max_position_embeddings
    max_position_embeddings: int
    dtype: str | None  # of the weights as the config has it: one of DTYPES
    pad_token_id: (
        int | None
    )  # in [0, vocab_size): its row of the embedding learns from the head alone
    eos_token_ids: tuple[int, ...]
    raw: dict[str, Any] = field(repr=False)  # the whole file

    def to_spec(self) -> dict[str, Any]:
        """The fields of `struct slide_config` (csrc/model/model.h) by their names there."""
        slides = self.layer_slides
        return {
            "model_type": self.model_type,
            "hidden": self.hidden_size,
            "layers": self.num_layers,
            "heads": self.num_heads,
            "kv_heads": self.num_kv_heads,
            "head_dim": self.head_dim,
            "inter": self.intermediate_size,
            "vocab": self.vocab_size,
            "rms_eps": self.rms_norm_eps,
            "tied": self.tie_word_embeddings,
            "padding_idx": -1 if self.pad_token_id is None else self.pad_token_id,
            "qkv_bias": self.qkv_bias,
            "o_bias": self.o_bias,
            "mlp_bias": self.mlp_bias,
            "sliding_window": self.sliding_window or 0,
            "layer_slides": None if slides is None else bytes(slides),
            "rope": self.rope_type,
            "rope_theta": self.rope_theta,
            "rope_factor": self.rope_factor,
            "rope_low": self.rope_low,
            "rope_high": self.rope_high,
            "rope_original": self.rope_original,
        }


def read_config(path: str | os.PathLike[str]) -> ModelConfig:
    """Reads `path`, a config.json or a folder that holds one.

    Raises ConfigError when the file can't be read, is not a JSON object, names a family that has
    no tables here, or has a key that changes the maths in a way that isn't implemented.
    """
    file = Path(path)
    try:
        if file.is_dir():
            file = file / "config.json"
        data = json.loads(file.read_bytes().decode("utf-8"))
    except OSError as error:
        raise ConfigError(f"{file}: can't be read: {error.strerror or error}") from error
    except RecursionError as error:
        raise ConfigError(f"{file}: not a model config: nested too deeply") from error
    except ValueError as error:  # JSON, UTF-8, an integer without end, a path with a zero byte
        raise ConfigError(f"{file}: not JSON: {error}") from error
    if not isinstance(data, dict):
        raise ConfigError(f"{file}: not a model config: {_show(data)} where an object should be")
    return _parse(data, file)


# ---- reading fields ----


def _show(value: object) -> str:
    """A value for a message, in JSON's words where they differ and cut where it is long."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    return reprlib.repr(value)


class _Fields:
    """An object of the file. Each getter checks type and range, or raises ConfigError."""

    def __init__(self, file: Path, data: Mapping[str, Any], prefix: str = "") -> None:
        self.file = file
        self.data = data
        self.prefix = prefix

    def fail(self, key: str, what: str) -> NoReturn:
        found = _show(self.data[key]) if key in self.data else "absent"
        raise ConfigError(f"{self.file}: {self.prefix}{key} is {found}: {what}")

    def has(self, key: str) -> bool:
        return self.data.get(key) is not None

    def integer(self, key: str, default: int, most: int = _INT32, least: int = 1) -> int:
        value = self.data.get(key, default)
        if type(value) is not int:  # a bool is an int to isinstance
            self.fail(key, "must be an integer")
        if not least <= value <= most:
            self.fail(key, f"must be {least} to {most}")
        return value

    def number(self, key: str, default: float) -> float:
        """Positive, finite, and a normal number in FP32, in which it is used."""
        value = self.data.get(key, default)
        if type(value) not in (int, float):
            self.fail(key, "must be a number")
        try:
            number = float(value)
        except OverflowError:
            number = math.inf
        if not _FLOAT32[0] <= number <= _FLOAT32[1]:  # false for NaN
            self.fail(key, "must be a positive number that FP32 can hold")
        return number

    def boolean(self, key: str, default: bool = False) -> bool:
        """null counts as false, as it does wherever Python code asks `if config.key`."""
        value = self.data.get(key, default)
        if value is None:
            return False
        if type(value) is not bool:
            self.fail(key, "must be true or false")
        return value

    def string(self, key: str) -> str | None:
        value = self.data.get(key)
        if value is not None and type(value) is not str:
            self.fail(key, "must be a string")
        return value

    def sub(self, key: str) -> "_Fields | None":
        """A nested object; None when absent or null."""
        value = self.data.get(key)
        if value is None:
            return None
        if not isinstance(value, dict):
            self.fail(key, "must be an object")
        return _Fields(self.file, value, f"{self.prefix}{key}.")


# ---- parsing ----


def _parse(data: dict[str, Any], file: Path) -> ModelConfig:
    outer = _Fields(file, data)
    text, model_type = _dispatch(outer)
    family = FAMILIES[model_type]
    _refuse_unknown_maths(text, model_type, family)
    if text is not outer and outer.has("quantization_config"):
        outer.fail("quantization_config", _NO_QUANTIZATION)
    if text.data.get("hidden_act", "silu") not in ("silu", "swish"):
        text.fail("hidden_act", 'only "silu" works')

    hidden = text.integer("hidden_size", 4096)
    layers = text.integer("num_hidden_layers", 32, _LAYERS_MAX)
    heads = text.integer("num_attention_heads", 32)
    kv_heads = _kv_heads(text, family, heads)
    head_dim = _head_dim(text, family, hidden, heads)
    if (heads + 2 * kv_heads) * head_dim > _INT32:
        text.fail("num_attention_heads", f"with head_dim {head_dim} too wide a projection")
    bias = text.boolean("attention_bias") if family.attention_bias else False
    window, slides = _window(text, family, layers)
    positions = text.integer("max_position_embeddings", family.max_position_embeddings)
    rope = _rope(text, positions)
    vocab = text.integer("vocab_size", family.vocab_size)
    return ModelConfig(
        model_type=model_type,
        hidden_size=hidden,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        intermediate_size=text.integer("intermediate_size", family.intermediate_size, _INT32 // 2),
        vocab_size=vocab,
        rms_norm_eps=text.number("rms_norm_eps", 1e-6),
        # The wrapper's own flag is no help: its class default, true, is saved over the text's.
        tie_word_embeddings=text.boolean("tie_word_embeddings"),
        qkv_bias=family.qkv_bias or bias,
        o_bias=bias,
        mlp_bias=text.boolean("mlp_bias") if family.mlp_bias else False,
        sliding_window=window,
        layer_slides=slides,
        rope_type=rope.type,
        rope_theta=rope.theta,
        rope_factor=rope.factor,
        rope_low=rope.low,
        rope_high=rope.high,
        rope_original=rope.original,
        max_position_embeddings=positions,
        dtype=_dtype(text) or _dtype(outer),
        pad_token_id=_pad_token_id(text, vocab),
        eos_token_ids=_eos_token_ids(text) or _eos_token_ids(outer),
        raw=data,
    )


def _dispatch(outer: _Fields) -> tuple[_Fields, str]:
    """The object that the hyper-parameters come from, and its family."""
    works = ", ".join(MODEL_TYPES)
    kind = outer.string("model_type")
    if kind is None:
        outer.fail("model_type", f"must be one of {works}")
    if kind in MODEL_TYPES:
        return outer, kind
    if kind in WRAPPERS:
        text = outer.sub("text_config")
        if text is None:
            outer.fail("text_config", f"{kind} needs it")
        inner = text.string("model_type") or "mistral"  # the wrapper class's default
        if inner not in MODEL_TYPES:
            text.fail("model_type", f"not supported; in {kind} these are: {works}")
        return text, inner
    outer.fail(
        "model_type",
        f"not supported; these are: {works}, and as a wrapper of one of them {', '.join(WRAPPERS)}",
    )


def _refuse_unknown_maths(text: _Fields, model_type: str, family: Family) -> None:
    implemented = {
        key
        for key, known in (
            ("attention_bias", family.attention_bias),
            ("mlp_bias", family.mlp_bias),
        )
        if known
    }
    for key, value in text.data.items():
        if value is None or key in implemented:
            continue
        neutral = family.neutral.get(key, NEUTRAL.get(key))
        if neutral is None:
            neutral = next((n for p, n in NEUTRAL_PATTERNS if p.fullmatch(key)), None)
        if neutral is None or any(value == harmless for harmless in neutral):
            continue
        if key in ("quantization_config", "compression_config"):
            text.fail(key, _NO_QUANTIZATION)
        works = " or ".join(["null", *(_show(harmless) for harmless in neutral)])
        text.fail(
            key, f"it changes the maths and is not implemented for {model_type}; only {works}"
        )


def _kv_heads(text: _Fields, family: Family, heads: int) -> int:
    key = "num_key_value_heads"
    null = key in text.data and text.data[key] is None
    default = heads if family.num_kv_heads is None else family.num_kv_heads
    kv_heads = heads if null else text.integer(key, default)
    if heads % kv_heads:
        what = f"must divide num_attention_heads, {heads}"
        text.fail(key, what if key in text.data else f"its default {kv_heads} {what}")
    return kv_heads


def _head_dim(text: _Fields, family: Family, hidden: int, heads: int) -> int:
    if text.has("head_dim"):
        head_dim = text.integer("head_dim", 1)
    elif family.head_dim is not None:
        head_dim = family.head_dim
    else:
        if hidden % heads:
            text.fail(
                "hidden_size", f"not a multiple of num_attention_heads, {heads}, nor head_dim"
            )
        head_dim = hidden // heads
    if head_dim % 2:
        text.fail("head_dim", f"{head_dim} is odd; rotary embeddings need an even one")
    return head_dim


def _window(text: _Fields, family: Family, layers: int) -> tuple[int | None, list[bool] | None]:
    """(sliding_window, layer_slides) as ModelConfig has them."""
    window: int | None = None
    switch = text.boolean("use_sliding_window", family.window == "always")
    if family.window != "none" and text.data.get("sliding_window", 4096) is not None:
        # Files carry a number even where the switch is off: checked, but unused.
        window = text.integer("sliding_window", 4096, least=1 if switch else 0)
    if family.window == "always" and window is not None and not switch:
        text.fail("use_sliding_window", "mistral has no switch; write sliding_window null instead")
    if not switch:
        window = None
    slides = _layer_types(text, layers)
    if slides is None:
        first = 0
        if family.window == "switch" and window is not None:
            first = text.integer("max_window_layers", 28, least=0)
        slides = [window is not None and i >= first for i in range(layers)]
    elif family.window != "switch" and any(s != (window is not None) for s in slides):
        text.fail("layer_types", "layers of this family all slide, or none, as sliding_window says")
    if any(slides) and window is None:
        text.fail("layer_types", "a layer slides, but there is no sliding_window in use")
    if not any(slides):
        return None, None
    return window, None if all(slides) else slides


def _layer_types(text: _Fields, layers: int) -> list[bool] | None:
    key = "layer_types"
    if not text.has(key):
        return None
    types = text.data[key]
    known = {"full_attention": False, "attention": False, "sliding_attention": True}
    if not isinstance(types, list) or not all(type(t) is str and t in known for t in types):
        text.fail(key, 'must be a list of "full_attention" and "sliding_attention"')
    if len(types) != layers:
        text.fail(key, f"has {len(types)} entries for {layers} layers")
    return [known[t] for t in types]


# ---- rotary embeddings ----


@dataclass(frozen=True)
class _Rope:
    type: str
    theta: float
    factor: float = 1.0
    low: float = 0.0
    high: float = 0.0
    original: int = 0


# Keys of each type; the others below are harmless at these values and refused at any other.
_ROPE_KEYS: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
}
_ROPE_COMMON = ("rope_type", "type", "rope_theta", "original_max_position_embeddings")
_ROPE_NEUTRAL = {"factor": 1, "attention_factor": 1, "partial_rotary_factor": 1}


def _rope(text: _Fields, positions: int) -> _Rope:
    """5.x has `rope_parameters`, with rope_theta in it; 4.x has `rope_scaling` beside rope_theta.
    Versions of transformers differ in which one wins, so they must agree where both are there."""
    objects = [o for o in (text.sub("rope_parameters"), text.sub("rope_scaling")) if o and o.data]
    theta = 10000.0
    said = [o for o in (*objects, text) if o.has("rope_theta")]
    for i, place in enumerate(said):
        value = place.number("rope_theta", theta)
        if i > 0 and value != theta:
            place.fail("rope_theta", f"but {said[0].prefix}rope_theta is {theta}; remove one")
        theta = value
    ropes = [_rope_object(o, text, theta, positions) for o in objects]
    if any(rope != ropes[0] for rope in ropes):
        text.fail("rope_scaling", "but rope_parameters says otherwise; remove one")
    return ropes[0] if ropes else _Rope("default", theta)


def _rope_object(rope: _Fields, text: _Fields, theta: float, positions: int) -> _Rope:
    key = "rope_type" if rope.has("rope_type") else "type"
    kind = rope.string(key)
    if rope.has("type") and rope.string("type") != kind:
        rope.fail("type", f"but rope_type is {_show(kind)}; remove one")
    if kind is None:
        kind = "default"
    if kind not in ROPE_TYPES:
        rope.fail(key, f"not supported; these are: {', '.join(ROPE_TYPES)}")
    for name, value in rope.data.items():
        if value is None or name in _ROPE_COMMON or name in _ROPE_KEYS[kind]:
            continue
        if name not in _ROPE_NEUTRAL:
            raise ConfigError(
                f"{rope.file}: {rope.prefix.rstrip('.')} of type {kind} has the key {_show(name)}, "
                "which is not implemented"
            )
        if value != _ROPE_NEUTRAL[name]:
            rope.fail(name, f"not implemented for rope type {kind}; only 1 works")
    for name in _ROPE_KEYS[kind]:
        if not rope.has(name):
            rope.fail(name, f"rope type {kind} needs it")
    factor = rope.number("factor", 1.0) if "factor" in _ROPE_KEYS[kind] else 1.0
    if kind != "llama3":
        return _Rope(kind, theta, factor)
    low, high = rope.number("low_freq_factor", 1.0), rope.number("high_freq_factor", 4.0)
    if not high - low >= _FLOAT32[0]:
        rope.fail("high_freq_factor", f"must be above low_freq_factor, {low}")
    key = "original_max_position_embeddings"
    places = [place for place in (rope, text) if place.has(key)]
    original = [place.integer(key, positions) for place in places] or [positions]
    if original[0] != original[-1]:
        rope.fail(key, f"but {key} outside is {original[-1]}; remove one")
    return _Rope(kind, theta, factor, low, high, original[0])


# ---- the rest ----


def _dtype(place: _Fields) -> str | None:
    key = "dtype" if place.has("dtype") else "torch_dtype"
    name = place.string(key)
    if name is None:
        return None
    name = name.removeprefix("torch.")
    if name not in DTYPES:
        place.fail(key, f"not supported; these are: {', '.join(DTYPES)}")
    return name


def _pad_token_id(text: _Fields, vocab: int) -> int | None:
    """As `nn.Embedding(padding_idx=)` takes it: negative ones count from the end."""
    if not text.has("pad_token_id"):
        return None
    token = text.integer("pad_token_id", 0, vocab - 1, -vocab)
    return token if token >= 0 else token + vocab


def _eos_token_ids(place: _Fields) -> tuple[int, ...]:
    value = place.data.get("eos_token_id")
    if value is None:
        return ()
    ids = value if isinstance(value, list) else [value]
    if any(type(i) is not int for i in ids):
        place.fail("eos_token_id", "must be an integer, a list of integers or null")
    return tuple(ids)
