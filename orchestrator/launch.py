"""Starting workers: the pools they get from their holder, what they are told, and who of them lives."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from longprefill.comms.transport.base import PoolAddress, TransportError
from longprefill.comms.transport.holder import Pool, create_pool, sweep_stale
from longprefill.orchestrator.plan import NUM_SLOTS, ClusterSettings
from longprefill.orchestrator.watch import Watch, Watched
from longprefill.partition.errors import UserError
from longprefill.partition.layout import PAGE_TOKENS
from longprefill.workers.cache.pages import CacheFormats, cache_kinds
from longprefill.workers.engine import TORCH_DTYPES
from longprefill.workers.handoff.parts import pool_file_bytes
from longprefill.workers.model.config import ModelConfig
from longprefill.workers.model.sharding import MeshPlace
from longprefill.workers.spec import Whereabouts, WorkerInfo, WorkerSpec

START_TIMEOUT_S = 600.0


@dataclass(frozen=True, kw_only=True)
class NewWorker:
    """An actor that was created and has not started. `spec` says what it is told, once it is known where it runs."""

    label: str
    actor: Any
    spec: Callable[[Whereabouts], WorkerSpec]


@dataclass(frozen=True, kw_only=True)
class StartedWorker:
    watched: Watched
    info: WorkerInfo


def start_workers(watch: Watch, workers: Sequence[NewWorker]) -> list[StartedWorker]:
    """Starts all of them at once and puts them under watch, in this order.

    Raises:
        UserError: a worker refuses the model, or there is no room for its pool.
        RunFailed: a worker did not start.
    """
    places: Mapping[str, Whereabouts] = watch.wait(
        {worker.label: worker.actor.describe.remote() for worker in workers}, deadline_s=START_TIMEOUT_S
    )
    watched = [Watched.at(places[w.label], label=w.label, actor=w.actor) for w in workers]
    for worker in watched:
        watch.add(worker)
    calls = {worker.label: worker.actor.start.remote(worker.spec(places[worker.label])) for worker in workers}
    infos = watch.wait(calls, deadline_s=START_TIMEOUT_S)
    return [StartedWorker(watched=worker, info=infos[worker.label]) for worker in watched]


class Holder:
    """Owns the pool files of workers on this machine, so that they outlive any of them."""

    def __init__(self, settings: ClusterSettings, config: ModelConfig) -> None:
        self.settings = settings
        self.formats = CacheFormats(latent=settings.latent, index_key=settings.index)
        # one ragged page a job at most: eight jobs' worth beyond what the tokens need
        self.num_pages = -(-settings.max_tokens // PAGE_TOKENS) + NUM_SLOTS
        kinds = cache_kinds(config, self.formats)
        self._pool_bytes = pool_file_bytes(config, TORCH_DTYPES[settings.dtype], kinds, self.num_pages, NUM_SLOTS)
        self._pools: dict[str, Pool] = {}
        sweep_stale()

    def create_pool(self, label: str) -> PoolAddress:
        """A new pool of this worker, in the place of one it had before.

        Raises:
            UserError: no room for it.
        """
        self.remove_pool(label)
        try:
            pool = create_pool(self._pool_bytes, label=label.replace(" ", "_").replace("-", "_"))
        except TransportError as error:
            raise UserError(f"cache pool of the {label}: {error}") from error
        self._pools[label] = pool
        return pool.address()

    def pool(self, label: str) -> Pool:
        """The pool that this worker has."""
        return self._pools[label]

    def remove_pool(self, label: str) -> None:
        pool = self._pools.pop(label, None)
        if pool is not None:
            pool.unlink()
            pool.close()

    def close(self) -> None:
        """Removes all pool files."""
        for label in list(self._pools):
            self.remove_pool(label)

    def spec(self, pool: PoolAddress | None, place: MeshPlace) -> WorkerSpec:
        """What a worker is told; pool None: it makes one itself."""
        settings = self.settings
        return WorkerSpec(
            model_dir=settings.model_dir,
            device=settings.device,
            dtype=settings.dtype,
            latent_format=settings.latent,
            index_format=settings.index,
            pool=pool,
            num_pages=self.num_pages,
            num_slots=NUM_SLOTS,
            place=place,
            backends=settings.backends,
            trace=settings.trace,
            keep_unpooled_keys=settings.keep_unpooled_keys,
            num_threads=settings.threads_per_rank,
        )
