"""The command line as a user starts it: a process of its own, with its own directory for temporary files."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from longprefill.kernels.native.build import CACHE_VARIABLE, cache_folder

from .processes import MARK, assert_nothing_left, marked, new_mark

TIMEOUT_S = 200.0
COMMAND = (str(Path(sys.executable).with_name("longprefill")),)


@dataclass(frozen=True, kw_only=True)
class Finished:
    code: int
    out: str
    err: str
    seconds: float

    @property
    def line(self) -> str:
        """The one line of standard error that a refusal is."""
        lines = self.err.splitlines()
        assert len(lines) == 1, self.err
        assert lines[0].startswith("longprefill: ")
        return lines[0].removeprefix("longprefill: ")

    @property
    def last_line(self) -> str:
        """The last line of standard error: after progress, the reason."""
        assert "Traceback" not in self.err, self.err
        lines = self.err.splitlines()
        assert lines, "nothing on standard error"
        assert lines[-1].startswith("longprefill: "), self.err
        return lines[-1].removeprefix("longprefill: ")


class Command:
    """A running `longprefill`. Made by `running`, which ends it."""

    def __init__(self, process: subprocess.Popen[bytes], mark: str, directory: Path) -> None:
        self.process = process
        self.mark = mark
        self.directory = directory
        self._started = time.monotonic()

    def finish(self, stdin: bytes | None = None) -> Finished:
        """Waits for the end."""
        out, _ = self.process.communicate(stdin, timeout=TIMEOUT_S)
        return Finished(
            code=self.process.returncode,
            out=out.decode(errors="replace"),
            err=self.error_text(),
            seconds=time.monotonic() - self._started,
        )

    def error_text(self) -> str:
        """Standard error so far."""
        return (self.directory.parent / f"{self.directory.name}.err").read_bytes().decode(errors="replace")

    def assert_nothing_left(self) -> None:
        """No process, file or pool of this command."""
        assert_nothing_left(self.mark, self.directory, self.process.pid)


@contextlib.contextmanager
def running(
    arguments: Sequence[object], *, environment: Mapping[str, str] | None = None, stdin: bool = False
) -> Iterator[Command]:
    """Starts the command; what is left of it at the block's end is killed, process by process."""
    # short, and never below a test's own long path: sockets live in it
    directory = Path(tempfile.mkdtemp(prefix="lpt-", dir="/tmp"))
    mark = new_mark()
    variables = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    # whatever HOME a test gives, kernels are compiled once
    variables |= {"TMPDIR": str(directory), MARK: mark, CACHE_VARIABLE: str(cache_folder())} | dict(environment or {})
    error_file = directory.parent / f"{directory.name}.err"
    try:
        with error_file.open("wb") as err:
            process = subprocess.Popen(
                [*COMMAND, *map(str, arguments)],
                stdin=subprocess.PIPE if stdin else subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=err,
                env=variables,
                start_new_session=True,
            )
        command = Command(process, mark, directory)
        try:
            yield command
        finally:
            for pid in [process.pid] if process.poll() is None else []:
                os.kill(pid, signal.SIGKILL)
            for pid in marked(mark):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            process.wait()
            for stream in (process.stdin, process.stdout):
                if stream is not None:
                    with contextlib.suppress(BrokenPipeError):
                        stream.close()
    finally:
        error_file.unlink(missing_ok=True)
        shutil.rmtree(directory, ignore_errors=True)


def run(*arguments: object, environment: Mapping[str, str] | None = None, stdin: bytes | None = None) -> Finished:
    """Runs the command to its end and checks that nothing is left of it."""
    with running(arguments, environment=environment, stdin=stdin is not None) as command:
        finished = command.finish(stdin)
        command.assert_nothing_left()
        return finished
