"""What the two ends of a page connection say to each other. Little endian; every read has a size limit and a deadline.

    receiver  MAGIC, nonce_r [16]
    sender    HELLO: MAGIC, channel, generation, size of the pool, nonce_s [16], proof [32]
    receiver  ANSWER: status, current generation, proof [32]
    then, for each piece
    sender    FRAME: copies, payload bytes, milliseconds it may wait, checksum; COPY: target, bytes, of each; payload
    receiver  REPLY: status, length of a text; the text

A proof is an HMAC of both nonces under the transfer's secret: each side shows that it knows it, without sending it. A
piece is written only when all of it is there and its checksum is right. Nothing is encrypted.
"""

from __future__ import annotations

import hashlib
import hmac
import select
import socket
import struct
import time
from collections.abc import Callable

from .base import TransportError

MAGIC = b"LPPAGE01"
NONCE_BYTES = 16
HELLO = struct.Struct("<8sIQQ16s32s")
ANSWER = struct.Struct("<BQ32s")
FRAME = struct.Struct("<IIIQ")
COPY = struct.Struct("<QQ")
REPLY = struct.Struct("<BH")
WRITTEN, REFUSED, DAMAGED = 0, 1, 2
MAX_FRAME_COPIES = 1 << 16
MAX_TEXT_BYTES = 512
LOOK_S = 0.2
"""Between two looks at whether somebody still wants the bytes."""


class ConnectionLost(TransportError):
    """The other side is gone, silent beyond the deadline, or says something that is not the protocol."""


def secret_of(key: bytes, channel: int, generation: int) -> bytes:
    """The secret of one transfer: whoever has it may write to this channel while it is at this generation."""
    return hmac.digest(key, b"transfer" + struct.pack("<IQ", channel, generation), hashlib.sha256)


def proof(secret: bytes, role: bytes, nonce_r: bytes, nonce_s: bytes, *numbers: int) -> bytes:
    """What only somebody with the secret can say about both nonces."""
    text = role + nonce_r + nonce_s + struct.pack(f"<{len(numbers)}Q", *numbers)
    return hmac.digest(secret, text, hashlib.sha256)


class Wire:
    """One end of a connection. `is_wanted` false, or a deadline, ends every wait with ConnectionLost."""

    def __init__(self, connection: socket.socket, *, is_wanted: Callable[[], bool] = lambda: True) -> None:
        connection.setblocking(False)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        self.socket = connection
        self._is_wanted = is_wanted

    def send(self, data: bytes | memoryview, deadline_s: float) -> None:
        """All of it."""
        view = memoryview(data).cast("B")
        while view:
            self._await(deadline_s, is_write=True)
            try:
                view = view[self.socket.send(view) :]
            except BlockingIOError:
                continue
            except OSError as error:
                raise ConnectionLost(f"the connection broke: {error.strerror or error}") from None

    def receive_into(self, target: memoryview, deadline_s: float) -> None:
        """Fills the buffer."""
        view = target.cast("B")
        while view:
            self._await(deadline_s, is_write=False)
            try:
                count = self.socket.recv_into(view)
            except BlockingIOError:
                continue
            except OSError as error:
                raise ConnectionLost(f"the connection broke: {error.strerror or error}") from None
            if count == 0:
                raise ConnectionLost("the other side closed the connection")
            view = view[count:]

    def receive(self, num_bytes: int, deadline_s: float) -> bytes:
        """So many bytes; callers bound the number."""
        buffer = bytearray(num_bytes)
        self.receive_into(memoryview(buffer), deadline_s)
        return bytes(buffer)

    def close(self) -> None:
        """A second call does nothing."""
        self.socket.close()

    def _await(self, deadline_s: float, *, is_write: bool) -> None:
        poll = select.poll()  # select() takes no descriptor above 1023, which a busy server comes to
        while True:
            if not self._is_wanted():
                raise ConnectionLost("the connection is not wanted any more")
            remaining = deadline_s - time.monotonic()
            if remaining <= 0:
                raise ConnectionLost("the other side did not answer before the deadline")
            try:
                poll.register(self.socket, select.POLLOUT if is_write else select.POLLIN)
                if poll.poll(1000 * min(remaining, LOOK_S)):
                    return
            except (OSError, ValueError):  # closed by another thread
                raise ConnectionLost("the connection was closed") from None
