"""The two calibration workers in a private Ray: what is asked of one, or of both at once."""

from __future__ import annotations

import statistics
import time
from types import TracebackType
from typing import Any

from longprefill.comms.torch_group import GroupSpec, Store, create_store
from longprefill.orchestrator.calibrate.worker import CalibrationActor
from longprefill.orchestrator.ray_runtime import LocalRay, worker_environment
from longprefill.orchestrator.watch import Watch, Watched, end_process
from longprefill.workers import device as devices

NUM_WORKERS = 2
HEARTBEAT_TIMEOUT_S = 20.0
CALL_TIMEOUT_S = 300.0
GROUP_TIMEOUT_S = 60.0


class Pair:
    """A context manager: no process outlives it."""

    def __init__(self) -> None:
        self._ray = LocalRay()
        self._watch = Watch(HEARTBEAT_TIMEOUT_S)
        self._workers: list[Watched] = []
        self._store: Store | None = None

    def __enter__(self) -> Pair:
        try:
            self._ray.start(NUM_WORKERS, worker_environment(1))
            actors = {f"worker {n}": CalibrationActor.options(num_cpus=1).remote() for n in range(NUM_WORKERS)}
            calls = {label: actor.describe.remote() for label, actor in actors.items()}
            for label, (pid, _) in self._watch.wait(calls, deadline_s=CALL_TIMEOUT_S).items():
                worker = Watched(label=label, actor=actors[label], pid=pid)
                self._workers.append(worker)
                self._watch.add(worker)
            self._workers.sort(key=lambda worker: worker.label)
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Ends both workers and Ray; a second call does nothing."""
        self._watch.clear()
        workers, self._workers = self._workers, []
        for worker in workers:
            end_process(worker.pid)
        if self._store is not None:
            self._store.close()
            self._store = None
        self._ray.stop()

    def ask(self, method: str, *arguments: Any, copies: int = NUM_WORKERS) -> list[Any]:
        """The answers of the first `copies` workers, asked at once.

        Raises:
            RunFailed: a worker died, hung, failed or did not answer in time.
            UserError: a worker refused.
        """
        asked = self._workers[:copies]
        calls = {worker.label: getattr(worker.actor, method).remote(*arguments) for worker in asked}
        found = self._watch.wait(calls, deadline_s=CALL_TIMEOUT_S)
        return [found[worker.label] for worker in asked]

    def join(self) -> None:
        """The workers meet as a group of two."""
        self._store, host, port = create_store()
        specs = {
            worker.label: GroupSpec(
                host=host,
                port=port,
                generation=1,
                rank=rank,
                size=NUM_WORKERS,
                device="cpu",
                backend=devices.backend_for(devices.resolve_device("cpu")),
                timeout_s=GROUP_TIMEOUT_S,
            )
            for rank, worker in enumerate(self._workers)
        }
        calls = {worker.label: worker.actor.join.remote(specs[worker.label]) for worker in self._workers}
        self._watch.wait(calls, deadline_s=CALL_TIMEOUT_S)

    def call_s(self, request: object, repeats: int = 30) -> float:
        """Median seconds of a control call to both workers that does nothing."""
        seconds: list[float] = []
        for _ in range(repeats + 5):
            started = time.perf_counter()
            self.ask("echo", request)
            seconds.append(time.perf_counter() - started)
        return statistics.median(seconds[5:])
