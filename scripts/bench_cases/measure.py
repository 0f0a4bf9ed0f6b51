"""One case against its ceiling and its peers, in turns."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

from longprefill.kernels.native.library import active_isa

SGEMM_SIZE = 2048
COPY_BYTES = 256 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    shape: str
    dtype: str
    run: Callable[[], Any]
    check: Callable[[], None]
    """Raises AssertionError if the kernel is wrong."""
    flops: int
    """From the formula, at the tile that it names; never what an implementation happens to do."""
    bytes: int
    """Compulsory traffic: every input once, every output once."""
    bound: Literal["compute", "memory"]
    peers: Mapping[str, Callable[[], Any]] = field(default_factory=dict)


def measure(op: str, case: Case, *, repeats: int, threads: int) -> dict[str, Any]:
    """Seconds of ours, the ceiling measured in the same turns, and the peers; medians of `repeats` turns."""
    torch.set_num_threads(threads)
    torch.set_flush_denormal(True)
    case.check()
    clock = time.thread_time if threads == 1 else time.perf_counter
    sgemm, copy = _ceilings()
    sides = {"ours": case.run, "sgemm": sgemm, "memcpy": copy, **case.peers}
    for run in sides.values():
        run()
    times: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(repeats):
        for name, run in sides.items():
            started = clock()
            run()
            times[name].append(clock() - started)
    seconds = {name: statistics.median(values) for name, values in times.items()}
    ceiling_gflops = 2 * SGEMM_SIZE**3 / seconds["sgemm"] / 1e9
    ceiling_gbytes = 2 * COPY_BYTES / seconds["memcpy"] / 1e9
    gflops, gbytes = case.flops / seconds["ours"] / 1e9, case.bytes / seconds["ours"] / 1e9
    return {
        "op": op,
        "shape": case.shape,
        "dtype": case.dtype,
        "isa": active_isa(),
        "threads": threads,
        "seconds": seconds["ours"],
        "spread": [min(times["ours"]), max(times["ours"])],
        "flops": case.flops,
        "bytes": case.bytes,
        "gflops": gflops,
        "bound": case.bound,
        "ceiling_gflops": ceiling_gflops,
        "ceiling_gbytes": ceiling_gbytes,
        "ratio": gflops / ceiling_gflops if case.bound == "compute" else gbytes / ceiling_gbytes,
        "peers": {name: seconds[name] for name in case.peers},
    }


def assert_close(actual: torch.Tensor, expected: torch.Tensor, tolerance: float) -> None:
    """RMS of the difference over RMS of the expected values."""
    ratio = (actual.double() - expected.double()).square().mean().sqrt() / expected.double().square().mean().sqrt()
    assert float(ratio) <= tolerance, f"wrong by {float(ratio):.1e} RMS, allowed {tolerance:.0e}: not timed"


def _ceilings() -> tuple[Callable[[], Any], Callable[[], Any]]:
    a, b = torch.randn(2, SGEMM_SIZE, SGEMM_SIZE).unbind()
    product = torch.empty(SGEMM_SIZE, SGEMM_SIZE)
    source, target = torch.ones(2, COPY_BYTES // 4).unbind()
    return lambda: torch.mm(a, b, out=product), lambda: target.copy_(source)
