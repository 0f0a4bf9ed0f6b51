"""Who answers SIGINT and SIGTERM for a while."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from types import FrameType

Handler = Callable[[int, FrameType | None], object] | signal.Handlers


@contextlib.contextmanager
def answered_by(handler: Handler) -> Iterator[None]:
    """SIGINT and SIGTERM go to `handler`, afterwards to whom they went before. Nothing changes outside the main thread,
    which alone may say so and alone gets them."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, handler) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, previous in before.items():
            signal.signal(number, previous)


def uninterrupted() -> contextlib.AbstractContextManager[None]:
    """Holds both back: half a clean-up leaves processes behind."""
    return answered_by(signal.SIG_IGN)
