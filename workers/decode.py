"""The decode side without any actor around it: takes a prefilled job over and generates from it.

Decode is prefill with steps of one token on a group of one rank, so every query reads the cached row here too. The
decode side samples every token, the first included, from fp32 logits with a counter-based generator keyed by (seed,
sample, position): a retry or another worker continues the same stream.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from longprefill.partition.layout import Slice
from longprefill.workers.cache.states import BoundaryState
from longprefill.workers.prefill import PrefillRank, StepPlan
from longprefill.workers.sampling import Sampling, Token

__all__ = ["DecodeRank", "Sampling", "Token"]


class DecodeRank:
    """Jobs that generate. `rank` is a PrefillRank over a group of one whose pool received the pages."""

    def __init__(self, rank: PrefillRank) -> None:
        self.rank = rank
        self._logits: dict[int, torch.Tensor] = {}
        self._tokens: dict[int, torch.Tensor] = {}

    def take(
        self, job: int, table: Sequence[int], state: BoundaryState, logits_V: torch.Tensor, max_tokens: int
    ) -> None:
        """Takes over a job whose pages are in place: its boundary state at T, fp32 logits of token T-1, and the most
        tokens (prompt and generated) it may come to.

        Raises:
            ValueError: the job is known, or max_tokens exceeds its pages.
        """
        tokens = torch.zeros(max_tokens, dtype=torch.int64)
        self.rank.open_job(job, tokens, tuple(table), state)
        self._tokens[job] = tokens
        self._logits[job] = logits_V

    def generate(self, job: int, sampling: Sampling) -> Iterator[Token]:
        """Yields tokens until a stop token or `max_new_tokens`."""
        tokens = self._tokens[job]
        for count in range(1, sampling.max_new_tokens + 1):
            position = self.rank.state(job).position
            token = self.rank.kernels.sampling.sample(
                self._logits[job],
                temperature=sampling.temperature,
                top_p=sampling.top_p,
                seed=sampling.seed,
                sample=sampling.sample,
                position=position,
            )
            if token in sampling.stop_token_ids:
                yield Token(token, "stop")
                return
            if count == sampling.max_new_tokens:
                yield Token(token, "length")
                return
            yield Token(token, None)
            tokens[position] = token
            plan = StepPlan(
                slices=(Slice(job=job, start=position, end=position + 1),),
                layout="contiguous",
                exchange="all_gather",
                logits_of=(job,),
            )
            self._logits[job] = self.rank.run_step(plan).logits[job]

    def drop(self, job: int) -> None:
        """Forgets a job; its pages may be given to another."""
        self.rank.close_job(job)
        del self._tokens[job], self._logits[job]
