"""Page transport to another machine: framed over TCP, authenticated by the transfer's secret, checksummed.

Slower than shared memory by the network and one copy at each end. Nothing is encrypted: for networks that are private
to the service. `socket_server.py` is the receiving side, `socket_wire.py` what they say.
"""

from __future__ import annotations

import hmac
import os
import socket
import time
from collections.abc import Iterator, Sequence

import torch

from longprefill.comms.checksum import checksum_bytes

from .base import Copy, Peer, TransportError
from .queued import QueuedTransport, refused
from .socket_wire import (
    ANSWER,
    COPY,
    FRAME,
    HELLO,
    MAGIC,
    MAX_FRAME_COPIES,
    MAX_TEXT_BYTES,
    NONCE_BYTES,
    REPLY,
    WRITTEN,
    ConnectionLost,
    Wire,
    proof,
)

CONNECT_TIMEOUT_S = 10.0
GRACE_S = 2.0
"""How long after its deadline a piece's answer is waited for: the receiver knows the deadline too, and says how the
piece ended."""


class SocketLink:
    """A connection to the server of a pool. Once it fails it stays broken: connect again."""

    def __init__(self, peer: Peer, wire: Wire) -> None:
        self._peer = peer
        self._wire = wire
        self._broken: str | None = None

    def write(self, piece: Sequence[Copy], source_B: torch.Tensor, deadline_s: float) -> None:
        for part in _split(piece):
            if self._broken is not None:
                raise TransportError(self._broken)
            try:
                self._send(part, source_B, deadline_s)
                status, length = REPLY.unpack(self._wire.receive(REPLY.size, deadline_s + GRACE_S))
                if length > MAX_TEXT_BYTES:
                    raise ConnectionLost(f"the receiver answers with {length} bytes")
                text = self._wire.receive(length, deadline_s + GRACE_S).decode(errors="replace")
            except ConnectionLost as error:
                self._broken = f"{self._peer.address.endpoint_text}: {error}"
                self._wire.close()
                raise TransportError(self._broken) from None
            if status != WRITTEN:
                raise TransportError(text)

    def close(self) -> None:
        self._broken = self._broken or "the connection is closed"
        self._wire.close()

    def _send(self, part: Sequence[Copy], source_B: torch.Tensor, deadline_s: float) -> None:
        # gathered into one buffer: its bytes cannot change between the checksum and the wire
        payload_B = torch.cat([source_B[copy.source : copy.source + copy.num_bytes] for copy in part]).cpu()
        payload = payload_B.numpy().data
        places = b"".join(COPY.pack(copy.target, copy.num_bytes) for copy in part)
        wait_ms = max(1, min(int((deadline_s - time.monotonic()) * 1000), 0xFFFFFFFF))
        self._wire.send(FRAME.pack(len(part), len(payload), wait_ms, checksum_bytes(payload)) + places, deadline_s)
        self._wire.send(payload, deadline_s)


class SocketTransport(QueuedTransport):
    """Sends to pools whose addresses have an endpoint."""

    def open_link(self, peer: Peer) -> SocketLink:
        address, endpoint = peer.address, peer.address.endpoint
        if endpoint is None:
            raise TransportError(f"pool '{address.path}' has no endpoint: its owner does not listen")
        deadline_s = time.monotonic() + CONNECT_TIMEOUT_S
        try:
            connection = socket.create_connection((endpoint.host, endpoint.port), timeout=CONNECT_TIMEOUT_S)
        except OSError as error:
            raise TransportError(f"{address.endpoint_text} cannot be reached: {error.strerror or error}") from None
        wire = Wire(connection)
        try:
            current = _shake_hands(wire, peer, endpoint.secret, deadline_s)
        except ConnectionLost as error:
            wire.close()
            raise TransportError(f"{address.endpoint_text} took no connection: {error}") from None
        if current != peer.generation:
            wire.close()
            raise TransportError(refused(address, current, peer.generation))
        return SocketLink(peer, wire)


def _shake_hands(wire: Wire, peer: Peer, secret: bytes, deadline_s: float) -> int:
    """The pool's current generation, from somebody who knows the secret."""
    greeting = wire.receive(len(MAGIC) + NONCE_BYTES, deadline_s)
    if greeting[: len(MAGIC)] != MAGIC:
        raise ConnectionLost("what listens there speaks another protocol or version")
    nonce_r, nonce_s = greeting[len(MAGIC) :], os.urandom(NONCE_BYTES)
    numbers = (peer.address.channel, peer.generation, peer.address.num_bytes)
    wire.send(HELLO.pack(MAGIC, *numbers, nonce_s, proof(secret, b"sender", nonce_r, nonce_s, *numbers)), deadline_s)
    status, current, shown = ANSWER.unpack(wire.receive(ANSWER.size, deadline_s))
    if not hmac.compare_digest(shown, proof(secret, b"receiver", nonce_r, nonce_s, status, current)):
        raise ConnectionLost("it does not know the transfer's secret")
    return current


def _split(piece: Sequence[Copy]) -> Iterator[Sequence[Copy]]:
    for first in range(0, len(piece), MAX_FRAME_COPIES):
        yield piece[first : first + MAX_FRAME_COPIES]
