"""Peak memory that a case's call takes beyond its inputs, seen in a process of its own.

The measuring process keeps freed memory, which would hide what a call takes; here the allocator is the system's own,
gives back what it kept, and the peak is cleared before the call. What is counted are the call's outputs and its scratch
memory.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from collections.abc import Iterable
from itertools import islice
from pathlib import Path

SCRIPTS = Path(__file__).resolve().parents[1]


def extra_bytes(op: str, number: int, *, seed: int, threads: int, unset: Iterable[str] = ()) -> int:
    """Bytes of the `number`-th case of an op. `unset` are environment variables that its process shall not have.

    Raises:
        CalledProcessError: the case failed there; what it said is on standard error.
    """
    dropped = set(unset)
    environment = {name: value for name, value in os.environ.items() if name not in dropped}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, (str(SCRIPTS), environment.get("PYTHONPATH"))))
    command = [sys.executable, "-m", "bench_cases.memory", op, str(number), str(seed), str(threads)]
    return int(subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True).stdout)


def main(op: str, number: int, seed: int, threads: int) -> None:
    import torch

    from . import CASES

    torch.set_num_threads(threads)
    case = next(islice(CASES[op](seed), number, None))
    case.check()  # code that the call needs is in memory from here on
    before = clear_peak()
    found = case.run()
    print(status_bytes("VmHWM") - before)
    del found


def clear_peak() -> int:
    """Gives free memory back and forgets the process's peak; returns the resident bytes."""
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    return status_bytes("VmRSS")


def status_bytes(name: str) -> int:
    """A line of /proc/self/status, VmRSS or VmHWM."""
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) << 10
    raise ValueError(f"/proc/self/status has no {name}")


if __name__ == "__main__":
    main(sys.argv[1], *(int(argument) for argument in sys.argv[2:]))
