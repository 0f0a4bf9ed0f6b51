"""From a model directory to canonical tensors, in slabs: the peak is the result and one slab.

`check_weights` (`pieces.py`) reads headers only and runs before anything heavy starts; `load_weights` checks the same.
Every read names a range in each dimension (`read_block`), so that a rank can read its share of rows or columns.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from longprefill.partition.errors import ModelError
from longprefill.workers.model.config import ModelConfig
from longprefill.workers.model.parameters import FP32_PARAMETERS, Shape, parameter_shapes
from longprefill.workers.model.pieces import Piece, check_weights, locate_pieces
from longprefill.workers.model.stored import fingerprint

__all__ = ["Piece", "TensorReader", "check_weights", "fingerprint", "load_weights", "parameter_dtype", "weights_bytes"]

SLAB_BYTES = 64 << 20
REOPEN_BYTES = 64 << 20
"""Pages of a mapped file count as resident until the file is closed, so it is reopened after this much."""


def parameter_dtype(name: str, dtype: torch.dtype) -> torch.dtype:
    """The dtype of a canonical parameter in a model of this compute dtype."""
    return torch.float32 if name.endswith(FP32_PARAMETERS) else dtype


def weights_bytes(config: ModelConfig, dtype: torch.dtype) -> int:
    """Bytes of all parameters as `load_weights` returns them."""
    shapes = parameter_shapes(config)
    return sum(math.prod(shape) * parameter_dtype(name, dtype).itemsize for name, shape in shapes.items())


def load_weights(
    model_dir: str | Path, config: ModelConfig, *, dtype: torch.dtype, device: torch.device | str = "cpu"
) -> dict[str, torch.Tensor]:
    """All parameters by canonical name, in the order of `parameter_shapes`; those of FP32_PARAMETERS stay fp32.

    Raises:
        ModelError: as `check_weights`.
    """
    pieces = locate_pieces(model_dir, config)
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
