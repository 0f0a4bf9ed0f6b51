"""Checks of what a caller passes to a group: the same refusals in every group. Errors here are the caller's bugs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch


def check_gather(local_LX: torch.Tensor, counts: Sequence[int], *, rank: int, size: int, op: str) -> None:
    """Refuses counts that do not fit the group or this rank's rows.

    Raises:
        ValueError: names the operation, the value and what is allowed.
    """
    if len(counts) != size:
        raise ValueError(
            f"op '{op}': {len(counts)} counts for {size} ranks: pass one count a rank, 0 for a rank without rows"
        )
    if any(count < 0 for count in counts):
        raise ValueError(f"op '{op}': counts {list(counts)}: every count is 0 or more")
    if local_LX.dim() == 0:
        raise ValueError(f"op '{op}': a scalar has no rows to gather: pass a tensor of shape [rows, ...]")
    if local_LX.shape[0] != counts[rank]:
        raise ValueError(f"op '{op}': rank {rank} passes {local_LX.shape[0]} rows but counts[{rank}] is {counts[rank]}")


def check_exchange(
    sends: Mapping[int, torch.Tensor],
    receive_shapes: Mapping[int, tuple[int, ...]],
    *,
    dtype: torch.dtype,
    rank: int,
    size: int,
    op: str,
) -> None:
    """Refuses peers outside the group, a wrong dtype and a message to oneself that is not received as it was sent.

    Raises:
        ValueError: names the operation, the value and what is allowed.
    """
    for peer in [*sends, *receive_shapes]:
        if not 0 <= peer < size:
            raise ValueError(f"op '{op}': peer {peer} is not in this group: ranks are 0 to {size - 1}")
    for peer, tensor in sends.items():
        if tensor.dtype != dtype:
            raise ValueError(f"op '{op}': the message to rank {peer} is {tensor.dtype}, this exchange moves {dtype}")
    sent_shape = tuple(sends[rank].shape) if rank in sends else None
    received_shape = tuple(receive_shapes[rank]) if rank in receive_shapes else None
    if sent_shape != received_shape:
        raise ValueError(
            f"op '{op}': rank {rank} sends itself shape {sent_shape} and receives shape {received_shape} from itself: "
            f"the two must be equal"
        )


def check_root(root: int, *, size: int, op: str) -> None:
    """Refuses a root outside the group.

    Raises:
        ValueError: names the operation, the value and what is allowed.
    """
    if not 0 <= root < size:
        raise ValueError(f"op '{op}': root {root} is not in this group: ranks are 0 to {size - 1}")


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """uint8 [nbytes] view of a contiguous tensor of any dtype: the form of every message (gloo has no bf16)."""
    # Not reshape: a tensor with dims of size 0 or 1 may count as contiguous and still have a last stride that is not 1.
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)
