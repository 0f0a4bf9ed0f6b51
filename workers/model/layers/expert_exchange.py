"""Expert parallelism: rows travel to the ranks that hold their experts, and weighted sums come back.

    S own rows, N rows at an expert rank, A experts a token, D width, W world ranks

A row goes to a rank once, however many of its experts live there. Sums travel back in fp32 and are added in ascending
expert
order, which is rank order. Counts depend on the routing, so they are exchanged first. Ranks without rows or without
experts take part in every exchange.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from longprefill.comms.group import Group
from longprefill.kernels.contracts import Routing


def run_experts(
    x_SD: torch.Tensor,
    routing: Routing,
    experts: tuple[range, ...],
    world: Group,
    compute: Callable[[torch.Tensor, Routing], torch.Tensor],
) -> torch.Tensor:
    """[S, D] fp32 sums over all of each row's experts.

    Args:
        x_SD: this rank's rows.
        routing: their experts, numbered over the whole model.
        experts: which experts each world rank holds.
        compute: the local experts' weighted fp32 sum of given rows; expert numbers are local, -1 stands for none.
    """
    rows_W = [_rows_for(routing.expert_TA, held) for held in experts]
    counts_W = torch.tensor([rows.numel() for rows in rows_W], dtype=torch.int64)
    counts_WW = world.all_gather_rows(counts_W[None], [1] * world.size, op="expert_counts")
    incoming = counts_WW[:, world.rank].tolist()
    received_ND = _exchange_rows(world, [x_SD[rows] for rows in rows_W], incoming, op="expert_dispatch")
    packed = [_packed_routing(routing, rows, held) for rows, held in zip(rows_W, experts, strict=True)]
    local_routing = _unpacked_routing(_exchange_rows(world, packed, incoming, op="expert_dispatch"))
    sums_ND = compute(received_ND, local_routing)
    returned = _exchange_parts(world, list(sums_ND.split(incoming)), counts_W.tolist(), op="expert_combine")
    total_SD = torch.zeros(x_SD.shape, dtype=torch.float32, device=x_SD.device)
    for rows, part_MD in zip(rows_W, returned, strict=True):
        total_SD.index_add_(0, rows, part_MD)
    return total_SD


def _rows_for(expert_SA: torch.Tensor, held: range) -> torch.Tensor:
    """Rows with at least one expert in `held`."""
    return ((expert_SA >= held.start) & (expert_SA < held.stop)).any(dim=1).nonzero()[:, 0]


def _packed_routing(routing: Routing, rows: torch.Tensor, held: range) -> torch.Tensor:
    """int32 [M, 2, A]: local expert numbers (-1: elsewhere) and the bits of the fp32 weights."""
    expert_MA = routing.expert_TA[rows]
    is_here = (expert_MA >= held.start) & (expert_MA < held.stop)
    local_MA = torch.where(is_here, expert_MA - held.start, -1).to(torch.int32)
    return torch.stack((local_MA, routing.weight_TA[rows].float().view(torch.int32)), dim=1)


def _unpacked_routing(packed_N2A: torch.Tensor) -> Routing:
    weight_NA = packed_N2A[:, 1].contiguous().view(torch.float32)
    return Routing(packed_N2A[:, 0].to(torch.int64), weight_NA)


def _exchange_rows(world: Group, parts: list[torch.Tensor], incoming: list[int], *, op: str) -> torch.Tensor:
    """parts[w] to rank w; what came, in rank order."""
    return torch.cat(_exchange_parts(world, parts, incoming, op=op))


def _exchange_parts(world: Group, parts: list[torch.Tensor], incoming: list[int], *, op: str) -> list[torch.Tensor]:
    row_shape, dtype = parts[0].shape[1:], parts[0].dtype
    received = world.exchange(
        {peer: part for peer, part in enumerate(parts) if part.shape[0] and peer != world.rank},
        {peer: (count, *row_shape) for peer, count in enumerate(incoming) if count and peer != world.rank},
        dtype=dtype,
        op=op,
    )
    received[world.rank] = parts[world.rank]
    empty = parts[0][:0]
    return [received.get(peer, empty) for peer in range(world.size)]
