"""Text to token ids and back through a model's tokenizer.json, and prompts from files.

A prompt is text or token ids: `.npy` (one dimension of integers), `.json` (a list of integers), `.ids` (one id a line).
Any other name, and standard input, is UTF-8 text, except that text whose every line is an integer is taken as ids too.
"""

from __future__ import annotations

import functools
import json
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer as Pipeline

from longprefill.partition.errors import ModelError, PromptError
from longprefill.workers.model.config import ModelConfig
from longprefill.workers.model.families.registry import read_config

STDIN = "-"
ID_LINE_BYTES = b"0123456789+- \t\r\n"
REPLACEMENT = "\ufffd"
"""What bytes become that are not a character, or not yet."""
WINDOW_TOKENS = 16
CONTEXT_TOKENS = 4
"""An unfinished character has at most 3 bytes, so at most the last 3 tokens hold it; one more for its left context."""


class Tokenizer:
    """The tokenizer of a model directory. `encode` adds no special tokens; those written in the text are recognized."""

    def __init__(self, model_dir: str | Path) -> None:
        """Read `model_dir`/tokenizer.json.

        Raises:
            ModelError: the file is missing or is not a tokenizer.
        """
        path = Path(model_dir) / "tokenizer.json"
        if not path.is_file():
            raise ModelError(f"{path} is missing: a model needs it to read and write text")
        try:
            self._pipeline = Pipeline.from_buffer(path.read_bytes())
        except ValueError as error:
            raise ModelError(f"{path} is not a tokenizer: {error}") from error
        self._special_ids = {
            number for number, token in self._pipeline.get_added_tokens_decoder().items() if token.special
        }

    @property
    def vocab_size(self) -> int:
        """Tokens, special ones included."""
        return self._pipeline.get_vocab_size(with_added_tokens=True)

    @functools.cached_property
    def longest_token_bytes(self) -> int:
        """Bytes of the longest token's spelling: no token stands for more text than that."""
        return max(len(piece.encode()) for piece in self._pipeline.get_vocab(with_added_tokens=True))

    def encode(self, text: str) -> list[int]:
        """Token ids of a text."""
        # The fast form keeps no offsets: half the memory and time on prompts of millions of tokens.
        return self._pipeline.encode_batch_fast([text], add_special_tokens=False)[0].ids

    def decode(self, ids: Iterable[int]) -> str:
        """Text of token ids without the special ones; bytes that are no character become U+FFFD."""
        return self._pipeline.decode(list(ids), skip_special_tokens=True)

    def token_id(self, token: str) -> int | None:
        """Id of a token by its exact spelling, None if there is none."""
        return self._pipeline.token_to_id(token)

    def spelling(self, token: int) -> str | None:
        """A token as the vocabulary spells it, the inverse of `token_id`; None if there is none of this id."""
        return self._pipeline.id_to_token(token)

    def is_special(self, token: int) -> bool:
        """Is the id a special token, which `decode` leaves out?"""
        return token in self._special_ids

    def stream(self) -> StreamDecoder:
        """A decoder for one generated sequence."""
        return StreamDecoder(self)


class StreamDecoder:
    """Turns tokens into text one by one. Bytes that may be the beginning of a character are held back until it is
    whole; all pieces and `finish` together are exactly `decode` of all tokens.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._window: list[int] = []
        self._num_sent = 0
        """Characters of the window's text that were returned."""

    def push(self, token: int) -> str:
        """The text that this token completes, often one piece, sometimes nothing."""
        if self._tokenizer.is_special(token):
            return ""
        self._window.append(token)
        settled = self._settled_text()
        piece = settled[self._num_sent :]
        self._num_sent = len(settled)
        if len(self._window) > WINDOW_TOKENS:
            del self._window[:-CONTEXT_TOKENS]
            self._num_sent = len(self._settled_text())
        return piece

    def finish(self) -> str:
        """What is still held back, as U+FFFD. The decoder is empty afterwards."""
        piece = self._tokenizer.decode(self._window)[self._num_sent :]
        self._window, self._num_sent = [], 0
        return piece

    def _settled_text(self) -> str:
        """The window's text without an unfinished last character (which decodes to one U+FFFD)."""
        return self._tokenizer.decode(self._window).removesuffix(REPLACEMENT)


def read_prompt(source: str | Path, model_dir: str | Path) -> np.ndarray:
    """Token ids of a prompt, int64 [T]; `source` is a file name or "-" for standard input.

    Raises:
        PromptError: the file is missing or not what its name says, the text is not UTF-8, the prompt is empty, longer
            than the model takes, has an id outside of the vocabulary, or is text for a model without tokenizer.json.
        ModelError: the model's config is missing, or its config or tokenizer.json is unusable.
    """
    config = read_config(model_dir)
    label = _label(source)
    found = read_source(source)
    ids = np.asarray(_ids_from_text(found, label, model_dir), dtype=np.int64) if isinstance(found, bytes) else found
    check_prompt(ids, config, label=label)
    return ids.astype(np.int64)


def read_source(source: str | Path) -> bytes | np.ndarray:
    """What a prompt's file (or "-", standard input) holds: UTF-8 text, not looked at yet, or token ids [T].

    Raises:
        PromptError: the file is missing or not what its name says.
    """
    path, label = Path(source), _label(source)
    is_file = str(source) != STDIN
    if is_file and path.suffix == ".npy":
        return _ids_from_npy(path)
    data = _file_bytes(path) if is_file else sys.stdin.buffer.read()
    if is_file and path.suffix == ".json":
        return _ids_from_json(data, label)
    if (is_file and path.suffix == ".ids") or _is_all_ids(data):
        return _ids_from_lines(data, label)
    return data


def _label(source: str | Path) -> str:
    return "standard input" if str(source) == STDIN else str(source)


def check_prompt(ids: np.ndarray | Sequence[int], config: ModelConfig, *, label: str = "prompt") -> None:
    """Raise unless the model can take these ids.

    Raises:
        PromptError: no id, too many, or one outside of the vocabulary.
    """
    ids = np.asarray(ids)
    if ids.size == 0:
        raise PromptError(f"{label} is empty: give at least one token")
    if ids.size > config.max_tokens:
        raise PromptError(f"{label} has {ids.size} tokens: this model takes at most {config.max_tokens}")
    outside = np.flatnonzero((ids < 0) | (ids >= config.vocab_size))
    if outside.size:
        position = int(outside[0])
        raise PromptError(
            f"{label}: token {int(ids[position])} at position {position} is outside of the vocabulary: "
            f"ids go from 0 to {config.vocab_size - 1} (vocab_size={config.vocab_size})"
        )


def _file_bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        raise PromptError(f"prompt file {path} does not exist: give a file, or - for standard input") from None
    except OSError as error:
        raise PromptError(f"prompt file {path} cannot be read: {error.strerror}") from error


def _ids_from_text(data: bytes, label: str, model_dir: str | Path) -> list[int]:
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise PromptError(
            f"{label} is not UTF-8 text: byte 0x{data[error.start]:02x} at offset {error.start}: "
            "convert it, or give token ids as .npy, .json or .ids"
        ) from None
    if not text:
        return []
    tokenizer_file = Path(model_dir) / "tokenizer.json"
    if not tokenizer_file.is_file():
        raise PromptError(
            f"{label} is text and {tokenizer_file} is missing: add it, or give token ids (.npy, .json, .ids)"
        )
    return Tokenizer(model_dir).encode(text)


def _ids_from_npy(path: Path) -> np.ndarray:
    try:
        ids = np.load(path, mmap_mode="r", allow_pickle=False)
    except FileNotFoundError:
        raise PromptError(f"prompt file {path} does not exist: give a file, or - for standard input") from None
    except (ValueError, EOFError, OSError) as error:
        raise PromptError(f"{path} is not a .npy array: {error}") from None
    if not isinstance(ids, np.ndarray) or ids.ndim != 1 or ids.dtype.kind not in "iu":
        shape = getattr(ids, "shape", None)
        raise PromptError(
            f"{path} holds dtype {getattr(ids, 'dtype', None)} and shape {shape}: "
            "a prompt has one dimension of integers"
        )
    return ids


def _ids_from_json(data: bytes, label: str) -> np.ndarray:
    try:
        values = json.loads(data)
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise PromptError(f"{label} is not valid JSON: {error}") from None
    if not isinstance(values, list):
        raise PromptError(f"{label} holds a {type(values).__name__}: a .json prompt is a list of token ids")
    for position, value in enumerate(values):
        if type(value) is not int:
            raise PromptError(f"{label}: {value!r} at position {position} is not a token id: it must be an integer")
    return _as_ids(values)


def _is_all_ids(data: bytes) -> bool:
    """Is there a line, and is every line an integer?"""
    if data.translate(None, ID_LINE_BYTES):
        return False
    lines = data.removesuffix(b"\n").split(b"\n")
    return all(_is_integer(line) for line in lines)


def _is_integer(line: bytes) -> bool:
    digits = line.strip()
    return (digits[1:] if digits[:1] in (b"+", b"-") else digits).isdigit()


def _ids_from_lines(data: bytes, label: str) -> np.ndarray:
    values = []
    for number, line in enumerate(data.splitlines(), start=1):
        if not line.strip():
            continue
        if not _is_integer(line):
            raise PromptError(f"{label}: line {number} is {line[:40]!r}: an .ids file has one token id a line")
        values.append(int(line))
    return _as_ids(values)


def _as_ids(values: list[int]) -> np.ndarray:
    """int64, with numbers beyond it held at its ends (they are outside of every vocabulary and get reported)."""
    limits = np.iinfo(np.int64)
    return np.asarray([min(max(value, limits.min), limits.max) for value in values], dtype=np.int64)
