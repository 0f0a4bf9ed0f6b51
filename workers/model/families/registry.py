"""The table of families, and the way from a model directory to a `ModelConfig`. Torch-free."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from longprefill.partition.errors import ModelError
from longprefill.workers.model.config import ModelConfig
from longprefill.workers.model.families import (
    deepseek_v32,
    glm5_next,
    glm_moe_dsa,
    kimi_linear,
    longprefill_hybrid,
)
from longprefill.workers.model.families.base import Family
from longprefill.workers.model.families.fields import Fields

FAMILIES: dict[str, Family] = {
    family.model_type: family
    for family in (
        deepseek_v32.FAMILY,
        glm5_next.FAMILY,
        glm5_next.TEXT_FAMILY,
        glm_moe_dsa.FAMILY,
        kimi_linear.FAMILY,
        longprefill_hybrid.FAMILY,
    )
}


def family_named(model_type: object) -> Family:
    """The family of a `model_type`.

    Raises:
        ModelError: there is none of that name.
    """
    if not isinstance(model_type, str) or model_type not in FAMILIES:
        known = ", ".join(sorted(FAMILIES))
        raise ModelError(f"config.json: model_type={model_type!r} is not supported: known are {known}")
    return FAMILIES[model_type]


def config_from(raw: Mapping[str, Any]) -> ModelConfig:
    """The model that a parsed config.json describes.

    Raises:
        ModelError: unknown `model_type`, a missing field, or a value out of range.
    """
    return family_named(raw.get("model_type")).read_config(raw)


def read_config(model_dir: str | Path) -> ModelConfig:
    """The model in a directory: config.json, and `eos_token_id` of generation_config.json where there is one.

    Raises:
        ModelError: the directory or its config.json is missing, unreadable or not supported.
    """
    directory = Path(model_dir)
    if not directory.is_dir():
        raise ModelError(f"model directory {directory} does not exist: it must hold config.json and *.safetensors")
    config = config_from(read_object(directory / "config.json"))
    generation = directory / "generation_config.json"
    if not generation.exists():
        return config
    fields = Fields(read_object(generation))
    eos_token_ids = fields.token_ids("eos_token_id", vocab_size=config.vocab_size)
    return dataclasses.replace(config, eos_token_ids=eos_token_ids) if eos_token_ids else config


def read_object(path: Path) -> dict[str, Any]:
    """The JSON object in a file.

    Raises:
        ModelError: no such file, not UTF-8 JSON, or not an object.
    """
    try:
        value = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise ModelError(f"{path} is missing: a model directory needs it") from None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ModelError(f"{path} is not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise ModelError(f"{path} holds a {type(value).__name__}: it must be a JSON object")
    return value
