"""The receiving side of the socket transport: writes what authenticated senders send into a pool of this machine.

One thread a connection, a limited number of them. A connection belongs to one channel at one generation: it may write
anywhere in the pool while the channel is at that generation.
"""

from __future__ import annotations

import contextlib
import fcntl
import hmac
import logging
import os
import secrets
import socket
import threading
import time

import torch

from longprefill.comms.checksum import checksum_bytes

from .base import Endpoint, PoolAddress, TransportError
from .holder import CHANNELS, Pool, attach_pool
from .queued import PIECE_BYTES, refused
from .socket_wire import (
    ANSWER,
    COPY,
    DAMAGED,
    FRAME,
    HELLO,
    LOOK_S,
    MAGIC,
    MAX_FRAME_COPIES,
    MAX_TEXT_BYTES,
    NONCE_BYTES,
    REFUSED,
    REPLY,
    WRITTEN,
    ConnectionLost,
    Wire,
    proof,
    secret_of,
)

logger = logging.getLogger(__name__)

MAX_CONNECTIONS = 512
HELLO_TIMEOUT_S = 10.0
FRAME_TIMEOUT_S = 120.0
"""For the rest of a frame that has begun."""
STALE_TIMEOUT_S = 60.0


class PoolServer:
    """Serves one pool at `host`, on a free port unless told."""

    def __init__(self, pool: Pool, host: str, port: int = 0) -> None:
        """Raises TransportError when the address cannot be used."""
        self._pool = pool
        self._key = secrets.token_bytes(32)
        try:
            family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
            self._listener = socket.create_server((host, port), family=family, backlog=64)
        except OSError as error:
            raise TransportError(f"cannot listen on {host}:{port}: {error.strerror or error}") from None
        self._listener.settimeout(LOOK_S)
        self.host, self.port = host, self._listener.getsockname()[1]
        self._is_closing = threading.Event()
        self._connections = threading.Semaphore(MAX_CONNECTIONS)
        self._serving: dict[threading.Thread, socket.socket] = {}
        self._acceptor = threading.Thread(target=self._accept, name="page-server", daemon=True)
        self._acceptor.start()

    def address(self, channel: int = 0) -> PoolAddress:
        """What to publish to writers of this channel at its present generation: it has the transfer's secret."""
        secret = secret_of(self._key, channel, self._pool.generation(channel))
        found = self._pool.address(channel)
        endpoint = Endpoint(host=self.host, port=self.port, secret=secret)
        return PoolAddress(path=found.path, num_bytes=found.num_bytes, channel=channel, endpoint=endpoint)

    def close(self, *, timeout_s: float = 10.0) -> None:
        """Takes and writes nothing more; a second call does nothing."""
        self._is_closing.set()
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes the acceptor
        self._listener.close()
        deadline_s = time.monotonic() + timeout_s
        self._acceptor.join(timeout_s)
        for thread, connection in tuple(self._serving.items()):
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
            thread.join(max(deadline_s - time.monotonic(), 0.0))

    def _accept(self) -> None:
        while not self._is_closing.is_set():
            try:
                connection, _ = self._listener.accept()
            except TimeoutError:
                continue
            except OSError:
                return  # closed
            if not self._connections.acquire(blocking=False):
                logger.warning("a connection was refused: %d are open", MAX_CONNECTIONS)
                connection.close()
                continue
            thread = threading.Thread(target=self._serve, args=(connection,), name="page-connection", daemon=True)
            self._serving[thread] = connection
            thread.start()

    def _serve(self, connection: socket.socket) -> None:
        try:
            wire = Wire(connection, is_wanted=lambda: not self._is_closing.is_set())
            with contextlib.closing(attach_pool(self._pool.address())) as pool:
                receiver = self._greet(wire, pool)
                if receiver is not None:
                    receiver.run(self._is_closing)
        except (TransportError, OSError) as error:
            logger.info("a connection ended: %s", error)
        finally:
            connection.close()
            self._serving.pop(threading.current_thread(), None)
            self._connections.release()

    def _greet(self, wire: Wire, pool: Pool) -> _Receiver | None:
        """The connection of a sender who knows the secret of a transfer; None when that transfer is over."""
        deadline_s = time.monotonic() + HELLO_TIMEOUT_S
        nonce_r = os.urandom(NONCE_BYTES)
        wire.send(MAGIC + nonce_r, deadline_s)
        magic, channel, generation, num_bytes, nonce_s, shown = HELLO.unpack(wire.receive(HELLO.size, deadline_s))
        secret = secret_of(self._key, channel, generation)
        expected = proof(secret, b"sender", nonce_r, nonce_s, channel, generation, num_bytes)
        if magic != MAGIC or not hmac.compare_digest(shown, expected):
            raise ConnectionLost("a sender without the secret")
        if channel >= CHANNELS or num_bytes != pool.num_bytes:
            raise ConnectionLost(f"channel {channel} of a pool of {num_bytes} bytes: this one has {pool.num_bytes}")
        current = pool.generation(channel)
        status = WRITTEN if current == generation else REFUSED
        wire.send(
            ANSWER.pack(status, current, proof(secret, b"receiver", nonce_r, nonce_s, status, current)), deadline_s
        )
        return _Receiver(wire, pool, channel, generation) if status == WRITTEN else None


class _Receiver:
    """One authenticated connection."""

    def __init__(self, wire: Wire, pool: Pool, channel: int, generation: int) -> None:
        self._wire = wire
        self._pool = pool
        self._channel = channel
        self._generation = generation
        self._payload = bytearray(PIECE_BYTES)
        self._current_at_s = time.monotonic()

    def run(self, is_closing: threading.Event) -> None:
        """Takes frames until the sender leaves."""
        wanted = Wire(self._wire.socket, is_wanted=lambda: not is_closing.is_set() and self._is_worth_keeping())
        while True:
            try:
                first = wanted.receive(1, time.monotonic() + 86400)
            except ConnectionLost:
                return
            self._take(first, time.monotonic() + FRAME_TIMEOUT_S)

    def _is_worth_keeping(self) -> bool:
        """A while beyond its generation, so that a late sender hears why its write is refused."""
        now = time.monotonic()
        if self._pool.generation(self._channel) == self._generation:
            self._current_at_s = now
        return now - self._current_at_s < STALE_TIMEOUT_S

    def _take(self, first: bytes, deadline_s: float) -> None:
        """One frame, whose first byte has come."""
        header = first + self._wire.receive(FRAME.size - 1, deadline_s)
        num_copies, num_bytes, wait_ms, checksum = FRAME.unpack(header)
        if not 1 <= num_copies <= MAX_FRAME_COPIES or not num_copies <= num_bytes <= PIECE_BYTES:
            raise ConnectionLost(f"a frame of {num_copies} copies and {num_bytes} bytes")
        writes_until_s = time.monotonic() + wait_ms / 1000
        places = list(COPY.iter_unpack(self._wire.receive(num_copies * COPY.size, deadline_s)))
        if sum(size for _, size in places) != num_bytes or not all(
            size > 0 and target + size <= self._pool.num_bytes for target, size in places
        ):
            raise ConnectionLost("a frame whose copies leave the pool or are not its payload")
        payload = memoryview(self._payload)[:num_bytes]
        self._wire.receive_into(payload, deadline_s)
        if checksum_bytes(payload) != checksum:
            self._reply(DAMAGED, "a piece was damaged on its way", deadline_s)
            return
        try:
            with self._pool.locked(self._channel, fcntl.F_RDLCK, min(writes_until_s, deadline_s)):
                current = self._pool.generation(self._channel)
                if current != self._generation:
                    raise TransportError(refused(self._pool.address(self._channel), current, self._generation))
                self._write(places, payload)
        except TransportError as error:
            self._reply(REFUSED, str(error), deadline_s)
            return
        self._reply(WRITTEN, "", deadline_s)

    def _write(self, places: list[tuple[int, int]], payload: memoryview) -> None:
        source_B = torch.frombuffer(payload, dtype=torch.uint8)
        first = 0
        for target, size in places:
            self._pool.bytes_B[target : target + size] = source_B[first : first + size]
            first += size

    def _reply(self, status: int, text: str, deadline_s: float) -> None:
        data = text.encode(errors="replace")[:MAX_TEXT_BYTES]
        self._wire.send(REPLY.pack(status, len(data)) + data, deadline_s)
