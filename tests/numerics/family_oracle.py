"""Whole models of transformers as oracles of ours: every layer's outputs and all logits, given equal discrete choices.

A checkpoint in published form is loaded by transformers' own class and by ours. What the class chooses (index top-k,
experts) is replayed in our run, where each difference must be a near tie; then the output of every mixer and
feed-forward at every position, and all logits, must agree.

Legend: T tokens, V vocabulary, K selected positions, A experts a token.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from longprefill.comms.group import Group
from longprefill.comms.thread_group import run_ranks
from longprefill.kernels.backends import resolve
from longprefill.partition.layout import PAGE_TOKENS, Slice
from longprefill.partition.steps import plan_steps
from longprefill.workers.cache.pages import CacheFormats, CachePool, cache_kinds, pool_bytes
from longprefill.workers.choices import Record, Replayer
from longprefill.workers.model.checkpoint import write_checkpoint
from longprefill.workers.model.config import MlaConfig, ModelConfig
from longprefill.workers.model.families.registry import read_config
from longprefill.workers.model.model import Model
from longprefill.workers.model.parameters import parameter_shapes
from longprefill.workers.model.sharding import MeshPlace, local_config, parameter_ranges
from longprefill.workers.model.sizes import RAW_CONFIGS
from longprefill.workers.model.weights import check_weights, load_weights
from longprefill.workers.prefill import PrefillRank, StepPlan
from longprefill.workers.trace import Tracer

from .tolerances import rms_ratio

TOLERANCE = 1e-5
WHOLE = 1 << 20
"""A step size that no prompt of these tests reaches."""

MESHES = [(1, WHOLE), (1, 64), (3, WHOLE), (3, 192), (3, 64)]
"""(ranks, step size) that every case runs on."""
VISION = {
    "depth": 1, "hidden_size": 16, "num_heads": 2, "intermediate_size": 16, "out_hidden_size": 16,
    "projection_intermediate_size": 16, "image_size": 28, "spatial_merge_size": 1,
}  # fmt: skip
"""The smallest tower; ours ignores it."""

Outputs = dict[str, torch.Tensor]
"""By place, one row a position: "N.mixer", "N.ffn", "logits"."""

Change = Callable[[ModelConfig, dict[str, torch.Tensor]], tuple[ModelConfig, dict[str, torch.Tensor]]]


@dataclass(frozen=True, kw_only=True, eq=False)
class Oracle:
    """A run of transformers' class."""

    tokens: torch.Tensor
    outputs: Outputs
    record: Record


@dataclass(kw_only=True)
class Run:
    """A run of ours."""

    outputs: Outputs
    rows: int = 0
    swaps: int = 0
    worst: float = 0.0


def prompt(num_tokens: int, vocab_size: int, seed: int = 0) -> torch.Tensor:
    """Random token ids, int64 [T]."""
    return torch.randint(0, vocab_size, (num_tokens,), generator=torch.Generator().manual_seed(seed + num_tokens))


def load_class(cls: Any, directory: Path) -> Any:
    """transformers' model in fp32; every tensor of the text model must come from the directory."""
    # grouped products refuse widths that are not multiples of 16 bytes
    model, info = cls.from_pretrained(
        directory, dtype=torch.float32, output_loading_info=True, experts_implementation="eager"
    )
    assert not [name for name in info["missing_keys"] if ".visual." not in name]
    assert not info["unexpected_keys"]
    return model.eval()


def run_class(model: Any, tokens: torch.Tensor, config: ModelConfig) -> Oracle:
    """Logits, layer outputs and choices of transformers' class over the whole prompt at once."""
    body = getattr(model.model, "language_model", model.model)
    outputs: Outputs = {}
    record: Record = {}

    def keep(name: str) -> Callable[..., None]:
        def hook(_module: Any, _inputs: Any, output: Any) -> None:
            rows = output[0] if isinstance(output, tuple) else output
            outputs[name] = rows.reshape(tokens.numel(), -1).clone()

        return hook

    def keep_positions(layer: int, topk: int) -> Callable[..., None]:
        def hook(_module: Any, _inputs: Any, chosen_1TK: torch.Tensor) -> None:
            chosen_TK = chosen_1TK[0][topk:].to(torch.int64)
            last = torch.iinfo(torch.int64).max
            ascending_TK = torch.where(chosen_TK < 0, last, chosen_TK).sort(dim=1).values
            record["positions", layer, 0, topk] = torch.where(ascending_TK == last, -1, ascending_TK).to(torch.int32)

        return hook

    def keep_experts(layer: int) -> Callable[..., None]:
        def hook(_module: Any, _inputs: Any, output: Any) -> None:
            record["experts", layer, 0, 0] = output[2].clone()

        return hook

    handles = []
    for n, layer in enumerate(body.layers):
        handles.append(layer.self_attn.register_forward_hook(keep(f"{n}.mixer")))
        handles.append(layer.mlp.register_forward_hook(keep(f"{n}.ffn")))
        mixer = config.layers[n].mixer
        if isinstance(mixer, MlaConfig) and mixer.indexer is not None:
            hook = keep_positions(n, mixer.indexer.topk)
            handles.append(layer.self_attn.indexer.register_forward_hook(hook))
        if hasattr(layer.mlp, "gate"):
            handles.append(layer.mlp.gate.register_forward_hook(keep_experts(n)))
    with torch.no_grad():
        outputs["logits"] = model(input_ids=tokens[None], use_cache=False).logits[0].clone()
    for handle in handles:
        handle.remove()
    return Oracle(tokens=tokens, outputs=outputs, record=record)


@dataclass
class _Tap:
    """A layer that keeps what it returns, with the positions of its rows."""

    layer: Any
    kept: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)

    def forward(self, x_SD: torch.Tensor, ctx: Any) -> torch.Tensor:
        output_SD = self.layer.forward(x_SD, ctx)
        self.kept.append((ctx.own_positions_S, output_SD.clone()))
        return output_SD


class TappedModel(Model):
    """Ours, with the outputs of all layers and the logits of all own rows kept in `taps`."""

    def __init__(self, config: ModelConfig, weights: dict[str, torch.Tensor]) -> None:
        super().__init__(config, weights)
        self.taps: dict[str, _Tap] = {}
        for n, layer in enumerate(self.layers):
            layer.mixer = self.taps[f"{n}.mixer"] = _Tap(layer.mixer)  # pyright: ignore[reportAttributeAccessIssue]
            layer.ffn = self.taps[f"{n}.ffn"] = _Tap(layer.ffn)  # pyright: ignore[reportAttributeAccessIssue]
        self.taps["logits"] = _Tap(None)

    def forward(self, token_ids_S: torch.Tensor, ctx: Any) -> torch.Tensor:
        hidden_SD = super().forward(token_ids_S, ctx)
        logits_TV = self.logits(ctx.gather_rows(hidden_SD, op="test"), ctx)
        if ctx.mesh.tp.rank == 0:
            self.taps["logits"].kept.append((ctx.positions_T, logits_TV))
        return hidden_SD


def run_ours(
    directory: Path, oracle: Oracle, *, cp: int = 1, tp: int = 1, step_tokens: int = WHOLE,
    single_tokens: int = 0, change: Change | None = None, replay: bool = True,
) -> Run:  # fmt: skip
    """Our engine over `cp` times `tp` ranks in threads; fp32 caches start as NaN. The last `single_tokens` go one by
    one, as in decode. `change` spoils config and weights; with `replay` off our own choices stand."""
    config = read_config(directory)
    weights = load_weights(directory, config, dtype=torch.float32)
    if change is not None:
        config, weights = change(config, weights)
    tokens = oracle.tokens
    num_pages = -(-tokens.numel() // PAGE_TOKENS) + 2
    table = tuple(reversed(range(1, num_pages - 1)))
    kinds = cache_kinds(config, CacheFormats(latent="fp32", index_key="fp32"))

    def on_rank(group: Group) -> tuple[TappedModel, Replayer]:
        place = MeshPlace.of(group.rank, num_cp=cp, num_tp=tp, expert_parallel=False)
        own_weights = dict(weights)
        if tp > 1:
            ranges = parameter_ranges(config, place)
            own_weights = load_weights(directory, config, dtype=torch.float32, ranges=ranges)
        model, choices = TappedModel(local_config(config, place), own_weights), Replayer(oracle.record)
        pool = CachePool(torch.full((pool_bytes(kinds, num_pages),), 0xFF, dtype=torch.uint8), kinds, num_pages)
        rank = PrefillRank(
            model, group, pool, resolve("cpu"), dtype=torch.float32, tracer=Tracer(False), num_tp=tp, full_config=config
        )
        rank.choices = choices if replay else None
        rank.open_job(0, tokens, (*table, num_pages - 1))
        prefilled = tokens.numel() - single_tokens
        singles = [(position, position + 1) for position in range(prefilled, tokens.numel())]
        for start, end in [*plan_steps(prefilled, step_tokens), *singles]:
            slices = (Slice(job=0, start=start, end=end),)
            rank.run_step(StepPlan(slices=slices, layout="zigzag", exchange="all_gather", logits_of=()))
        return model, choices

    result = Run(outputs={})
    ranks = run_ranks(cp * tp, on_rank, timeout_s=60.0)
    for name, expected in oracle.outputs.items():
        kept = [entry for model, _ in ranks for entry in model.taps[name].kept]
        positions_T = torch.cat([positions for positions, _ in kept])
        assert torch.equal(positions_T.sort().values, torch.arange(tokens.numel())), name
        result.outputs[name] = torch.full_like(expected, torch.nan)
        result.outputs[name][positions_T] = torch.cat([rows for _, rows in kept])
    for _, choices in ranks:
        result.rows, result.swaps = result.rows + choices.rows, result.swaps + choices.swaps
        result.worst = max(result.worst, choices.worst)
    return result


def differences(run: Run, oracle: Oracle) -> dict[str, float]:
    """Relative RMS difference by place."""
    return {name: rms_ratio(run.outputs[name], expected) for name, expected in oracle.outputs.items()}


def assert_agrees(run: Run, oracle: Oracle, tolerance: float = TOLERANCE) -> None:
    """Every output within the tolerance, every choice equal or a near tie, and every layer's choices looked at."""
    expected_rows = sum(rows.shape[0] for rows in oracle.record.values())
    assert run.rows == expected_rows, f"{run.rows} rows of choices were compared, {expected_rows} were made"
    assert run.worst <= tolerance, f"{run.swaps} swapped choices, the worst {run.worst:.1e} from its tie"
    wrong = {name: ratio for name, ratio in differences(run, oracle).items() if not ratio <= tolerance}
    assert not wrong, "relative RMS difference: " + ", ".join(f"{name} {ratio:.1e}" for name, ratio in wrong.items())


def is_caught(run: Run, oracle: Oracle, tolerance: float = TOLERANCE) -> bool:
    """Whether `assert_agrees` fails by far: an output ten times beyond the tolerance, or a choice that was no tie."""
    worst = max(ratio if ratio == ratio else float("inf") for ratio in differences(run, oracle).values())
    return worst > 10 * tolerance or run.worst > 10 * tolerance


def with_mixers(spoil: Callable[[int, Any], Any]) -> Change:
    """A change of every layer's mixer config: `spoil(layer, mixer)` gives the wrong one."""

    def change(config: ModelConfig, weights: dict[str, torch.Tensor]) -> tuple[ModelConfig, dict[str, torch.Tensor]]:
        layers = [dataclasses.replace(layer, mixer=spoil(n, layer.mixer)) for n, layer in enumerate(config.layers)]
        return dataclasses.replace(config, layers=tuple(layers)), weights

    return change


def with_zeros(ending: str) -> Change:
    """A change of weights: all those whose names end so are zero."""

    def change(config: ModelConfig, weights: dict[str, torch.Tensor]) -> tuple[ModelConfig, dict[str, torch.Tensor]]:
        zeros = {name: torch.zeros_like(value) for name, value in weights.items() if name.endswith(ending)}
        assert zeros, ending
        return config, weights | zeros

    return change


def assert_same_weights(directory: Path, expected: dict[str, torch.Tensor]) -> None:
    """The directory loads to these canonical tensors, bit for bit."""
    config = read_config(directory)
    check_weights(directory, config)
    loaded = load_weights(directory, config, dtype=torch.float32)
    assert list(loaded) == list(expected) == list(parameter_shapes(config))
    for name, value in expected.items():
        assert torch.equal(loaded[name], value), name


class Case:
    """A tiny checkpoint of a family in published form, transformers' model of it and that model's run; each method is
    what one test says."""

    def __init__(self, directory: Path, family: str, cls: Any, num_tokens: int, fields: Mapping[str, Any]) -> None:
        """`fields` change config.json; of a multimodal one the text part."""
        raw = dict(RAW_CONFIGS[family, "tiny"])
        if "text_config" in raw:
            raw |= {"vision_config": VISION, "text_config": raw["text_config"] | fields}
        else:
            raw |= fields
        self.directory = directory
        self.config = write_checkpoint(directory, raw, 0, torch.float32)
        self.model = load_class(cls, directory)
        self.oracle = run_class(self.model, prompt(num_tokens, self.config.vocab_size), self.config)

    @property
    def weights(self) -> dict[str, torch.Tensor]:
        """What the published directory loads to."""
        return load_weights(self.directory, self.config, dtype=torch.float32)

    def assert_agrees(self, **options: Any) -> None:
        """A run of ours (`run_ours`) agrees with the class at every place."""
        assert_agrees(run_ours(self.directory, self.oracle, **options), self.oracle)

    def assert_catches(self, change: Change | None = None, **options: Any) -> None:
        """A spoiled run of ours is told from the class's."""
        assert is_caught(run_ours(self.directory, self.oracle, change=change, **options), self.oracle)

    def assert_saved_loads(self, target: Path, *, published: bool) -> None:
        """What transformers saves, with an expert a tensor as published or with fused experts, in several files."""
        self.model.save_pretrained(target, save_original_format=published, max_shard_size="50KB")
        assert len(list(target.glob("*.safetensors"))) > 1
        assert_same_weights(target, self.weights)


@contextlib.contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """An attribute that is `value` inside."""
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)
