"""Waiting for something to happen to a job."""

from __future__ import annotations

import asyncio


class News:
    """Who waits for a job is woken when it changes."""

    def __init__(self) -> None:
        self._events: dict[int, tuple[asyncio.Event, int]] = {}

    def tell(self, job: int) -> None:
        """Wakes everyone who waits for the job."""
        event, _ = self._events.pop(job, (None, 0))
        if event is not None:
            event.set()

    async def wait(self, job: int, timeout_s: float) -> bool:
        """Until the job changes; False after `timeout_s`."""
        event, num_waiting = self._events.get(job) or (asyncio.Event(), 0)
        self._events[job] = (event, num_waiting + 1)
        try:
            async with asyncio.timeout(timeout_s):
                await event.wait()
        except TimeoutError:
            return False
        else:
            return True
        finally:
            current, num_waiting = self._events.get(job, (None, 0))
            if current is event:
                if num_waiting > 1:
                    self._events[job] = (event, num_waiting - 1)
                else:
                    del self._events[job]
