"""What a candidate needs and takes: memory of its fullest rank, seconds to the first token, bytes that travel."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from copy import copy
from dataclasses import dataclass, replace
from functools import cached_property
from math import ceil
from typing import NamedTuple

from longprefill.orchestrator.costs.exchanges import ExchangeBytes, ExchangeCosts
from longprefill.orchestrator.costs.profile import ProfileError
from longprefill.orchestrator.costs.prompt import PromptTime, prompt_time
from longprefill.orchestrator.costs.rates import LinkRates
from longprefill.orchestrator.costs.step import StepCosts, StepOptions, StepTime
from longprefill.orchestrator.memory import KERNEL_BYTES, PROCESS_BYTES, RankMemory, step_bytes_per_token, weight_bytes
from longprefill.orchestrator.plan import ClusterSettings, cache_bytes_per_page
from longprefill.orchestrator.planner.candidate import Candidate, PlanRequest
from longprefill.orchestrator.planner.machines import Machines, Site
from longprefill.orchestrator.shapes import model_shape
from longprefill.partition.generators import LayoutKind, generate
from longprefill.partition.layout import PAGE_TOKENS, Slice
from longprefill.partition.shapes import KdaShape, MlaShape, ModelShape, MoeShape
from longprefill.partition.traffic import step_traffic
from longprefill.workers.model.config import ModelConfig, MoeConfig
from longprefill.workers.model.sharding import MeshPlace


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """A candidate's seconds and memory."""

    candidate: Candidate
    ttft_s: float
    """From the prompts' arrival to the first token of the last of them: what is made small."""
    mean_ttft_s: float
    """Mean over the concurrent prompts."""
    prompt: PromptTime
    """One prompt, or those that share their step."""
    handoff_s: float
    """Of the hand-off, what no step hides."""
    queue_s: float
    """The last prompt's wait for those before it on the same group."""
    num_groups: int
    memory: RankMemory
    site: Site

    @property
    def prefill_s(self) -> float:
        return self.prompt.seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class RankKind:
    """Ranks of a mesh that need the same on the same device."""

    device: str
    device_bytes: int
    tp_ranks: tuple[int, ...]
    """Their places in the tensor-parallel group."""
    num_ranks: int
    memory: RankMemory
    """With spread experts as many as the fullest rank has of them."""


class _Sizes(NamedTuple):
    """Bytes of one job on a rank: of a page of all layers, of the widest layer's row, of KDA states and conv tails."""

    page: int
    widest_row: float
    states: int


class Evaluator:
    """One model, one request, one set of machines."""

    def __init__(self, config: ModelConfig, request: PlanRequest, machines: Machines, *, has_decode: bool) -> None:
        self.config = config
        self.request = request
        self.machines = machines
        self.has_decode = has_decode
        self.unknown: list[tuple[Candidate, str]] = []
        """Candidates that could not be estimated, and which rate is missing."""
        self._found: dict[tuple[str, Candidate], Estimate | None] = {}
        self._shapes: dict[tuple[int, int | None, str, str], ModelShape] = {}
        self._sizes_of: dict[tuple[int, str, str], _Sizes] = {}
        self._weights: dict[int, int] = {}
        self._weights_of: dict[tuple[int, int], int] = {}
        self._per_token: dict[int, int] = {}
        self._costs: dict[tuple[object, ...], dict[StepOptions, StepCosts]] = {}

    def with_tokens(self, num_tokens: int) -> Evaluator:
        """The same for one prompt of another length, with nothing cached."""
        other = copy(self)
        other.request = replace(self.request, tokens=num_tokens, cached=0, concurrent=1)
        other._found = {}
        return other

    def settings(self, latent_format: str, index_format: str) -> ClusterSettings:
        """The engine's settings that sizes follow from."""
        return ClusterSettings(
            model_dir=self.request.model,
            dtype=self.request.dtype,
            latent_format=latent_format,
            index_format=index_format,
        )

    @property
    def item_bytes(self) -> int:
        return 2 if self.request.dtype == "bf16" else 4

    def shape(self, candidate: Candidate) -> ModelShape:
        """The model as one rank of the candidate's mesh holds it."""
        world = candidate.num_devices if candidate.is_expert_parallel else None
        key = (candidate.tp, world, candidate.latent_format, candidate.index_format)
        if key not in self._shapes:
            settings = self.settings(candidate.latent_format, candidate.index_format)
            self._shapes[key] = model_shape(self.config, settings, self._place(candidate))
        return self._shapes[key]

    def memory(self, candidate: Candidate) -> RankMemory:
        """Bytes of the fullest rank: weights, caches of the jobs that it holds at once, a step's activations."""
        request = self.request
        num_pages = candidate.jobs_per_step * -(-request.tokens // PAGE_TOKENS)
        sizes = self._sizes(candidate)
        cache = num_pages * sizes.page
        if candidate.is_cache_sharded:
            # its own rows, and one layer's rows of everything while that layer runs
            cache = -(-cache // candidate.cp) + ceil(num_pages * PAGE_TOKENS * sizes.widest_row)
        cache += 2 * candidate.jobs_per_step * sizes.states
        rows = min(candidate.step_tokens, num_pages * PAGE_TOKENS)
        per_token = self._step_bytes(candidate.num_devices)
        return RankMemory(
            process=PROCESS_BYTES,
            weights=self.weights(candidate),
            cache=cache,
            step=KERNEL_BYTES + rows * per_token,
        )

    def _sizes(self, candidate: Candidate) -> _Sizes:
        """Sizes of one job's caches, which experts have no part in."""
        key = (candidate.tp, candidate.latent_format, candidate.index_format)
        if key not in self._sizes_of:
            shape = self.shape(replace(candidate, is_expert_parallel=False))
            settings = self.settings(candidate.latent_format, candidate.index_format)
            self._sizes_of[key] = _Sizes(
                page=cache_bytes_per_page(self.config, settings),
                widest_row=max((_row_bytes(layer.mixer) for layer in shape.layers), default=0),
                states=state_bytes(shape),
            )
        return self._sizes_of[key]

    def memory_by_rank(self, candidate: Candidate, site: Site) -> list[RankKind]:
        """Kinds of ranks: they differ by device, and in weights by their place in the tensor-parallel group."""
        fullest = self.memory(candidate)
        spare = self._weights[candidate.tp] - fullest.weights  # experts that are elsewhere
        by_weights: dict[int, list[int]] = {}
        for rank in range(candidate.tp):
            # between the first and the last all are alike
            weights = self._weights_at(candidate.tp, rank if rank in (0, candidate.tp - 1) else 1)
            by_weights.setdefault(weights, []).append(rank)
        groups: Counter[tuple[str, int]] = Counter()
        for machine, slots in site.parts:
            groups[machine.profile.name, machine.memory_bytes] += slots
        return [
            RankKind(
                device=device,
                device_bytes=device_bytes,
                tp_ranks=tuple(ranks),
                num_ranks=slots * len(ranks),
                memory=replace(fullest, weights=weights - spare),
            )
            for (device, device_bytes), slots in groups.items()
            for weights, ranks in by_weights.items()
        ]

    def weights(self, candidate: Candidate) -> int:
        """Weights of the fullest rank: of the first or last of its tensor-parallel group, less the experts that are
        elsewhere."""
        num_tp = candidate.tp
        if num_tp not in self._weights:
            self._weights[num_tp] = max(self._weights_at(num_tp, rank) for rank in {0, num_tp - 1})
        total = self._weights[num_tp]
        if candidate.is_expert_parallel:
            for layer in self.config.layers:
                if isinstance(moe := layer.ffn, MoeConfig):
                    width = self.config.hidden if moe.latent_dim is None else moe.latent_dim
                    elsewhere = moe.num_experts - -(-moe.num_experts // candidate.num_devices)
                    total -= elsewhere * 3 * width * moe.intermediate * self.item_bytes
        return total

    def _weights_at(self, num_tp: int, rank: int) -> int:
        """Weights of one rank of a tensor-parallel group that has all experts."""
        key = (num_tp, rank)
        if key not in self._weights_of:
            place = MeshPlace.of(rank, num_cp=1, num_tp=num_tp, expert_parallel=False)
            self._weights_of[key] = weight_bytes(self.config, self.item_bytes, place)
        return self._weights_of[key]

    def _step_bytes(self, num_devices: int) -> int:
        if num_devices not in self._per_token:
            self._per_token[num_devices] = step_bytes_per_token(self.config, self.item_bytes, num_devices)
        return self._per_token[num_devices]

    def largest_step(self, candidate: Candidate, memory_bytes: int) -> int:
        """Tokens of the longest step that fits, a multiple of 2P pages where it can be; 0: not even one page does."""
        rest = self.memory(replace(candidate, step_tokens=PAGE_TOKENS))
        per_token = self._step_bytes(candidate.num_devices)
        room = (memory_bytes - rest.total) // per_token + PAGE_TOKENS
        unit = 2 * candidate.cp * PAGE_TOKENS
        unit = unit if room >= unit else PAGE_TOKENS
        return max(room // unit * unit, 0)

    def estimate(self, candidate: Candidate) -> Estimate | None:
        """Seconds and memory; None: no room on the machines, or a rate that it needs is not known (see `unknown`)."""
        return self._tried(self._estimate, candidate)

    def rough(self, candidate: Candidate) -> Estimate | None:
        """`estimate` from one step in the middle, times the number of steps: a step's time is near linear in its
        start."""
        return self._tried(self._rough, candidate)

    def _tried(self, estimated: Callable[[Candidate], Estimate | None], candidate: Candidate) -> Estimate | None:
        key = (estimated.__name__, candidate)
        if key not in self._found:
            try:
                self._found[key] = estimated(candidate)
            except ProfileError as error:
                self.unknown.append((candidate, str(error)))
                self._found[key] = None
        return self._found[key]

    def _estimate(self, candidate: Candidate) -> Estimate | None:
        site = self.machines.site(candidate.cp, candidate.tp)
        if site is None:
            return None
        request = self.request
        prompt = prompt_time(
            self.costs(candidate, site),
            request.tokens,
            candidate.step_tokens,
            candidate.layout,
            start=request.cached,
            num_jobs=candidate.jobs_per_step,
        )
        return self._finished(candidate, site, prompt)

    def _rough(self, candidate: Candidate) -> Estimate | None:
        site = self.machines.site(candidate.cp, candidate.tp)
        if site is None:
            return None
        request = self.request
        rest = request.tokens - request.cached
        num_steps = -(-rest // candidate.step_tokens)
        if num_steps <= 2 or candidate.jobs_per_step > 1:
            return self._estimate(candidate)
        middle = request.cached + (rest - candidate.step_tokens) // 2 // PAGE_TOKENS * PAGE_TOKENS
        time = self.step(candidate, candidate.layout, middle)
        steps = rest / candidate.step_tokens
        prompt = PromptTime(
            seconds=steps * time.seconds,
            num_steps=num_steps,
            parts={name: steps * seconds for name, seconds in time.parts.items()},
            max_work_s=steps * time.max_work_s,
            mean_work_s=steps * time.mean_work_s,
            waiting_s=steps * time.waiting_s,
            exposed_s=steps * time.exposed_s,
            host_s=steps * time.host_s,
            first_step_s=time.seconds,
            last_step_s=time.seconds,
        )
        return self._finished(candidate, site, prompt)

    def step(self, candidate: Candidate, layout: LayoutKind, start: int) -> StepTime:
        """One step of the candidate's size from a position on."""
        site = self.machines.site(candidate.cp, candidate.tp)
        assert site is not None
        piece = Slice(job=0, start=start, end=start + candidate.step_tokens)
        return self.costs(candidate, site).step([piece], layout)

    def costs(self, candidate: Candidate, site: Site) -> StepCosts:
        """Costs of the candidate's steps on its site."""
        options = StepOptions(
            exchange=candidate.exchange,
            is_cache_sharded=candidate.is_cache_sharded,
            is_expert_parallel=candidate.is_expert_parallel,
        )
        key = (candidate.cp, candidate.tp, candidate.latent_format, candidate.index_format, options.is_expert_parallel)
        by_options = self._costs.setdefault(key, {})
        if not by_options:
            by_options[options] = StepCosts(self.shape(candidate), site.placement, options)
        elif options not in by_options:
            by_options[options] = next(iter(by_options.values())).with_options(options)
        return by_options[options]

    def traffic(self, candidate: Candidate) -> dict[str, int]:
        """Bytes that the fullest rank receives from other ranks over the whole prompt, by operation; those of expert
        parallelism for even routing."""
        request = self.request
        rest = request.tokens - request.cached
        length = min(candidate.step_tokens, rest)
        layout = generate(candidate.layout, [Slice(job=0, start=0, end=length)], candidate.cp)
        steps = candidate.jobs_per_step * rest / length
        found: Counter[str] = Counter()
        for name, ranks in step_traffic(layout, self.shape(candidate), candidate.exchange).items():
            most = max(rank.received_bytes for rank in ranks)
            if name == "cache_rows" and candidate.is_cache_sharded:
                most = most * (request.tokens + request.cached + length) // (2 * length)
            found[name] += int(most * steps)
        site = self.machines.site(candidate.cp, candidate.tp)
        assert site is not None
        exchanges = ExchangeCosts(ExchangeBytes(layout, self.shape(candidate)), site.placement)
        for layer in self.shape(candidate).layers:
            gathers, sums = exchanges.tensor_parallel_bytes(layer)
            found["tensor_parallel"] += int((sum(gathers) + sum(sums)) * steps)
            if candidate.is_expert_parallel and isinstance(layer.ffn, MoeShape):
                found["experts"] += int(sum(exchanges.experts_bytes(layer.ffn)) * steps)
        return {name: size for name, size in found.items() if size}

    def handoff_bytes(self, candidate: Candidate, num_tokens: int) -> int:
        """Pages of so many tokens, all layers."""
        return -(-num_tokens // PAGE_TOKENS) * self._sizes(candidate).page

    def _finished(self, candidate: Candidate, site: Site, prompt: PromptTime) -> Estimate:
        request = self.request
        num_groups = max(self.machines.num_slots(candidate.tp) // candidate.cp, 1)
        rounds = ceil(request.concurrent / (num_groups * candidate.jobs_per_step))
        handoff_s = self._handoff_s(candidate, site, prompt)
        queue_s = (rounds - 1) * prompt.seconds
        mean_wait = mean_wait_rounds(request.concurrent, num_groups * candidate.jobs_per_step)
        return Estimate(
            candidate=candidate,
            ttft_s=prompt.seconds + handoff_s + queue_s,
            mean_ttft_s=prompt.seconds * (1 + mean_wait) + handoff_s,
            prompt=prompt,
            handoff_s=handoff_s,
            queue_s=queue_s,
            num_groups=num_groups,
            memory=self.memory(candidate),
            site=site,
        )

    def _handoff_s(self, candidate: Candidate, site: Site, prompt: PromptTime) -> float:
        """What of the hand-off the steps do not hide: the last step's pages and the state, or a backlog."""
        if not self.has_decode:
            return 0.0
        request = self.request
        pages = candidate.jobs_per_step * self.handoff_bytes(candidate, request.tokens - request.cached)
        last = pages // prompt.num_steps + candidate.jobs_per_step * self._sizes(candidate).states * candidate.tp
        last += candidate.jobs_per_step * 4 * self.config.vocab_size
        links = LinkRates(site.placement.links, site.placement.profiles[0].name)
        scope = "network" if len(self.machines.machines) > 1 else "node"
        last_s, all_s = (
            links.seconds("transport", scope, ranks=2, num_bytes=-(-size // candidate.num_devices))
            for size in (last, pages + last)
        )
        return max(last_s, all_s - (prompt.seconds - prompt.first_step_s))

    def _place(self, candidate: Candidate, rank: int = 0) -> MeshPlace:
        return MeshPlace.of(
            rank, num_cp=candidate.cp, num_tp=candidate.tp, expert_parallel=candidate.is_expert_parallel
        )

    @cached_property
    def has_experts(self) -> bool:
        return any(isinstance(layer.ffn, MoeConfig) for layer in self.config.layers)


def state_bytes(model: ModelShape) -> int:
    """KDA states and conv tails of one job, as one tensor-parallel rank holds them."""
    return sum(
        layer.mixer.state_bytes + max(layer.mixer.conv_width - 1, 0) * layer.mixer.conv_channels * model.element_bytes
        for layer in model.layers
        if isinstance(layer.mixer, KdaShape)
    )


def _row_bytes(mixer: object) -> float:
    if not isinstance(mixer, MlaShape):
        return 0.0
    return mixer.row_bytes + (0.0 if mixer.indexer is None else mixer.indexer.key_bytes / mixer.indexer.pool)


def mean_wait_rounds(num_prompts: int, at_once: int) -> float:
    """Mean number of rounds that a prompt waits when `at_once` run together: those of round n wait for n others."""
    num_full, rest = divmod(num_prompts, at_once)
    return (at_once * num_full * (num_full - 1) // 2 + rest * num_full) / num_prompts


def limits(memory: RankMemory) -> Mapping[str, int]:
    """A rank's memory by what it is for."""
    return {
        "process": memory.process,
        "weights": memory.weights,
        "cache": memory.cache,
        "step": memory.step,
        "total": memory.total,
    }
