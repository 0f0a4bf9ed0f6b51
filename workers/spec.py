"""What a worker process is told when it starts, and what it says of itself. Everything pickles."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from longprefill.workers.model.sharding import MeshPlace

if TYPE_CHECKING:
    from longprefill.comms.transport.base import PoolAddress

DTYPES = ("bf16", "fp32")


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSpec:
    model_dir: str
    device: str
    """"cpu", "cuda" or "npu"."""
    dtype: str
    """Compute dtype, one of DTYPES."""
    latent_format: str
    index_format: str
    pool: PoolAddress | None
    """The holder's file with this worker's cache pages and hand-off slots; None: the worker makes one itself, because
    its holder is on another machine."""
    num_pages: int
    num_slots: int
    place: MeshPlace
    """Where in the mesh the worker is, and so which share of the weights it holds; a decode worker is alone."""
    backends: Mapping[str, str] = field(default_factory=dict)
    """Kernel backend by op, for ops that shall not use the default."""
    trace: bool = False
    keep_unpooled_keys: bool = False
    num_threads: int = 1


class Whereabouts(NamedTuple):
    """A process, and where its pid means something."""

    pid: int
    node: str
    """Name of the machine, for people."""
    machine: str
    """Equal for two processes exactly when they see each other's pids."""

    @staticmethod
    def here() -> Whereabouts:
        """Of this process."""
        namespace = Path("/proc/self/ns/pid").stat().st_ino
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return Whereabouts(os.getpid(), socket.gethostname(), f"{boot}/{namespace}")


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerInfo:
    """A started worker."""

    pid: int
    node: str
    weights_bytes: int
    load_s: float
    backends: Mapping[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerStats:
    """What a worker has to say of itself at the end of a run."""

    peak_rss_bytes: int
    comm: Mapping[str, tuple[int, int, float]]
    """(calls, bytes sent, exposed seconds) by operation."""
    spans: tuple[tuple[str, str, float, float, int, int], ...]
    """(name, category, start us, duration us, layer, job): workers.trace.Span."""
