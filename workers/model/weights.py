"""From a model directory to canonical tensors, in slabs: the peak is the result and one slab.

`check_weights` (`pieces.py`) reads headers only and runs before anything heavy starts; `load_weights` checks the same.
Every read names a range in each dimension (`read_block`), so that a rank can read its share of rows or columns.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate, product
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from longprefill.partition.errors import ModelError
from longprefill.workers.model.config import ModelConfig
from longprefill.workers.model.parameters import FP32_PARAMETERS, Shape, parameter_shapes
from longprefill.workers.model.pieces import SCALE_SUFFIX, Piece, check_weights, locate_pieces
from longprefill.workers.model.sharding import Ranges, shard_shape
from longprefill.workers.model.stored import fingerprint

__all__ = ["Piece", "TensorReader", "check_weights", "fingerprint", "load_weights", "parameter_dtype"]

SLAB_BYTES = 64 << 20
REOPEN_BYTES = 64 << 20
"""Pages of a mapped file count as resident until the file is closed, so it is reopened after this much."""


def parameter_dtype(name: str, dtype: torch.dtype) -> torch.dtype:
    """The dtype of a canonical parameter in a model of this compute dtype."""
    return torch.float32 if name.endswith(FP32_PARAMETERS) else dtype


def load_weights(
    model_dir: str | Path,
    config: ModelConfig,
    *,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    ranges: Mapping[str, Ranges] | None = None,
) -> dict[str, torch.Tensor]:
    """Parameters by canonical name, in the order of `parameter_shapes`; those of FP32_PARAMETERS stay fp32.

    Args:
        ranges: what to read of every parameter (`sharding.parameter_ranges`); nothing else is read. None: everything.

    Raises:
        ModelError: as `check_weights`.
    """
    pieces = locate_pieces(model_dir, config)
    shapes = parameter_shapes(config)
    wanted = ranges or {name: tuple((range(size),) for size in shape) for name, shape in shapes.items()}
    weights = {
        name: torch.empty(shard_shape(wanted[name]), dtype=parameter_dtype(name, dtype), device=device)
        for name in shapes
    }
    with TensorReader(config.fp8_block) as reader:
        for piece in sorted(pieces, key=lambda piece: piece.stored.path):
            target, runs = weights[piece.parameter], wanted[piece.parameter]
            if piece.part.expert is not None:
                place = _places(runs[0]).get(piece.part.expert)
                if place is None:
                    continue
                target, runs = target[place], runs[1:]
            _fill(target, piece, runs, reader)
    return weights


def _fill(target: torch.Tensor, piece: Piece, runs: Ranges, reader: TensorReader) -> None:
    """Copies what `runs` want of a piece, in slabs, to its place in the rank's tensor."""
    first, rest = runs[0], runs[1:]
    local = 0
    for run in first:
        begin = max(run.start, piece.part.row)
        end = min(run.stop, piece.part.row + piece.part.shape[0])
        for rows in _slabs(begin, end, piece.part.shape):
            place = local + rows.start - run.start
            for columns, places in _blocks(rest):
                source = (slice(rows.start - piece.part.row, rows.stop - piece.part.row), *columns)
                slab = target[(slice(place, place + len(rows)), *places)]
                slab.copy_(reader.read_block(piece, source))
        local += len(run)


def _blocks(runs: Ranges) -> Iterator[tuple[tuple[slice, ...], tuple[slice, ...]]]:
    """(source, target) slices of every combination of runs of the trailing dimensions."""
    choices: list[list[tuple[slice, slice]]] = []
    for dim_runs in runs:
        offsets = accumulate((len(run) for run in dim_runs), initial=0)
        choices.append(
            [
                (slice(run.start, run.stop), slice(at, at + len(run)))
                for run, at in zip(dim_runs, offsets, strict=False)
                if len(run)
            ]
        )
    for combination in product(*choices):
        yield tuple(source for source, _ in combination), tuple(target for _, target in combination)


def _places(runs: tuple[range, ...]) -> dict[int, int]:
    """Where each index of the runs is in the rank's tensor."""
    return {index: place for place, index in enumerate(index for run in runs for index in run)}


class TensorReader:
    """Reads blocks of stored tensors, one open file at a time. A context manager; one thread."""

    def __init__(self, fp8_block: tuple[int, int] | None = None) -> None:
        """`fp8_block`: rows and columns that share a scale in FP8 tensors (ModelConfig.fp8_block)."""
        self._fp8_block = fp8_block
        self._scales: tuple[str, torch.Tensor] | None = None
        self._path: Path | None = None
        self._file: Any = None
        self._handle: Any = None
        self._bytes_read = 0

    def __enter__(self) -> TensorReader:
        return self

    def __exit__(self, *_: object) -> None:
        self._close()

    def read_block(self, piece: Piece, block: Sequence[slice]) -> torch.Tensor:
        """A range of every dimension of the piece (as `piece.part.shape` counts them), in the stored dtype, or
        fp32 from FP8. The result may view the mapped file: copy it before the next call.

        Raises:
            ModelError: the file vanished or changed since its header was read.
        """
        ranges = _stored_block(piece.stored.shape, piece.part.shape, block)
        if piece.scales is not None and (self._scales is None or self._scales[0] != piece.name):
            # read before the codes: the scales may be in another file, and one is open at a time
            whole = tuple(slice(0, size) for size in piece.scales.shape)
            scales = self._read(piece.scales.path, piece.name + SCALE_SUFFIX, whole)
            self._scales = piece.name, scales.float().clone()
        stored = self._read(piece.stored.path, piece.name, ranges)
        if piece.scales is not None:
            assert self._scales is not None and self._fp8_block is not None
            stored = dequantize_block(stored, self._scales[1], ranges, self._fp8_block)
        return stored.reshape([rows.stop - rows.start for rows in block])

    def _read(self, path: Path, name: str, ranges: tuple[slice, ...]) -> torch.Tensor:
        try:
            self._open(path)
            stored = self._handle.get_slice(name)[ranges]
        except (OSError, RuntimeError, ValueError) as error:
            raise ModelError(f"{path} cannot be read: tensor {name}: {error}") from error
        self._bytes_read += stored.numel() * stored.element_size()
        return stored

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


def dequantize_block(
    codes: torch.Tensor, scales: torch.Tensor, ranges: Sequence[slice], fp8_block: tuple[int, int]
) -> torch.Tensor:
    """fp32 values of a range of an FP8 tensor.

    Args:
        codes: e4m3, the range of the stored tensor.
        scales: of the whole stored tensor, one number a block of its last two dimensions; blocks at the end are ragged.
        ranges: where the codes are in the stored tensor.
        fp8_block: rows and columns of a block.
    """
    factors = scales[tuple(ranges[:-2])]
    for dim, rows, extent in zip((-2, -1), ranges[-2:], fp8_block, strict=True):
        of_number = torch.arange(rows.start, rows.stop) // extent
        factors = factors.index_select(dim, of_number)
    return codes.float() * factors


def _slabs(start: int, end: int, shape: Shape) -> Iterator[range]:
    """Rows [start, end) in runs whose fp32 form stays within SLAB_BYTES."""
    step = max(1, SLAB_BYTES // (4 * math.prod(shape[1:])))
    for first in range(start, end, step):
        yield range(first, min(first + step, end))


def _stored_block(stored_shape: Shape, shape: Shape, block: Sequence[slice]) -> tuple[slice, ...]:
    """Ranges of the stored dimensions for ranges of the canonical ones; dimensions of size 1 come and go."""
    wide = iter([rows for rows, size in zip(block, shape, strict=True) if size != 1])
    return tuple(slice(0, 1) if size == 1 else next(wide, slice(0, 1)) for size in stored_shape)
