"""Writes trained weights as a published model directory: config.json, bf16 weights, a tokenizer whose ids are bytes."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from longprefill.workers.model.checkpoint import published_form, save_tensors, save_tokenizer, write_json
from longprefill.workers.model.families.registry import config_from, family_named
from longprefill.workers.model.vocabulary import BOS_TOKEN, EOS_TOKEN
from longprefill.workers.model.weights import parameter_dtype

from .curriculum import raw_config
from .data import BOS_ID, EOS_ID


def export(weights: Path, num_blocks: int, directory: Path) -> None:
    """Writes or overwrites the directory's model files; other files in it stay."""
    directory.mkdir(parents=True, exist_ok=True)
    raw = raw_config(num_blocks) | {"dtype": "bfloat16"}
    config = config_from(raw)
    write_json(directory / "config.json", raw)
    save_tokenizer(directory, byte_tokenizer())
    parameters = load_file(weights)
    tensors: dict[str, torch.Tensor] = {}
    for parameter, location in family_named(config.family).locate(config).items():
        value = parameters[parameter].to(parameter_dtype(parameter, torch.bfloat16))
        for part in location.alternatives[0]:
            tensors[part.names[0]] = published_form(part, value, config)
    save_tensors(tensors, directory / "model.safetensors")


def byte_tokenizer() -> Tokenizer:
    """Id n is byte n; then the two special tokens."""
    spelling = _byte_spellings()
    vocabulary = {spelling[byte]: byte for byte in range(256)}
    vocabulary |= {BOS_TOKEN: BOS_ID, EOS_TOKEN: EOS_ID}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([BOS_TOKEN, EOS_TOKEN])
    return tokenizer


def _byte_spellings() -> list[str]:
    """How byte-level tokenizers spell each byte: printable ones as themselves, the others from U+0100 on."""
    printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = (chr(0x100 + number) for number in range(256))
    return [chr(byte) if byte in printable else next(others) for byte in range(256)]
