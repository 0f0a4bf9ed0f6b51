"""scripts/make_document: as long as asked for, in whole paragraphs."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "make_document"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model directory with nothing but a byte-level tokenizer without merges: a token a byte."""
    alphabet = {letter: index for index, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab=alphabet, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    directory = tmp_path_factory.mktemp("model")
    tokenizer.save(str(directory / "tokenizer.json"))
    return directory


def make(file: Path, model: Path, min_tokens: int) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(SCRIPT), str(file), "--min-tokens", str(min_tokens), "--model", str(model)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def test_document_is_long_enough_and_whole(model: Path, tmp_path: Path) -> None:
    num_tokens = 60_000
    result = make(tmp_path / "document.txt", model, num_tokens)
    assert result.returncode == 0, result.stderr
    text = (tmp_path / "document.txt").read_text(encoding="utf-8")
    assert f"{len(text.encode())} tokens" in result.stdout
    assert len(text.encode()) >= num_tokens
    assert len(text[: text.rstrip().rfind("\n\n")].encode()) < num_tokens, "a paragraph more than needed"
    assert text.endswith("\n\n")


@pytest.mark.parametrize(
    ("min_tokens", "message"), [(10**9, "ask for fewer"), (0, "--min-tokens 0: must be 1 or more")]
)
def test_impossible_lengths_are_refused(model: Path, tmp_path: Path, min_tokens: int, message: str) -> None:
    result = make(tmp_path / "document.txt", model, min_tokens)
    assert result.returncode == 2
    assert message in result.stderr
    assert not (tmp_path / "document.txt").exists()


def test_a_directory_without_tokenizer_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({}))
    result = make(tmp_path / "document.txt", tmp_path, 10)
    assert result.returncode == 2
    assert "there is no tokenizer.json" in result.stderr
