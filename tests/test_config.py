"""slidedp.config: what config.json says, against transformers' own config classes; refusals that
name file and key; and mutated configs, which load or raise ConfigError and nothing else."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from slidedp.config import _LAYERS_MAX, MODEL_TYPES, ConfigError, ModelConfig, read_config
from slidedp.config_keys import FAMILIES, NEUTRAL

Json = dict[str, Any]

LLAMA3_ROPE: Json = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
SHAPE: Json = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 128,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
}
# Arguments of the config classes, beside SHAPE; rope_parameters in the spelling of 5.x.
CASES: dict[str, tuple[str, Json]] = {
    "llama": ("llama", {}),
    "llama-rope": (
        "llama",
        {"rope_parameters": {**LLAMA3_ROPE, "rope_theta": 5e5}, "tie_word_embeddings": True},
    ),
    "llama-linear": (
        "llama",
        {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}},
    ),
    "llama-bias": ("llama", {"attention_bias": True, "mlp_bias": True, "head_dim": 24}),
    "llama-no-kv": ("llama", {"num_key_value_heads": None}),
    "mistral": ("mistral", {"sliding_window": None, "head_dim": 32}),
    "mistral-window": ("mistral", {"sliding_window": 8}),
    "mistral-default-window": ("mistral", {}),
    "qwen2": ("qwen2", {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}),
    "qwen2-window": (
        "qwen2",
        {"use_sliding_window": True, "max_window_layers": 1, "sliding_window": 8},
    ),
    "qwen2-all-slide": (
        "qwen2",
        {"use_sliding_window": True, "max_window_layers": 0, "sliding_window": 8},
    ),
    "qwen2-none-slides": (
        "qwen2",
        {"use_sliding_window": True, "max_window_layers": 3, "sliding_window": 8},
    ),
    "qwen2-no-window": ("qwen2", {"use_sliding_window": True, "sliding_window": None}),
    "qwen3": ("qwen3", {"tie_word_embeddings": True}),
    "qwen3-bias": ("qwen3", {"attention_bias": True, "head_dim": 16}),
    "qwen3-layer-types": (
        "qwen3",
        {
            "use_sliding_window": True,
            "sliding_window": 8,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    ),
}


def write(folder: Path, data: object) -> Path:
    path = folder / "config.json"
    path.write_text(json.dumps(data))
    return path


def refused(folder: Path, data: object, *parts: str) -> None:
    path = write(folder, data)
    with pytest.raises(ConfigError) as caught:
        read_config(path)
    message = str(caught.value)
    assert message.startswith(str(path))
    for part in parts:
        assert part in message


# ---- against transformers ----


def expected(reference: Any) -> Json:
    """ModelConfig's fields as a transformers config object has them."""
    kind = reference.model_type
    rope = reference.rope_parameters
    llama3 = rope["rope_type"] == "llama3"
    heads = reference.num_attention_heads
    bias = bool(getattr(reference, "attention_bias", False))
    layers = reference.num_hidden_layers
    window = getattr(reference, "sliding_window", None)
    slides = [window is not None] * layers
    if kind in ("qwen2", "qwen3"):
        slides = [t == "sliding_attention" for t in reference.layer_types]
    return {
        "model_type": kind,
        "hidden_size": reference.hidden_size,
        "num_layers": layers,
        "num_heads": heads,
        "num_kv_heads": reference.num_key_value_heads,
        "head_dim": getattr(reference, "head_dim", None) or reference.hidden_size // heads,
        "intermediate_size": reference.intermediate_size,
        "vocab_size": reference.vocab_size,
        "rms_norm_eps": reference.rms_norm_eps,
        "tie_word_embeddings": reference.tie_word_embeddings,
        "qkv_bias": bias or kind == "qwen2",
        "o_bias": bias,
        "mlp_bias": bool(getattr(reference, "mlp_bias", False)),
        "sliding_window": window if any(slides) else None,
        "layer_slides": slides if any(slides) and not all(slides) else None,
        "rope_type": rope["rope_type"],
        "rope_theta": rope["rope_theta"],
        "rope_factor": rope.get("factor", 1.0),
        "rope_low": rope["low_freq_factor"] if llama3 else 0.0,
        "rope_high": rope["high_freq_factor"] if llama3 else 0.0,
        "rope_original": rope["original_max_position_embeddings"] if llama3 else 0,
        "max_position_embeddings": reference.max_position_embeddings,
    }


def found(config: ModelConfig) -> Json:
    others = ("dtype", "pad_token_id", "eos_token_ids", "raw")
    return {k: v for k, v in vars(config).items() if k not in others}


def old_spelling(kind: str, arguments: Json) -> Json:
    """The file that transformers 4.x would have written."""
    data: Json = {"model_type": kind, "torch_dtype": "bfloat16", **arguments}
    rope = data.pop("rope_parameters", None)
    if rope is not None:
        data["rope_theta"] = rope["rope_theta"]
        scaling = {k: v for k, v in rope.items() if k != "rope_theta"}
        if scaling["rope_type"] == "linear":
            scaling["type"] = scaling.pop("rope_type")
        data["rope_scaling"] = None if scaling == {"rope_type": "default"} else scaling
    return data


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("spelling", ["5.x", "4.x"])
def test_as_transformers_reads_it(tmp_path: Path, case: str, spelling: str) -> None:
    transformers = pytest.importorskip("transformers")
    kind, more = CASES[case]
    arguments = {**SHAPE, **more}
    if spelling == "5.x":
        transformers.AutoConfig.for_model(kind, dtype="bfloat16", **arguments).save_pretrained(
            tmp_path
        )
    else:
        write(tmp_path, old_spelling(kind, arguments))
    config = read_config(tmp_path)
    reference = transformers.AutoConfig.from_pretrained(tmp_path)
    assert found(config) == expected(reference)
    assert config.dtype == "bfloat16"
    assert config.raw == json.loads((tmp_path / "config.json").read_text())


@pytest.mark.parametrize("kind", MODEL_TYPES)
def test_class_defaults(tmp_path: Path, kind: str) -> None:
    """A file that says nothing but its family."""
    transformers = pytest.importorskip("transformers")
    write(tmp_path, {"model_type": kind})
    assert found(read_config(tmp_path)) == expected(
        transformers.AutoConfig.from_pretrained(tmp_path)
    )


@pytest.mark.parametrize("tied", [False, True])
def test_mistral3_wrapper(tmp_path: Path, tied: bool) -> None:
    transformers = pytest.importorskip("transformers")
    text = transformers.MistralConfig(
        **SHAPE, head_dim=24, sliding_window=None, tie_word_embeddings=tied, dtype="bfloat16"
    )
    vision = {
        "model_type": "pixtral",
        "hidden_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "intermediate_size": 32,
        "image_size": 28,
        "patch_size": 14,
    }
    transformers.Mistral3Config(text_config=text, vision_config=vision).save_pretrained(tmp_path)
    config = read_config(tmp_path)
    assert found(config) == expected(text)
    assert config.dtype == "bfloat16"
    assert config.raw["model_type"] == "mistral3"


def test_wrapper_refusals(tmp_path: Path) -> None:
    refused(tmp_path, {"model_type": "mistral3"}, "text_config is absent")
    refused(tmp_path, {"model_type": "mistral3", "text_config": 3}, "text_config is 3", "object")
    ministral = {"model_type": "mistral3", "text_config": {"model_type": "ministral3"}}
    refused(tmp_path, ministral, "text_config.model_type", "'ministral3'", "mistral")
    fp8 = {"model_type": "mistral3", "text_config": {}, "quantization_config": {"bits": 8}}
    refused(tmp_path, fp8, "quantization_config", "BF16")
    bad = {"model_type": "mistral3", "text_config": {"hidden_size": "5120"}}
    refused(tmp_path, bad, "text_config.hidden_size is '5120'")


# ---- the spec ----


def struct_fields() -> list[str]:
    """Names in `struct slide_config`, in order."""
    header = Path(__file__).parent.parent / "csrc" / "model" / "model.h"
    body = re.search(r"struct slide_config \{(.*?)\n\};", header.read_text(), re.DOTALL)
    assert body is not None
    names: list[str] = []
    for line in re.sub(r"/\*.*?\*/", "", body[1], flags=re.DOTALL).split(";"):
        names += re.findall(r"(\w+)(?:\[\d+\])?\s*(?:,|$)", line.strip())
    return names


def test_spec_has_the_fields_of_the_struct(tmp_path: Path) -> None:
    spec = read_config(write(tmp_path, {"model_type": "llama"})).to_spec()
    assert list(spec) == struct_fields()


def test_spec_values(tmp_path: Path) -> None:
    kind, more = CASES["qwen2-window"]
    spec = read_config(write(tmp_path, {"model_type": kind, **SHAPE, **more})).to_spec()
    assert spec["layer_slides"] == b"\0\1\1"
    assert spec["sliding_window"] == 8
    assert (spec["hidden"], spec["layers"], spec["heads"], spec["kv_heads"]) == (64, 3, 4, 2)
    assert (spec["inter"], spec["vocab"], spec["rms_eps"], spec["tied"]) == (96, 128, 1e-5, False)
    spec = read_config(write(tmp_path, {"model_type": "mistral", "sliding_window": None})).to_spec()
    assert spec["sliding_window"] == 0
    assert spec["layer_slides"] is None


def test_model_types_are_those_of_the_core() -> None:
    core = pytest.importorskip("slidedp._slidedp")
    assert sorted(core.model_types()) == sorted(MODEL_TYPES)


def test_model_types_have_defaults() -> None:
    assert tuple(FAMILIES) == MODEL_TYPES


def test_limits_are_those_of_the_core() -> None:
    source = Path(__file__).parent.parent / "csrc" / "model" / "family.c"
    limit = re.search(r"#define LAYERS_MAX (\d+)", source.read_text())
    assert limit is not None
    assert int(limit[1]) == _LAYERS_MAX


# ---- token ids and dtype ----


@pytest.mark.parametrize(
    ("value", "ids"), [(2, (2,)), ([2, 5], (2, 5)), (None, ()), ([], ()), (0, (0,))]
)
def test_eos_token_id(tmp_path: Path, value: object, ids: tuple[int, ...]) -> None:
    path = write(tmp_path, {"model_type": "llama", "eos_token_id": value})
    assert read_config(path).eos_token_ids == ids


@pytest.mark.parametrize(("value", "token"), [(None, None), (2, 2), (0, 0), (-1, 31999)])
def test_pad_token_id(tmp_path: Path, value: object, token: int | None) -> None:
    path = write(tmp_path, {"model_type": "llama", "pad_token_id": value})
    assert read_config(path).pad_token_id == token


@pytest.mark.parametrize(
    ("more", "dtype"),
    [
        ({}, None),
        ({"torch_dtype": "float16"}, "float16"),
        ({"torch_dtype": "torch.float32"}, "float32"),
        ({"dtype": "bfloat16", "torch_dtype": "float32"}, "bfloat16"),
        ({"dtype": None, "torch_dtype": "float32"}, "float32"),
    ],
)
def test_dtype(tmp_path: Path, more: Json, dtype: str | None) -> None:
    assert read_config(write(tmp_path, {"model_type": "llama", **more})).dtype == dtype


# ---- refusals ----


@pytest.mark.parametrize(
    ("kind", "more", "parts"),
    [
        # family
        ("gpt2", {}, ["model_type is 'gpt2'", *MODEL_TYPES]),
        (None, {}, ["model_type", "llama"]),
        (7, {}, ["model_type is 7"]),
        ("llama", {"text_config": {}}, ["text_config"]),
        # types and ranges
        ("llama", {"hidden_size": "64"}, ["hidden_size is '64'", "integer"]),
        ("llama", {"hidden_size": True}, ["hidden_size is true", "integer"]),
        ("llama", {"hidden_size": 64.0}, ["hidden_size is 64.0", "integer"]),
        ("llama", {"hidden_size": None}, ["hidden_size is null", "integer"]),
        ("llama", {"hidden_size": 0}, ["hidden_size is 0"]),
        ("llama", {"vocab_size": -1}, ["vocab_size is -1"]),
        ("llama", {"vocab_size": 2**31}, ["vocab_size"]),
        ("llama", {"intermediate_size": 2**30}, ["intermediate_size"]),
        ("llama", {"num_hidden_layers": 10**9}, ["num_hidden_layers", "65536"]),
        ("llama", {"num_key_value_heads": 3}, ["num_key_value_heads is 3", "4"]),
        ("qwen2", {"num_key_value_heads": ...}, ["num_key_value_heads is absent", "default 32"]),
        ("llama", {"hidden_size": 66}, ["hidden_size is 66", "4"]),
        ("llama", {"hidden_size": 60}, ["head_dim is absent", "15 is odd"]),
        ("llama", {"head_dim": 7}, ["head_dim is 7", "even"]),
        ("llama", {"head_dim": 2**30}, ["num_attention_heads", "too wide"]),
        ("llama", {"rms_norm_eps": float("nan")}, ["rms_norm_eps is nan"]),
        ("llama", {"rms_norm_eps": 0}, ["rms_norm_eps is 0"]),
        ("llama", {"rms_norm_eps": "1e-5"}, ["rms_norm_eps is '1e-5'", "number"]),
        ("llama", {"rms_norm_eps": 10**400}, ["rms_norm_eps"]),
        ("llama", {"tie_word_embeddings": 1}, ["tie_word_embeddings is 1", "true or false"]),
        ("llama", {"attention_bias": "no"}, ["attention_bias is 'no'"]),
        ("llama", {"eos_token_id": "</s>"}, ["eos_token_id"]),
        ("llama", {"eos_token_id": [1, True]}, ["eos_token_id"]),
        ("llama", {"pad_token_id": 128}, ["pad_token_id is 128", "127"]),
        ("llama", {"torch_dtype": "float8_e4m3fn"}, ["torch_dtype", "bfloat16"]),
        ("llama", {"dtype": {"text": "float32"}}, ["dtype", "string"]),
        # RoPE
        ("llama", {"rope_scaling": {"type": "yarn", "factor": 4}}, ["rope_scaling.type", "'yarn'"]),
        ("llama", {"rope_parameters": {"rope_type": "dynamic"}}, ["rope_type", "'dynamic'"]),
        ("llama", {"rope_scaling": {"rope_type": "longrope"}}, ["'longrope'", "llama3"]),
        ("llama", {"rope_scaling": {"type": "linear"}}, ["rope_scaling.factor is absent"]),
        ("llama", {"rope_scaling": {"type": "linear", "factor": -1}}, ["rope_scaling.factor"]),
        ("llama", {"rope_scaling": {"type": "linear", "rope_type": "llama3"}}, ["scaling.type"]),
        ("llama", {"rope_scaling": {**LLAMA3_ROPE, "low_freq_factor": 4}}, ["high_freq_factor"]),
        ("llama", {"rope_scaling": {**LLAMA3_ROPE, "mscale": 0.7}}, ["mscale"]),
        ("llama", {"rope_scaling": {"rope_type": "default", "factor": 2}}, ["factor is 2"]),
        ("llama", {"rope_scaling": []}, ["rope_scaling is []", "object"]),
        ("llama", {"rope_theta": 0}, ["rope_theta is 0"]),
        ("llama", {"rope_theta": 1e6, "rope_parameters": {"rope_theta": 1e4}}, ["rope_theta"]),
        (
            "llama",
            {"rope_parameters": LLAMA3_ROPE, "rope_scaling": {"type": "linear", "factor": 2}},
            ["rope_scaling", "rope_parameters says otherwise"],
        ),
        ("qwen3", {"rope_parameters": {"full_attention": {}}}, ["'full_attention'"]),
        ("llama", {"partial_rotary_factor": 0.5}, ["partial_rotary_factor is 0.5"]),
        ("llama", {"rope_parameters": {"partial_rotary_factor": 0.5}}, ["partial_rotary_factor"]),
        ("llama", {"rope_interleaved": True}, ["rope_interleaved is true"]),
        # windows
        ("mistral", {"sliding_window": 0}, ["sliding_window is 0"]),
        ("mistral", {"sliding_window": "8"}, ["sliding_window is '8'"]),
        ("mistral", {"use_sliding_window": False}, ["use_sliding_window", "null"]),
        ("mistral", {"layer_types": ["full_attention"] * 3}, ["layer_types"]),
        ("llama", {"sliding_window": 8}, ["sliding_window is 8"]),
        ("llama", {"layer_types": ["sliding_attention"] * 3}, ["layer_types"]),
        ("qwen2", {"layer_types": ["sliding_attention"] * 3}, ["layer_types", "sliding_window"]),
        ("qwen2", {"layer_types": ["full_attention"]}, ["layer_types", "1 entries for 3"]),
        ("qwen3", {"layer_types": ["linear_attention"] * 3}, ["layer_types"]),
        ("qwen3", {"layer_types": [{}, [], 1]}, ["layer_types"]),
        (
            "qwen2",
            {"use_sliding_window": True, "max_window_layers": "1"},
            ["max_window_layers is '1'"],
        ),
        # other maths
        ("llama", {"hidden_act": "gelu"}, ["hidden_act is 'gelu'", "silu"]),
        ("llama", {"attention_dropout": 0.1}, ["attention_dropout is 0.1"]),
        ("llama", {"resid_pdrop": 0.1}, ["resid_pdrop is 0.1"]),
        ("llama", {"quantization_config": {}}, ["quantization_config", "BF16"]),
        ("llama", {"pretraining_tp": 2}, ["pretraining_tp is 2"]),
        ("llama", {"final_logit_softcapping": 30.0}, ["final_logit_softcapping is 30.0"]),
        ("llama", {"attn_logit_softcapping": 50.0}, ["attn_logit_softcapping is 50.0"]),
        ("llama", {"residual_multiplier": 0.22}, ["residual_multiplier is 0.22"]),
        ("llama", {"embedding_multiplier": 12}, ["embedding_multiplier is 12"]),
        ("llama", {"attention_multiplier": 1.0}, ["attention_multiplier is 1.0"]),
        ("llama", {"logits_scaling": 8}, ["logits_scaling is 8"]),
        ("llama", {"qk_layernorm": True}, ["qk_layernorm is true"]),
        ("llama", {"num_local_experts": 8}, ["num_local_experts is 8"]),
        ("qwen3", {"num_experts": 128}, ["num_experts is 128"]),
        ("llama", {"is_causal": False}, ["is_causal is false"]),
        ("llama", {"no_rope_layers": [1, 1, 0]}, ["no_rope_layers"]),
        ("mistral", {"attention_bias": True}, ["attention_bias is true"]),
        ("qwen2", {"attention_bias": False}, ["attention_bias is false"]),
        ("qwen3", {"mlp_bias": True}, ["mlp_bias is true"]),
    ],
)
def test_refused(tmp_path: Path, kind: object, more: Json, parts: list[str]) -> None:
    data = {"model_type": kind, **SHAPE, **more}
    refused(tmp_path, {k: v for k, v in data.items() if v is not ...}, *parts)


@pytest.mark.parametrize(
    "more",
    [
        {"attention_dropout": 0.0, "pretraining_tp": 1, "mlp_bias": False, "head_dim": None},
        {"rope_scaling": None, "rope_theta": 5e5, "rope_interleaved": False},
        {"rope_scaling": {}, "rope_parameters": {}},
        {"rope_scaling": LLAMA3_ROPE, "rope_parameters": {**LLAMA3_ROPE, "rope_theta": 1e4}},
        {"rope_theta": 1e4, "rope_parameters": {"rope_theta": 10000, "rope_type": "default"}},
        {
            "residual_multiplier": 1.0,
            "logit_scale": 1,
            "num_experts": 0,
            "quantization_config": None,
        },
        {"final_logit_softcapping": None, "qk_layernorm": False, "hidden_act": "swish"},
        {"classifier_dropout": 0.1, "initializer_range": 0.5, "use_cache": True, "my_key": [{}]},
        {"layer_types": ["full_attention"] * 3, "max_window_layers": 28, "transformers.js": {}},
    ],
)
def test_harmless(tmp_path: Path, more: Json) -> None:
    config = read_config(write(tmp_path, {"model_type": "llama", **SHAPE, **more}))
    assert config.hidden_size == 64
    assert config.raw == {"model_type": "llama", **SHAPE, **more}


def test_window_unused_without_its_switch(tmp_path: Path) -> None:
    """Qwen files carry a window that is switched off."""
    data = {"model_type": "qwen2", **SHAPE, "sliding_window": 131072, "max_window_layers": 28}
    config = read_config(write(tmp_path, {**data, "use_sliding_window": False}))
    assert config.sliding_window is None
    assert config.layer_slides is None


def test_original_positions_outside_the_rope_object(tmp_path: Path) -> None:
    rope = {k: v for k, v in LLAMA3_ROPE.items() if k != "original_max_position_embeddings"}
    data = {"model_type": "llama", **SHAPE, "rope_scaling": rope}
    assert read_config(write(tmp_path, data)).rope_original == 256
    data["original_max_position_embeddings"] = 64
    assert read_config(write(tmp_path, data)).rope_original == 64
    refused(tmp_path, {**data, "rope_scaling": LLAMA3_ROPE}, "original_max_position", "64")


# ---- files ----


@pytest.mark.parametrize(
    ("content", "part"),
    [
        (b"", "not JSON"),
        (b'{"model_type": "llama",}', "not JSON"),
        (b"\xff\xfe{}", "not JSON"),
        (b"\xef\xbb\xbf{}", "not JSON"),
        (b"[]", "[] where an object should be"),
        (b"null", "null where an object should be"),
        (b"[" * 100_000, "nested too deeply"),
        (b'{"vocab_size": ' + b"9" * 5000 + b"}", "not JSON"),
    ],
)
def test_bad_files(tmp_path: Path, content: bytes, part: str) -> None:
    path = tmp_path / "config.json"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=re.escape(part)) as caught:
        read_config(path)
    assert str(path) in str(caught.value)


def test_missing_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"config\.json: can't be read: No such file"):
        read_config(tmp_path)
    with pytest.raises(ConfigError, match=r"nowhere: can't be read: No such file"):
        read_config(str(tmp_path / "nowhere"))
    with pytest.raises(ConfigError, match="null"):
        read_config("a\0b")


# ---- mutations ----

SCALARS = (
    st.none()
    | st.booleans()
    | st.integers(-3, 9)
    | st.integers(-(2**70), 2**70)
    | st.floats()
    | st.text(max_size=8)
    | st.sampled_from(["llama3", "linear", "default", "yarn", "silu", "full_attention", "mistral"])
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(
            st.sampled_from(list(LLAMA3_ROPE)) | st.text(max_size=6), inner, max_size=4
        )
    ),
    max_leaves=8,
)
OTHER_KEYS = [
    *NEUTRAL,
    *[
        "model_type",
        "text_config",
        "dtype",
        "torch_dtype",
        "rope_scaling",
        "rope_parameters",
        "rope_theta",
    ],
    *["sliding_window", "use_sliding_window", "max_window_layers", "layer_types", "head_dim"],
    *[
        "tie_word_embeddings",
        "pad_token_id",
        "eos_token_id",
        "hidden_act",
        "num_experts",
        "rope_type",
        "type",
    ],
    *["final_logit_softcapping", "residual_multiplier", "attention_dropout"],
]


@st.composite
def mutated(draw: Callable[..., Any]) -> Json:
    kind, more = draw(st.sampled_from(list(CASES.values())))
    plain: Json = {"model_type": kind, **SHAPE, **more}
    data: Json = old_spelling(kind, plain) if draw(st.booleans()) else plain
    data = json.loads(json.dumps(data))
    if draw(st.integers(0, 4)) == 0:
        data = {"model_type": "mistral3", "text_config": data}
    for _ in range(draw(st.integers(1, 3))):
        nested = [v for v in data.values() if isinstance(v, dict)]
        place: Json = draw(st.sampled_from([data, *nested]))
        key = draw(st.sampled_from([*place, *OTHER_KEYS]) | st.text(max_size=5))
        if draw(st.integers(0, 4)) == 0:
            place.pop(key, None)
        else:
            place[key] = draw(VALUES)
    return data


@settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=mutated())
def test_mutated_configs_load_or_are_refused(
    tmp_path_factory: pytest.TempPathFactory, data: Json
) -> None:
    path = write(tmp_path_factory.getbasetemp(), data)
    config, message = None, ""
    try:
        config = read_config(path)
    except ConfigError as error:
        message = str(error)
    if config is None:
        assert message.startswith(str(path))
        return
    spec = config.to_spec()
    assert spec["model_type"] in MODEL_TYPES
    for key in ["hidden", "layers", "heads", "kv_heads", "head_dim", "inter", "vocab"]:
        assert type(spec[key]) is int
        assert 1 <= spec[key] < 2**31
    assert spec["heads"] % spec["kv_heads"] == 0
    assert spec["head_dim"] % 2 == 0
    assert (spec["heads"] + 2 * spec["kv_heads"]) * spec["head_dim"] < 2**31
    for key in ["rms_eps", "rope_theta", "rope_factor"]:
        assert type(spec[key]) is float
        assert 0 < spec[key] < float("inf")
    for key in ["tied", "qkv_bias", "o_bias", "mlp_bias"]:
        assert type(spec[key]) is bool
    slides = spec["layer_slides"]
    assert slides is None or (len(slides) == spec["layers"] and spec["sliding_window"] > 0)
