"""What is asked of a generation and what comes back, token by token. Torch-free: checked before anything starts."""

from __future__ import annotations

from dataclasses import dataclass

from longprefill.partition.errors import UserError


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How tokens are chosen. temperature 0 is greedy."""

    max_new_tokens: int
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0
    sample: int = 0
    """Number of the continuation, for several of one prompt."""
    stop_token_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.max_new_tokens < 1:
            raise UserError(f"max_new_tokens={self.max_new_tokens}: generate at least 1 token")
        if not self.temperature >= 0 or self.temperature == float("inf"):
            raise UserError(f"temperature={self.temperature}: use 0 (greedy) or a positive number")
        if not 0 < self.top_p <= 1:
            raise UserError(f"top_p={self.top_p}: use a number in (0, 1]")
        if not 0 <= self.seed < 2**64:
            raise UserError(f"seed={self.seed}: use an integer in [0, 2**64)")


@dataclass(frozen=True, slots=True)
class Token:
    id: int
    finish_reason: str | None
    """None: more follow; "stop": a stop token (still reported); "length": max_new_tokens reached."""
