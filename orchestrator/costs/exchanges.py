"""Seconds of the exchanges of a step: bytes of the fullest rank by `partition.traffic`'s formulas, over the links."""

from __future__ import annotations

from collections import Counter
from functools import cached_property

from longprefill.orchestrator.costs.placement import Placement
from longprefill.orchestrator.costs.rates import LinkRates
from longprefill.partition.layout import Layout
from longprefill.partition.shapes import GqaShape, KdaShape, LayerShape, MlaShape, ModelShape, MoeShape
from longprefill.partition.traffic import (
    boundary_traffic,
    cache_row_traffic,
    published_bytes,
    summary_traffic,
    tensor_parallel_rows,
)
from longprefill.partition.work import Exchange


class ExchangeCosts:
    """Exchanges of one layout on one placement."""

    def __init__(self, layout: Layout, model: ModelShape, placement: Placement) -> None:
        self._layout = layout
        self._model = model
        self._placement = placement
        self._links = LinkRates(placement.links, placement.profiles[0].name)
        self._known: dict[object, float] = {}

    def halo_s(self, kda: KdaShape) -> float:
        """Input rows before each fragment, from the rank that has them."""
        key = ("halo", kda)
        if key not in self._known:
            self._known[key] = self._halo(kda)
        return self._known[key]

    def _halo(self, kda: KdaShape) -> float:
        local = max(sum(flags) for flags in self._continued)
        row_bytes = self._model.hidden * self._model.element_bytes
        num_bytes = local * max(kda.conv_width - 1, 0) * row_bytes
        return self._between_ranks("send", num_bytes, messages=min(local, 2))

    def states_s(self, kda: KdaShape, exchange: Exchange) -> float:
        """The exchange of one KDA layer's states; a relay pays in `relay_wait_s`."""
        key = (kda, exchange)
        if key not in self._known:
            self._known[key] = self._states(kda, exchange)
        return self._known[key]

    def relay_wait_s(self, kda: KdaShape, fragment_s: float) -> float:
        """Waiting for states in a chain of N fragments, F on a rank, in the number of head groups that makes it least.

        G groups of heads run through N fragments as through a pipeline: F G + N - F slots of a group each, F G of them
        the rank's own work. Every slot ends with a message. Of several jobs the longest chain counts: the others' scans
        fill its gaps.
        """
        chain = max((self._layout.chain(piece.job) for piece in self._layout.slices), key=len)
        num_fragments = len(chain)
        each = max(Counter(fragment.rank for fragment in chain).values())
        best = float("inf")
        groups = 1
        while groups <= kda.num_value_heads:
            hop_s = self._between_ranks("send", kda.state_bytes // groups)
            slots = each * groups + num_fragments - each
            best = min(best, (num_fragments - each) * fragment_s / groups + slots * hop_s)
            groups *= 2
        return best

    def rows_s(self, mixer: MlaShape | GqaShape, *, is_sharded: bool) -> float:
        """The gather of one layer's cache rows: the step's to every rank, or all that the step sees where each rank
        keeps only its own."""
        key = (mixer, is_sharded)
        if key not in self._known:
            traffic = cache_row_traffic(self._layout, mixer)
            num_bytes = max(rank.received_bytes for rank in traffic)
            if is_sharded and self._layout.num_tokens:
                visible = sum(piece.end for piece in self._layout.slices)
                num_bytes = num_bytes * visible // self._layout.num_tokens
            self._known[key] = self._between_ranks("all_gather", num_bytes, messages=self._placement.cp - 1)
        return self._known[key]

    def ring_s(self, gqa: GqaShape, attention_s: float) -> float:
        """What a ring of keys and values exposes beside `attention_s` of attention in one layer: P steps, each with
        its message's fixed cost, and what of a part's transfer takes longer than the attention over the part before."""
        num_cp = self._placement.cp
        part = -(-self._layout.num_tokens // num_cp) * gqa.row_bytes
        fixed_s = self._between_ranks("send", 1)
        transfer_s = self._between_ranks("send", part) - fixed_s
        return num_cp * fixed_s + (num_cp - 1) * max(transfer_s - attention_s / num_cp, 0.0)

    def boundary_s(self) -> float:
        """All boundary states, once a step."""
        num_bytes = 0
        for layer in self._model.layers:
            if layer.mixer not in self._boundary:
                ranks = boundary_traffic(self._layout, layer.mixer, self._model.element_bytes)
                self._boundary[layer.mixer] = max(rank.received_bytes for rank in ranks)
            num_bytes += self._boundary[layer.mixer]
        return self._between_ranks("all_gather", num_bytes)

    def experts_s(self, moe: MoeShape) -> float:
        """Rows to the ranks that hold their experts, with routing weights, and fp32 sums back; routing is even."""
        key = ("experts", moe)
        if key not in self._known:
            self._known[key] = self._experts(moe)
        return self._known[key]

    def _experts(self, moe: MoeShape) -> float:
        world = self._placement.num_devices
        return sum(
            self._between_ranks("exchange", size, messages=world - 1, ranks=world) for size in self.experts_bytes(moe)
        )

    def experts_bytes(self, moe: MoeShape) -> tuple[int, int]:
        """What a rank receives of rows for its experts, and of sums for its rows."""
        world = self._placement.num_devices
        rows = -(-max(self._layout.row_counts) // self._placement.tp)
        width = self._model.hidden if moe.latent_dim is None else moe.latent_dim
        visited = (world - 1) * (1.0 - (1.0 - 1.0 / world) ** moe.experts_per_token)
        there = int(rows * visited * (width * self._model.element_bytes + 8 * moe.experts_per_token))
        return there, int(rows * visited * 4 * width)

    def tensor_parallel_s(self, layer: LayerShape) -> float:
        """Gathers of rows inside the tensor-parallel group before each part of a layer, and sums after it."""
        if self._placement.tp == 1:
            return 0.0
        if layer not in self._tensor_parallel:
            gathers, sums = self.tensor_parallel_bytes(layer)
            gather_s = sum(self._in_node("all_gather", size) for size in gathers)
            self._tensor_parallel[layer] = gather_s + sum(self._in_node("exchange", size) for size in sums)
        return self._tensor_parallel[layer]

    def tensor_parallel_bytes(self, layer: LayerShape) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """What a rank receives from its tensor-parallel group in one layer: by gathers, and by sums."""
        num_tp, model = self._placement.tp, self._model
        received = -(-max(self._layout.row_counts) // num_tp) * (num_tp - 1)
        rows = tensor_parallel_rows(layer, model)
        gathers = tuple(received * size for size in (*rows.gathers, rows.selection))
        return gathers, (received * model.hidden * model.element_bytes,) * rows.num_sums

    def _states(self, kda: KdaShape, exchange: Exchange) -> float:
        peers = self._placement.cp - 1
        if exchange == "relay":
            return 0.0
        if exchange == "all_gather":
            published = published_bytes(self._layout, kda)
            return self._between_ranks("all_gather", sum(published) - min(published), messages=peers)
        ranks = summary_traffic(self._layout, kda, exchange)
        num_bytes = max(rank.received_bytes for rank in ranks)
        # two exchanges, of [E | M] and of incoming states: about two thirds and one third of the bytes
        there = num_bytes * 2 // 3
        return sum(self._between_ranks("exchange", size, messages=peers) for size in (there, num_bytes - there))

    def _between_ranks(self, pattern: str, num_bytes: int, *, messages: int = 1, ranks: int | None = None) -> float:
        """Seconds of bytes from peers here and on other machines, which come at the same time."""
        placement = self._placement
        ranks = placement.cp if ranks is None else ranks
        calling = 2 if pattern == "send" else ranks
        remote = int(num_bytes * placement.remote_share)
        here = min(ranks, placement.cp_per_node * (ranks // placement.cp))
        local_s = self._links.seconds(
            pattern,
            "node",
            ranks=min(here, calling),
            num_bytes=num_bytes - remote,
            messages=min(messages, max(here - 1, 1)),
        )
        if not remote:
            return local_s
        remote_messages = max(messages - here + 1, 1)
        return max(
            local_s,
            self._links.seconds(pattern, "network", ranks=calling, num_bytes=remote, messages=remote_messages),
        )

    def _in_node(self, pattern: str, num_bytes: int) -> float:
        num_tp = self._placement.tp
        return self._links.seconds(pattern, "node", ranks=num_tp, num_bytes=num_bytes, messages=num_tp - 1)

    @cached_property
    def _continued(self) -> list[list[bool]]:
        """For every rank, whether each of its fragments continues one of another rank."""
        found: list[list[bool]] = [[] for _ in range(self._layout.num_ranks)]
        for piece in self._layout.slices:
            before = None
            for fragment in self._layout.chain(piece.job):
                found[fragment.rank].append(before is not None and before != fragment.rank)
                before = fragment.rank
        return found

    @cached_property
    def _boundary(self) -> dict[object, int]:
        return {}

    @cached_property
    def _tensor_parallel(self) -> dict[LayerShape, float]:
        return {}
