"""A copy of an FP8 checkpoint in fp32, for readers that cannot multiply codes by their scales on this machine."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from longprefill.partition.errors import ModelError
from longprefill.workers.model.families.registry import read_object
from longprefill.workers.model.pieces import SCALE_SUFFIX
from longprefill.workers.model.stored import INDEX_NAME, read_stored_tensors
from longprefill.workers.model.weights import dequantize_block


def write_dequantized(model_dir: Path, target: Path, fp8_block: tuple[int, int]) -> None:
    """Writes config.json without its quantization and every weight file with FP8 tensors as fp32. Files are read one at
    a time; tensors keep their names.

    Raises:
        ModelError: the directory cannot be read, or an FP8 tensor has no scales.
    """
    stored = read_stored_tensors(model_dir)
    raw = read_object(model_dir / "config.json")
    raw.pop("quantization_config", None)
    if isinstance(raw.get("text_config"), dict):
        raw["text_config"].pop("quantization_config", None)
    (target / "config.json").write_text(json.dumps(raw))
    weight_map: dict[str, str] = {}
    for path in sorted({tensor.path for tensor in stored.values()}):
        tensors: dict[str, torch.Tensor] = {}
        for name, value in load_file(path).items():
            if name.endswith(SCALE_SUFFIX):
                continue
            if value.dtype == torch.float8_e4m3fn:
                scales = stored.get(name + SCALE_SUFFIX)
                if scales is None:
                    raise ModelError(
                        f"{path}: {name} is FP8 and there is no {name + SCALE_SUFFIX}: copy the model again"
                    )
                factors = load_file(scales.path)[name + SCALE_SUFFIX].float()
                ranges = [slice(0, size) for size in value.shape]
                value = dequantize_block(value, factors, ranges, fp8_block)
            tensors[name] = value.contiguous()
        weight_map |= dict.fromkeys(tensors, path.name)
        save_file(tensors, target / path.name, metadata={"format": "pt"})
    if (model_dir / INDEX_NAME).exists():
        (target / INDEX_NAME).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
