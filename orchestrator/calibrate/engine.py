"""One prefill rank over a reduced model, stepped wherever a calibration wants it, every operation timed in place.

Weights are random, caches hold random rows of the usual spread: no step before the measured one is needed.

S own rows, D hidden, T tokens, W numbers of a cache row
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import replace

import torch

from longprefill.kernels.backends import KernelTable, resolve
from longprefill.kernels.contracts import Summary
from longprefill.kernels.kda.algebra import fold
from longprefill.orchestrator.calibrate.lone_group import LoneGroup
from longprefill.orchestrator.calibrate.reduced import reduced
from longprefill.orchestrator.calibrate.samples import BenchSpec, StepSample, TimedStep
from longprefill.orchestrator.calibrate.stopwatch import Lap, Stopwatch, Timed
from longprefill.partition.layout import PAGE_TOKENS, Slice
from longprefill.workers.cache.pages import CacheFormats, CachePool, cache_kinds, pool_bytes
from longprefill.workers.cache.states import BoundaryState
from longprefill.workers.engine import TORCH_DTYPES
from longprefill.workers.model.config import KdaConfig, LayerConfig, MlaConfig
from longprefill.workers.model.initial import initial_parameter
from longprefill.workers.model.layers.residual import ResidualScheme
from longprefill.workers.model.model import Model
from longprefill.workers.model.parameters import parameter_shapes
from longprefill.workers.model.weights import parameter_dtype
from longprefill.workers.prefill import PrefillRank, StepPlan

WARM_TOKENS = 1024
"""Tokens of the first step, whose rows tell how cache rows are spread."""
FILL_ROWS = 8192
OPS_OF_SPANS = {
    "kda.project": "kda.project",
    "kda.halo": "kda.project",
    "kda.conv": "kda.conv",
    "kernel.prepare": "prepare",
    "kernel.summarize": "kda.summary",
    "kernel.scan": "kda.scan",
    "kda.scan_first": "kda.output",
    "kda.summarize": "copies",
    "kda.scan": "copies",
    "kda.output": "kda.output",
    "cache_rows": "mla.rows",
    "query": "mla.query",
    "cache_rows.wait": "mla.write",
    "indexer": "indexer",
    "attention.dense": "attention.dense",
    "attention.sparse": "attention.sparse",
    "output": "mla.output",
    "ffn.dense": "ffn.dense",
    "moe.route": "moe.route",
    "moe.experts": "moe.experts",
    "moe.shared": "moe.shared",
    "kda": "norms",
    "mla": "norms",
    "dsa": "norms",
}
"""Operation of every span; what lies between a layer's spans counts as norms. `prepare` is a part of each scan.
`copies`, around the scans of later fragments, count as summary where fragments lie in the middle, and else, as there is
little of it, as output."""
SEVERAL = ("prepare", "kda.scan", "indexer", "attention.dense", "attention.sparse")
"""Operations that one layer runs for each fragment, or for each of two groups of fragments."""


class EngineBench:
    """Loads the reduced model and fills its cache."""

    def __init__(self, spec: BenchSpec, clock: Callable[[], float] = time.thread_time) -> None:
        self.spec = spec
        self.config = reduced(spec.config)
        self.stopwatch = Stopwatch(clock)
        dtype = TORCH_DTYPES[spec.dtype]
        weights = {
            name: initial_parameter(name, shape, self.config, spec.seed).to(parameter_dtype(name, dtype))
            for name, shape in parameter_shapes(self.config).items()
        }
        kernels = resolve("cpu")
        spans = {function: f"kernel.{function}" for function in ("prepare", "summarize", "scan")}
        timed: KernelTable = replace(kernels, kda=Timed(kernels.kda, self.stopwatch, spans))  # pyright: ignore[reportArgumentType]
        self.kernels = kernels
        num_pages = -(-spec.max_tokens // PAGE_TOKENS)
        kinds = cache_kinds(self.config, CacheFormats(latent=spec.latent_format, index_key=spec.index_format))
        pool = CachePool(torch.zeros(pool_bytes(kinds, num_pages), dtype=torch.uint8), kinds, num_pages)
        self.rank = PrefillRank(
            Model(self.config, weights), LoneGroup(0, 1), pool, timed, dtype=dtype, tracer=self.stopwatch
        )
        generator = torch.Generator().manual_seed(spec.seed)
        self.tokens_T = torch.randint(0, self.config.vocab_size, (num_pages * PAGE_TOKENS,), generator=generator)
        self.table = tuple(range(num_pages))
        self._state = self._warm(generator)

    def step(self, step: TimedStep) -> StepSample:
        """Runs one step from random caches and a usual state."""
        self.rank.group = LoneGroup(step.rank, step.num_ranks)
        state = BoundaryState(position=step.start, kda=dict(self._state.kda), pool_tails=dict(self._state.pool_tails))
        if step.start == 0:
            state = BoundaryState.start(self.config, self.rank.dtype, self.rank.device)
        self.rank.open_job(0, self.tokens_T[: step.start + step.tokens], self.table, state)
        self.stopwatch.take_laps()
        plan = StepPlan(slices=step.slices, layout=step.layout, exchange="all_gather", logits_of=())
        wall_started, started = time.perf_counter(), self.stopwatch.clock()
        self.rank.run_step(plan)
        elapsed, wall_s = self.stopwatch.clock() - started, time.perf_counter() - wall_started
        self.rank.close_job(0)
        return self._sample(self.stopwatch.take_laps(), elapsed, wall_s / elapsed)

    def head_s(self, repeats: int = 3) -> float:
        """Logits of one row."""
        row_D = torch.randn(1, self.config.hidden).to(self.rank.dtype)
        model = self.rank.model

        def run() -> None:
            normed = self.kernels.norm.rms_norm(row_D, model.final_norm, self.config.norm_eps)
            torch.nn.functional.linear(normed, model.head).float()

        return self._median(run, repeats)

    def fold_s(self, layer: LayerConfig, num_folds: int = 4, repeats: int = 5) -> float:
        """`num_folds` states of a KDA layer through transitions, all heads."""
        kda = layer.mixer
        assert isinstance(kda, KdaConfig)
        state = torch.randn(kda.num_value_heads, kda.key_dim, kda.value_dim)
        transition = torch.randn(kda.num_value_heads, kda.key_dim, kda.key_dim) / kda.key_dim
        return self._median(lambda: fold((Summary(state, transition),) * num_folds, state), repeats)

    def residual_s(self, rows: int, repeats: int = 3) -> float:
        """What the model's residual scheme costs beyond a plain stream, over all its layers and `rows` rows."""
        config, dtype = self.spec.config, self.rank.dtype
        weights = {
            name: initial_parameter(name, shape, config, 0).to(parameter_dtype(name, dtype))
            for name, shape in parameter_shapes(config).items()
            if "_res." in name or "_hc." in name
        }
        embedding_SD = torch.randn(rows, config.hidden).to(dtype)
        norm_D = torch.ones(config.hidden, dtype=dtype)

        def walk(scheme: ResidualScheme) -> None:
            stream = scheme.start(embedding_SD.clone(), self.kernels)
            for layer in range(len(config.layers)):
                stream.mixer_input(layer, norm_D)
                stream.add(embedding_SD)
                stream.ffn_input(layer, norm_D)
                stream.add(embedding_SD)
            stream.final()

        full, plain = ResidualScheme(config, weights), ResidualScheme(replace(config, residual=None), {})
        return self._median(lambda: walk(full), repeats) - self._median(lambda: walk(plain), repeats)

    @torch.inference_mode()
    def _median(self, run: Callable[[], object], repeats: int) -> float:
        run()
        found: list[float] = []
        for _ in range(repeats):
            started = self.stopwatch.clock()
            run()
            found.append(self.stopwatch.clock() - started)
        return statistics.median(found)

    def _warm(self, generator: torch.Generator) -> BoundaryState:
        """A first step; then every page gets rows with its rows' mean and spread. Returns the state it left."""
        num_tokens = min(WARM_TOKENS, self.spec.max_tokens)
        self.rank.open_job(0, self.tokens_T[:num_tokens], self.table)
        plan = StepPlan(
            slices=(Slice(job=0, start=0, end=num_tokens),), layout="zigzag", exchange="all_gather", logits_of=()
        )
        self.rank.run_step(plan)
        cache = self.rank.cache(0)
        for kind in self.rank.pool.kinds:
            rows = cache.rows(kind.layer, kind.kind, num_tokens)
            seen_TW = rows.read(0, rows.num_rows, torch.float32)
            mean_W, std_W = seen_TW.mean(dim=0), seen_TW.std(dim=0)
            last = kind.num_rows(len(self.table) * PAGE_TOKENS)
            for first in range(rows.num_rows, last, FILL_ROWS):
                noise_TW = torch.randn(min(FILL_ROWS, last - first), kind.format.width, generator=generator)
                cache.write(kind.layer, kind.kind, first, kind.format.encode(mean_W + std_W * noise_TW))
        state = self.rank.state(0)
        self.rank.close_job(0)
        return state

    def _sample(self, laps: list[Lap], elapsed: float, stretch: float) -> StepSample:
        layers: list[dict[str, tuple[float, ...]]] = [{} for _ in self.config.layers]
        boundary_s = sum(lap.seconds for lap in laps if lap.name == "boundary_state")
        for lap in laps:
            if lap.layer < 0 or lap.name not in OPS_OF_SPANS:
                continue
            found = layers[lap.layer]
            found[OPS_OF_SPANS[lap.name]] = (*found.get(OPS_OF_SPANS[lap.name], ()), lap.seconds)
        return StepSample(
            layers=tuple(map(self._tidied, layers, self.config.layers)),
            boundary_s=boundary_s,
            outside_s=elapsed - sum(lap.seconds for lap in laps),
            stretch=stretch,
        )

    def _tidied(self, found: Mapping[str, tuple[float, ...]], layer: LayerConfig) -> dict[str, tuple[float, ...]]:
        """Operations that the model counts once a layer are one number."""
        tidied = {op: laps if op in SEVERAL else (sum(laps),) for op, laps in found.items()}
        if prepared := tidied.pop("prepare", ()):
            tidied["kda.scan"] = tuple(map(sum, zip(tidied["kda.scan"], prepared, strict=True)))
        if copies := tidied.pop("copies", ()):
            op = "kda.summary" if "kda.summary" in tidied else "kda.output"
            tidied[op] = (sum(tidied[op]) + sum(copies),)
        if isinstance(layer.mixer, MlaConfig) and layer.mixer.selection is not None and "attention.dense" in tidied:
            tidied["attention.short"] = tidied.pop("attention.dense")
        return tidied
