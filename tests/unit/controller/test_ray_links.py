"""What the controller makes of a host's answer that is an error."""

from __future__ import annotations

import asyncio
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import ActorDiedError, RayTaskError

from longprefill.orchestrator.controller.links import HostBroken, HostGone, HostSilent
from longprefill.orchestrator.controller.ray_links import RayHost
from longprefill.orchestrator.hosts.contract import StaleEpoch


def asked(error: BaseException | None) -> None:
    """A host's `state`, which raises `error`, or never answers."""

    def remote(*_: Any) -> SimpleNamespace:
        answer: Future[None] = Future()
        if error is not None:
            answer.set_exception(error)
        return SimpleNamespace(future=lambda: answer)

    host = RayHost("prefill-0", SimpleNamespace(state=SimpleNamespace(remote=remote)), 1)
    asyncio.run(host.call("state", deadline_s=0.05))


def of_host(cause: Exception) -> BaseException:
    return RayTaskError("state", "traceback", cause).as_instanceof_cause()


def test_a_timeout_inside_the_host_is_not_its_silence() -> None:
    with pytest.raises(HostBroken, match="prefill-0: state failed: TimeoutError: the disk"):
        asked(of_host(TimeoutError("the disk")))
    with pytest.raises(HostSilent, match="did not answer state"):
        asked(None)


def test_refusals_come_as_they_are_and_a_dead_host_is_gone() -> None:
    with pytest.raises(StaleEpoch, match="epoch 2"):
        asked(of_host(StaleEpoch("epoch 2 commands")))
    with pytest.raises(HostGone, match="prefill-0 died"):
        asked(ActorDiedError())
