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
from longprefill.workers.model.families.base import Alternative, Location, Part
from longprefill.workers.model.families.registry import family_named
from longprefill.workers.model.parameters import Shape
from longprefill.workers.model.stored import StoredTensor, read_stored_tensors

LOADABLE_DTYPES = ("BF16", "F16", "F32", "F64")
UNUSED_SUFFIXES = ("rotary_emb.inv_freq",)
"""Stored buffers that follow from the config."""


class Piece(NamedTuple):
    """A part of a canonical parameter and the stored tensor that holds it."""

    parameter: str
    part: Part
    name: str
    """Of the stored tensor."""
    stored: StoredTensor


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
    locations = family_named(config.family).locate(config)
    pieces: list[Piece] = []
    for parameter, location in locations.items():
        found = _find(model_dir, parameter, location, stored)
        assert sum(piece.part.shape[0] for piece in found) == _num_rows(location.shape, found)
        pieces += found
    _refuse_unknown(config, locations, stored)
    return pieces


def _num_rows(shape: Shape, pieces: Sequence[Piece]) -> int:
    """Rows that the pieces of a parameter must fill together."""
    return shape[0] if pieces[0].part.expert is None else shape[0] * shape[1]


def _find(model_dir: str | Path, parameter: str, location: Location, stored: dict[str, StoredTensor]) -> list[Piece]:
    missing: list[Part] = []
    for alternative in location.alternatives:
        pieces = [_piece(parameter, part, stored) for part in alternative]
        if None not in pieces:
            complete = [piece for piece in pieces if piece is not None]
            for piece in complete:
                _check_piece(piece)
            return complete
        missing.append(_most_telling(alternative, pieces))
    tried = "; or ".join(" or ".join(part.names) for part in missing)
    raise ModelError(f"{model_dir}: parameter {parameter} is missing: the checkpoint has no tensor {tried}")


def _most_telling(alternative: Alternative, pieces: Sequence[Piece | None]) -> Part:
    """The first part without a tensor."""
    return next(part for part, piece in zip(alternative, pieces, strict=True) if piece is None)


def _piece(parameter: str, part: Part, stored: dict[str, StoredTensor]) -> Piece | None:
    for name in part.names:
        for spelling in (name, name.removeprefix("model.")):
            if spelling in stored:
                return Piece(parameter, part, spelling, stored[spelling])
    return None


def _check_piece(piece: Piece) -> None:
    path, dtype, shape = piece.stored
    if dtype not in LOADABLE_DTYPES:
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


def _refuse_unknown(config: ModelConfig, locations: dict[str, Location], stored: dict[str, StoredTensor]) -> None:
    """A tensor that no parameter reads (a bias, say) means other maths than ours: refuse it. Layers beyond the model's
    (multi-token prediction) and tied heads are left alone.
    """
    known = {
        spelling
        for location in locations.values()
        for alternative in location.alternatives
        for part in alternative
        for name in part.names
        for spelling in (name, name.removeprefix("model."))
    }
    for name, tensor in stored.items():
        if name in known or name.endswith(UNUSED_SUFFIXES) or (config.tie_embeddings and name == "lm_head.weight"):
            continue
        words = name.removeprefix("model.").split(".")
        if words[0] == "layers" and words[1].isdigit() and int(words[1]) >= len(config.layers):
            continue
        raise ModelError(
            f"{tensor.path}: tensor {name} {list(tensor.shape)} is unknown to family {config.family}: "
            "this checkpoint has a part that the family lacks"
        )
