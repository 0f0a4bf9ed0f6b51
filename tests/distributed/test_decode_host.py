"""A decode host and a prefill rank in this process: what arrives is verified, what is damaged, stale or garbage is
refused, and room is given back."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from longprefill.comms.checksum import checksum_bytes
from longprefill.comms.manifest import Manifest
from longprefill.comms.messages import Ack, Commit, Nack, decode, encode
from longprefill.comms.torch_group import GroupSpec
from longprefill.comms.transport.base import PoolAddress, TransportError
from longprefill.orchestrator.hosts.contract import (
    GenerateRequest,
    HostSettings,
    NoRoom,
    Reservation,
    SampleStart,
    UnknownHostJob,
)
from longprefill.orchestrator.hosts.decode_host import DecodeHost
from longprefill.orchestrator.launch import Holder
from longprefill.orchestrator.plan import NUM_SLOTS, ClusterSettings
from longprefill.partition.errors import UserError
from longprefill.partition.layout import PAGE_TOKENS, Slice
from longprefill.workers.engine import PrefillWorker
from longprefill.workers.handoff.parts import build_messages, layer_counts
from longprefill.workers.model.checkpoint import write_checkpoint
from longprefill.workers.model.families.registry import read_config
from longprefill.workers.model.sharding import ALONE
from longprefill.workers.model.stored import fingerprint
from longprefill.workers.prefill import StepPlan

from .engine_support import hybrid

T = TypeVar("T")
EPOCH = 1
NUM_NEW = 5
TOKENS = np.random.default_rng(4).integers(8, 500, 150)


class Pair:
    """The host, and a rank that has prefilled `TOKENS` as job 0."""

    def __init__(self, model: Path) -> None:
        cluster = ClusterSettings(model_dir=str(model), dtype="fp32", max_tokens=16 * PAGE_TOKENS)
        self.host = DecodeHost(HostSettings(name="decode-0", cluster=cluster, listen="127.0.0.1"))
        self.host.start(EPOCH)
        self.sent: tuple[bytes, bytes] | None = None
        """What the fuzz test changes; made once."""
        self.config = read_config(model)
        self.fingerprint = fingerprint(model)
        # a smaller pool than the host's: its pages lie elsewhere in it
        self.holder = Holder(replace(cluster, max_tokens=5 * PAGE_TOKENS), self.config)
        self.rank = PrefillWorker()
        self.rank.start(self.holder.spec(self.holder.create_pool("rank"), ALONE))
        self.rank.join(
            GroupSpec(host="", port=0, generation=1, rank=0, size=1, device="cpu", backend="gloo", timeout_s=10)
        )
        assert self.host.await_ready(EPOCH, 60.0).state == "ready"
        self.rank.open_job(0, TOKENS, (9, 4, 7))
        step = (Slice(job=0, start=0, end=len(TOKENS)),)
        self.rank.run_step(StepPlan(slices=step, layout="zigzag", exchange="all_gather", logits_of=(0,)))

    def close(self) -> None:
        self.host.close(EPOCH)
        self.holder.close()

    def reservation(self, attempt: int = 0, **changes: Any) -> Reservation:
        fields: dict[str, Any] = {
            "job": 0,
            "transfer_id": "t",
            "num_tokens": len(TOKENS),
            "max_new_tokens": NUM_NEW,
            "num_samples": 1,
        }
        return Reservation(attempt=attempt, **(fields | changes))

    def send(self, attempt: int = 0, transfer_id: str = "t") -> tuple[bytes, bytes]:
        """Reserves and sends everything; the messages that commit it."""
        target = self.host.reserve(EPOCH, self.reservation(attempt, transfer_id=transfer_id))
        assert self.rank.open_handoff(0, target, len(TOKENS)) is None
        part = self.rank.finish_handoff(0)
        assert part.error is None
        return build_messages(
            [part],
            transfer_id=transfer_id,
            attempt=attempt,
            job=0,
            fingerprint=self.fingerprint,
            formats=self.holder.formats,
            layers=layer_counts(self.config),
            position=len(TOKENS),
        )

    def commit(self, messages: tuple[bytes, bytes]) -> Ack | Nack:
        answer = decode(self.host.commit(EPOCH, *messages))
        assert isinstance(answer, Ack | Nack)
        return answer

    def generate(self) -> list[int]:
        self.host.generate(EPOCH, GenerateRequest(job=0, samples=(SampleStart(sample=0),), max_new_tokens=NUM_NEW))
        tokens: list[int] = []
        cursor = self.host.state(EPOCH).first_cursor
        while len(tokens) < NUM_NEW:
            news = self.host.poll(EPOCH, cursor, 20.0)
            assert news.tokens
            tokens += [token.token for token in news.tokens]
            cursor = news.cursor
        return tokens


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    model = tmp_path_factory.mktemp("models") / "hybrid"
    write_checkpoint(model, hybrid("kda", "dsa", index_kpool=4), 3, torch.float32)
    running = Pair(model)
    yield running
    running.close()
    assert running.host.state(EPOCH).state == "closed"


@pytest.fixture(autouse=True)
def released(pair: Pair) -> Iterator[None]:
    """What was reserved or committed is given back, to the last page and slot."""
    yield
    pair.rank.cancel_handoff(0)
    pair.host.release(EPOCH, 0)
    state = pair.host.state(EPOCH)
    assert (state.jobs, state.used_tokens) == ((), 0)
    assert pair.host._worker.receiver.num_free_slots == NUM_SLOTS


@pytest.fixture(scope="module")
def expected(pair: Pair) -> list[int]:
    assert isinstance(pair.commit(pair.send()), Ack)
    tokens = pair.generate()
    pair.host.release(EPOCH, 0)
    return tokens


def test_a_repeated_commit_is_acknowledged_again(pair: Pair, expected: list[int]) -> None:
    messages = pair.send()
    answer = pair.commit(messages)
    assert isinstance(answer, Ack)
    assert pair.commit(messages) == answer
    assert pair.generate() == expected
    assert pair.commit(messages) == answer
    with pytest.raises(UserError, match="release it first"):
        pair.host.reserve(EPOCH, pair.reservation(1))
    pair.host.release(EPOCH, 0, "another transfer")
    assert pair.host.state(EPOCH).jobs[0].stage == "ended"


def test_pages_by_socket(pair: Pair, expected: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank that does not find the pool's file sends to its endpoint; without one it says why it cannot."""
    receiver = pair.host._worker.receiver
    server = pair.host._server
    assert server is not None

    def elsewhere(channel: int) -> PoolAddress:
        address = server.address(channel)
        return replace(address, path=address.path.replace("-decode_0-", "-elsewhere-"))

    monkeypatch.setattr(receiver, "publish", elsewhere)
    assert pair.rank.check_link(*pair.host.link(EPOCH)) is None
    assert isinstance(pair.commit(pair.send()), Ack)
    assert pair.generate() == expected
    pair.host.release(EPOCH, 0)
    monkeypatch.setattr(receiver, "publish", lambda channel: replace(elsewhere(channel), endpoint=None))
    assert "cannot be opened" in (pair.rank.check_link(*pair.host.link(EPOCH)) or "")
    target = pair.host.reserve(EPOCH, pair.reservation())
    assert "cannot be opened" in (pair.rank.open_handoff(0, target, 0) or "")


def test_damage_is_refused_and_a_further_attempt_is_right(pair: Pair, expected: list[int]) -> None:
    messages = pair.send()
    begin, _ = pair.host._worker._pool.byte_range(1, "latent", pair.host._jobs[0].pages[1])
    pair.host._worker._pool_file.bytes_B[begin + 7] ^= 1
    answer = pair.commit(messages)
    assert isinstance(answer, Nack)
    assert (answer.code, answer.may_retry) == ("checksum", True)
    with pytest.raises(UnknownHostJob):
        pair.host.generate(EPOCH, GenerateRequest(job=0, samples=(SampleStart(sample=0),), max_new_tokens=1))
    assert isinstance(pair.commit(pair.send(attempt=1)), Ack)
    assert pair.generate() == expected


def run_to_end(generator: Generator[None, None, T]) -> T:
    while True:
        try:
            next(generator)
        except StopIteration as end:
            return end.value


def test_an_attempt_that_is_replaced_while_it_is_verified(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("longprefill.workers.handoff.receiver.VERIFY_BYTES", 1)
    receiver = pair.host._worker.receiver
    verification = receiver.verification(*pair.send())
    for _ in range(3):
        next(verification)
    newer = pair.send(attempt=1)
    answer, received = run_to_end(verification)
    found = decode(answer)
    assert isinstance(found, Nack)
    assert (found.code, received) == ("unknown_transfer", None)
    assert isinstance(pair.commit(newer), Ack)


def test_a_fenced_rank_cannot_write(pair: Pair) -> None:
    target = pair.host.reserve(EPOCH, pair.reservation())
    assert pair.host.reserve(EPOCH, pair.reservation()) == target  # repeated: the same answer
    pair.host.reserve(EPOCH, pair.reservation(transfer_id="newer"))
    assert "is refused" in (pair.rank.open_handoff(0, target, 0) or "")
    with pytest.raises(TransportError, match="cannot follow"):
        pair.host.reserve(EPOCH, pair.reservation(-1, transfer_id="newer"))


def test_sides_that_differ_find_out_before_a_byte_moves(pair: Pair) -> None:
    target = pair.host.reserve(EPOCH, pair.reservation())
    assert pair.rank.open_handoff(0, target, 0) is None
    for other in (target.identity.replace("float32", "bfloat16"), target.identity.replace("latent fp32", "latent fp8")):
        assert "configure both alike" in (pair.rank.check_link(target.address, other) or "")
        refusal = pair.rank.open_handoff(0, replace(target, identity=other), len(TOKENS)) or ""
        assert f"the decode worker has {other}" in refusal


def test_room_is_reserved_for_all_that_may_come(pair: Pair) -> None:
    size = pair.host.state(EPOCH).max_tokens
    for changes in ({"max_new_tokens": size}, {"num_samples": 16, "max_new_tokens": 100}):
        with pytest.raises(NoRoom) as refusal:
            pair.host.reserve(EPOCH, pair.reservation(**changes))
        assert refusal.value.free_tokens == refusal.value.max_tokens == size < refusal.value.needed_tokens
    for job in range(NUM_SLOTS):
        pair.host.reserve(EPOCH, pair.reservation(job=job, num_tokens=10))
    with pytest.raises(NoRoom, match="8 jobs are on their way"):
        pair.host.reserve(EPOCH, pair.reservation(job=NUM_SLOTS, num_tokens=10))
    for job in range(NUM_SLOTS):
        pair.host.release(EPOCH, job)


def rewritten(messages: tuple[bytes, bytes], **changes: Any) -> tuple[bytes, bytes]:
    """The messages of a sender who means this."""
    manifest, commit = decode(messages[0]), decode(messages[1])
    assert isinstance(manifest, Manifest)
    assert isinstance(commit, Commit)
    encoded = encode(replace(manifest, **changes))
    return encoded, encode(replace(commit, checksum=checksum_bytes(encoded)))


def test_manifests_that_are_wrong(pair: Pair) -> None:
    messages = pair.send()
    manifest = decode(messages[0])
    assert isinstance(manifest, Manifest)
    pages = manifest.pages
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"model_fingerprint": "0" * 64}, "incompatible"),
        ({"latent_format": "bf16"}, "incompatible"),
        ({"layers": replace(manifest.layers, kda=2)}, "incompatible"),
        ({"pages": (replace(pages[0], layer=0), *pages[1:])}, "incompatible"),
        ({"pages": pages[1:]}, "incomplete"),
        ({"states": manifest.states[1:]}, "incomplete"),
        ({"logits": None}, "incomplete"),
        ({"position": 4000}, "no_room"),
        ({"position": len(TOKENS) + 1}, "checksum"),
        ({"job": "1"}, "unknown_transfer"),
        ({"attempt": 1}, "unknown_transfer"),
    ]
    for changes, code in wrong:
        answer = pair.commit(rewritten(messages, **changes))
        assert isinstance(answer, Nack), changes
        assert answer.code == code, (changes, answer.reason)
    assert isinstance(pair.commit(messages), Ack)


@settings(max_examples=60)
@given(st.data())
def test_garbage_is_answered(pair: Pair, data: st.DataObject) -> None:
    """Bytes changed, cut or made up: a Nack each time, and the worker lives."""
    if pair.sent is None or not pair.host.state(EPOCH).jobs:
        pair.sent = pair.send()
    garbage: list[bytes] = []
    for message in pair.sent:
        kind = data.draw(st.sampled_from(["as it is", "cut", "changed", "made up"]))
        at = data.draw(st.integers(0, len(message) - 1))
        changed = message[:at] + bytes([data.draw(st.integers(0, 255))]) + message[at + 1 :]
        made_up = data.draw(st.binary(max_size=64))
        garbage.append({"as it is": message, "cut": message[:at], "changed": changed, "made up": made_up}[kind])
    if tuple(garbage) != pair.sent:
        assert isinstance(pair.commit((garbage[0], garbage[1])), Nack)
