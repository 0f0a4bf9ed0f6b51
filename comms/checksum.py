"""The checksum of every byte handed over: xxh3, 64 bit. It finds damage, not forgery."""

from __future__ import annotations

import torch
import xxhash

from .arguments import as_bytes


def checksum_bytes(data: bytes | bytearray | memoryview) -> int:
    """xxh3_64 of `data`, 0 to 2**64 - 1."""
    return xxhash.xxh3_64_intdigest(data)


def checksum_tensor(tensor: torch.Tensor) -> int:
    """xxh3_64 of a tensor's elements in memory order of a contiguous tensor, whatever its strides and device."""
    data_B = as_bytes(tensor.detach().contiguous()).cpu()
    return xxhash.xxh3_64_intdigest(data_B.numpy().data)
