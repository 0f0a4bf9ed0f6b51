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


# ---- many jobs and samples at once (decode_batch.py) -----------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleStart:
    """One continuation. A fresh one is `SampleStart(sample=n)`. One that is taken up again has `num_generated` tokens
    already; `forced` are those of them that the prefilled prompt did not contain: they are run, not sampled."""

    sample: int
    num_generated: int = 0
    forced: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.sample < 0:
            raise UserError(f"sample={self.sample}: samples are numbered from 0")
        if not len(self.forced) <= self.num_generated:
            raise UserError(
                f"sample {self.sample}: {len(self.forced)} forced tokens of {self.num_generated} generated ones"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateRequest:
    """How to continue a committed job. Samples that are not named are not generated."""

    job: int
    samples: tuple[SampleStart, ...]
    max_new_tokens: int
    """Of every sample, the generated ones included."""
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0
    stop_token_ids: tuple[int, ...] = ()
    num_logprobs: int | None = None
    """None: no log-probabilities; else each token's own and so many best."""

    def __post_init__(self) -> None:
        Sampling(max_new_tokens=self.max_new_tokens, temperature=self.temperature, top_p=self.top_p, seed=self.seed)
        if not self.samples or len({start.sample for start in self.samples}) < len(self.samples):
            raise UserError(f"job {self.job}: name each sample once, and at least one")
        for start in self.samples:
            if start.num_generated >= self.max_new_tokens:
                raise UserError(
                    f"sample {start.sample} of job {self.job} has {start.num_generated} of {self.max_new_tokens} "
                    "tokens already: leave it out"
                )
        if self.num_logprobs is not None and self.num_logprobs < 0:
            raise UserError(f"num_logprobs={self.num_logprobs}: use 0 or more")


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeToken:
    job: int
    sample: int
    index: int
    """Within the sample, from 0."""
    token: int
    finish_reason: str | None
    """"stop" (this is a stop token), "length", or None: more follow."""
    logprob: float | None = None
    """Natural logarithm, of the softmax of the untempered logits."""
    top_logprobs: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeFailure:
    """A job that cannot be continued, though the worker lives."""

    job: int
    reason: str
