"""What a worker process is told when it starts, and what it says of itself. Everything pickles."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

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
    pool: PoolAddress
    """The holder's file with this worker's cache pages and hand-off slots."""
    num_pages: int
    num_slots: int
    place: MeshPlace
    """Where in the mesh the worker is, and so which share of the weights it holds; a decode worker is alone."""
    backends: Mapping[str, str] = field(default_factory=dict)
    """Kernel backend by op, for ops that shall not use the default."""
    trace: bool = False
    keep_unpooled_keys: bool = False
    num_threads: int = 1


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
