"""From the last step to the last token: a job's caches go to the decode worker with most room, wait for a slot, decode.

Pages have streamed while steps ran; after the last one the rest and the state follow. What a failure ends goes to
another worker, a few times, and then the prompt is computed again, as in the service (`controller/handing_off.py`).
"""

from __future__ import annotations

from collections.abc import Iterable

from longprefill.orchestrator.scheduler.decisions import Block
from longprefill.orchestrator.simulator.engine import Event, Timed
from longprefill.orchestrator.simulator.world import Handed, World
from longprefill.partition.layout import PAGE_TOKENS

MOST_ATTEMPTS = 3
"""Workers that a job is sent to before its prompt is computed again."""


class HandedOver(Event[World]):
    """All of a job has reached the decode side."""

    def __init__(self, job: int, handed: Handed) -> None:
        self.job = job
        self.handed = handed

    def happen(self, world: World, now: float) -> Iterable[Timed[World]]:
        if world.handed.get(self.job) is not self.handed:
            return []  # a failure ended this way before
        self.handed.worker = None
        world.waiting_for_slot.append(self.job)
        return fill_slots(world, now)


class DecodeEnds(Event[World]):
    def __init__(self, job: int, handed: Handed) -> None:
        self.job = job
        self.handed = handed

    def happen(self, world: World, now: float) -> Iterable[Timed[World]]:
        if world.handed.get(self.job) is not self.handed:
            return []
        assert self.handed.worker is not None
        del world.handed[self.job]
        world.free_slots[self.handed.worker] += 1
        world.end(self.job, now)
        return fill_slots(world, now)


def prefilled(world: World, job: int, block: Block, now: float) -> list[Timed[World]]:
    """A job's last step has ended: its prompt may be kept, its caches go to a decode worker."""
    record = world.jobs[job]
    record.prefilled_s = now
    if world.cache is not None:
        world.cache.insert(world.requests[job].full_blocks, world.matches.pop(job), block.start)
    if not world.cluster.decode.num_workers:
        record.first_token_s = now
        world.end(job, now)
        return []
    return [_sent(world, job, Handed(block=block, worker=world.freest_worker()), record.sent_s)]


def send_again(world: World, job: int, now: float) -> list[Timed[World]]:
    """The worker that a job was sent to is gone: from its first page on to another, or its prompt is computed again."""
    before, record = world.handed[job], world.jobs[job]
    if before.num_attempts == MOST_ATTEMPTS:
        prefill_again(world, job, now)
        return []
    record.num_handed_again += 1
    world.num_handed_again += 1
    handed = Handed(block=before.block, worker=world.freest_worker(), num_attempts=before.num_attempts + 1)
    return [_sent(world, job, handed, now + _page_seconds(world, record.num_tokens))]


def prefill_again(world: World, job: int, now: float) -> None:
    """A job's caches are nowhere any more."""
    record = world.jobs[job]
    del world.handed[job]
    if job in world.waiting_for_slot:
        world.waiting_for_slot.remove(job)
    if record.first_token_s > now:
        record.first_token_s = float("nan")
    record.num_losses += 1
    world.begins_again(job, record.num_tokens)
    if not world.is_given_up(job, now):
        world.submit(job, now)


def fill_slots(world: World, now: float) -> list[Timed[World]]:
    """Jobs that wait for a slot get those that are free, first come, first served."""
    events: list[Timed[World]] = []
    while world.waiting_for_slot and (worker := world.freest_worker()) is not None and world.free_slots[worker]:
        job = world.waiting_for_slot.popleft()
        handed, record, token_s = world.handed[job], world.jobs[job], world.cluster.decode.token_s
        world.free_slots[worker] -= 1
        handed.worker, handed.is_decoding = worker, True
        if not record.first_token_s <= now:  # tokens of an earlier generation stay
            record.first_token_s = now + token_s
        events.append(Timed(now + world.requests[job].output_tokens * token_s, DecodeEnds(job, handed)))
    return events


def stream_pages(world: World, job: int, num_tokens: int, now: float) -> None:
    """The pages of a step that has ended follow those before them."""
    record = world.jobs[job]
    record.sent_s = max(record.sent_s, now) + _page_seconds(world, num_tokens)


def _sent(world: World, job: int, handed: Handed, pages_s: float) -> Timed[World]:
    """When pages are over at a time, the state follows."""
    decode = world.cluster.decode
    world.handed[job] = handed
    state_s = world.cluster.fleet.state_bytes / decode.handoff_bytes_per_s
    return Timed(pages_s + state_s + decode.handoff_latency_s, HandedOver(job, handed))


def _page_seconds(world: World, num_tokens: int) -> float:
    num_bytes = -(-num_tokens // PAGE_TOKENS) * PAGE_TOKENS * world.cluster.fleet.token_bytes
    return num_bytes / world.cluster.decode.handoff_bytes_per_s
