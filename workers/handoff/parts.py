"""What both sides of a hand-off share: targets, parts, slots and the controller's messages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from longprefill.comms.checksum import checksum_bytes, checksum_tensor
from longprefill.comms.manifest import LayerCounts, LogitsEntry, Manifest, PageEntry, StateEntry
from longprefill.comms.messages import Commit, encode
from longprefill.comms.transport.base import PoolAddress, TransportError
from longprefill.workers.cache.pages import CacheFormats, CacheKind, pool_bytes
from longprefill.workers.cache.states import BoundaryState, packed_bytes
from longprefill.workers.model.config import KdaConfig, MlaConfig, ModelConfig

DRAIN_TIMEOUT_S = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class HandoffTarget:
    """Where a decode worker expects one job. Pickles."""

    address: PoolAddress
    generation: int
    table: tuple[int, ...]
    """Physical pages at the decode side."""
    num_pages: int
    """Of the decode side's pool, which decides where in it they lie."""
    identity: str
    """`handoff_identity` of the decode side: with another one, pages would not fit where they go."""
    slot_offset: int
    """Byte offset of the job's slot in the pool file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HandoffPart:
    """What one rank sent."""

    pages: tuple[PageEntry, ...]
    states: tuple[StateEntry, ...]
    logits: LogitsEntry | None
    error: str | None = None
    """Why this rank's transfer failed: the attempt must be repeated."""


def handoff_identity(fingerprint: str, dtype: torch.dtype, formats: CacheFormats) -> str:
    """What two sides must have in common, in words."""
    name = str(dtype).removeprefix("torch.")
    return f"model {fingerprint[:12]}, {name}, latent {formats.latent}, index {formats.index_key}"


def check_identity(own: str, target: str) -> None:
    """Raises TransportError unless both sides have the same."""
    if own != target:
        raise TransportError(f"this prefill group has {own}; the decode worker has {target}: configure both alike")


def slot_bytes(config: ModelConfig, dtype: torch.dtype) -> int:
    """A slot: the largest packed boundary state, then fp32 logits."""
    pools = [
        m.indexer.pool for layer in config.layers if isinstance(m := layer.mixer, MlaConfig) and m.indexer is not None
    ]
    largest = max(packed_bytes(config, position, dtype) for position in range(max(pools, default=1)))
    return -(-largest // 64) * 64 + -(-4 * config.vocab_size // 64) * 64


def layer_counts(config: ModelConfig) -> LayerCounts:
    """What a complete hand-off of this model has, by kind of layer."""
    kda = sum(isinstance(layer.mixer, KdaConfig) for layer in config.layers)
    dsa = sum(isinstance(layer.mixer, MlaConfig) and layer.mixer.indexer is not None for layer in config.layers)
    return LayerCounts(kda=kda, mla=len(config.layers) - kda - dsa, dsa=dsa)


def pool_file_bytes(
    config: ModelConfig, dtype: torch.dtype, kinds: tuple[CacheKind, ...], num_pages: int, num_slots: int
) -> int:
    """Size of a worker's pool file."""
    return pool_bytes(kinds, num_pages) + num_slots * slot_bytes(config, dtype)


def build_messages(
    parts: Sequence[HandoffPart],
    *,
    transfer_id: str,
    attempt: int,
    job: int,
    fingerprint: str,
    formats: CacheFormats,
    layers: LayerCounts,
    position: int,
) -> tuple[bytes, bytes]:
    """(manifest, commit) of a finished job from what its ranks sent."""
    logits = [part.logits for part in parts if part.logits is not None]
    manifest = Manifest(
        transfer_id=transfer_id,
        attempt=attempt,
        job=str(job),
        model_fingerprint=fingerprint,
        latent_format=formats.latent,
        index_format=formats.index_key if layers.dsa else None,
        layers=layers,
        position=position,
        pages=tuple(page for part in parts for page in part.pages),
        states=tuple(state for part in parts for state in part.states),
        logits=logits[0] if logits else None,
    )
    encoded = encode(manifest)
    commit = Commit(
        transfer_id=transfer_id,
        attempt=attempt,
        job=str(job),
        position=position,
        num_manifests=1,
        num_pages=len(manifest.pages),
        num_states=len(manifest.states),
        num_bytes=manifest.num_bytes,
        checksum=checksum_bytes(encoded),
    )
    return encoded, encode(commit)


def state_entries(state: BoundaryState, owner: int) -> tuple[StateEntry, ...]:
    """Manifest entries of a packed boundary state, in the order of `BoundaryState.pack`."""
    kinds = {"state": "kda_state", "conv": "conv_tail", "pool_key": "pool_key", "pool_gate": "pool_gate"}
    entries: list[StateEntry] = []
    for name, tensor in state.named_tensors():
        _, layer, field_name = name.split(".")
        entries.append(
            StateEntry(
                layer=int(layer),
                kind=kinds[field_name],
                shape=tuple(tensor.shape),
                dtype=str(tensor.dtype).removeprefix("torch."),
                num_bytes=tensor.nbytes,
                checksum=checksum_tensor(tensor),
                owner=owner,
            )
        )
    return tuple(entries)
