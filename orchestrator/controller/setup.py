"""From the configuration to hosts and a scheduler over them."""

from __future__ import annotations

from collections.abc import Mapping

from longprefill.orchestrator.config import ServiceConfig
from longprefill.orchestrator.controller.estimates import OVERHEAD_S
from longprefill.orchestrator.controller.live import Host
from longprefill.orchestrator.hosts.contract import HostSettings
from longprefill.orchestrator.plan import step_tokens_for
from longprefill.orchestrator.scheduler.jobs import StepCosts
from longprefill.orchestrator.scheduler.live import LiveScheduler
from longprefill.orchestrator.scheduler.settings import FleetSettings
from longprefill.partition.layout import PAGE_TOKENS
from longprefill.workers.model.config import ModelConfig


def make_hosts(config: ServiceConfig) -> tuple[list[Host], list[Host]]:
    """A host for every group and worker of the configuration. Decode workers take pages of any prefill group, whose
    dtype and formats are alike."""
    prefill, decode = list[Host](), list[Host]()
    for unit, (name, pool) in enumerate(config.prefill_groups):
        cluster = pool.cluster_settings(config.model.dir, trace=config.service.trace)
        settings = HostSettings(name=name, cluster=cluster, resources=_beside_cpu(pool.resources))
        prefill.append(Host(name=name, role="prefill", unit=unit, settings=settings))
    for unit, (name, pool) in enumerate(config.decode_workers):
        cluster = config.decode_settings(pool)
        settings = HostSettings(name=name, cluster=cluster, resources=_beside_cpu(pool.resources), listen=pool.listen)
        decode.append(Host(name=name, role="decode", unit=unit, settings=settings))
    return prefill, decode


def _beside_cpu(resources: Mapping[str, float]) -> dict[str, float]:
    return {name: amount for name, amount in resources.items() if name != "CPU"}


def make_scheduler(config: ServiceConfig, model: ModelConfig, costs: StepCosts) -> LiveScheduler:
    """A unit a prefill group, all of them lost until they are ready."""
    num_units = len(config.prefill_groups)
    pool = config.prefill[0]
    cluster = pool.cluster_settings(config.model.dir)
    # capacity is counted in tokens of whole pages: groups hold whatever their caches' format is
    fleet = FleetSettings(
        num_units=num_units,
        devices_per_unit=pool.num_ranks,
        tp=pool.tp,
        cache_bytes=-(-pool.max_tokens // PAGE_TOKENS) * PAGE_TOKENS,
        token_bytes=1,
        is_recoverable=False,
        can_move=False,
    )
    most = step_tokens_for(cluster, model, pool.max_tokens)
    scheduler = LiveScheduler(config.scheduler_settings(most), fleet, costs, overhead_s=OVERHEAD_S)
    for unit in range(num_units):
        scheduler.unit_lost(unit, 0.0)
    return scheduler
