"""`longprefill serve`: everything checked, Ray started or joined, controller, workers and HTTP started at once; then
this process watches over them until it is told to end, and ends what it has started.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

import typer

from longprefill.orchestrator.api import proxy
from longprefill.orchestrator.config import ConfigError, ServiceConfig
from longprefill.orchestrator.config_file import read_service_config
from longprefill.orchestrator.errors import RunFailed
from longprefill.orchestrator.placement import demands, unsatisfiable
from longprefill.orchestrator.ray_runtime import LocalRay, processes_naming, worker_environment
from longprefill.orchestrator.service_checks import check_service
from longprefill.orchestrator.signals import answered_by, uninterrupted
from longprefill.partition.errors import UserError

logger = logging.getLogger(__name__)

START_TIMEOUT_S = 900.0
END_TIMEOUT_S = 30.0
STOP_TIMEOUT_S = 15.0
POLL_S = 0.2
WATCH_S = 1.0
SILENCE_S = 60.0
"""A cluster that was joined is gone when it has not answered for so long."""
MAX_LOSSES, LOSSES_WINDOW_S = 10, 120.0
"""Of the controller, before the service gives up."""
LOCK_NAME = "serve.lock"
SERVERS = ("gcs_server", "raylet")


def serve(config_file: Path) -> None:
    """Runs the service until SIGTERM or SIGINT, which drain it first; a second one ends it at once.

    Raises:
        UserError: the configuration cannot be used, or can never be placed; nothing is left running.
        RunFailed: Ray, the controller or the HTTP side did not start, or are gone.
    """
    started = time.monotonic()
    config = read_service_config(config_file)
    with _state_lock(Path(config.service.state_dir)):
        check_service(config)
        service = RunningService(config)
        try:
            url = service.start()
            with service.asked_by_signals():  # from before anyone may send one
                typer.echo(f"ready on {url} in {time.monotonic() - started:.1f} s")
                service.watch()
            service.drain()
        except RayGone as error:
            service.end_without_ray(str(error))
        finally:
            service.close()


class RayGone(RunFailed):
    """The servers of our own Ray have ended."""


class RunningService:
    """What this process has started. `close` ends all of it, whatever state it is in."""

    def __init__(self, config: ServiceConfig) -> None:
        self.config = config
        self._ray = LocalRay()
        self._servers: tuple[int, ...] = ()
        self._controller: Any = None
        self._verdict: Any = None
        self._has_http = False
        self._asked_to_end = threading.Event()
        self._losses: list[float] = []

    # ---- start ---------------------------------------------------------------------------------------------------

    def start(self) -> str:
        """Until the service is ready; its URL.

        Raises:
            UserError, RunFailed: as `serve`.
        """
        self._start_ray()
        import ray

        from longprefill.orchestrator.api import deployment
        from longprefill.orchestrator.controller.actor import create_controller

        nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
        reason = unsatisfiable(nodes, demands(self.config))
        if reason is not None:
            raise ConfigError(reason)
        try:
            self._controller = create_controller(self.config, node_id=ray.get_runtime_context().get_node_id())
        except ValueError as error:
            raise ConfigError(f"this Ray cluster has a longprefill service already: {error}") from error
        self._has_http = True
        http = _Attempt(lambda: deployment.start(self.config))
        self._await_ready(http)
        return str(http.result)

    def _start_ray(self) -> None:
        service = self.config.service
        num_threads = max(pool.threads_per_rank for pool in self.config.prefill)
        environment = worker_environment(num_threads) | proxy.ENVIRONMENT
        if service.ray_address is None:
            num_cpus = sum(demand.num_packs * demand.pack["CPU"] for demand in demands(self.config))
            self._ray.start(int(-(-num_cpus // 1)), environment)
            assert self._ray.directory is not None
            self._servers = tuple(pid for pid in processes_naming(self._ray.directory) if _is_server(pid))
            return
        import ray

        try:
            ray.init(
                address=service.ray_address,
                log_to_driver=False,
                logging_level=logging.ERROR,
                configure_logging=False,
                runtime_env={"env_vars": environment},
            )
        except (ConnectionError, RuntimeError, ValueError, OSError) as error:
            lines = str(error).splitlines() or [type(error).__name__]
            raise RunFailed(f"the Ray cluster at {service.ray_address} cannot be joined: {lines[0]}") from error

    def _await_ready(self, http: _Attempt) -> None:
        """Until controller, a group, a decode worker and HTTP are ready; every reason for waiting is told once."""
        import ray
        from ray.exceptions import RayError

        deadline, told = time.monotonic() + START_TIMEOUT_S, ""
        while True:
            if http.error is not None:
                raise http.error
            self._check_verdict()
            self._check_servers()
            try:
                found: Any = ray.get(self._controller.readiness.remote(), timeout=END_TIMEOUT_S)
                if found.is_ready and http.wait(0):
                    return
                reasons = found.reasons or ("the HTTP side starts",)
            except RayError as error:
                reasons = (f"the controller does not answer: {str(error).splitlines()[0]}",)
            line = "; ".join(reasons)
            if line != told and time.monotonic() > deadline - START_TIMEOUT_S + SILENCE_S:
                _say(f"waiting: {line}")
                told = line
            if time.monotonic() > deadline:
                raise RunFailed(f"the service was not ready after {START_TIMEOUT_S:.0f} s: {line}")
            time.sleep(POLL_S)

    # ---- watch and end -------------------------------------------------------------------------------------------

    def asked_by_signals(self) -> contextlib.AbstractContextManager[None]:
        """A first SIGTERM or SIGINT asks the service to end, a second one interrupts it."""
        return answered_by(self._ask_to_end)

    def watch(self) -> None:
        """Until a signal.

        Raises:
            RunFailed: Ray is gone, or the controller will not come back.
        """
        while not self._asked_to_end.wait(WATCH_S):
            self._check_verdict()
            self._check_servers()

    def drain(self) -> None:
        """Takes no new jobs and lets the others end, as long as the configuration allows. What has not ended stays in
        the journal."""
        import ray
        from ray.exceptions import RayError

        timeout_s = self.config.service.drain_timeout_s
        draining = self._controller.drain.remote(timeout_s)
        deadline = time.monotonic() + timeout_s + END_TIMEOUT_S
        while time.monotonic() < deadline:
            self._check_servers()  # the signal may have gone to all processes of the service
            if ray.wait([draining], timeout=POLL_S)[0]:
                break
        with contextlib.suppress(RayError):
            if not ray.get(draining, timeout=POLL_S):
                _say("unfinished jobs go on at the next start")

    def end_without_ray(self, reason: str) -> NoReturn:
        """Ends this process at once: Ray's library would wait a minute for servers that are gone, and then abort. The
        next start removes what their directory holds."""
        if self._ray.directory is not None:
            for pid in processes_naming(self._ray.directory):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        if self._asked_to_end.is_set():
            _say("Ray has ended with the same signal; unfinished jobs go on at the next start")
        else:
            _say(reason)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0 if self._asked_to_end.is_set() else 1)

    def close(self) -> None:
        """Ends HTTP, controller, workers, and Ray if it is ours."""
        import ray

        with uninterrupted():
            if ray.is_initialized():
                try:
                    self._check_servers()
                    self._end_actors()
                except RayGone as error:
                    self.end_without_ray(str(error))
            if self.config.service.ray_address is not None and ray.is_initialized():
                ray.shutdown()
            self._ray.stop()

    def _end_actors(self) -> None:
        import ray

        if self._has_http:
            from longprefill.orchestrator.api import deployment

            self._bounded(deployment.stop)
        controller = self._controller
        if controller is not None:
            self._bounded(lambda: ray.get(controller.end.remote(end_hosts=True), timeout=STOP_TIMEOUT_S))
            self._bounded(lambda: ray.kill(controller, no_restart=True))

    def _bounded(self, call: Callable[[], object]) -> None:
        """A call of Ray, which waits for a minute for servers that are gone, and then aborts this process.

        Raises:
            RayGone: they are, or seem to be.
        """
        deadline = time.monotonic() + STOP_TIMEOUT_S
        attempt = _Attempt(call)
        while not attempt.wait(POLL_S):
            self._check_servers()
            if time.monotonic() > deadline:
                raise RayGone("Ray does not answer while the service ends; its processes are killed")

    def _ask_to_end(self, number: int, frame: FrameType | None) -> None:
        if self._asked_to_end.is_set():
            raise KeyboardInterrupt  # the second time: now
        self._asked_to_end.set()

    def _check_verdict(self) -> None:
        """Raises what the controller can never recover from; one that Ray starts again is asked again."""
        import ray
        from ray.exceptions import RayError

        if self._verdict is None:
            self._verdict = self._controller.verdict.remote()
        ready, _ = ray.wait([self._verdict], timeout=0)
        if not ready:
            return
        reference, self._verdict = self._verdict, None
        try:
            reason = ray.get(reference)
        except RayError as error:
            logger.info("the controller was lost: %s", error)
            self._count_loss()
            return
        raise RunFailed(f"the controller has ended: {reason}")

    def _count_loss(self) -> None:
        """Ray starts the controller again for ever: one that cannot live must end the service some time.

        Raises:
            RunFailed: it was lost too often in a short time.
        """
        now = time.monotonic()
        self._losses = [at for at in self._losses if now - at < LOSSES_WINDOW_S] + [now]
        if len(self._losses) > MAX_LOSSES:
            raise RunFailed(
                f"the controller was lost {len(self._losses)} times in {LOSSES_WINDOW_S:.0f} s: see "
                f"{self.config.service.state_dir}/logs/controller.log"
            )
        _say("the controller was lost; Ray starts it again")

    def _check_servers(self) -> None:
        if not self._are_servers_alive():
            raise RayGone("Ray is gone: start the service again, its jobs are in the journal")

    def _are_servers_alive(self) -> bool:
        if self.config.service.ray_address is None:
            return all(_is_alive(pid) for pid in self._servers)
        import ray

        attempt = _Attempt(ray.nodes)
        return attempt.wait(SILENCE_S) and attempt.error is None


class _Attempt:
    """A call in a thread that nobody need wait for. `error`: what was expected to go wrong with it."""

    def __init__(self, call: Callable[[], object]) -> None:
        self._call = call
        self._is_done = threading.Event()
        self.result: Any = None
        self.error: Exception | None = None
        threading.Thread(target=self._run, daemon=True).start()

    def wait(self, timeout_s: float) -> bool:
        """Whether it has ended."""
        return self._is_done.wait(timeout_s)

    def _run(self) -> None:
        from ray.exceptions import RayError

        try:
            self.result = self._call()
        except (UserError, RunFailed, RayError, RuntimeError, OSError) as error:
            self.error = error
        finally:
            self._is_done.set()


def _say(line: str) -> None:
    typer.echo(f"longprefill: {line}", err=True)


def _is_server(pid: int) -> bool:
    with contextlib.suppress(OSError):
        name = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")[0].decode(errors="replace")
        return Path(name).name in SERVERS
    return False


def _is_alive(pid: int) -> bool:
    """A process that runs; one that has ended and that nobody has waited for does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in ("Z", "X")
    except OSError:
        return False


@contextlib.contextmanager
def _state_lock(directory: Path) -> Iterator[None]:
    """One service a state_dir.

    Raises:
        ConfigError: another one runs, or the directory cannot be used.
    """
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        handle = os.open(directory / LOCK_NAME, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise ConfigError(f"[service] state_dir={str(directory)!r} cannot be used: {error.strerror}") from None
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(
                f"[service] state_dir={str(directory)!r} is used by a service that runs: give another, or end that one"
            ) from None
        yield
    finally:
        os.close(handle)
