"""What a prefill host refuses before its ranks hear of it: a refused command leaves the group as it was."""

from __future__ import annotations

import numpy as np

from longprefill.orchestrator.groups import PrefillGroup
from longprefill.orchestrator.hosts.contract import NoRoom, UnknownHostJob
from longprefill.partition.errors import PromptError, UserError
from longprefill.partition.layout import PAGE_TOKENS, Slice


def checked_prompt(tokens_T: np.ndarray, vocab_size: int) -> np.ndarray:
    """The prompt as int32 [T].

    Raises:
        PromptError: empty, no token ids, or ids outside the vocabulary.
    """
    tokens = np.asarray(tokens_T)
    if tokens.ndim != 1 or tokens.size == 0 or not np.issubdtype(tokens.dtype, np.integer):
        raise PromptError(f"a prompt is a list of 1 or more token ids, got {tokens.dtype} of shape {tokens.shape}")
    if tokens.min() < 0 or tokens.max() >= vocab_size:
        raise PromptError(f"token ids {tokens.min()} to {tokens.max()}: the vocabulary has 0 to {vocab_size - 1}")
    return tokens.astype(np.int32)


def check_room(group: PrefillGroup, job: int, num_tokens: int) -> None:
    """Raises NoRoom when there are not enough free pages."""
    needed, free, most = -(-num_tokens // PAGE_TOKENS), group.pages.num_free, group.holder.num_pages
    if needed > free:
        raise NoRoom(
            f"job {job} of {num_tokens} tokens needs {needed} cache pages of {PAGE_TOKENS}, {free} of {most} are free",
            needed * PAGE_TOKENS,
            free * PAGE_TOKENS,
            most * PAGE_TOKENS,
        )


def checked_step(group: PrefillGroup, slices: tuple[Slice, ...]) -> tuple[int, ...]:
    """The jobs that end with the step.

    Raises:
        UnknownHostJob, UserError: a job is not open, or a slice does not continue it.
    """
    if not slices or len({part.job for part in slices}) < len(slices):
        raise UserError(f"a step has one slice a job and at least one: {[part.job for part in slices]}")
    for part in slices:
        if not group.is_open(part.job):
            raise UnknownHostJob(f"job {part.job} is not open here: closed, or lost with its group")
        position, size = group.position(part.job), group.num_tokens(part.job)
        if part.start != position or part.end > size:
            raise UserError(
                f"job {part.job} stands at {position} of {size} tokens: a slice [{part.start}, {part.end}) does not "
                "continue it"
            )
    return tuple(part.job for part in slices if part.end == group.num_tokens(part.job))


def check_snapshot(group: PrefillGroup, path: str, tokens: np.ndarray) -> None:
    """Raises UserError unless the snapshot is a beginning of this prompt."""
    header = group.read_snapshot(path)
    position = header.position
    if position > len(tokens) or not np.array_equal(header.tokens_T[:position].numpy(), tokens[:position]):
        raise UserError(f"snapshot {path}: its first {position} tokens are not this prompt's of {len(tokens)}")
    if position == len(tokens) and header.logits_V is None:
        raise UserError(f"snapshot {path} stands at the prompt's end without its logits: export it after the last step")
