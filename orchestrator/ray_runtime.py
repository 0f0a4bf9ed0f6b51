"""The embedded Ray: a private local instance for one `LocalCluster`, with its noise and its surprises turned off.

It lives in a directory of its own, so that it meets no other Ray of this machine or of another user, and leaves
nothing: the directory goes with it, and what a killed process left is removed by the next start.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import secrets
import shutil
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from longprefill.orchestrator.errors import RunFailed
from longprefill.partition.errors import UserError

logger = logging.getLogger(__name__)

OBJECT_STORE_BYTES = 128 << 20
"""Ray carries control only: prompts and logits of a few megabytes."""
PREFIX = "lpray-"
LOCK_NAME = "owner"
MAX_ROOT_BYTES = 28
"""Ray puts sockets about 70 bytes deeper, and a socket's path has 107 at most."""
END_TIMEOUT_S = 5.0
QUIET_LOGGERS = ("ray._private.authentication.authentication_token_setup", "ray._private.services", "ray._private.node")


class LocalRay:
    """Start once, stop once. `directory` holds sessions, sockets and logs while it runs."""

    def __init__(self) -> None:
        self.directory: Path | None = None
        self._lock = -1
        self._printer: Callable[..., None] | None = None

    def start(self, num_cpus: int, worker_environment: Mapping[str, str]) -> None:
        """Starts Ray with `num_cpus` logical CPUs (they bound nothing; ranks are counted, cores are shared). All its
        workers have `worker_environment`: inherited, which is seconds faster than a Ray runtime environment.

        Raises:
            UserError: this process already runs Ray, or there is no directory for it.
            RunFailed: Ray did not come up.
        """
        import ray
        from ray.exceptions import RayError

        if ray.is_initialized():
            raise UserError(
                "Ray is already running in this process: close the other LocalCluster or call ray.shutdown() first"
            )
        sweep_stale_directories()
        self._make_directory()
        self._hush()
        for name in QUIET_LOGGERS:
            logging.getLogger(name).setLevel(logging.ERROR)
        set_ray_environment()
        try:
            with _environment(worker_environment), _own_signal_handlers():
                ray.init(
                    address="local",
                    num_cpus=num_cpus,
                    num_gpus=0,
                    include_dashboard=False,
                    log_to_driver=False,
                    logging_level=logging.ERROR,
                    object_store_memory=OBJECT_STORE_BYTES,
                    configure_logging=False,
                    _temp_dir=str(self.directory),
                )
        except SystemExit as end:  # what Ray makes of a SIGTERM while it starts
            raise KeyboardInterrupt from end
        except Exception as error:
            # Ray says with a bare Exception that its processes took too long to start
            if not isinstance(error, (RayError, RuntimeError, OSError, ValueError)) and type(error) is not Exception:
                raise
            lines = str(error).splitlines() or [type(error).__name__]
            raise RunFailed(f"Ray did not start: {lines[0]}") from error

    def stop(self) -> None:
        """Ends Ray's processes, also those of an interrupted start, and removes the directory; a second call does
        nothing."""
        import ray

        if self.directory is None:
            return  # not started, or a Ray that runs here is another's
        if ray.is_initialized():
            ray.shutdown()
        self._unhush()
        directory, self.directory = self.directory, None
        deadline = time.monotonic() + END_TIMEOUT_S
        while (pids := processes_naming(directory)) and time.monotonic() < deadline:
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.02)
        while directory.exists() and time.monotonic() < deadline:
            shutil.rmtree(directory, ignore_errors=True)  # a worker may be writing its last line: try again
        os.close(self._lock)

    def _hush(self) -> None:
        # Ray prints what its servers report, the death of a worker say, to standard output, which holds the result
        from ray._private import worker

        self._printer = worker.print_to_stdstream
        worker.print_to_stdstream = _log_message

    def _unhush(self) -> None:
        from ray._private import worker

        if self._printer is not None:
            worker.print_to_stdstream = self._printer
            self._printer = None

    def _make_directory(self) -> None:
        # made under another name, so that nobody can sweep it before its lock is held
        unready = Path(tempfile.mkdtemp(prefix=f"new-{PREFIX}", dir=_root()))
        self._lock = os.open(unready / LOCK_NAME, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        self.directory = unready.with_name(unready.name.removeprefix("new-"))
        unready.rename(self.directory)


def sweep_stale_directories() -> list[Path]:
    """Removes the directories whose owners no longer live, and returns them."""
    removed = []
    for path in sorted(_root().glob(f"{PREFIX}*")):
        try:
            lock = os.open(path / LOCK_NAME, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError:
            continue  # another user's, or somebody else's sweep was faster
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            continue
        else:
            shutil.rmtree(path, ignore_errors=True)
            removed.append(path)
        finally:
            os.close(lock)
    return removed


def processes_naming(directory: Path) -> list[int]:
    """Pids whose command line names this directory: Ray's servers all do."""
    needle = str(directory).encode()
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            with contextlib.suppress(OSError):
                if needle in (entry / "cmdline").read_bytes():
                    found.append(int(entry.name))
    return found


def worker_environment(num_threads: int) -> dict[str, str]:
    """Environment of a worker process: passive waiting, or ranks that share cores spin each other to death."""
    return {
        "OMP_NUM_THREADS": str(num_threads),
        "MKL_NUM_THREADS": str(num_threads),
        "OMP_WAIT_POLICY": "PASSIVE",
        "KMP_BLOCKTIME": "0",
        "PYTHONSAFEPATH": "1",
        "TORCH_DEVICE_BACKEND_AUTOLOAD": "0",
    }


def _log_message(data: Mapping[str, Any], *_: object, **__: object) -> None:
    """In the place of Ray's printer."""
    for line in data.get("lines", ()):
        logger.info("Ray: %s", line)


def set_ray_environment() -> None:
    """For good: Ray's C++ part reads these once a process, so that a second token would open no door."""
    variables = {
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
        # else Ray's head keeps a record of every call, some kilobytes each, that only its own dashboard shows
        "RAY_task_events_report_interval_ms": "0",
        # workers inherit an environment of their own, so one started in advance is of no use; those that are wanted
        # start all at once, not two by two
        "RAY_prestart_worker_first_driver": "0",
        "RAY_enable_worker_prestart": "0",
        "RAY_worker_maximum_startup_concurrency": "64",
        # with a token given, Ray neither reads nor writes one under HOME, which may not be writable
        "RAY_AUTH_TOKEN": secrets.token_hex(16),
    }
    for name, value in variables.items():
        os.environ.setdefault(name, value)


def _root() -> Path:
    """Where the directory goes: the first writable one whose path is short enough for sockets below it."""
    candidates = [tempfile.gettempdir(), "/tmp", "/var/tmp", "/dev/shm"]
    for name in candidates:
        if len(os.fsencode(name)) <= MAX_ROOT_BYTES and os.path.isdir(name) and os.access(name, os.W_OK | os.X_OK):
            return Path(name)
    raise UserError(
        f"Ray needs a writable directory with a path of at most {MAX_ROOT_BYTES} bytes; tried "
        f"{', '.join(dict.fromkeys(candidates))}: set TMPDIR to one"
    )


@contextlib.contextmanager
def _environment(variables: Mapping[str, str]) -> Iterator[None]:
    """These variables while the block runs: what Ray's processes inherit, without changing this process for good."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


@contextlib.contextmanager
def _own_signal_handlers() -> Iterator[None]:
    """Puts back this process's answer to SIGTERM, which Ray replaces by its own."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
