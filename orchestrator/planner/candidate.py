"""One way to run a prompt, and what was asked for."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import get_args

from longprefill.orchestrator.plan import FORMATS
from longprefill.partition.errors import UserError
from longprefill.partition.generators import GENERATORS, LayoutKind
from longprefill.partition.steps import check_step_tokens
from longprefill.partition.work import Exchange
from longprefill.workers.spec import DTYPES

MOST_CP, MOST_TP = 1024, 64
"""Ranks that the engine takes."""


class PlanError(UserError):
    """No plan: a request that cannot be, or one that nothing here can do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanRequest:
    """What the command line asked for. None: the planner chooses.

    Raises:
        UserError: a value that cannot be, with what is allowed.
    """

    model: str
    tokens: int
    cluster: Path
    cached: int = 0
    """Tokens of the prompt that a boundary state and pages already stand for."""
    concurrent: int = 1
    """Equal prompts that come together."""
    devices: tuple[int, ...] = ()
    """Numbers of devices to plan for; none: all of the cluster."""
    deadline_s: float | None = None
    cp: int | None = None
    tp: int | None = None
    expert_parallel: bool | None = None
    step_tokens: int | None = None
    layout: LayoutKind | None = None
    exchange: Exchange | None = None
    dtype: str = "bf16"
    latent_format: str | None = None
    index_format: str | None = None

    def __post_init__(self) -> None:
        if self.tokens < 1:
            raise PlanError(f"--tokens {self.tokens}: a prompt has at least 1 token")
        if not 0 <= self.cached < self.tokens:
            raise PlanError(f"--cached {self.cached}: use 0 to {self.tokens - 1}, the last token is always computed")
        if not 1 <= self.concurrent <= 1_000_000:
            raise PlanError(f"--concurrent {self.concurrent}: use 1 to 1000000 prompts")
        if self.deadline_s is not None and not 0 < self.deadline_s < float("inf"):
            raise PlanError(f"--deadline-s {self.deadline_s}: use a positive number of seconds")
        for name, value, most in (("cp", self.cp, MOST_CP), ("tp", self.tp, MOST_TP)):
            if value is not None and not 1 <= value <= most:
                raise PlanError(f"--{name} {value}: use 1 to {most} ranks")
        if self.step_tokens is not None:
            check_step_tokens(self.step_tokens)
        choices = {
            "layout": (self.layout, tuple(GENERATORS)),
            "exchange": (self.exchange, get_args(Exchange)),
            "dtype": (self.dtype, DTYPES),
            "latent-format": (self.latent_format, FORMATS["latent"]),
            "index-format": (self.index_format, FORMATS["index"]),
        }
        for name, (value, allowed) in choices.items():
            if value is not None and value not in allowed:
                raise PlanError(f"--{name} {value!r} is not one of {', '.join(allowed)}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """One way to run: everything that a step plan and a group need to be told."""

    cp: int
    tp: int
    step_tokens: int
    latent_format: str
    index_format: str
    layout: LayoutKind = "zigzag"
    exchange: Exchange = "all_gather"
    is_expert_parallel: bool = False
    is_cache_sharded: bool = False
    jobs_per_step: int = 1
    """Prompts that share their step."""

    @property
    def num_devices(self) -> int:
        return self.cp * self.tp

    def describe(self) -> str:
        """The mesh in words."""
        words = [f"cp {self.cp}"]
        words += [f"tp {self.tp}"] if self.tp > 1 else []
        words += ["experts spread"] if self.is_expert_parallel else []
        words += ["caches sharded"] if self.is_cache_sharded else []
        return ", ".join(words)
