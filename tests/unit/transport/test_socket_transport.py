"""What only the socket transport must stand: strangers, garbage, damage, servers that vanish or say nothing."""

from __future__ import annotations

import contextlib
import fcntl
import hmac
import os
import resource
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from longprefill.comms.checksum import checksum_bytes
from longprefill.comms.transport import socket_transport
from longprefill.comms.transport.base import Copy, Endpoint, PoolAddress, TransferState, TransportError
from longprefill.comms.transport.holder import Pool
from longprefill.comms.transport.socket_server import PoolServer
from longprefill.comms.transport.socket_transport import SocketTransport
from longprefill.comms.transport.socket_wire import (
    ANSWER,
    COPY,
    DAMAGED,
    FRAME,
    HELLO,
    MAGIC,
    NONCE_BYTES,
    REFUSED,
    REPLY,
    WRITTEN,
    Wire,
    proof,
)

DEADLINE_S = 30.0
SIZE = 1000
WHOLE = Copy(source=0, target=0, num_bytes=SIZE)


@pytest.fixture
def pool(make_pool: Callable[..., Pool]) -> Pool:
    return make_pool(SIZE)


@pytest.fixture
def server(pool: Pool) -> Iterator[PoolServer]:
    running = PoolServer(pool, "127.0.0.1")
    yield running
    running.close()


@pytest.fixture
def transport() -> Iterator[SocketTransport]:
    found = SocketTransport()
    found.register_pool("own", torch.arange(SIZE, dtype=torch.int64).remainder(251).to(torch.uint8))
    yield found
    found.close()


def dialled(server: PoolServer) -> Wire:
    return Wire(socket.create_connection((server.host, server.port), timeout=DEADLINE_S))


def greeted(server: PoolServer, address: PoolAddress) -> tuple[Wire, int]:
    """A connection through its handshake, by hand, and the server's answer."""
    assert address.endpoint is not None
    wire, deadline_s = dialled(server), time.monotonic() + DEADLINE_S
    nonce_r = wire.receive(len(MAGIC) + NONCE_BYTES, deadline_s)[len(MAGIC) :]
    nonce_s, numbers = os.urandom(NONCE_BYTES), (address.channel, 0, SIZE)
    shown = proof(address.endpoint.secret, b"sender", nonce_r, nonce_s, *numbers)
    wire.send(HELLO.pack(MAGIC, *numbers, nonce_s, shown), deadline_s)
    status, _, _ = ANSWER.unpack(wire.receive(ANSWER.size, deadline_s))
    return wire, status


def frame(payload: bytes, places: list[tuple[int, int]], *, checksum: int | None = None) -> bytes:
    header = FRAME.pack(len(places), len(payload), 1000, checksum_bytes(payload) if checksum is None else checksum)
    return header + b"".join(COPY.pack(*place) for place in places) + payload


def is_ended(wire: Wire) -> bool:
    try:
        wire.receive(1, time.monotonic() + DEADLINE_S)
    except TransportError as error:
        return "deadline" not in str(error)
    return False


def test_only_who_knows_the_transfers_secret_may_write(
    server: PoolServer, transport: SocketTransport, pool: Pool
) -> None:
    address = server.address(3)
    assert address.endpoint is not None
    wrong = replace(address.endpoint, secret=os.urandom(32))
    other_channel = server.address(4).endpoint
    for endpoint in (wrong, other_channel):
        with pytest.raises(TransportError, match=f"127.0.0.1:{server.port} took no connection"):
            transport.connect(replace(address, endpoint=endpoint), generation=0)
    with pytest.raises(TransportError, match="took no connection"):
        transport.connect(replace(address, num_bytes=SIZE + 1), generation=0)
    assert address.endpoint.secret.hex() not in repr(address)
    assert repr(address.endpoint.secret) not in repr(address)
    old = address
    pool.advance_generation(3, timeout_s=DEADLINE_S)
    with pytest.raises(TransportError, match="took no connection"):  # a new generation needs its own secret
        transport.connect(old, generation=1)
    assert transport.connect(server.address(3), generation=1).generation == 1


def test_a_server_that_does_not_know_the_secret_gets_nothing(transport: SocketTransport) -> None:
    """Somebody else listens at the address: it cannot prove itself."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def answer() -> None:
            connection, _ = listener.accept()
            with connection, contextlib.suppress(ConnectionError):
                connection.sendall(MAGIC + bytes(NONCE_BYTES))
                connection.recv(HELLO.size)
                connection.sendall(ANSWER.pack(WRITTEN, 0, hmac.digest(b"", b"", "sha256")))
                connection.recv(1)

        thread = threading.Thread(target=answer)
        thread.start()
        endpoint = Endpoint(host="127.0.0.1", port=listener.getsockname()[1], secret=b"s" * 32)
        with pytest.raises(TransportError, match="does not know the transfer's secret"):
            transport.connect(PoolAddress(path="", num_bytes=SIZE, endpoint=endpoint), generation=0)
        thread.join(DEADLINE_S)


@pytest.mark.parametrize("greeting", [b"HTTP/1.1 400 Bad Request\r\n", b""])
def test_a_server_of_another_kind(greeting: bytes, transport: SocketTransport, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another protocol, or silence."""
    monkeypatch.setattr(socket_transport, "CONNECT_TIMEOUT_S", 0.5)
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def answer() -> None:
            connection, _ = listener.accept()
            with connection, contextlib.suppress(ConnectionError):
                connection.sendall(greeting)
                connection.recv(1)

        thread = threading.Thread(target=answer)
        thread.start()
        endpoint = Endpoint(host="127.0.0.1", port=listener.getsockname()[1], secret=b"")
        with pytest.raises(TransportError, match="another protocol" if greeting else "before the deadline"):
            transport.connect(PoolAddress(path="", num_bytes=SIZE, endpoint=endpoint), generation=0)
        thread.join(DEADLINE_S)
    with pytest.raises(TransportError, match="cannot be reached"):
        transport.connect(PoolAddress(path="", num_bytes=SIZE, endpoint=endpoint), generation=0)
    with pytest.raises(TransportError, match="has no endpoint"):
        transport.connect(PoolAddress(path="x", num_bytes=SIZE), generation=0)


def test_damage_and_frames_that_cannot_be(server: PoolServer, pool: Pool) -> None:
    deadline_s = time.monotonic() + DEADLINE_S
    wire, status = greeted(server, server.address())
    assert status == WRITTEN
    wire.send(frame(b"abcd", [(0, 4)], checksum=7), deadline_s)
    status, length = REPLY.unpack(wire.receive(REPLY.size, deadline_s))
    assert (status, wire.receive(length, deadline_s)) == (DAMAGED, b"a piece was damaged on its way")
    wire.send(frame(b"abcd", [(0, 2), (998, 2)]), deadline_s)  # the connection goes on
    assert REPLY.unpack(wire.receive(REPLY.size, deadline_s)) == (WRITTEN, 0)
    assert bytes(pool.bytes_B.numpy())[:3] + bytes(pool.bytes_B.numpy())[-3:] == b"ab\0\0cd"
    pool.advance_generation(timeout_s=DEADLINE_S)
    wire.send(frame(b"efgh", [(0, 4)]), deadline_s)
    status, length = REPLY.unpack(wire.receive(REPLY.size, deadline_s))
    assert status == REFUSED
    assert b"is refused" in wire.receive(length, deadline_s)
    wire.close()
    wrong = [
        frame(b"abcd", [(997, 4)]),
        frame(b"abcd", [(0, 3)]),
        frame(b"abcd", [(0, 4), (2**64 - 1, 0)]),
        frame(b"abcd", [(2**64 - 4, 4)]),
        frame(b"", []),
        struct.pack("<IIIQ", 1, 0xFFFFFFFF, 1000, 0),
        struct.pack("<IIIQ", 0xFFFFFFFF, 4, 1000, 0),
    ]
    generation_1 = server.address(1)
    for data in wrong:
        wire, status = greeted(server, generation_1)
        assert status == WRITTEN
        wire.send(data, deadline_s)
        assert is_ended(wire), data
        wire.close()
    assert bytes(pool.bytes_B.numpy())[:3] == b"ab\0"


@settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(garbage=st.binary(min_size=HELLO.size, max_size=200))
def test_garbage_ends_its_connection_only(garbage: bytes, server: PoolServer, pool: Pool) -> None:
    wire = dialled(server)
    wire.receive(len(MAGIC) + NONCE_BYTES, time.monotonic() + DEADLINE_S)
    wire.send(garbage, time.monotonic() + DEADLINE_S)
    assert is_ended(wire)
    wire.close()
    assert pool.bytes_B.eq(0).all()


def test_a_server_that_ends_fails_what_is_under_way(server: PoolServer, transport: SocketTransport) -> None:
    peer = transport.connect(server.address(), generation=0)
    first = transport.submit("own", peer, [WHOLE], timeout_s=DEADLINE_S)
    assert transport.wait(first, timeout_s=DEADLINE_S).state is TransferState.DONE
    server.close()
    for _ in range(2):  # the second time the connection is known to be broken
        transfer = transport.submit("own", peer, [WHOLE], timeout_s=DEADLINE_S)
        progress = transport.wait(transfer, timeout_s=DEADLINE_S)
        assert progress.state is TransferState.FAILED
        assert f"127.0.0.1:{server.port}: the" in (progress.error or "")
    server.close()


def test_an_address_that_is_not_ours_cannot_be_listened_at(pool: Pool) -> None:
    with pytest.raises(TransportError, match="cannot listen on"):
        PoolServer(pool, "192.0.2.1")


def test_descriptors_beyond_the_thousandth_work(server: PoolServer) -> None:
    """A server of many connections has them; select() would not take them."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 2048), hard))
    try:
        with socket.create_connection((server.host, server.port), timeout=DEADLINE_S) as low:
            high = fcntl.fcntl(low, fcntl.F_DUPFD_CLOEXEC, 1500)
        wire = Wire(socket.socket(fileno=high))
        assert wire.receive(len(MAGIC), time.monotonic() + DEADLINE_S) == MAGIC
        wire.send(bytes(HELLO.size), time.monotonic() + DEADLINE_S)
        wire.close()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
