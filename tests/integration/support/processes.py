"""Which processes a run has started: they inherit a mark in their environment, so no name or parent need be guessed."""

from __future__ import annotations

import contextlib
import os
import secrets
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

MARK = "LONGPREFILL_TEST_MARK"
T = TypeVar("T")
DEADLINE_S = 60.0


def new_mark() -> str:
    """A value of `MARK` that nothing else has."""
    return secrets.token_hex(12)


def marked(mark: str) -> dict[int, str]:
    """Living processes with this mark, but for the caller: command line by pid."""
    needle = f"{MARK}={mark}".encode()
    found = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            with contextlib.suppress(OSError):
                if needle in (entry / "environ").read_bytes():
                    words = (entry / "cmdline").read_bytes().replace(b"\0", b" ")
                    found[int(entry.name)] = words.decode(errors="replace").strip()
    return found


def wait_for(condition: Callable[[], T], what: Callable[[], str], *, deadline_s: float = DEADLINE_S) -> T:
    """The condition's first true value."""
    deadline = time.monotonic() + deadline_s
    while not (value := condition()):
        if time.monotonic() > deadline:
            raise AssertionError(f"{what()}: not within {deadline_s:.0f} s")
        time.sleep(0.02)
    return value


def pid_running(mark: str, title: str) -> int:
    """Waits until a marked process shows `title` (Ray titles a worker by the call it runs) and returns its pid."""
    return wait_for(
        lambda: next((pid for pid, line in marked(mark).items() if title in line), 0), lambda: f"a process {title}"
    )


def assert_nothing_left(mark: str, directory: Path, owner: int, *, exempt: int = 0) -> None:
    """No marked process but `exempt`, nothing in its directory for temporary files, no cache pool of `owner`. Processes
    that were just ended may take a moment."""
    wait_for(lambda: not marked(mark).keys() - {exempt}, lambda: f"processes left: {marked(mark)}", deadline_s=15)
    assert [path.name for path in directory.iterdir()] == []
    assert pool_files(owner) == []


def pool_files(owner: int) -> list[Path]:
    """Cache pools that a process made."""
    return sorted(Path("/dev/shm").glob(f"longprefill-{owner}-*"))


@contextlib.contextmanager
def marking() -> Iterator[str]:
    """Marks what this process starts inside the block."""
    mark = new_mark()
    before = os.environ.get(MARK)
    os.environ[MARK] = mark
    try:
        yield mark
    finally:
        os.environ.pop(MARK)
        if before is not None:
            os.environ[MARK] = before
