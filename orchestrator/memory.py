"""How much memory a rank needs, estimated before anything starts, and how much this machine can still give."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from longprefill.partition.errors import UserError
from longprefill.workers.model.config import (
    AttnResConfig,
    HyperConnectionConfig,
    KdaConfig,
    MlaConfig,
    ModelConfig,
    MoeConfig,
)
from longprefill.workers.model.parameters import FP32_PARAMETERS, parameter_shapes
from longprefill.workers.model.sharding import ALONE, MeshPlace, held_ranges, shard_shape

PROCESS_BYTES = 450 << 20
"""A worker process before it loads anything: Python, torch and Ray (measured, 2026-11, CPU build)."""
KERNEL_BYTES = 256 << 20
"""Blocks that kernels work in, whatever the step's length."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankMemory:
    """Bytes of one rank, by what they are for."""

    process: int
    weights: int
    cache: int
    step: int

    @property
    def total(self) -> int:
        return self.process + self.weights + self.cache + self.step


def weight_bytes(config: ModelConfig, item_bytes: int, place: MeshPlace = ALONE) -> int:
    """Bytes of what a rank holds of all parameters when the compute dtype has `item_bytes` bytes."""
    first, repeats = {}, Counter(config.layers)
    for index, layer in enumerate(config.layers):
        first.setdefault(layer, str(index))
    times = {index: repeats[layer] for layer, index in first.items()}  # equal layers are counted once
    total = 0
    for name, shape in parameter_shapes(config).items():
        number = times.get(name.split(".", 2)[1], 0) if name.startswith("layers.") else 1
        if number:
            size = math.prod(shard_shape(held_ranges(name, shape, config, place)))
            total += number * size * (4 if name.endswith(FP32_PARAMETERS) else item_bytes)
    return total


def step_bytes_per_token(config: ModelConfig, item_bytes: int, num_ranks: int) -> int:
    """What one token of a step costs the fullest rank: its share of the widest layer's activations, and the whole row
    of every gather buffer."""
    widest = max(_mixer_width(layer.mixer, item_bytes) for layer in config.layers)
    feed_forward = max(_ffn_width(layer.ffn, config.hidden, item_bytes) for layer in config.layers)
    streams = 6
    if isinstance(config.residual, AttnResConfig):
        streams += -(-len(config.layers) // config.residual.block_layers)
    elif isinstance(config.residual, HyperConnectionConfig):
        streams += 2 * config.residual.num_streams
    local = streams * config.hidden * item_bytes + max(widest, feed_forward)
    gathered = max(
        2
        * item_bytes
        * (mixer.kv_lora_rank + mixer.rope_dim + (0 if mixer.indexer is None else mixer.indexer.head_dim))
        if isinstance(mixer := layer.mixer, MlaConfig)
        else 0
        for layer in config.layers
    )
    return -(-local // num_ranks) + gathered


def _mixer_width(mixer: KdaConfig | MlaConfig, item_bytes: int) -> int:
    if isinstance(mixer, KdaConfig):
        key, value = mixer.num_value_heads * mixer.key_dim, mixer.num_value_heads * mixer.value_dim
        raw = mixer.conv_channels * item_bytes * 3
        # fp32: q, k, g, and what `prepare` keeps for every token
        return raw + 4 * (2 * mixer.num_heads * mixer.key_dim + 6 * key + 3 * value + 2 * 64 * mixer.num_value_heads)
    query = mixer.num_heads * (mixer.nope_dim + mixer.rope_dim + mixer.kv_lora_rank * 2 + mixer.value_dim * 2)
    index = 0
    if mixer.indexer is not None:
        index = 8 * mixer.indexer.num_heads * mixer.indexer.head_dim + 12 * mixer.indexer.topk
    return query * item_bytes + index


def _ffn_width(ffn: object, hidden: int, item_bytes: int) -> int:
    if not isinstance(ffn, MoeConfig):
        return 3 * hidden * item_bytes
    return ffn.experts_per_token * (3 * ffn.intermediate + 2 * hidden) * max(item_bytes, 4)


def available_bytes() -> int:
    """Memory this process's machine (or container) can still give, in bytes."""
    available = 0
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            available = int(line.split()[1]) << 10
    limit, used = Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")
    if limit.exists() and used.exists() and limit.read_text().strip() != "max":
        available = min(available, int(limit.read_text()) - int(used.read_text()))
    return available


def check_memory(
    rank: RankMemory, decode: RankMemory, *, num_cp: int, num_tp: int, num_decode: int, available: int
) -> None:
    """Refuses ranks that the machine cannot hold. `rank` is the fullest prefill rank.

    Raises:
        UserError: with the estimate, what is available and the largest --cp that fits.
    """
    needed = num_cp * num_tp * rank.total + num_decode * decode.total
    if needed <= available:
        return
    fitting = (available - num_decode * decode.total) // (rank.total * num_tp)
    remedy = f"use --cp {fitting} or less" if fitting >= 1 else "use a shorter prompt, a smaller model or --dtype bf16"
    ranks = f"--cp {num_cp}" + (f" --tp {num_tp}" if num_tp > 1 else "")
    raise UserError(
        f"{ranks} needs an estimated {_gib(needed)} ({num_cp * num_tp} prefill and {num_decode} decode "
        f"ranks of {_gib(rank.total)}: process {_gib(rank.process)}, weights {_gib(rank.weights)}, "
        f"cache {_gib(rank.cache)}, "
        f"step {_gib(rank.step)}), {_gib(available)} are available: {remedy}"
    )


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / (1 << 30):.2f} GiB"
