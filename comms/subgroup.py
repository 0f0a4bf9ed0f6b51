"""A part of a group as a group of its own: the rows and the columns of a mesh, over the messages of their parent.

Every rank of the parent makes the same calls on its own part in the same order, so the parts need no meeting of their
own and the parent's deadline, ledger and checks hold for them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from .arguments import check_exchange, check_gather, check_root
from .group import Group, Pending


class ReadyPending(Pending):
    """A result that is already there."""

    def __init__(self, result_LX: torch.Tensor) -> None:
        self._result_LX = result_LX

    def wait(self) -> torch.Tensor:
        return self._result_LX


class SubGroup(Group):
    """The ranks `members` of `parent`, this rank among them; rank numbers here are places in `members`."""

    def __init__(self, parent: Group, members: Sequence[int]) -> None:
        if parent.rank not in members or len(set(members)) != len(members):
            raise ValueError(
                f"members {list(members)} of rank {parent.rank}'s part: it must be there, and no rank twice"
            )
        self.rank = list(members).index(parent.rank)
        self.size = len(members)
        self.ledger = parent.ledger
        self._parent = parent
        self._members = tuple(members)

    def start_all_gather_rows(self, local_LX: torch.Tensor, counts: Sequence[int], *, op: str) -> Pending:
        """Done at once: the parent's point-to-point messages have no form that overlaps."""
        check_gather(local_LX, counts, rank=self.rank, size=self.size, op=op)
        others = [peer for peer in range(self.size) if peer != self.rank]
        parts = self.exchange(
            {peer: local_LX for peer in others if local_LX.shape[0]},
            {peer: (counts[peer], *local_LX.shape[1:]) for peer in others if counts[peer]},
            dtype=local_LX.dtype,
            op=op,
        )
        parts[self.rank] = local_LX
        return ReadyPending(torch.cat([parts[peer] for peer in range(self.size) if peer in parts]))

    def exchange(
        self,
        sends: Mapping[int, torch.Tensor],
        receive_shapes: Mapping[int, tuple[int, ...]],
        *,
        dtype: torch.dtype,
        op: str,
    ) -> dict[int, torch.Tensor]:
        check_exchange(sends, receive_shapes, dtype=dtype, rank=self.rank, size=self.size, op=op)
        received = self._parent.exchange(
            {self._members[peer]: tensor for peer, tensor in sends.items()},
            {self._members[peer]: shape for peer, shape in receive_shapes.items()},
            dtype=dtype,
            op=op,
        )
        return {self._members.index(peer): tensor for peer, tensor in received.items()}

    def broadcast(self, tensor: torch.Tensor, root: int, *, op: str) -> torch.Tensor:
        check_root(root, size=self.size, op=op)
        others = [peer for peer in range(self.size) if peer != root]
        if self.rank == root:
            self.exchange(dict.fromkeys(others, tensor), {}, dtype=tensor.dtype, op=op)
        else:
            tensor.copy_(self.exchange({}, {root: tuple(tensor.shape)}, dtype=tensor.dtype, op=op)[root])
        return tensor

    def barrier(self, *, op: str) -> None:
        """Waits for the whole parent: its ranks all call this."""
        self._parent.barrier(op=op)

    def close(self) -> None:
        """Nothing of its own to end; the parent is closed by whoever made it."""
