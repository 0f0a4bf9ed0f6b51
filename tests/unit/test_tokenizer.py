"""The trained tokenizer: any text survives, streaming equals decoding, training repeats."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from longprefill.partition.errors import ModelError
from longprefill.workers.model.tokenizer import Tokenizer
from longprefill.workers.model.vocabulary import BOS_ID, EOS_ID, MIN_VOCAB, python_documentation, train_tokenizer

VOCAB = 320


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model")
    train_tokenizer(VOCAB).save(str(directory / "tokenizer.json"))
    return directory


@pytest.fixture(scope="module")
def tokenizer(model_dir: Path) -> Tokenizer:
    return Tokenizer(model_dir)


def streamed(tokenizer: Tokenizer, ids: list[int]) -> list[str]:
    """The pieces of a stream, the last one from `finish`."""
    stream = tokenizer.stream()
    return [*(stream.push(token) for token in ids), stream.finish()]


def test_vocabulary(tokenizer: Tokenizer) -> None:
    assert tokenizer.vocab_size == VOCAB
    assert tokenizer.token_id("<|bos|>") == BOS_ID
    assert tokenizer.token_id("<|eos|>") == EOS_ID
    assert tokenizer.token_id("<|pad|>") is None
    assert tokenizer.is_special(EOS_ID)
    assert not tokenizer.is_special(EOS_ID + 1)


@given(st.text())
def test_text_survives(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert all(0 <= token < VOCAB for token in ids)
    assert "".join(streamed(tokenizer, ids)) == text


@given(st.lists(st.integers(0, VOCAB - 1)))
def test_a_stream_of_any_tokens_is_their_decoding(tokenizer: Tokenizer, ids: list[int]) -> None:
    """Random tokens are mostly broken UTF-8, as a random model's output is."""
    assert "".join(streamed(tokenizer, ids)) == tokenizer.decode(ids)


@given(st.lists(st.integers(2, 2 + 255), min_size=40, max_size=80))
def test_long_runs_of_broken_bytes_stream(tokenizer: Tokenizer, ids: list[int]) -> None:
    assert "".join(streamed(tokenizer, ids)) == tokenizer.decode(ids)


def test_an_emoji_comes_whole(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("a😀b")
    assert len(ids) == 6
    assert streamed(tokenizer, ids) == ["a", "", "", "", "😀", "b", ""]


def test_an_unfinished_emoji_is_told_at_the_end(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("a😀")[:-1]
    assert streamed(tokenizer, ids) == ["a", "", "", "", "\ufffd"]


def test_an_emoji_across_the_window_comes_whole(tokenizer: Tokenizer) -> None:
    for length in range(30):
        pieces = streamed(tokenizer, tokenizer.encode("é" * length + "😀!"))
        assert "".join(pieces) == "é" * length + "😀!"
        assert "\ufffd" not in "".join(pieces)


def test_special_tokens_are_read_and_not_written(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("a<|eos|>b")
    assert EOS_ID in ids
    assert tokenizer.decode(ids) == "ab"
    assert "".join(streamed(tokenizer, ids)) == "ab"


def test_a_finished_stream_starts_afresh(tokenizer: Tokenizer) -> None:
    stream = tokenizer.stream()
    stream.push(tokenizer.encode("😀")[0])
    assert stream.finish() == "\ufffd"
    assert stream.push(tokenizer.encode("b")[0]) == "b"


def test_training_repeats(model_dir: Path, tmp_path: Path) -> None:
    train_tokenizer(VOCAB).save(str(tmp_path / "tokenizer.json"))
    assert (tmp_path / "tokenizer.json").read_bytes() == (model_dir / "tokenizer.json").read_bytes()


def test_the_training_text_is_large_and_repeats() -> None:
    text = "\n".join(python_documentation())
    assert len(text) > 500_000
    assert text == "\n".join(python_documentation())


def test_training_limits() -> None:
    with pytest.raises(ModelError, match=rf"vocab_size=257 is too small .* at least {MIN_VOCAB}"):
        train_tokenizer(MIN_VOCAB - 1)
    with pytest.raises(ModelError, match=r"vocab_size=1000000 is more than the training text gives: use \d+ or fewer"):
        train_tokenizer(1_000_000)


def test_a_directory_without_a_usable_tokenizer(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"tokenizer.json is missing: a model needs it"):
        Tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text('{"model": 3}')
    with pytest.raises(ModelError, match=r"tokenizer.json is not a tokenizer: "):
        Tokenizer(tmp_path)
