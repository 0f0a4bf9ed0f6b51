"""Everything about a service that can be refused before anything starts."""

from __future__ import annotations

import shutil
from pathlib import Path

from longprefill.orchestrator.config import ConfigError, ServiceConfig
from longprefill.orchestrator.controller.estimates import service_costs
from longprefill.orchestrator.journal.journal import Journal
from longprefill.orchestrator.memory import available_bytes
from longprefill.orchestrator.plan import NUM_SLOTS, ClusterSettings, cache_bytes_per_page, check_fits, step_tokens_for
from longprefill.orchestrator.scheduler.jobs import Mesh
from longprefill.partition.errors import UserError
from longprefill.partition.layout import PAGE_TOKENS, Slice
from longprefill.workers.model.config import ModelConfig
from longprefill.workers.model.families.registry import read_config
from longprefill.workers.model.pieces import check_weights
from longprefill.workers.model.tokenizer import Tokenizer

OWN_RESOURCES = ("CPU",)
"""Of a Ray that the service starts itself."""


def check_service(config: ServiceConfig) -> None:
    """Model, journal, costs, and for a service with its own Ray this machine's memory.

    Raises:
        UserError: the first thing that cannot be.
    """
    model = read_config(config.model.dir)
    check_weights(config.model.dir, model)
    if (Path(config.model.dir) / "tokenizer.json").is_file():
        Tokenizer(config.model.dir)
    Journal.open(config.service.state_dir).close()
    _check_costs(config, model)
    if config.service.ray_address is None:
        _check_resources(config)
        _check_memory(config, model)


def _check_costs(config: ServiceConfig, model: ModelConfig) -> None:
    pool = config.prefill[0]
    step = (Slice(job=0, start=0, end=min(pool.max_tokens, 4096)),)
    try:
        service_costs(config, model).step_seconds(step, pool.layout, Mesh(cp=pool.cp, tp=pool.tp))
    except UserError as error:
        raise ConfigError(f"[scheduler] profile={config.scheduler.profile!r}: {error}") from error


def _check_resources(config: ServiceConfig) -> None:
    for pool in (*config.prefill, *config.decode):
        for name in pool.resources:
            if name not in OWN_RESOURCES:
                raise ConfigError(
                    f"pool {pool.name}: resources {name}: a service with a Ray of its own has none of that; join a "
                    "cluster with [service] ray_address, or leave it out"
                )


def _check_memory(config: ServiceConfig, model: ModelConfig) -> None:
    """All groups and workers together on this machine."""
    needed = cache = 0
    groups: list[tuple[str, ClusterSettings, int, int]] = [
        (pool.name, pool.cluster_settings(config.model.dir), pool.num_ranks, pool.count) for pool in config.prefill
    ]
    groups += [(pool.name, config.decode_settings(pool), 1, pool.count) for pool in config.decode]
    for name, settings, num_ranks, count in groups:
        try:
            rank = check_fits(settings, model, step_tokens_for(settings, model, settings.max_tokens), num_decode=0)
        except UserError as error:
            raise ConfigError(f"pool {name}: {error}") from error
        pages = -(-settings.max_tokens // PAGE_TOKENS) + NUM_SLOTS
        needed += count * num_ranks * rank.total
        cache += count * num_ranks * pages * cache_bytes_per_page(model, settings)
    available = available_bytes()
    if needed > available:
        raise ConfigError(
            f"all pools together need an estimated {_gib(needed)} and {_gib(available)} are available: use fewer or "
            "smaller pools, a smaller max_tokens, or dtype = 'bf16'"
        )
    free = shutil.disk_usage("/dev/shm").free if Path("/dev/shm").is_dir() else 0
    free = max(free, shutil.disk_usage(Path(config.service.state_dir)).free)
    if cache > free:
        raise ConfigError(
            f"the cache pages of all pools need {_gib(cache)} of shared memory and {_gib(free)} are free: use a "
            "smaller max_tokens, fewer ranks, or latent_format = 'fp8' and index_format = 'mxfp8'"
        )


def _gib(num_bytes: float) -> str:
    return f"{num_bytes / (1 << 30):.2f} GiB"
