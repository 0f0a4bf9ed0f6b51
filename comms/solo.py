"""The group of one rank: nothing travels, results are copies as in every other group."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

import torch

from .arguments import check_exchange, check_gather, check_root
from .group import Group, GroupError, Ledger, Pending


class SoloPending(Pending):
    """The copy is made at `wait`: before it the caller promised not to change the input."""

    def __init__(self, group: SoloGroup, local_LX: torch.Tensor, op: str) -> None:
        self._group = group
        self._local_LX: torch.Tensor | None = local_LX
        self._op = op

    def wait(self) -> torch.Tensor:
        if self._local_LX is None:
            raise RuntimeError(f"op '{self._op}': the result was already taken: wait once and keep it")
        self._group.check_open(self._op)
        started = time.perf_counter()
        result_LX = self._local_LX.clone(memory_format=torch.contiguous_format)
        self._local_LX = None
        self._group.ledger.add(self._op, seconds=time.perf_counter() - started)
        return result_LX


class SoloGroup(Group):
    """A group of size 1. The ledger counts calls; the bytes are 0."""

    def __init__(self) -> None:
        self.rank = 0
        self.size = 1
        self.ledger = Ledger()
        self._is_open = True

    def check_open(self, op: str) -> None:
        """Raises `GroupError` once the group is closed."""
        if not self._is_open:
            raise GroupError(f"rank 0 of 1: op '{op}': the group is closed")

    def start_all_gather_rows(self, local_LX: torch.Tensor, counts: Sequence[int], *, op: str) -> Pending:
        self.check_open(op)
        check_gather(local_LX, counts, rank=0, size=1, op=op)
        self.ledger.add(op, calls=1)
        return SoloPending(self, local_LX, op)

    def exchange(
        self,
        sends: Mapping[int, torch.Tensor],
        receive_shapes: Mapping[int, tuple[int, ...]],
        *,
        dtype: torch.dtype,
        op: str,
    ) -> dict[int, torch.Tensor]:
        self.check_open(op)
        check_exchange(sends, receive_shapes, dtype=dtype, rank=0, size=1, op=op)
        self.ledger.add(op, calls=1)
        return {0: sends[0].clone(memory_format=torch.contiguous_format)} if 0 in receive_shapes else {}

    def broadcast(self, tensor: torch.Tensor, root: int, *, op: str) -> torch.Tensor:
        self.check_open(op)
        check_root(root, size=1, op=op)
        self.ledger.add(op, calls=1)
        return tensor

    def barrier(self, *, op: str) -> None:
        self.check_open(op)
        self.ledger.add(op, calls=1)

    def close(self) -> None:
        self._is_open = False
