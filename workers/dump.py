"""What `--dump` writes: logits, cache rows and states of one job in sequence order, dequantized, as safetensors.

logits               fp32 [vocab]        of the last prompt token
layers.N.latent      [T, r + d_r]        k_R in the checkpoint's pair order
layers.N.index_key   [T, d]              before pooling
layers.N.state       fp32 [G, K, V]
layers.N.conv        [W - 1, C]          last projected rows of q | k | v
"""

from __future__ import annotations

import torch

from longprefill.workers.model.config import KdaConfig, MlaConfig
from longprefill.workers.prefill import PrefillRank


def collect(rank: PrefillRank, job: int, logits_V: torch.Tensor | None, owner: int) -> dict[str, torch.Tensor]:
    """A collective: every rank of the group calls it. `owner` is the rank that has the logits. The result is complete
    on every rank."""
    config = rank.full_config
    state = rank.whole_state(job)
    if logits_V is None:
        logits_V = torch.empty(config.vocab_size, dtype=torch.float32)
    tensors = {"logits": rank.mesh.world.broadcast(logits_V, owner, op="dump")}
    for layer, spec in enumerate(config.layers):
        prefix = f"layers.{layer}."
        mixer = spec.mixer
        if isinstance(mixer, KdaConfig):
            tensors[prefix + "state"] = state.kda[layer].state_GKV
            tensors[prefix + "conv"] = state.kda[layer].conv_tail_WC
            continue
        rows = rank.cache(job).rows(layer, "latent", state.position)
        tensors[prefix + "latent"] = rows.read(0, rows.num_rows, rank.dtype)
        if mixer.indexer is None:
            continue
        if mixer.indexer.pool == 1:
            rows = rank.cache(job).rows(layer, "index_key", state.position)
            tensors[prefix + "index_key"] = rows.read(0, rows.num_rows, rank.dtype)
        else:
            tensors[prefix + "index_key"] = _unpooled(rank, job, layer, mixer)
    return {name: tensor.contiguous().clone() for name, tensor in tensors.items()}


def _unpooled(rank: PrefillRank, job: int, layer: int, mixer: MlaConfig) -> torch.Tensor:
    """Index keys before pooling, gathered from the ranks that computed them."""
    assert mixer.indexer is not None
    entries = rank.unpooled_keys(job).get(layer, [])
    width = mixer.indexer.head_dim
    keys_TX = torch.cat([keys for *_, keys in entries]) if entries else torch.empty(0, width)
    ranges = [torch.arange(start, start + keys.shape[0]) for _, start, keys in entries]
    positions_T = torch.cat(ranges) if ranges else torch.empty(0, dtype=torch.int64)
    counts_R = torch.zeros(rank.mesh.world.size, dtype=torch.int64)
    counts_R[rank.mesh.world.rank] = positions_T.numel()
    ones = [1] * rank.mesh.world.size
    counts = rank.mesh.world.all_gather_rows(
        counts_R[rank.mesh.world.rank : rank.mesh.world.rank + 1], ones, op="dump"
    ).tolist()
    keys = rank.mesh.world.all_gather_rows(keys_TX.float(), counts, op="dump")
    positions = rank.mesh.world.all_gather_rows(positions_T, counts, op="dump")
    if positions.sort().values.ne(torch.arange(rank.state(job).position)).any():
        raise RuntimeError(f"layer {layer}: index keys of job {job} were not all computed in this run")
    result = torch.empty_like(keys)
    result[positions] = keys
    return result
