"""Making, finding and ending the named actors that hosts are, and calling them without waiting for ever."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayTaskError

from longprefill.orchestrator.hosts.contract import NAMESPACE, HostSettings, HostState
from longprefill.orchestrator.watch import end_process
from longprefill.workers.spec import Whereabouts

FREE_TIMEOUT_S = 10.0
FREE_POLL_S = 0.05


def create_host(settings: HostSettings, role: str) -> Any:
    """A new detached host, "prefill" or "decode"; its handle, at once. It does nothing before `start`.

    Raises:
        ValueError: an actor of this name exists.
    """
    # a decode host is its worker; a prefill host only commands its ranks, which have places of their own
    options: dict[str, Any] = {"num_cpus": 0}
    if role == "prefill":
        from longprefill.orchestrator.hosts.prefill_host import PrefillHostActor as actor
    else:
        from longprefill.orchestrator.hosts.decode_host import DecodeHostActor as actor

        others = {name: amount for name, amount in settings.resources.items() if name not in ("CPU", "GPU")}
        options = {"num_cpus": settings.resources.get("CPU", 1.0), "num_gpus": settings.resources.get("GPU", 0.0)}
        options["resources"] = others
    if settings.environment:
        options["runtime_env"] = {"env_vars": dict(settings.environment)}
    named = actor.options(name=settings.name, namespace=NAMESPACE, lifetime="detached", **options)
    return named.remote(settings)


def find_host(name: str) -> Any | None:
    """The handle of a running host, None when there is none of this name."""
    try:
        return ray.get_actor(name, namespace=NAMESPACE)
    except ValueError:
        return None


def end_host(name: str, state: HostState | None = None) -> None:
    """Ends a host's actor and everything it has started, if it is there, and returns when its name is free (or after
    `FREE_TIMEOUT_S`). `close` first, or its pool files stay until a next host of this machine removes them. `state`,
    its last one, helps with a stopped process: Ray ends none, so it is killed by its pid where that is known here."""
    host = find_host(name)
    if host is not None:
        ray.kill(host, no_restart=True)
    if state is not None and state.machine == Whereabouts.here().machine and _is_ray_worker(state.pid):
        end_process(state.pid)
    deadline = time.monotonic() + FREE_TIMEOUT_S
    while find_host(name) is not None and time.monotonic() < deadline:
        time.sleep(FREE_POLL_S)


def _is_ray_worker(pid: int) -> bool:
    """The pid of a host that ended long ago may be another process's now."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().startswith(b"ray::")
    except OSError:
        return False


def cause_of(error: BaseException) -> BaseException:
    """What a host raised, without the wrapping that Ray gives it."""
    return error.cause if isinstance(error, RayTaskError) else error
