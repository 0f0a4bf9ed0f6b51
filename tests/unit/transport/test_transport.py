"""Transports, by shared memory and by socket: every byte where it belongs, nothing written after it was forbidden."""

from __future__ import annotations

import fcntl
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from longprefill.comms.transport import holder, queued
from longprefill.comms.transport.base import (
    Copy,
    NotDrainedError,
    PageTransport,
    PoolAddress,
    TransferState,
    TransportBusyError,
    TransportError,
)
from longprefill.comms.transport.holder import Pool, attach_pool
from longprefill.comms.transport.queued import QueuedTransport, pieces
from longprefill.comms.transport.shared_memory import SharedMemoryTransport
from longprefill.comms.transport.socket_server import PoolServer
from longprefill.comms.transport.socket_transport import SocketTransport

DEADLINE_S = 30.0


Reach = Callable[..., PoolAddress]
KINDS: dict[str, type[QueuedTransport]] = {"shared memory": SharedMemoryTransport, "socket": SocketTransport}


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def transport(kind: str) -> Iterator[QueuedTransport]:
    found = KINDS[kind](max_queued=2)
    yield found
    found.close()


@pytest.fixture
def reach(kind: str) -> Iterator[Reach]:
    """The address at which a pool's channel is reached by this kind of transport."""
    servers: dict[Path, PoolServer] = {}

    def address(pool: Pool, channel: int = 0) -> PoolAddress:
        if kind == "shared memory":
            return pool.address(channel)
        if pool.path not in servers:
            servers[pool.path] = PoolServer(pool, "127.0.0.1")
        return servers[pool.path].address(channel)

    yield address
    for server in servers.values():
        server.close()


@pytest.fixture
def one_page_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(queued, "PIECE_BYTES", 64)


@st.composite
def batches(draw: st.DrawFn) -> list[Copy]:
    """Copies of a pool of 1000 bytes to disjoint places of another."""
    sizes = draw(st.lists(st.integers(1, 200), min_size=1, max_size=5))
    order = draw(st.permutations(range(len(sizes))))
    targets = {place: sum(sizes[other] for other in order[: order.index(place)]) for place in order}
    sources = [draw(st.integers(0, 1000 - size)) for size in sizes]
    if draw(st.booleans()):
        sources = [sum(sizes[:place]) for place in range(len(sizes))]
    return [Copy(source=sources[i], target=targets[i], num_bytes=size) for i, size in enumerate(sizes)]


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(batch=batches())
def test_every_byte_arrives_and_no_other_changes(
    batch: list[Copy],
    transport: QueuedTransport,
    make_pool: Callable[..., Pool],
    reach: Reach,
    one_page_pieces: None,
) -> None:
    source_B = torch.randint(0, 256, (1000,), dtype=torch.uint8)
    pool = make_pool(1000)
    pool.bytes_B.fill_(0xAB)
    expected_B = torch.full((1000,), 0xAB, dtype=torch.uint8)
    for copy in batch:
        expected_B[copy.target : copy.target + copy.num_bytes] = source_B[copy.source : copy.source + copy.num_bytes]
    name = pool.path.name
    transport.register_pool(name, source_B)
    peer = transport.connect(reach(pool), generation=0)
    transfer = transport.submit(name, peer, batch, timeout_s=DEADLINE_S)
    progress = transport.wait(transfer, timeout_s=DEADLINE_S)
    transport.forget(transfer)
    transport.disconnect(peer, timeout_s=DEADLINE_S)
    assert progress.state is TransferState.DONE
    assert progress.moved_bytes == progress.total_bytes == sum(copy.num_bytes for copy in batch)
    assert torch.equal(pool.bytes_B, expected_B)


@given(batch=batches())
def test_pieces_are_the_batch_cut_and_joined(batch: list[Copy]) -> None:
    def places(copies: Iterator[Copy] | list[Copy]) -> list[tuple[int, int]]:
        return [(copy.source + i, copy.target + i) for copy in copies for i in range(copy.num_bytes)]

    found = list(pieces(batch))
    assert places([copy for piece in found for copy in piece]) == places(batch)
    assert all(0 < sum(copy.num_bytes for copy in piece) <= queued.PIECE_BYTES for piece in found)
    one_run = [Copy(source=5 + i, target=9 + i, num_bytes=1) for i in range(20)]
    assert list(pieces(one_run)) == [[Copy(source=5, target=9, num_bytes=20)]]


def test_a_write_of_an_old_generation_is_refused_at_connect_and_in_flight(
    transport: QueuedTransport, make_pool: Callable[..., Pool], reach: Reach
) -> None:
    pool = make_pool(100)
    assert pool.generation() == 0
    old = reach(pool)
    generation = pool.advance_generation(timeout_s=DEADLINE_S)
    with pytest.raises(TransportError, match="is at generation 1: a write of generation 0 is refused"):
        transport.connect(old, generation=0)
    transport.register_pool("own", torch.ones(100, dtype=torch.uint8))
    peer = transport.connect(reach(pool), generation=generation)
    assert pool.advance_generation(timeout_s=DEADLINE_S) == 2
    transfer = transport.submit("own", peer, [Copy(source=0, target=0, num_bytes=100)], timeout_s=DEADLINE_S)
    progress = transport.wait(transfer, timeout_s=DEADLINE_S)
    assert progress.state is TransferState.FAILED
    assert "a write of generation 1 is refused" in (progress.error or "")
    assert pool.bytes_B.eq(0).all()


def test_channels_are_fenced_one_by_one(
    transport: QueuedTransport, make_pool: Callable[..., Pool], reach: Reach
) -> None:
    pool = make_pool(100)
    transport.register_pool("own", torch.ones(100, dtype=torch.uint8))
    peers = [transport.connect(reach(pool, channel), generation=0) for channel in (3, 4, holder.CHANNELS - 1)]
    pool.advance_generation(3, timeout_s=DEADLINE_S)
    copy = Copy(source=0, target=0, num_bytes=100)
    transfers = []
    for peer in peers:
        transfers.append(transport.submit("own", peer, [copy], timeout_s=DEADLINE_S))
        transport.wait(transfers[-1], timeout_s=DEADLINE_S)
    states = [transport.poll(transfer).state for transfer in transfers]
    assert states == [TransferState.FAILED, TransferState.DONE, TransferState.DONE]


def held(transport: QueuedTransport, make_pool: Callable[..., Pool], reach: Reach) -> tuple[Pool, Pool, Any]:
    """A pool whose lock is held, so that every transfer to it stays where it is until that is released."""
    pool = make_pool(1000)
    owner = attach_pool(pool.address())
    transport.register_pool("own", torch.ones(1000, dtype=torch.uint8))
    return pool, owner, transport.connect(reach(pool), generation=0)


COPY = Copy(source=0, target=0, num_bytes=1000)


def submit_and_start(transport: QueuedTransport, peer: Any) -> Any:
    """A submitted transfer that the copying thread has begun with."""
    transfer = transport.submit("own", peer, [COPY], timeout_s=DEADLINE_S)
    deadline_s = time.monotonic() + DEADLINE_S
    while transport.poll(transfer).state is TransferState.QUEUED:
        assert time.monotonic() < deadline_s
        os.sched_yield()
    return transfer


def test_a_cancelled_transfer_is_drained_before_the_call_returns(
    transport: QueuedTransport, make_pool: Callable[..., Pool], reach: Reach, one_page_pieces: None
) -> None:
    pool, owner, peer = held(transport, make_pool, reach)
    with owner.locked(0, fcntl.F_WRLCK, time.monotonic() + DEADLINE_S):
        running = submit_and_start(transport, peer)
        queued = transport.submit("own", peer, [COPY], timeout_s=DEADLINE_S)
        assert transport.cancel_and_drain(queued, timeout_s=DEADLINE_S).state is TransferState.CANCELLED
        with pytest.raises(NotDrainedError, match="quarantine"):
            transport.cancel_and_drain(running, timeout_s=0.01)
    progress = transport.cancel_and_drain(running, timeout_s=DEADLINE_S)
    assert progress.state is TransferState.CANCELLED
    assert progress.moved_bytes == int(pool.bytes_B.sum()) <= 64
    owner.close()


def test_a_done_transfer_stays_done_when_cancelled(
    transport: QueuedTransport, make_pool: Callable[..., Pool], reach: Reach
) -> None:
    _, owner, peer = held(transport, make_pool, reach)
    transfer = transport.submit("own", peer, [COPY], timeout_s=DEADLINE_S)
    assert transport.wait(transfer, timeout_s=DEADLINE_S).state is TransferState.DONE
    assert transport.cancel_and_drain(transfer, timeout_s=DEADLINE_S).state is TransferState.DONE
    transport.forget(transfer)
    with pytest.raises(TransportError, match="is unknown"):
        transport.poll(transfer)
    owner.close()


def test_a_transfer_fails_at_its_deadline(
    transport: QueuedTransport, make_pool: Callable[..., Pool], reach: Reach
) -> None:
    pool, owner, peer = held(transport, make_pool, reach)
    with owner.locked(0, fcntl.F_WRLCK, time.monotonic() + DEADLINE_S):
        late = transport.submit("own", peer, [COPY], timeout_s=0.02)
        progress = transport.wait(late, timeout_s=DEADLINE_S)
    assert progress.state is TransferState.FAILED
    assert "another process holds its lock" in (progress.error or "")
    assert pool.bytes_B.eq(0).all()
    owner.close()


def test_the_queue_is_bounded_and_its_end_is_told(
    transport: QueuedTransport, make_pool: Callable[..., Pool], reach: Reach
) -> None:
    _, owner, peer = held(transport, make_pool, reach)
    with owner.locked(0, fcntl.F_WRLCK, time.monotonic() + DEADLINE_S):
        running = submit_and_start(transport, peer)
        for _ in range(2):
            transport.submit("own", peer, [COPY], timeout_s=DEADLINE_S)
        with pytest.raises(TransportBusyError, match="2 batches of at most 2 are queued"):
            transport.submit("own", peer, [COPY], timeout_s=DEADLINE_S)
        with pytest.raises(TransportError, match="running: cancel and drain it first"):
            transport.forget(running)
    assert transport.wait(running, timeout_s=DEADLINE_S).state is TransferState.DONE
    owner.close()


def test_close_drains_and_ends_the_thread(kind: str, make_pool: Callable[..., Pool], reach: Reach) -> None:
    transport = KINDS[kind]()
    _, owner, peer = held(transport, make_pool, reach)
    with owner.locked(0, fcntl.F_WRLCK, time.monotonic() + DEADLINE_S):
        transfer = submit_and_start(transport, peer)
        with pytest.raises(NotDrainedError):
            transport.close(timeout_s=0.01)
    transport.close(timeout_s=DEADLINE_S)
    transport.close()
    assert transport.poll(transfer).state.is_terminal
    assert not any(thread is transport._thread for thread in threading.enumerate())
    with pytest.raises(TransportError, match="closed"):
        transport.submit("own", peer, [COPY], timeout_s=1)
    owner.close()


WRONG_CALLS: dict[str, tuple[Callable[[PageTransport, Any], object], str]] = {
    "no copies": (lambda t, peer: t.submit("own", peer, [], timeout_s=1), "without copies"),
    "unknown pool": (lambda t, peer: t.submit("other", peer, [COPY], timeout_s=1), "'other' is not registered"),
    "no deadline": (lambda t, peer: t.submit("own", peer, [COPY], timeout_s=0), "timeout_s=0"),
    "outside the source": (
        lambda t, peer: t.submit("own", peer, [Copy(source=1, target=0, num_bytes=1000)], timeout_s=1),
        "source offset 1: needs 1 or more inside",
    ),
    "outside the target": (
        lambda t, peer: t.submit("own", peer, [Copy(source=0, target=-1, num_bytes=10)], timeout_s=1),
        "target offset -1",
    ),
    "nothing to copy": (
        lambda t, peer: t.submit("own", peer, [Copy(source=0, target=0, num_bytes=0)], timeout_s=1),
        "a copy of 0 bytes",
    ),
    "name twice": (lambda t, peer: t.register_pool("own", torch.ones(1, dtype=torch.uint8)), "registered already"),
    "pool of floats": (lambda t, peer: t.register_pool("floats", torch.ones(4)), "needs contiguous uint8"),
    "pool with gaps": (
        lambda t, peer: t.register_pool("gaps", torch.ones(4, dtype=torch.uint8)[::2]),
        "needs contiguous uint8",
    ),
}


@pytest.mark.parametrize("name", WRONG_CALLS)
def test_a_wrong_call_is_refused(
    name: str, transport: QueuedTransport, make_pool: Callable[..., Pool], reach: Reach
) -> None:
    call, expected = WRONG_CALLS[name]
    pool, owner, peer = held(transport, make_pool, reach)
    with pytest.raises(TransportError, match=expected):
        call(transport, peer)
    assert pool.bytes_B.eq(0).all()
    owner.close()


def test_a_disconnected_peer_takes_no_more(
    transport: QueuedTransport, make_pool: Callable[..., Pool], reach: Reach
) -> None:
    _, owner, peer = held(transport, make_pool, reach)
    transport.disconnect(peer, timeout_s=DEADLINE_S)
    with pytest.raises(TransportError, match="is not connected"):
        transport.submit("own", peer, [COPY], timeout_s=1)
    with pytest.raises(TransportError, match="is not connected"):
        transport.disconnect(peer, timeout_s=1)
    owner.close()
