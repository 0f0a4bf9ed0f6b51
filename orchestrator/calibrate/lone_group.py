"""The group of a rank that is alone in a mesh of any size: it computes what it would compute beside its peers.

Nothing travels. Peers' cache rows are repetitions of this rank's own bytes, so that indexer and attention meet rows of
the usual kind; everything else that would come from a peer is zero, which keeps every state finite. For measuring only:
results are not those of a run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from longprefill.comms.arguments import check_exchange, check_gather, check_root
from longprefill.comms.group import Group, Ledger, Pending


class LonePending(Pending):
    """The result is made at `wait`, as the other groups copy a rank's own rows there."""

    def __init__(self, local_LX: torch.Tensor, counts: Sequence[int], rank: int) -> None:
        self._local_LX = local_LX
        self._counts = counts
        self._rank = rank

    def wait(self) -> torch.Tensor:
        local_LX = self._local_LX
        result_LX = local_LX.new_empty((sum(self._counts), *local_LX.shape[1:]))
        is_repeated = local_LX.dtype == torch.uint8 and local_LX.shape[0] > 0
        for peer, rows_LX in enumerate(result_LX.split(list(self._counts))):
            if peer == self._rank:
                rows_LX.copy_(local_LX)
            elif is_repeated:
                for part_LX in rows_LX.split(local_LX.shape[0]):
                    part_LX.copy_(local_LX[: part_LX.shape[0]])
            else:
                rows_LX.zero_()
        return result_LX


class LoneGroup(Group):
    """`rank` of `size`, without the others. The ledger counts calls."""

    def __init__(self, rank: int, size: int) -> None:
        if not 0 <= rank < size:
            raise ValueError(f"rank={rank} of size={size}: ranks are 0 to {size - 1}")
        self.rank = rank
        self.size = size
        self.ledger = Ledger()

    def start_all_gather_rows(self, local_LX: torch.Tensor, counts: Sequence[int], *, op: str) -> Pending:
        check_gather(local_LX, counts, rank=self.rank, size=self.size, op=op)
        self.ledger.add(op, calls=1)
        return LonePending(local_LX, counts, self.rank)

    def exchange(
        self,
        sends: Mapping[int, torch.Tensor],
        receive_shapes: Mapping[int, tuple[int, ...]],
        *,
        dtype: torch.dtype,
        op: str,
    ) -> dict[int, torch.Tensor]:
        check_exchange(sends, receive_shapes, dtype=dtype, rank=self.rank, size=self.size, op=op)
        self.ledger.add(op, calls=1)
        received = {peer: torch.zeros(shape, dtype=dtype) for peer, shape in receive_shapes.items()}
        if self.rank in sends:
            received[self.rank].copy_(sends[self.rank])
        return received

    def broadcast(self, tensor: torch.Tensor, root: int, *, op: str) -> torch.Tensor:
        check_root(root, size=self.size, op=op)
        self.ledger.add(op, calls=1)
        return tensor

    def barrier(self, *, op: str) -> None:
        self.ledger.add(op, calls=1)

    def close(self) -> None:
        """Nothing is open."""
