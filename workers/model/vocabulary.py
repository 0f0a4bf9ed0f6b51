"""A real byte-level BPE tokenizer, trained without a network on text that ships with Python. Torch-free.

The same Python and tokenizers release give the same file byte for byte.
"""

from __future__ import annotations

import ast
import importlib.util
import os
from collections.abc import Iterator
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from longprefill.partition.errors import ModelError

BOS_TOKEN, EOS_TOKEN = "<|bos|>", "<|eos|>"
BOS_ID, EOS_ID = 0, 1
MIN_VOCAB = 2 + 256
"""The special tokens and every byte."""
DOCUMENTED_MODULES = (
    "argparse", "ast", "asyncio.events", "bisect", "calendar", "collections", "concurrent.futures._base",
    "configparser", "copy", "csv", "dataclasses", "datetime", "decimal", "difflib", "doctest", "email.message",
    "enum", "fractions", "functools", "gettext", "heapq", "http.client", "inspect", "ipaddress", "json.encoder",
    "logging", "mailbox", "multiprocessing.managers", "optparse", "pathlib", "pickle", "pprint", "random", "shutil",
    "socket", "statistics", "string", "subprocess", "tarfile", "tempfile", "textwrap", "threading", "tokenize",
    "turtle", "typing", "unittest.case", "unittest.mock", "urllib.parse", "urllib.request", "uuid",
    "xml.dom.minidom", "zipfile",
)  # fmt: skip


def train_tokenizer(vocab_size: int) -> Tokenizer:
    """A tokenizer of exactly `vocab_size` tokens: <|bos|> is 0, <|eos|> is 1, then the bytes and the merges.

    Raises:
        ModelError: fewer tokens than bytes, or more than the text has merges for.
    """
    if vocab_size < MIN_VOCAB:
        raise ModelError(
            f"vocab_size={vocab_size} is too small for a byte-level tokenizer: it must be at least {MIN_VOCAB}"
        )
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[BOS_TOKEN, EOS_TOKEN],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    tokenizer.train_from_iterator(python_documentation(), trainer=trainer)
    trained = tokenizer.get_vocab_size()
    if trained != vocab_size:
        raise ModelError(f"vocab_size={vocab_size} is more than the training text gives: use {trained} or fewer")
    return tokenizer


def python_documentation() -> Iterator[str]:
    """The pydoc topics, then the docstrings of some standard modules, each a document."""
    yield from _string_values(_source("pydoc_data.topics"))
    for module in DOCUMENTED_MODULES:
        for node in ast.walk(_source(module)):
            if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
                text = ast.get_docstring(node)
                if text:
                    yield text


def _source(module: str) -> ast.Module:
    spec = importlib.util.find_spec(module)
    if spec is None or spec.origin is None:
        raise ModelError(
            f"this Python has no module {module}: use a complete Python, the tokenizer is trained on its texts"
        )
    return ast.parse(Path(spec.origin).read_bytes())


def _string_values(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Dict):
            for value in node.values:
                if isinstance(value, ast.Constant) and isinstance(value.value, str):
                    yield value.value
