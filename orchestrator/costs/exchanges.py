"""Seconds of the exchanges of a step: bytes of the fullest rank by `partition.traffic`'s formulas, over the links."""

from __future__ import annotations

from collections import Counter
from functools import cached_property

from longprefill.orchestrator.costs.placement import Placement
from longprefill.orchestrator.costs.rates import LinkRates
from longprefill.partition.layout import Layout
from longprefill.partition.shapes import GqaShape, KdaShape, LayerShape, MlaShape, ModelShape, MoeShape
from longprefill.partition.traffic import (
    boundary_bytes,
    cache_row_bytes,
    published_bytes,
    tensor_parallel_rows,
    transposed_bytes,
)
from longprefill.partition.work import Exchange


class ExchangeBytes:
    """What the fullest rank receives in each exchange of one layout, whatever the links are. Each is counted once."""

    def __init__(self, layout: Layout, model: ModelShape) -> None:
        self.layout = layout
        self.model = model
        self._known: dict[object, int] = {}

    def states(self, kda: KdaShape, exchange: Exchange) -> int:
        """KDA states of one layer, gathered or transposed; a relay's go from fragment to fragment."""
        key = (kda, exchange)
        if key not in self._known:
            if exchange == "all_gather":
                published = published_bytes(self.layout, kda)
                self._known[key] = sum(published) - min(published)
            else:
                self._known[key] = max(transposed_bytes(self.layout, kda))
        return self._known[key]

    def rows(self, mixer: MlaShape | GqaShape) -> int:
        """One layer's cache rows of the step."""
        if mixer not in self._known:
            made = cache_row_bytes(self.layout, mixer)
            self._known[mixer] = sum(made) - min(made)
        return self._known[mixer]

    @cached_property
    def boundary(self) -> int:
        """All boundary states, from the owners of the jobs' last fragments."""
        owners = [self.layout.chain(piece.job)[-1].rank for piece in self.layout.slices]
        total = 0
        for mixer, times in Counter(layer.mixer for layer in self.model.layers).items():
            sent = [0] * self.layout.num_ranks
            for owner, piece in zip(owners, self.layout.slices, strict=True):
                sent[owner] += boundary_bytes(piece, mixer, self.model.element_bytes)
            total += times * (sum(sent) - min(sent))
        return total

    @cached_property
    def most_continued(self) -> int:
        """Fragments of a rank that continue one of another rank: of the rank that has most."""
        counts = [0] * self.layout.num_ranks
        for piece in self.layout.slices:
            before = None
            for fragment in self.layout.chain(piece.job):
                counts[fragment.rank] += before is not None and before != fragment.rank
                before = fragment.rank
        return max(counts)


class ExchangeCosts:
    """Exchanges of one layout on one placement."""

    def __init__(self, counted: ExchangeBytes, placement: Placement) -> None:
        self._bytes = counted
        self._layout = counted.layout
        self._model = counted.model
        self._placement = placement
        self._links = LinkRates(placement.links, placement.profiles[0].name)

    def halo_s(self, kda: KdaShape) -> float:
        """Input rows before each fragment, from the rank that has them."""
        local = self._bytes.most_continued
        num_bytes = local * max(kda.conv_width - 1, 0) * self._model.hidden * self._model.element_bytes
        return self._between_ranks("send", num_bytes, messages=min(local, 2))

    def states_s(self, kda: KdaShape, exchange: Exchange) -> float:
        """The exchange of one KDA layer's states; a relay pays in `relay_wait_s`."""
        peers = self._placement.cp - 1
        if exchange == "relay":
            return 0.0
        num_bytes = self._bytes.states(kda, exchange)
        if exchange == "all_gather":
            return self._between_ranks("all_gather", num_bytes, messages=peers)
        # two exchanges, of [E | M] and of incoming states: about two thirds and one third of the bytes
        there = num_bytes * 2 // 3
        return sum(self._between_ranks("exchange", size, messages=peers) for size in (there, num_bytes - there))

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
        num_bytes = self._bytes.rows(mixer)
        if is_sharded and self._layout.num_tokens:
            visible = sum(piece.end for piece in self._layout.slices)
            num_bytes = num_bytes * visible // self._layout.num_tokens
        return self._between_ranks("all_gather", num_bytes, messages=self._placement.cp - 1)

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
        return self._between_ranks("all_gather", self._bytes.boundary)

    def experts_s(self, moe: MoeShape) -> float:
        """Rows to the ranks that hold their experts, with routing weights, and fp32 sums back; routing is even."""
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
        gathers, sums = self.tensor_parallel_bytes(layer)
        gather_s = sum(self._in_node("all_gather", size) for size in gathers)
        return gather_s + sum(self._in_node("exchange", size) for size in sums)

    def tensor_parallel_bytes(self, layer: LayerShape) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """What a rank receives from its tensor-parallel group in one layer: by gathers, and by sums."""
        num_tp, model = self._placement.tp, self._model
        received = -(-max(self._layout.row_counts) // num_tp) * (num_tp - 1)
        rows = tensor_parallel_rows(layer, model)
        gathers = tuple(received * size for size in (*rows.gathers, rows.selection))
        return gathers, (received * model.hidden * model.element_bytes,) * rows.num_sums

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
