"""The Ray actor of a calibration: an engine to step, and a rank that exchanges bytes with the other one.

Call order: describe -> [load -> step ... head_s, fold_s, residual_s] for every model -> join -> gather_s, exchange_s,
overlap_s -> transport_s.
"""

from __future__ import annotations

import os
import socket
import time
from typing import Any

import ray
import torch

from longprefill.comms.group import Group
from longprefill.comms.torch_group import GroupSpec, TorchGroup
from longprefill.comms.transport.base import Copy, TransferState, TransportError
from longprefill.comms.transport.holder import create_pool
from longprefill.comms.transport.shared_memory import SharedMemoryTransport
from longprefill.orchestrator.calibrate.engine import EngineBench
from longprefill.orchestrator.calibrate.samples import BenchSpec, StepSample, TimedStep
from longprefill.workers import device as devices
from longprefill.workers.engine import CONTROL
from longprefill.workers.model.config import LayerConfig

TRANSPORT_TIMEOUT_S = 30.0
OVERLAP_GEMM = 256


class CalibrationWorker:
    """One of the two."""

    def __init__(self) -> None:
        self._bench: EngineBench | None = None
        self._group: Group | None = None

    @ray.method(concurrency_group="control")
    def describe(self) -> tuple[int, str]:
        """(pid, node)."""
        return os.getpid(), socket.gethostname()

    @ray.method(concurrency_group="control")
    def ping(self) -> bool:
        return True

    def echo(self, request: Any) -> Any:
        """What a control call costs that does nothing."""
        return request

    def load(self, spec: BenchSpec) -> None:
        """Makes an engine; the one before it is forgotten."""
        devices.configure_threads(1)
        torch.set_flush_denormal(True)
        self._bench = None
        self._bench = EngineBench(spec)

    def step(self, step: TimedStep) -> StepSample:
        return self._engine.step(step)

    def head_s(self) -> float:
        return self._engine.head_s()

    def fold_s(self, layer: LayerConfig, num_folds: int) -> float:
        return self._engine.fold_s(layer, num_folds)

    def residual_s(self, rows: int) -> float:
        return self._engine.residual_s(rows)

    @property
    def _engine(self) -> EngineBench:
        assert self._bench is not None
        return self._bench

    def join(self, spec: GroupSpec) -> None:
        """Meets the other worker."""
        if self._group is not None:
            self._group.close()
        self._group = TorchGroup(spec)

    def gather_s(self, num_bytes: int, repeats: int) -> tuple[float, ...]:
        """Wall seconds of gathers to which every rank gives `num_bytes`."""
        group = self._peers
        rows_B = torch.ones(num_bytes, dtype=torch.uint8)
        return self._timed(lambda: group.all_gather_rows(rows_B, [num_bytes] * group.size, op="gather"), repeats)

    def exchange_s(self, num_bytes: int, repeats: int) -> tuple[float, ...]:
        """Wall seconds of exchanges in which every rank sends `num_bytes` to the next and gets as much."""
        group = self._peers
        rows_B = torch.ones(num_bytes, dtype=torch.uint8)
        after, before = (group.rank + 1) % group.size, (group.rank - 1) % group.size

        def run() -> None:
            group.exchange({after: rows_B}, {before: (num_bytes,)}, dtype=torch.uint8, op="exchange")

        return self._timed(run, repeats)

    def overlap_s(self, num_bytes: int, repeats: int) -> tuple[tuple[float, float, float], ...]:
        """Wall seconds of a gather, of products that take about twice as long, and of both at once as a layer runs
        them: started, computed beside, waited for."""
        group = self._peers
        rows_B = torch.ones(num_bytes, dtype=torch.uint8)
        a, b = torch.randn(2, OVERLAP_GEMM, OVERLAP_GEMM).bfloat16().unbind()
        counts = [num_bytes] * group.size
        gather_s = min(self.gather_s(num_bytes, 3))
        started = time.perf_counter()
        torch.mm(a, b)
        num_products = max(1, round(2 * gather_s / (time.perf_counter() - started)))
        # all ranks compute as much: each takes the mean of what they would
        shared = group.all_gather_rows(torch.tensor([num_products]), [1] * group.size, op="products")
        num_products = int(shared.float().mean())

        def compute() -> None:
            for _ in range(num_products):
                torch.mm(a, b)

        def together() -> None:
            pending = group.start_all_gather_rows(rows_B, counts, op="gather")
            compute()
            pending.wait()

        found: list[tuple[float, float, float]] = []
        for _ in range(repeats):
            alone = self.gather_s(num_bytes, 1)[0]
            found.append((alone, self._timed(compute, 1)[0], self._timed(together, 1)[0]))
        return tuple(found)

    def transport_s(self, num_bytes: int, repeats: int) -> tuple[float, ...]:
        """Wall seconds of one-sided copies of `num_bytes` from a pool of this process into another.

        Raises:
            RuntimeError: a copy failed.
        """
        source, target = create_pool(num_bytes, label="calibrate_source"), create_pool(num_bytes, label="calibrate")
        transport = SharedMemoryTransport(max_queued=1)
        try:
            source.bytes_B.fill_(1)
            transport.register_pool("source", source.bytes_B)
            generation = target.advance_generation(timeout_s=TRANSPORT_TIMEOUT_S)
            peer = transport.connect(target.address(), generation=generation)

            def run() -> None:
                batch = [Copy(source=0, target=0, num_bytes=num_bytes)]
                transfer = transport.submit("source", peer, batch, timeout_s=TRANSPORT_TIMEOUT_S)
                progress = transport.wait(transfer, timeout_s=TRANSPORT_TIMEOUT_S)
                if progress.state is not TransferState.DONE:
                    raise TransportError(f"a copy of {num_bytes} bytes ended as {progress.state.value}")
                transport.forget(transfer)

            return self._timed(run, repeats, in_step=False)
        finally:
            transport.close()
            for pool in (source, target):
                pool.unlink()
                pool.close()

    def _timed(self, run: Any, repeats: int, *, in_step: bool = True) -> tuple[float, ...]:
        """After one call that does not count. `in_step`: the ranks begin every call together."""
        seconds: list[float] = []
        for _ in range(repeats + 1):
            if in_step:
                self._peers.barrier(op="begin")
            started = time.perf_counter()
            run()
            seconds.append(time.perf_counter() - started)
        return tuple(seconds[1:])

    @property
    def _peers(self) -> Group:
        assert self._group is not None
        return self._group


# ray's type stubs know neither concurrency groups nor what they return
CalibrationActor: Any = ray.remote(concurrency_groups=CONTROL, max_restarts=0)(CalibrationWorker)  # pyright: ignore[reportCallIssue]
