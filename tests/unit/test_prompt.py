"""Prompts: text and the three forms of token ids, and every refusal with its words."""

from __future__ import annotations

import io
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from longprefill.partition.errors import PromptError
from longprefill.workers.model.sizes import RAW_CONFIGS
from longprefill.workers.model.tokenizer import Tokenizer, read_prompt
from longprefill.workers.model.vocabulary import train_tokenizer

VOCAB = 300
MAX_TOKENS = 1000


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model")
    raw = RAW_CONFIGS["longprefill_hybrid", "tiny"] | {"vocab_size": VOCAB, "max_position_embeddings": MAX_TOKENS}
    (directory / "config.json").write_text(json.dumps(raw))
    train_tokenizer(VOCAB).save(str(directory / "tokenizer.json"))
    return directory


def written(tmp_path: Path, name: str, content: bytes | str) -> Path:
    path = tmp_path / name
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=30)
@given(ids=st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=50))
def test_every_form_of_ids_is_the_same_prompt(ids: list[int], model_dir: Path, tmp_path: Path) -> None:
    lines = "\n".join(str(token) for token in ids)
    np.save(tmp_path / "p.npy", np.asarray(ids, dtype=np.uint16))
    forms = [
        tmp_path / "p.npy",
        written(tmp_path, "p.json", json.dumps(ids)),
        written(tmp_path, "p.ids", lines),
        written(tmp_path, "p.txt", lines + "\n"),
        written(tmp_path, "windows", lines.replace("\n", "\r\n")),
    ]
    for form in forms:
        read = read_prompt(form, model_dir)
        assert read.dtype == np.int64
        assert read.tolist() == ids, form


@pytest.mark.parametrize("text", ["hello", "12 13", "1\n\n2", "1_0", "\n", "3.5\n", "12\nend", "-", "😀\r\n"])
def test_text_goes_through_the_tokenizer(text: str, model_dir: Path, tmp_path: Path) -> None:
    ids = read_prompt(written(tmp_path, "p.txt", text), model_dir)
    assert ids.tolist() == Tokenizer(model_dir).encode(text)


@pytest.mark.parametrize("content", ["some text", "5\n6\n7\n"])
def test_standard_input(content: str, model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", SimpleNamespace(buffer=io.BytesIO(content.encode())))
    expected = [5, 6, 7] if content[0] == "5" else Tokenizer(model_dir).encode(content)
    assert read_prompt("-", model_dir).tolist() == expected


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("p.txt", b"ab\xffcd", r"p.txt is not UTF-8 text: byte 0xff at offset 2"),
        ("p.txt", "é".encode()[:1], r"byte 0xc3 at offset 0"),
        ("p.txt", "", r"p.txt is empty: give at least one token"),
        ("p.ids", "", r"p.ids is empty"),
        ("p.json", "[]", r"p.json is empty"),
        ("p.txt", "1\n300\n", r"token 300 at position 1 is outside of the vocabulary: ids go from 0 to 299"),
        ("p.txt", "-1\n", r"token -1 at position 0 is outside .*vocab_size=300"),
        ("p.ids", "5\n99999999999999999999999\n", r"at position 1 is outside of the vocabulary"),
        ("p.json", "[1, 2, 300]", r"token 300 at position 2 is outside"),
        ("p.ids", "1\n2.0\n", r"p.ids: line 2 is b'2.0': an .ids file has one token id a line"),
        ("p.ids", "1_0\n", r"line 1 is b'1_0'"),
        ("p.json", "{}", r"p.json holds a dict: a .json prompt is a list of token ids"),
        ("p.json", "[1, 2.0]", r"2.0 at position 1 is not a token id: it must be an integer"),
        ("p.json", "[1, true]", r"True at position 1 is not a token id"),
        ("p.json", '[1, "2"]', r"'2' at position 1 is not a token id"),
        ("p.json", "[1,", r"p.json is not valid JSON"),
        ("p.json", b"[\xff]", r"p.json is not valid JSON"),
        ("p.npy", b"no array", r"p.npy is not a .npy array"),
        ("p.npy", b"", r"p.npy is not a .npy array"),
    ],
)
def test_refusals(name: str, content: bytes | str, message: str, model_dir: Path, tmp_path: Path) -> None:
    with pytest.raises(PromptError, match=message):
        read_prompt(written(tmp_path, name, content), model_dir)


@pytest.mark.parametrize(
    ("array", "message"),
    [
        (
            np.zeros(3, dtype=np.float32),
            r"holds dtype float32 and shape \(3,\): a prompt has one dimension of integers",
        ),
        (np.zeros((1, 3), dtype=np.int64), r"holds dtype int64 and shape \(1, 3\)"),
        (np.zeros((), dtype=np.int64), r"shape \(\)"),
        (np.zeros(3, dtype=bool), r"dtype bool"),
        (np.zeros(0, dtype=np.int64), r"is empty"),
        (np.array([1, 2**63], dtype=np.uint64), r"token 9223372036854775808 at position 1 is outside"),
        (np.array([1, "x"], dtype=object), r"is not a .npy array"),
    ],
)
def test_array_refusals(array: Any, message: str, model_dir: Path, tmp_path: Path) -> None:
    np.save(tmp_path / "p.npy", array, allow_pickle=True)
    with pytest.raises(PromptError, match=message):
        read_prompt(tmp_path / "p.npy", model_dir)


@pytest.mark.parametrize("name", ["p.txt", "p.npy", "p.json", "p.ids"])
def test_a_missing_file(name: str, model_dir: Path, tmp_path: Path) -> None:
    with pytest.raises(PromptError, match=rf"prompt file .*{name} does not exist"):
        read_prompt(tmp_path / name, model_dir)
    with pytest.raises(PromptError, match="cannot be read"):
        read_prompt(tmp_path, model_dir)


def test_a_prompt_longer_than_the_model_takes(model_dir: Path, tmp_path: Path) -> None:
    assert read_prompt(written(tmp_path, "p.ids", "7\n" * MAX_TOKENS), model_dir).size == MAX_TOKENS
    with pytest.raises(PromptError, match=r"has 1001 tokens: this model takes at most 1000"):
        read_prompt(written(tmp_path, "p.ids", "7\n" * (MAX_TOKENS + 1)), model_dir)


def test_text_needs_a_tokenizer_and_ids_do_not(model_dir: Path, tmp_path: Path) -> None:
    bare = tmp_path / "bare"
    bare.mkdir()
    (bare / "config.json").write_bytes((model_dir / "config.json").read_bytes())
    assert read_prompt(written(tmp_path, "p.txt", "5\n6\n"), bare).tolist() == [5, 6]
    with pytest.raises(PromptError, match=r"q.txt is text and .*tokenizer.json is missing: add it, or give token ids"):
        read_prompt(written(tmp_path, "q.txt", "five"), bare)
