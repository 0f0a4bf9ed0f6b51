"""The boundary state: what one step of a job leaves and the next one needs. With the pages it is the whole of a job.

    KDA layer   state fp32 [G, K, V], conv tail [W - 1, C]: the last raw projected rows
    DSA layer   with k-pool: index keys and pool gates of the tokens of the incomplete last pool, fp32 [n, X] each

Every size follows from the config and the position, so a packed state needs no header.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from longprefill.workers.model.config import KdaConfig, MlaConfig, ModelConfig


@dataclass(kw_only=True)
class KdaState:
    state_GKV: torch.Tensor
    conv_tail_WC: torch.Tensor


@dataclass(kw_only=True)
class PoolTail:
    key_nX: torch.Tensor
    gate_nX: torch.Tensor


@dataclass(kw_only=True)
class BoundaryState:
    """A job's states after its first `position` tokens. Treated as a value: a step makes a new one."""

    position: int
    kda: dict[int, KdaState]
    pool_tails: dict[int, PoolTail]

    @staticmethod
    def start(config: ModelConfig, dtype: torch.dtype, device: torch.device) -> BoundaryState:
        """The state before the first token: zeros and nothing pooled."""
        return BoundaryState.unpack(
            config, 0, dtype, torch.zeros(packed_bytes(config, 0, dtype), dtype=torch.uint8, device=device)
        )

    def named_tensors(self) -> list[tuple[str, torch.Tensor]]:
        """In layer order, the order of `pack`."""
        tensors: list[tuple[int, str, torch.Tensor]] = []
        for layer, kda in self.kda.items():
            tensors += [(layer, "state", kda.state_GKV), (layer, "conv", kda.conv_tail_WC)]
        for layer, tail in self.pool_tails.items():
            tensors += [(layer, "pool_key", tail.key_nX), (layer, "pool_gate", tail.gate_nX)]
        tensors.sort(key=lambda entry: entry[0])
        return [(f"layers.{layer}.{name}", tensor) for layer, name, tensor in tensors]

    def pack(self) -> torch.Tensor:
        """Flat uint8."""
        parts = [tensor.contiguous().view(-1).view(torch.uint8) for _, tensor in self.named_tensors()]
        return torch.cat(parts) if parts else torch.empty(0, dtype=torch.uint8)

    @staticmethod
    def unpack(config: ModelConfig, position: int, dtype: torch.dtype, packed: torch.Tensor) -> BoundaryState:
        """Reads what `pack` wrote (a copy, so that the buffer may be reused).

        Raises:
            ValueError: the buffer's size is not that of a state of this model at this position.
        """
        expected = packed_bytes(config, position, dtype)
        if packed.numel() != expected:
            raise ValueError(
                f"a packed boundary state at position {position} has {expected} bytes, got {packed.numel()}"
            )
        result = BoundaryState(position=position, kda={}, pool_tails={})
        offset = 0
        for layer, shapes in _shapes(config, position, dtype):
            tensors: list[torch.Tensor] = []
            for shape, kind in shapes:
                size = _num_bytes(shape, kind)
                # clone before viewing: the slice may not be aligned for the dtype
                tensors.append(packed[offset : offset + size].clone().view(kind).view(shape))
                offset += size
            if isinstance(config.layers[layer].mixer, KdaConfig):
                result.kda[layer] = KdaState(state_GKV=tensors[0], conv_tail_WC=tensors[1])
            else:
                result.pool_tails[layer] = PoolTail(key_nX=tensors[0], gate_nX=tensors[1])
        return result


def packed_bytes(config: ModelConfig, position: int, dtype: torch.dtype) -> int:
    """Bytes of a packed boundary state at this position."""
    return sum(_num_bytes(shape, kind) for _, shapes in _shapes(config, position, dtype) for shape, kind in shapes)


def _num_bytes(shape: tuple[int, ...], dtype: torch.dtype) -> int:
    size = dtype.itemsize
    for extent in shape:
        size *= extent
    return size


def _shapes(
    config: ModelConfig, position: int, dtype: torch.dtype
) -> list[tuple[int, tuple[tuple[tuple[int, ...], torch.dtype], ...]]]:
    rows: list[tuple[int, tuple[tuple[tuple[int, ...], torch.dtype], ...]]] = []
    for layer, spec in enumerate(config.layers):
        mixer = spec.mixer
        if isinstance(mixer, KdaConfig):
            state = (mixer.num_value_heads, mixer.key_dim, mixer.value_dim)
            tail = (mixer.conv_width - 1, mixer.conv_channels)
            rows.append((layer, ((state, torch.float32), (tail, dtype))))
        elif isinstance(mixer, MlaConfig) and mixer.indexer is not None and mixer.indexer.pool > 1:
            pending = (position % mixer.indexer.pool, mixer.indexer.head_dim)
            rows.append((layer, ((pending, torch.float32), (pending, torch.float32))))
    return rows
