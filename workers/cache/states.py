"""The boundary state: what one step of a job leaves and the next one needs. With the pages it is the whole of a job.

    KDA layer   state fp32 [G, K, V], conv tail [W - 1, C]: the last raw projected rows
    DSA layer   with k-pool: index keys and pool gates of the tokens of the incomplete last pool, fp32 [n, X] each

Every size follows from the config and the position, so a packed state needs no header.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from longprefill.workers.model.config import KdaConfig, MlaConfig, ModelConfig

LayerShapes = tuple[int, tuple[tuple[tuple[int, ...], torch.dtype], ...]]
"""A layer and (shape, dtype) of each of its tensors."""


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
        """In the order of `pack`: the KDA layers, then the pool tails."""
        tensors: list[tuple[str, torch.Tensor]] = []
        for layer, kda in sorted(self.kda.items()):
            tensors += [(f"layers.{layer}.state", kda.state_GKV), (f"layers.{layer}.conv", kda.conv_tail_WC)]
        for layer, tail in sorted(self.pool_tails.items()):
            tensors += [(f"layers.{layer}.pool_key", tail.key_nX), (f"layers.{layer}.pool_gate", tail.gate_nX)]
        return tensors

    def pack(self) -> torch.Tensor:
        """Flat uint8: `pack_kda` and then `pack_pool_tails`."""
        return torch.cat((self.pack_kda(), self.pack_pool_tails()))

    def pack_kda(self) -> torch.Tensor:
        """Flat uint8 of the KDA states and conv tails."""
        return _packed([tensor for _, kda in sorted(self.kda.items()) for tensor in (kda.state_GKV, kda.conv_tail_WC)])

    def pack_pool_tails(self) -> torch.Tensor:
        """Flat uint8 of the incomplete pools."""
        tails = sorted(self.pool_tails.items())
        return _packed([tensor for _, tail in tails for tensor in (tail.key_nX, tail.gate_nX)])

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
        for layer, shapes in (*_kda_shapes(config, dtype), *_pool_tail_shapes(config, position)):
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
    return kda_bytes(config, dtype) + pool_tail_bytes(config, position)


def kda_bytes(config: ModelConfig, dtype: torch.dtype) -> int:
    """Bytes of `BoundaryState.pack_kda`."""
    return sum(_num_bytes(*entry) for _, shapes in _kda_shapes(config, dtype) for entry in shapes)


def pool_tail_bytes(config: ModelConfig, position: int) -> int:
    """Bytes of `BoundaryState.pack_pool_tails` at this position."""
    return sum(_num_bytes(*entry) for _, shapes in _pool_tail_shapes(config, position) for entry in shapes)


def shard_state(full: BoundaryState, config: ModelConfig, tp_rank: int, num_tp: int) -> BoundaryState:
    """The heads that one tensor-parallel rank holds of a whole model's state. `config` is the whole model's."""
    kda: dict[int, KdaState] = {}
    for layer, state in full.kda.items():
        blocks = state.conv_tail_WC.split(_conv_blocks(config, layer), dim=1)
        kda[layer] = KdaState(
            state_GKV=state.state_GKV.chunk(num_tp)[tp_rank],
            conv_tail_WC=torch.cat([block.chunk(num_tp, dim=1)[tp_rank] for block in blocks], dim=1),
        )
    return BoundaryState(position=full.position, kda=kda, pool_tails=dict(full.pool_tails))


def merge_states(parts: Sequence[BoundaryState], config: ModelConfig) -> BoundaryState:
    """The whole model's state from those of all tensor-parallel ranks, in rank order."""
    kda: dict[int, KdaState] = {}
    for layer in parts[0].kda:
        local_blocks = [size // len(parts) for size in _conv_blocks(config, layer)]
        tails = [part.kda[layer].conv_tail_WC.split(local_blocks, dim=1) for part in parts]
        kda[layer] = KdaState(
            state_GKV=torch.cat([part.kda[layer].state_GKV for part in parts]),
            conv_tail_WC=torch.cat([block for blocks in zip(*tails, strict=True) for block in blocks], dim=1),
        )
    return BoundaryState(position=parts[0].position, kda=kda, pool_tails=dict(parts[0].pool_tails))


def _conv_blocks(config: ModelConfig, layer: int) -> list[int]:
    """Channels of q, k and v: each is split by heads on its own."""
    mixer = config.layers[layer].mixer
    assert isinstance(mixer, KdaConfig)
    key_width = mixer.num_heads * mixer.key_dim
    return [key_width, key_width, mixer.num_value_heads * mixer.value_dim]


def _packed(tensors: list[torch.Tensor]) -> torch.Tensor:
    parts = [tensor.contiguous().view(-1).view(torch.uint8) for tensor in tensors]
    return torch.cat(parts) if parts else torch.empty(0, dtype=torch.uint8)


def _num_bytes(shape: tuple[int, ...], dtype: torch.dtype) -> int:
    size = dtype.itemsize
    for extent in shape:
        size *= extent
    return size


def _kda_shapes(config: ModelConfig, dtype: torch.dtype) -> list[LayerShapes]:
    rows: list[LayerShapes] = []
    for layer, spec in enumerate(config.layers):
        if isinstance(kda := spec.mixer, KdaConfig):
            state = (kda.num_value_heads, kda.key_dim, kda.value_dim)
            tail = (kda.conv_width - 1, kda.conv_channels)
            rows.append((layer, ((state, torch.float32), (tail, dtype))))
    return rows


def _pool_tail_shapes(config: ModelConfig, position: int) -> list[LayerShapes]:
    rows: list[LayerShapes] = []
    for layer, spec in enumerate(config.layers):
        mla = spec.mixer
        if isinstance(mla, MlaConfig) and mla.indexer is not None and mla.indexer.pool > 1:
            pending = (position % mla.indexer.pool, mla.indexer.head_dim)
            rows.append((layer, ((pending, torch.float32), (pending, torch.float32))))
    return rows
