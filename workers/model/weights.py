"""From a model directory to canonical tensors, in slabs: the peak is the result and one slab.

`check_weights` reads headers only and is meant to run before anything heavy starts; `load_weights` checks the same.
Every read names a range in each dimension (`read_block`), so that a rank can read its share of rows or columns.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import safe_open

from longprefill.partition.errors import ModelError
from longprefill.workers.model.config import ModelConfig
from longprefill.workers.model.families.base import Alternative, Location, Part
from longprefill.workers.model.families.registry import family_named
from longprefill.workers.model.parameters import FP32_PARAMETERS, Shape, parameter_shapes
from longprefill.workers.model.stored import StoredTensor, fingerprint, read_stored_tensors

__all__ = ["Piece", "TensorReader", "check_weights", "fingerprint", "load_weights", "parameter_dtype", "weights_bytes"]

LOADABLE_DTYPES = ("BF16", "F16", "F32", "F64")
SLAB_BYTES = 64 << 20
REOPEN_BYTES = 64 << 20
"""Pages of a mapped file count as resident until the file is closed, so it is reopened after this much."""
UNUSED_SUFFIXES = ("rotary_emb.inv_freq",)
"""Stored buffers that follow from the config."""


class Piece(NamedTuple):
    """A part of a canonical parameter and the stored tensor that holds it."""

    parameter: str
    part: Part
    name: str
    """Of the stored tensor."""
    stored: StoredTensor


def parameter_dtype(name: str, dtype: torch.dtype) -> torch.dtype:
    """The dtype of a canonical parameter in a model of this compute dtype."""
    return torch.float32 if name.endswith(FP32_PARAMETERS) else dtype


def weights_bytes(config: ModelConfig, dtype: torch.dtype) -> int:
    """Bytes of all parameters as `load_weights` returns them."""
    shapes = parameter_shapes(config)
    return sum(math.prod(shape) * parameter_dtype(name, dtype).itemsize for name, shape in shapes.items())


def check_weights(model_dir: str | Path, config: ModelConfig) -> None:
    """Raise unless every parameter is there with its shape. Reads headers only.

    Raises:
        ModelError: a file is missing, truncated or corrupt; a tensor is missing, misshapen, quantized, or one that the
            family does not know.
    """
    _locate_pieces(model_dir, config)


def load_weights(
    model_dir: str | Path, config: ModelConfig, *, dtype: torch.dtype, device: torch.device | str = "cpu"
) -> dict[str, torch.Tensor]:
    """All parameters by canonical name, in the order of `parameter_shapes`; those of FP32_PARAMETERS stay fp32.

    Raises:
        ModelError: as `check_weights`.
    """
    pieces = _locate_pieces(model_dir, config)
    weights = {
        name: torch.empty(shape, dtype=parameter_dtype(name, dtype), device=device)
        for name, shape in parameter_shapes(config).items()
    }
    with TensorReader() as reader:
        for piece in sorted(pieces, key=lambda piece: piece.stored.path):
            target = weights[piece.parameter]
            if piece.part.expert is not None:
                target = target[piece.part.expert]
            for rows in _slabs(piece.part.shape):
                first = piece.part.row + rows.start
                block = (rows, *(slice(0, size) for size in piece.part.shape[1:]))
                target[first : first + rows.stop - rows.start].copy_(reader.read_block(piece, block))
    return weights


class TensorReader:
    """Reads blocks of stored tensors, one open file at a time. A context manager; one thread."""

    def __init__(self) -> None:
        self._path: Path | None = None
        self._file: Any = None
        self._handle: Any = None
        self._bytes_read = 0

    def __enter__(self) -> TensorReader:
        return self

    def __exit__(self, *_: object) -> None:
        self._close()

    def read_block(self, piece: Piece, block: Sequence[slice]) -> torch.Tensor:
        """A range of every dimension of the piece (as `piece.part.shape` counts them), in the stored dtype. The result
        may view the mapped file: copy it before the next call.

        Raises:
            ModelError: the file vanished or changed since its header was read.
        """
        try:
            self._open(piece.stored.path)
            stored = self._handle.get_slice(piece.name)[_stored_block(piece.stored.shape, piece.part.shape, block)]
        except (OSError, RuntimeError, ValueError) as error:
            raise ModelError(f"{piece.stored.path} cannot be read: tensor {piece.name}: {error}") from error
        self._bytes_read += stored.numel() * stored.element_size()
        return stored.reshape([rows.stop - rows.start for rows in block])

    def _open(self, path: Path) -> None:
        if path == self._path and self._bytes_read < REOPEN_BYTES:
            return
        self._close()
        self._file = safe_open(path, framework="pt", device="cpu")
        self._handle = self._file.__enter__()
        self._path, self._bytes_read = path, 0

    def _close(self) -> None:
        if self._file is not None:
            self._file.__exit__(None, None, None)
        self._path = self._file = self._handle = None


def _slabs(shape: Shape) -> Iterator[slice]:
    """Cut the first dimension so that a slab in fp32 stays within SLAB_BYTES."""
    row_bytes = 4 * math.prod(shape[1:])
    step = max(1, SLAB_BYTES // row_bytes)
    for start in range(0, shape[0], step):
        yield slice(start, min(start + step, shape[0]))


def _stored_block(stored_shape: Shape, shape: Shape, block: Sequence[slice]) -> tuple[slice, ...]:
    """Ranges of the stored dimensions for ranges of the canonical ones; dimensions of size 1 come and go."""
    wide = iter([rows for rows, size in zip(block, shape, strict=True) if size != 1])
    return tuple(slice(0, 1) if size == 1 else next(wide, slice(0, 1)) for size in stored_shape)


def _locate_pieces(model_dir: str | Path, config: ModelConfig) -> list[Piece]:
    """The stored tensor of every part of every parameter, all of them checked against the headers."""
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
