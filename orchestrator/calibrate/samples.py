"""What a calibration asks of an engine and what it gets. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass

from longprefill.partition.generators import LayoutKind
from longprefill.partition.layout import Slice
from longprefill.workers.model.config import ModelConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchSpec:
    """A model to measure and how it runs. `config` is what one rank holds (`workers.model.sharding.local_config`)."""

    config: ModelConfig
    dtype: str
    latent_format: str
    index_format: str
    max_tokens: int
    seed: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class TimedStep:
    """The tokens [start, start + tokens) of a job as `rank` of `num_ranks` sees them."""

    start: int
    tokens: int
    layout: LayoutKind = "zigzag"
    rank: int = 0
    num_ranks: int = 1
    is_on_grid: bool = True
    """Whether steps of as many rows are timed at other starts too."""

    @property
    def slices(self) -> tuple[Slice, ...]:
        return (Slice(job=0, start=self.start, end=self.start + self.tokens),)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSample:
    """Seconds of one step: of every operation of every layer of the reduced model in order of its calls, of the
    boundary state, and of what is outside of layers."""

    layers: tuple[dict[str, tuple[float, ...]], ...]
    boundary_s: float
    outside_s: float
    stretch: float
    """Wall time of the step over the clock's: above 1 where other processes took the core."""
