"""Make model directories with seeded random weights, as published ones look: config, safetensors, index, tokenizer.

For tests, the quickstart and benchmarks. Directories of one seed are equal byte for byte (same Python, torch and
tokenizers). `initial.py` says how the weights are drawn.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer

from longprefill.partition.errors import ModelError
from longprefill.workers.model.config import ModelConfig
from longprefill.workers.model.families.base import Family, Location, Part
from longprefill.workers.model.families.registry import config_from, family_named
from longprefill.workers.model.initial import initial_parameter
from longprefill.workers.model.parameters import FP32_PARAMETERS
from longprefill.workers.model.pieces import SCALE_SUFFIX
from longprefill.workers.model.sizes import RAW_CONFIGS
from longprefill.workers.model.stored import INDEX_NAME
from longprefill.workers.model.vocabulary import BOS_TOKEN, EOS_TOKEN, train_tokenizer
from longprefill.workers.model.weights import parameter_dtype

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32, "fp8": torch.bfloat16}
"""Of what is not FP8."""
FP8_BLOCK = (128, 128)
FP8_MAX = 448.0
SMALLEST_SCALE = 1e-12
UNQUANTIZED = ("embed", "head", "moe.gate", "indexer.weights_proj", "indexer.pool_gate", "kda.conv")
"""Ends of matrices that published FP8 checkpoints keep in bf16, besides all that stay fp32."""
FILES_OF_SIZE = {"tiny": 1, "mesh": 1, "small": 2, "bench": 2, "peer": 1}
DEAD_HEAD_A_LOG = 9.0
"""Stored for heads that are not live: a reader that takes the wrong ones forgets everything at once."""


def make_checkpoint(
    family: str, size: str, directory: str | Path, *, seed: int = 0, dtype: str = "bf16",
    fields: Mapping[str, Any] | None = None,
) -> ModelConfig:  # fmt: skip
    """Write the named model with its tokenizer into a new or empty directory; `fields` change its config.json, see
    `with_fields`.

    Raises:
        ModelError: unknown family, size or dtype, a field that changes nothing or that the family refuses, or a
            directory that holds something.
    """
    if (family, size) not in RAW_CONFIGS:
        known = ", ".join(f"{name} {word}" for name, word in RAW_CONFIGS)
        raise ModelError(f"there is no model {family} {size}: known are {known}")
    if dtype not in DTYPES:
        raise ModelError(f"dtype={dtype!r} is not supported: use one of {', '.join(DTYPES)}")
    raw = with_fields(RAW_CONFIGS[family, size], fields or {})
    fp8_block = FP8_BLOCK if dtype == "fp8" else None
    config = write_checkpoint(directory, raw, seed, DTYPES[dtype], num_files=FILES_OF_SIZE[size], fp8_block=fp8_block)
    write_tokenizer(Path(directory), config.vocab_size)
    return config


def with_fields(raw: Mapping[str, Any], fields: Mapping[str, Any]) -> dict[str, Any]:
    """A raw config with changed fields, in `text_config` where there is one and the field is not beside it; an object
    changes the fields inside.

    Raises:
        ModelError: a field changes nothing of the model, or the family refuses it.
    """
    changed = _merged(raw, fields)
    config = config_from(changed)
    for name, value in fields.items():
        others = _merged(raw, {key: kept for key, kept in fields.items() if key != name})
        if _is_same(others, config):
            raise ModelError(f"{name}={json.dumps(value)} changes nothing of this model: check its name and value")
    return changed


def _is_same(raw: Mapping[str, Any], config: ModelConfig) -> bool:
    try:
        return config_from(raw) == config
    except ModelError:
        return False


def _merged(raw: Mapping[str, Any], fields: Mapping[str, Any]) -> dict[str, Any]:
    changed = dict(raw)
    for name, value in fields.items():
        is_inside = "text_config" in raw and name not in raw
        owner = dict(changed["text_config"]) if is_inside else changed
        before = owner.get(name)
        owner[name] = before | value if isinstance(value, dict) and isinstance(before, dict) else value
        if is_inside:
            changed["text_config"] = owner
    return changed


def write_checkpoint(
    directory: str | Path, raw_config: Mapping[str, Any], seed: int, dtype: torch.dtype, *, num_files: int = 1,
    fp8_block: tuple[int, int] | None = None,
) -> ModelConfig:  # fmt: skip
    """Write config.json, generation_config.json and the weights (no tokenizer) of any config that a family reads; with
    `fp8_block` its matrices in FP8 with one scale for so many rows and columns.

    Raises:
        ModelError: the config is not allowed, or the directory holds something.
    """
    raw = {**raw_config, "dtype": str(dtype).removeprefix("torch.")}
    if fp8_block is not None:
        raw["quantization_config"] = {
            "activation_scheme": "dynamic",
            "fmt": "e4m3",
            "quant_method": "fp8",
            "weight_block_size": list(fp8_block),
        }
    config = config_from(raw)
    target = Path(directory)
    target.mkdir(parents=True, exist_ok=True)
    if any(target.iterdir()):
        raise ModelError(f"{target} is not empty: give a new directory")
    write_json(target / "config.json", raw)
    write_json(target / "generation_config.json", {name: raw.get(name) for name in ("bos_token_id", "eos_token_id")})
    family = family_named(config.family)
    locations = family.locate(config)
    stored_heads = raw_config.get("linear_attn_config", {}).get("num_stored_heads")
    tensors = _published_tensors(config, family, locations, seed, dtype, stored_heads)
    _write_files(target, tensors, _published_bytes(locations, dtype), num_files)
    return config


def write_tokenizer(directory: Path, vocab_size: int) -> None:
    """A tokenizer that is trained for so many tokens."""
    save_tokenizer(directory, train_tokenizer(vocab_size))


def save_tokenizer(directory: Path, tokenizer: Tokenizer) -> None:
    """tokenizer.json and the few words that transformers needs beside it."""
    tokenizer.save(str(directory / "tokenizer.json"))
    words = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": BOS_TOKEN, "eos_token": EOS_TOKEN}
    write_json(directory / "tokenizer_config.json", words)


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """One object, with sorted keys."""
    path.write_text(json.dumps(value, indent=2, sort_keys=True) + "\n")


def _published_tensors(
    config: ModelConfig, family: Family, locations: dict[str, Location], seed: int, dtype: torch.dtype,
    stored_heads: int | None,
) -> Iterator[tuple[str, torch.Tensor]]:  # fmt: skip
    """(published name, tensor) in load order, one canonical parameter alive at a time."""
    for parameter, location in locations.items():
        value = initial_parameter(parameter, location.shape, config, seed)
        if parameter.endswith("kda.a_log") and stored_heads is not None:
            value = torch.cat([value, torch.full((stored_heads - value.numel(),), DEAD_HEAD_A_LOG)])
        value = value.to(parameter_dtype(parameter, dtype))
        for part in location.alternatives[0]:
            name, tensor = family.spellings(part.names[0])[0], published_form(part, value, config)
            if config.fp8_block is None or not _is_quantized(parameter, tensor):
                yield name, tensor
            else:
                codes, scales = quantize_fp8(tensor, config.fp8_block)
                yield name, codes
                yield name + SCALE_SUFFIX, scales


def _is_quantized(parameter: str, tensor: torch.Tensor) -> bool:
    return tensor.dim() == 2 and not parameter.endswith((*UNQUANTIZED, *FP32_PARAMETERS))


def quantize_fp8(matrix_RC: torch.Tensor, fp8_block: tuple[int, int]) -> tuple[torch.Tensor, torch.Tensor]:
    """(e4m3 codes [R, C], fp32 scales, one a block): a block's largest number becomes the largest code. Blocks at the
    end may be ragged."""
    rows, columns = (torch.arange(size) // extent for size, extent in zip(matrix_RC.shape, fp8_block, strict=True))
    num_blocks = int(rows[-1]) + 1, int(columns[-1]) + 1
    block_RC = rows[:, None] * num_blocks[1] + columns
    largest = torch.zeros(num_blocks[0] * num_blocks[1])
    largest.scatter_reduce_(0, block_RC.flatten(), matrix_RC.float().abs().flatten(), "amax")
    scales = (largest / FP8_MAX).clamp_min(SMALLEST_SCALE)
    codes_RC = (matrix_RC.float() / scales[block_RC]).clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn)
    return codes_RC, scales.view(num_blocks)


def published_form(part: Part, value: torch.Tensor, config: ModelConfig) -> torch.Tensor:
    """The part's rows in the shape that published checkpoints store."""
    if part.can_be_longer:
        return value.reshape(1, 1, -1, 1) if config.family == "kimi_linear" else value
    rows = value if part.expert is None else value[part.expert]
    rows = rows[part.row : part.row + part.shape[0]]
    if part.names[0].endswith("conv1d.weight"):
        rows = rows.unsqueeze(1)
    return rows.clone(memory_format=torch.contiguous_format)


def save_tensors(tensors: dict[str, torch.Tensor], path: Path) -> None:
    """One file as published ones are."""
    save_file(tensors, path, metadata={"format": "pt"})
    path.chmod(0o644)  # safetensors makes files that only their owner can read


def _published_bytes(locations: dict[str, Location], dtype: torch.dtype) -> int:
    return sum(
        math.prod(location.shape) * parameter_dtype(name, dtype).itemsize for name, location in locations.items()
    )


def _write_files(
    directory: Path, tensors: Iterator[tuple[str, torch.Tensor]], total_bytes: int, num_files: int
) -> None:
    """Cut the stream of tensors into files of about equal bytes; an index where there is more than one."""
    file_names = [f"model-{number:05d}-of-{num_files:05d}.safetensors" for number in range(1, num_files + 1)]
    if num_files == 1:
        file_names = ["model.safetensors"]
    weight_map: dict[str, str] = {}
    batch: dict[str, torch.Tensor] = {}
    written = 0
    for name, tensor in tensors:
        batch[name] = tensor
        written += tensor.numel() * tensor.element_size()
        weight_map[name] = file_names[0]
        if len(file_names) > 1 and written >= total_bytes * (num_files - len(file_names) + 1) / num_files:
            save_tensors(batch, directory / file_names.pop(0))
            batch = {}
    save_tensors(batch, directory / file_names[0])
    if num_files > 1:
        index = {"metadata": {"total_size": written}, "weight_map": weight_map}
        write_json(directory / INDEX_NAME, index)
