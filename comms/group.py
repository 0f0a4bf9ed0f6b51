"""What a rank may ask of the ranks beside it. One interface over gloo, nccl, hccl (`torch_group.py`), threads in one
process (`thread_group.py`, for tests) and a single rank (`SoloGroup`).

All sizes are known on every rank beforehand (they follow from the layout), so nothing is negotiated and nothing is
pickled. Every rank of the group enters every call in the same order, ranks without rows too. Every call carries an
operation name for the byte ledger and ends within the group's deadline, by a result or by `GroupError`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch


class GroupError(RuntimeError):
    """A collective failed: a peer died, hung beyond the deadline, or the group was closed. Names rank, op and cause."""

    def __init__(self, message: str) -> None:
        super().__init__(message)  # one argument, so that it pickles across Ray


@dataclass(kw_only=True)
class OpCount:
    calls: int = 0
    bytes: int = 0
    """Bytes this rank sent to other ranks."""
    seconds: float = 0.0
    """Time this rank spent in starting and waiting, not hidden behind compute."""


@dataclass
class Ledger:
    """Calls, sent bytes and exposed seconds of this rank by operation name."""

    ops: dict[str, OpCount] = field(default_factory=dict)

    def add(self, op: str, *, calls: int = 0, num_bytes: int = 0, seconds: float = 0.0) -> None:
        count = self.ops.setdefault(op, OpCount())
        count.calls += calls
        count.bytes += num_bytes
        count.seconds += seconds


class Pending(ABC):
    """A started exchange; `wait` returns its result once, or raises `GroupError` at the deadline."""

    @abstractmethod
    def wait(self) -> torch.Tensor: ...


class Group(ABC):
    """The ranks that run one step together. Not thread-safe: one thread a rank drives it."""

    rank: int
    size: int
    ledger: Ledger

    @abstractmethod
    def start_all_gather_rows(self, local_LX: torch.Tensor, counts: Sequence[int], *, op: str) -> Pending:
        """Ragged all-gather along dim 0: rank r contributes `counts[r]` rows (0 is legal), all rows have one shape and
        dtype. The result is [sum(counts), ...] in rank order. The input must not be changed before `wait`."""

    def all_gather_rows(self, local_LX: torch.Tensor, counts: Sequence[int], *, op: str) -> torch.Tensor:
        return self.start_all_gather_rows(local_LX, counts, op=op).wait()

    @abstractmethod
    def exchange(
        self,
        sends: Mapping[int, torch.Tensor],
        receive_shapes: Mapping[int, tuple[int, ...]],
        *,
        dtype: torch.dtype,
        op: str,
    ) -> dict[int, torch.Tensor]:
        """Point-to-point messages, all in flight at once: `sends[peer]` goes to that peer, the result holds one tensor
        for each peer of `receive_shapes`. A message to oneself is a copy. Peers that appear in neither cost nothing."""

    @abstractmethod
    def broadcast(self, tensor: torch.Tensor, root: int, *, op: str) -> torch.Tensor:
        """The root's tensor on every rank; the others pass a buffer of the same shape and dtype, which is filled and
        returned."""

    @abstractmethod
    def barrier(self, *, op: str) -> None: ...

    @abstractmethod
    def close(self) -> None:
        """Ends the group; a second call does nothing. Peers that are still inside a call get `GroupError`."""
