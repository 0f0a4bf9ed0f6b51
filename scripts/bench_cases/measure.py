"""One case against its ceiling and its peers, in turns."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

from longprefill.kernels.native.library import active_isa

GEMM_SIZE = 2048
COPY_BYTES = 256 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    shape: str
    dtype: str
    run: Callable[[], Any]
    check: Callable[[], float | None]
    """Raises AssertionError if the kernel is wrong. What it returns is the result's `error`: RMS of the difference from
    fp64 over RMS, at this shape."""
    flops: int
    """From the formula, at the tile that it names; never what an implementation happens to do."""
    bytes: int
    """Compulsory traffic: every input once, every output once."""
    bound: Literal["compute", "bf16", "memory"]
    """The ceiling: sgemm, a bf16 matrix product, or memcpy."""
    peers: Mapping[str, Callable[[], Any]] = field(default_factory=dict)
    peer_shares: Mapping[str, float] = field(default_factory=dict)
    """What a peer runs of the flops where that is not all: its seconds are divided by it, and its name says so."""
    measures_memory: bool = False
    """Whether the peak of extra memory is a result too (memory.py)."""

    def __post_init__(self) -> None:
        for name, share in self.peer_shares.items():
            if name not in self.peers or not 0 < share < 1:
                raise ValueError(f"peer_shares[{name!r}]={share}: name one of {list(self.peers)}, in (0, 1)")


def measure(op: str, case: Case, *, repeats: int, threads: int) -> dict[str, Any]:
    """Seconds of ours, the ceiling measured in the same turns, and the peers, all for the whole shape; medians of
    `repeats` turns. `extra_bytes` is None: this process cannot tell (memory.py)."""
    torch.set_num_threads(threads)
    torch.set_flush_denormal(True)
    error = case.check()
    clock = time.thread_time if threads == 1 else time.perf_counter
    sides = {"ours": case.run, **_ceilings(case.bound), **case.peers}
    for run in sides.values():
        run()
    times: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(repeats):
        for name, run in sides.items():
            started = clock()
            run()
            times[name].append(clock() - started)
    seconds = {name: statistics.median(values) for name, values in times.items()}
    ceiling_gflops = 2 * GEMM_SIZE**3 / seconds["gemm"] / 1e9
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
        "error": error,
        "ratio": gbytes / ceiling_gbytes if case.bound == "memory" else gflops / ceiling_gflops,
        "peers": {name: seconds[name] / case.peer_shares.get(name, 1.0) for name in case.peers},
        "peer_shares": dict(case.peer_shares),
        "extra_bytes": None,
    }


def assert_close(actual: torch.Tensor, expected: torch.Tensor, tolerance: float) -> float:
    """RMS of the difference over RMS of the expected values: returns it, and raises if it is more than allowed."""
    ratio = (actual.double() - expected.double()).square().mean().sqrt() / expected.double().square().mean().sqrt()
    assert float(ratio) <= tolerance, f"wrong by {float(ratio):.1e} RMS, allowed {tolerance:.0e}: not timed"
    return float(ratio)


def bf16_product_dtype() -> torch.dtype:
    """What the fastest product of bf16 operands runs in: without instructions for it torch's own is a hundred times
    slower than that of the widened operands."""
    return torch.bfloat16 if torch.ops.mkldnn._is_mkldnn_bf16_supported() else torch.float32


def _ceilings(bound: str) -> dict[str, Callable[[], Any]]:
    """`gemm` in fp32, or of bf16 operands where that is the ceiling, and `memcpy`."""
    dtype = bf16_product_dtype() if bound == "bf16" else torch.float32
    a, b = torch.randn(2, GEMM_SIZE, GEMM_SIZE).to(dtype).unbind()
    product = torch.empty(GEMM_SIZE, GEMM_SIZE, dtype=dtype)
    source, target = torch.ones(2, COPY_BYTES // 4).unbind()
    return {"gemm": lambda: torch.mm(a, b, out=product), "memcpy": lambda: target.copy_(source)}
