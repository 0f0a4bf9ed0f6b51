"""Which stored tensor holds which part of which parameter, all of them checked against the files' headers.

Torch-free, so that a damaged checkpoint is refused before anything heavy starts.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from longprefill.partition.errors import ModelError
from longprefill.workers.model.config import ModelConfig
from longprefill.workers.model.families.base import Alternative, Family, Location, Part
from longprefill.workers.model.families.registry import family_named
from longprefill.workers.model.parameters import Shape
from longprefill.workers.model.stored import StoredTensor, read_stored_tensors

LOADABLE_DTYPES = ("BF16", "F16", "F32", "F64")
FP8_DTYPE = "F8_E4M3"
SCALE_DTYPES = ("F32", "BF16", "F16")
SCALE_SUFFIX = "_scale_inv"
"""Of the tensor that holds an FP8 tensor's scales: what its blocks are multiplied by."""
UNUSED_SUFFIXES = ("rotary_emb.inv_freq",)
"""Stored buffers that follow from the config."""


class Piece(NamedTuple):
    """A part of a canonical parameter and the stored tensor that holds it."""

    parameter: str
    part: Part
    name: str
    """Of the stored tensor."""
    stored: StoredTensor
    scales: StoredTensor | None = None
    """With FP8: the tensor `name` + SCALE_SUFFIX."""


def check_weights(model_dir: str | Path, config: ModelConfig) -> None:
    """Raise unless every parameter is there with its shape. Reads headers only.

    Raises:
        ModelError: a file is missing, truncated or corrupt; a tensor is missing, misshapen, quantized, or one that the
            family does not know.
    """
    locate_pieces(model_dir, config)


def locate_pieces(model_dir: str | Path, config: ModelConfig) -> list[Piece]:
    """The stored tensor of every part of every parameter, all of them checked against the headers.

    Raises:
        ModelError: as `check_weights`.
    """
    stored = read_stored_tensors(model_dir)
    family = family_named(config.family)
    locations = family.locate(config)
    pieces: list[Piece] = []
    for parameter, location in locations.items():
        found = _find(model_dir, parameter, location, stored, family)
        for piece in found:
            _check_piece(piece, config)
        assert sum(piece.part.shape[0] for piece in found) == _num_rows(location.shape, found)
        pieces += found
    _refuse_unknown(config, family, locations, stored)
    return pieces


def _num_rows(shape: Shape, pieces: Sequence[Piece]) -> int:
    """Rows that the pieces of a parameter must fill together."""
    return shape[0] if pieces[0].part.expert is None else shape[0] * shape[1]


def _find(
    model_dir: str | Path, parameter: str, location: Location, stored: dict[str, StoredTensor], family: Family
) -> list[Piece]:
    missing: list[Part] = []
    for alternative in location.alternatives:
        pieces = [_piece(parameter, part, stored, family) for part in alternative]
        if None not in pieces:
            return [piece for piece in pieces if piece is not None]
        missing.append(_most_telling(alternative, pieces))
    tried = "; or ".join(" or ".join(family.spellings(name)[0] for name in part.names) for part in missing)
    raise ModelError(f"{model_dir}: parameter {parameter} is missing: the checkpoint has no tensor {tried}")


def _most_telling(alternative: Alternative, pieces: Sequence[Piece | None]) -> Part:
    """The first part without a tensor."""
    return next(part for part, piece in zip(alternative, pieces, strict=True) if piece is None)


def _piece(parameter: str, part: Part, stored: dict[str, StoredTensor], family: Family) -> Piece | None:
    for name in part.names:
        for spelling in family.spellings(name):
            if spelling in stored:
                scales = stored.get(spelling + SCALE_SUFFIX) if stored[spelling].dtype == FP8_DTYPE else None
                return Piece(parameter, part, spelling, stored[spelling], scales)
    return None


def _check_piece(piece: Piece, config: ModelConfig) -> None:
    path, dtype, shape = piece.stored
    if dtype == FP8_DTYPE:
        _check_scales(piece, config)
    elif dtype not in LOADABLE_DTYPES:
        allowed = ", ".join(LOADABLE_DTYPES)
        raise ModelError(
            f"{path}: tensor {piece.name} has dtype {dtype}: it must be one of {allowed}: give the bf16 model"
        )
    have, need = ([size for size in sizes if size != 1] for sizes in (shape, piece.part.shape))
    if piece.part.can_be_longer and math.prod(shape) >= math.prod(piece.part.shape) and len(have) <= 1:
        return
    if have != need:
        raise ModelError(
            f"{path}: tensor {piece.name} has shape {list(shape)}, and {piece.parameter} needs "
            f"{list(piece.part.shape)}: config.json and weights do not belong together"
        )


def _check_scales(piece: Piece, config: ModelConfig) -> None:
    """An FP8 tensor needs one scale a block; leading dimensions (fused experts) have their own."""
    path, _, shape = piece.stored
    if config.fp8_block is None:
        raise ModelError(
            f"{path}: tensor {piece.name} has dtype {FP8_DTYPE}, and config.json no quantization_config that says "
            "how it is scaled: give the bf16 model"
        )
    if piece.scales is None:
        missing = piece.name + SCALE_SUFFIX
        raise ModelError(f"{path}: tensor {piece.name} has dtype {FP8_DTYPE} and its scales {missing} are missing")
    if len(shape) < 2:
        raise ModelError(f"{path}: tensor {piece.name} {list(shape)} has dtype {FP8_DTYPE}: only matrices can")
    blocks = [-(-size // extent) for size, extent in zip(shape[-2:], config.fp8_block, strict=True)]
    need = (*shape[:-2], *blocks)
    if piece.scales.shape != need or piece.scales.dtype not in SCALE_DTYPES:
        raise ModelError(
            f"{piece.scales.path}: tensor {piece.name}{SCALE_SUFFIX} is {piece.scales.dtype} "
            f"{list(piece.scales.shape)}: it must be {' or '.join(SCALE_DTYPES)} {list(need)}, "
            f"one number for each block of {config.fp8_block[0]} x {config.fp8_block[1]}"
        )


def _refuse_unknown(
    config: ModelConfig, family: Family, locations: dict[str, Location], stored: dict[str, StoredTensor]
) -> None:
    """A tensor that no parameter reads (a bias, say) means other maths than ours: refuse it. Layers beyond the model's
    (multi-token prediction) and tied heads are left alone.
    """
    known = {
        spelling
        for location in locations.values()
        for alternative in location.alternatives
        for part in alternative
        for name in part.names
        for spelling in family.spellings(name)
    }
    known |= {name + SCALE_SUFFIX for name in known if name in stored and stored[name].dtype == FP8_DTYPE}
    for name, tensor in stored.items():
        if name.startswith(family.foreign_prefixes):
            continue
        if name in known or name.endswith(UNUSED_SUFFIXES) or (config.tie_embeddings and name == "lm_head.weight"):
            continue
        if _is_beyond_last_layer(name, config, family):
            continue
        raise ModelError(
            f"{tensor.path}: tensor {name} {list(tensor.shape)} is unknown to family {config.family}: "
            "this checkpoint has a part that the family lacks"
        )


def _is_beyond_last_layer(name: str, config: ModelConfig, family: Family) -> bool:
    for prefix in family.body_prefixes:
        words = name.removeprefix(prefix).split(".") if name.startswith(prefix) else []
        if len(words) > 1 and words[0] == "layers" and words[1].isdigit():
            return int(words[1]) >= len(config.layers)
    return False
