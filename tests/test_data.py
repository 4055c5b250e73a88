"""From samples to the engine's arrays: shift, masks, documents, positions, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from slidedp import data
from slidedp.data import DataError, collate, open_dataset, prepare


def array(*rows: list[int]) -> np.ndarray:
    return np.array(rows)


def test_shift() -> None:
    out = prepare({"input_ids": array([1, 2, 3]), "labels": array([1, -100, 3])}, 10, "b")
    assert out["input_ids"].tolist() == [[1, 2, 3]]
    assert out["labels"].tolist() == [[-100, 3, -100]]
    assert set(out) == {"input_ids", "labels"}
    assert all(v.dtype == np.int32 and v.flags.c_contiguous for v in out.values())


def test_documents() -> None:
    """Positions restart, attention starts at the document, the label at a border is masked."""
    ids = array([1, 2, 3, 4, 5, 6])
    out = prepare(
        {"input_ids": ids, "labels": ids, "document_ids": array([7, 7, 3, 3, 3, 9])}, 9, "b"
    )
    assert out["first"].tolist() == [[0, 0, 2, 2, 2, 5]]
    assert out["positions"].tolist() == [[0, 1, 0, 1, 2, 0]]
    assert out["labels"].tolist() == [[2, -100, 4, 5, -100, -100]]


def test_given_positions_stay() -> None:
    batch = {"input_ids": array([1, 2]), "position_ids": array([8191, 20000])}
    assert prepare(batch, 9, "b")["positions"].tolist() == [[8191, 20000]]


def test_attention_mask_masks_labels() -> None:
    batch = {
        "input_ids": array([1, 2, 3, 0], [1, 2, 3, 4]),
        "labels": array([1, 2, 3, 0], [1, 2, 3, 4]),
        "attention_mask": array([1, 1, 1, 0], [1, 1, 1, 1]),
    }
    assert prepare(batch, 9, "b")["labels"].tolist() == [[2, 3, -100, -100], [2, 3, 4, -100]]


@pytest.mark.parametrize(
    ("batch", "words"),
    [
        ({"input_ids": array([1, 10])}, ["token id 10", "row 0, column 1", "[0, 10)"]),
        ({"input_ids": array([-1, 1])}, ["token id -1"]),
        ({"input_ids": array([1, 2]), "labels": array([1, 10])}, ["label 10", "column 1"]),
        ({"input_ids": array([1, 2]), "labels": array([1, -1])}, ["label -1"]),
        ({"input_ids": array([1, 2]), "labels": array([1])}, ["labels", "[1, 1]"]),
        ({"input_ids": np.array([1, 2])}, ["[2]", "[rows, tokens]"]),
        ({"input_ids": np.zeros((0, 4), int)}, ["[0, 4]"]),
        ({"input_ids": np.array([[1.0, 2.0]])}, ["integers", "float64"]),
        ({"input_ids": np.array([[1, 2**40]])}, ["32 bits"]),
        ({"labels": array([1])}, ["no input_ids"]),
        ({"input_ids": array([1]), "token_type_ids": array([0])}, ["token_type_ids"]),
        ({"input_ids": array([1, 2]), "attention_mask": array([0, 1])}, ["right"]),
        ({"input_ids": array([1, 2]), "attention_mask": array([2, 2])}, ["right"]),
        (
            {"input_ids": array([1, 2, 3]), "document_ids": array([0, 1, 0])},
            ["document 0", "twice"],
        ),
        ({"input_ids": array([1]), "position_ids": array([-1])}, ["position -1"]),
    ],
)
def test_refused(batch: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(DataError) as error:
        prepare(batch, 10, "micro-batch 3")
    assert all(word in str(error.value) for word in ["micro-batch 3", *words]), error.value


def test_collate_pads_right() -> None:
    samples = [{"input_ids": [1, 2, 3]}, {"input_ids": [4], "labels": [-100]}]
    batch = collate(samples, ["a", "b"], 8)
    assert batch["input_ids"].tolist() == [[1, 2, 3], [4, 0, 0]]
    assert batch["labels"].tolist() == [[1, 2, 3], [-100, -100, -100]]


def test_collate_documents() -> None:
    """Padding after packed documents is none of them."""
    samples = [{"input_ids": [1, 2, 3], "document_ids": [0, 0, 1]}, {"input_ids": [4]}]
    out = prepare(collate(samples, ["a", "b"], 8), 9, "b")
    assert out["first"].tolist() == [[0, 0, 2], [0, 1, 1]]
    assert out["labels"].tolist() == [[2, -100, -100], [-100, -100, -100]]


@pytest.mark.parametrize(
    ("sample", "words"),
    [
        ([1, 2], ["list", "mapping"]),
        ({"labels": [1]}, ["no input_ids"]),
        ({"input_ids": []}, ["one length"]),
        ({"input_ids": [[1]]}, ["one dimension"]),
        ({"input_ids": [1, 2], "labels": [1]}, ["labels [1]"]),
        ({"input_ids": list(range(9))}, ["9 tokens", "max_seq_length is 8"]),
    ],
)
def test_collate_refuses(sample: Any, words: list[str]) -> None:
    with pytest.raises(DataError) as error:
        collate([sample], ["train_dataset, sample 5"], 8)
    assert all(word in str(error.value) for word in ["sample 5", *words]), error.value


@pytest.fixture
def tokenizer(tmp_path: Path) -> Path:
    from tokenizers import Tokenizer, models, pre_tokenizers

    vocab = {"<end>": 0, **{c: i + 1 for i, c in enumerate("abcdefgh ")}}
    made = Tokenizer(models.WordLevel(vocab, unk_token="<end>"))
    made.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    made.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<end>"}))
    return tmp_path / "tokenizer.json"


def test_text_is_a_stream_of_rows(tokenizer: Path, tmp_path: Path) -> None:
    file = tmp_path / "text.txt"
    file.write_text("abcdefg")
    rows = open_dataset(file, tokenizer, 4)
    assert [rows[i]["input_ids"].tolist() for i in range(len(rows))] == [[1, 2, 3, 4], [5, 6, 7, 0]]
    assert "document_ids" not in rows[0]
    with pytest.raises(IndexError):
        rows[2]


def test_jsonl_documents_are_packed(tokenizer: Path, tmp_path: Path) -> None:
    file = tmp_path / "text.jsonl"
    file.write_text('{"text": "ab"}\n\n{"text": "cd"}\n')
    rows = open_dataset(file, tokenizer, 4)
    assert [rows[i]["input_ids"].tolist() for i in range(len(rows))] == [[1, 2, 0, 3], [4, 0]]
    assert rows[0]["document_ids"].tolist() == [0, 0, 0, 1]


def test_jsonl_tokens(tokenizer: Path, tmp_path: Path) -> None:
    file = tmp_path / "tokens.jsonl"
    file.write_text('{"input_ids": [1, 2]}\n{"input_ids": [3], "labels": [-100]}\n')
    assert len(open_dataset(file, tokenizer, 4)) == 2


def test_arrays(tokenizer: Path, tmp_path: Path) -> None:
    assert len(open_dataset(np.arange(9), tokenizer, 4)) == 2  # a lone last token is left out
    assert len(open_dataset(np.arange(10), tokenizer, 4)) == 3
    assert len(open_dataset(np.zeros((3, 4), np.int64), tokenizer, 4)) == 3
    np.save(tmp_path / "a.npy", np.arange(8))
    assert open_dataset(tmp_path / "a.npy", tokenizer, 4)[1]["input_ids"].tolist() == [4, 5, 6, 7]


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("missing.txt", ["no file"]),
        ([], ["empty"]),
        (np.zeros((0, 4), int), ["empty"]),
        (np.zeros(1, int), ["one token"]),
        (np.zeros((2, 2, 2), int), ["3 dimensions"]),
        (np.zeros((2, 2)), ["float64"]),
        (3, ["int"]),
        ([""], ["no text"]),
    ],
)
def test_sources_refused(tokenizer: Path, source: Any, words: list[str]) -> None:
    with pytest.raises(DataError) as error:
        open_dataset(source, tokenizer, 4, "eval_dataset")
    assert all(word in str(error.value) for word in ["eval_dataset", *words]), error.value


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("a.txt", b"\xff\xfe", ["UTF-8"]),
        ("a.txt", b" \n ", ["empty"]),
        ("a.jsonl", b'{"text": 1}', ["line 1", "string"]),
        ("a.jsonl", b'{"text": "a"}\n{', ["line 2"]),
        ("a.jsonl", b'{"txt": "a"}', ["line 1", "input_ids"]),
        ("a.jsonl", b'{"text": "a"}\n{"input_ids": [1]}', ["mixes"]),
        ("a.jsonl", b"", ["empty"]),
    ],
)
def test_files_refused(
    tokenizer: Path, tmp_path: Path, name: str, content: bytes, words: list[str]
) -> None:
    file = tmp_path / name
    file.write_bytes(content)
    with pytest.raises(DataError) as error:
        open_dataset(file, tokenizer, 4)
    assert all(word in str(error.value) for word in words), error.value


def test_text_without_tokenizer(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"tokenizer\.json"):
        open_dataset(["a"], tmp_path / "tokenizer.json", 4)


def test_keys_are_documented() -> None:
    assert all(f"`{key}`" in (data.__doc__ or "") for key in data.KEYS)
