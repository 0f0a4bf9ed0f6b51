"""The decode side without any actor around it: takes prefilled jobs over and generates from them.

Decode is prefill with steps of one token on a group of one rank, so every query reads the cached row here too. The
decode side samples every token, the first included, from fp32 logits with a counter-based generator keyed by (seed,
sample, position): a retry or another worker continues the same stream.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import torch

from longprefill.partition.layout import PAGE_TOKENS, Slice
from longprefill.workers.cache.states import BoundaryState
from longprefill.workers.prefill import PrefillRank, StepPlan
from longprefill.workers.sampling import Sampling, Token

__all__ = ["DecodeRank", "Sampling", "Token"]


class DecodeRank:
    """Sequences that generate, each under a number of its own. `rank` is a PrefillRank over a group of one whose pool
    received the pages."""

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
        # numpy's zeros cost no memory before they are written, and of the prompt's part nobody ever reads one
        tokens = torch.from_numpy(np.zeros(max_tokens, dtype=np.int64))
        self.rank.open_job(job, tokens, tuple(table), state)
        self._tokens[job] = tokens
        self._logits[job] = logits_V

    def copy_page(self, source: int, target: int) -> None:
        """Copies a physical page of every layer: the partial last page of a prompt, for another continuation of it."""
        for kind in self.rank.pool.kinds:
            pages = self.rank.pool.pages(kind.layer, kind.kind)
            pages[target] = pages[source]

    def position(self, job: int) -> int:
        """Tokens that have run: the next one's position."""
        return self.rank.state(job).position

    def logits(self, job: int) -> torch.Tensor:
        """fp32 [V] of the token before `position`."""
        return self._logits[job]

    def sample(self, job: int, sampling: Sampling) -> int:
        """The token at the job's position.

        Raises:
            ValueError: the logits are broken.
        """
        return self.rank.kernels.sampling.sample(
            self._logits[job],
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            seed=sampling.seed,
            sample=sampling.sample,
            position=self.position(job),
        )

    def advance(self, tokens: Mapping[int, Sequence[int]]) -> None:
        """One step over the next tokens, one or more, of several jobs. If it raises, all stand where they stood."""
        slices: list[Slice] = []
        for job, following in tokens.items():
            start = self.position(job)
            self._tokens[job][start : start + len(following)] = torch.tensor(following, dtype=torch.int64)
            slices.append(Slice(job=job, start=start, end=start + len(following)))
        plan = StepPlan(slices=tuple(slices), layout="contiguous", exchange="all_gather", logits_of=tuple(tokens))
        self._logits |= self.rank.run_step(plan).logits

    def generate(self, job: int, sampling: Sampling) -> Iterator[Token]:
        """Yields tokens until a stop token or `max_new_tokens`."""
        for count in range(1, sampling.max_new_tokens + 1):
            token = self.sample(job, sampling)
            if token in sampling.stop_token_ids:
                yield Token(token, "stop")
                return
            if count == sampling.max_new_tokens:
                yield Token(token, "length")
                return
            yield Token(token, None)
            self.advance({job: (token,)})

    def drop(self, job: int) -> None:
        """Forgets a job; its pages may be given to another."""
        self.rank.close_job(job)
        del self._tokens[job], self._logits[job]


def continuation_pages(num_tokens: int, max_new_tokens: int, num_samples: int) -> int:
    """Pages that a prompt of `num_tokens` and all its continuations need: whole pages of the prompt are shared, the
    partial one is copied on write."""
    return num_tokens // PAGE_TOKENS + num_samples * _own_pages(num_tokens, max_new_tokens)


def continuation_table(pages: Sequence[int], num_tokens: int, max_new_tokens: int, number: int) -> tuple[int, ...]:
    """Page table of continuation `number` (0 holds the prompt as it arrived) within the pages of the job."""
    num_shared, num_own = num_tokens // PAGE_TOKENS, _own_pages(num_tokens, max_new_tokens)
    first = num_shared + number * num_own
    return (*pages[:num_shared], *pages[first : first + num_own])


def _own_pages(num_tokens: int, max_new_tokens: int) -> int:
    return -(-(num_tokens + max_new_tokens) // PAGE_TOKENS) - num_tokens // PAGE_TOKENS
