"""`longprefill serve` as a process that a script watches, kills and measures."""

from __future__ import annotations

import contextlib
import os
import random
import select
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

MARK = "LONGPREFILL_SCRIPT"
READY_S = 240.0


def clean_up(base: Path, *, is_wanted: bool) -> None:
    """Removes what a script left, or says where it is."""
    if is_wanted:
        print(f"state and logs are in {base}", file=sys.stderr)
    else:
        shutil.rmtree(base, ignore_errors=True)


class Service:
    """`longprefill serve`, started again whenever it ends by itself."""

    def __init__(self, base: Path, config: str) -> None:
        """`config`: service.toml with {state} and {port} in it. `base` is made."""
        self.base = base
        self.mark = f"{os.getpid()}-{random.randrange(1 << 32):08x}"
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self.log: list[str] = []
        self.start_seconds: list[float] = []
        base.mkdir()
        (base / "service.toml").write_text(config.format(state=base / "state", port=self.port))
        self._ends = threading.Event()
        self._process: subprocess.Popen[str] | None = None
        self._keeper = threading.Thread(target=self._keep, daemon=True)

    def __enter__(self) -> Service:
        self._start()
        self._keeper.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ends.set()
        assert self._process is not None
        self._process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(60)
        self._keeper.join(60)
        for pid in self.processes():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def processes(self) -> list[int]:
        """Everything that the service started, itself included."""
        found = []
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit() and int(entry.name) != os.getpid():
                with contextlib.suppress(OSError):
                    if f"{MARK}={self.mark}".encode() in (entry / "environ").read_bytes():
                        found.append(int(entry.name))
        return found

    def memory(self) -> dict[str, int]:
        """Proportional set size in bytes, by role: shared pages are counted once in all."""
        found: dict[str, int] = {}
        for pid in self.processes():
            with contextlib.suppress(OSError):
                words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")[0].decode(errors="replace").split()
                role = os.path.basename(words[0]) if words else "ended"
                role = role.partition(".")[0] if role.startswith("ray::") else role  # an actor's method comes and goes
                for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
                    if line.startswith("Pss:"):
                        found[role] = found.get(role, 0) + (int(line.split()[1]) << 10)
        return found

    def kill_controller(self) -> bool:
        for pid in self.processes():
            with contextlib.suppress(OSError):
                if Path(f"/proc/{pid}/cmdline").read_bytes().startswith(b"ray::ControllerActor"):
                    os.kill(pid, signal.SIGKILL)
                    return True
        return False

    def kill_cluster(self) -> bool:
        """Every process but the one that an init system watches."""
        assert self._process is not None
        for pid in self.processes():
            if pid != self._process.pid:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        return True

    def _start(self) -> None:
        variables = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
        started = time.monotonic()
        with (self.base / "serve.err").open("a") as err:
            self._process = subprocess.Popen(
                [Path(sys.executable).with_name("longprefill"), "serve", "--config", self.base / "service.toml"],
                stdout=subprocess.PIPE,
                stderr=err,
                env=variables | {MARK: self.mark, "PYTHONSAFEPATH": "1"},
                text=True,
                start_new_session=True,
            )
        assert self._process.stdout is not None
        ready, _, _ = select.select([self._process.stdout], [], [], READY_S)
        line = self._process.stdout.readline().strip() if ready else ""
        if not line.startswith("ready on"):
            raise RuntimeError(f"the service did not start: {(self.base / 'serve.err').read_text()[-2000:]}")
        self.start_seconds.append(time.monotonic() - started)
        self.log.append(line)

    def _keep(self) -> None:
        while not self._ends.is_set():
            assert self._process is not None
            with contextlib.suppress(subprocess.TimeoutExpired):
                code = self._process.wait(0.2)
                if not self._ends.is_set():
                    self.log.append(f"ended with exit code {code}, started again")
                    self._start()
