"""A decode host as the prefill host reaches it: over Ray, with deadlines, refusals as they are, losses as one error."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayError

from longprefill.comms.transport.base import PoolAddress
from longprefill.orchestrator.handoff import HANDOFF_TIMEOUT_S
from longprefill.orchestrator.hosts.actors import cause_of, find_host
from longprefill.orchestrator.hosts.contract import HandoffFailed, HandoffRequest, NoRoom, Reservation, StaleEpoch
from longprefill.partition.errors import UserError
from longprefill.workers.handoff.parts import HandoffTarget


class RemoteDecode:
    """A `DecodeSide`. All methods raise NoRoom and StaleEpoch as the host does, and HandoffFailed for everything else.

    Raises:
        HandoffFailed: there is no host of this name.
    """

    def __init__(
        self, name: str, epoch: Callable[[], int], *, request: HandoffRequest | None = None, num_tokens: int = 0
    ) -> None:
        """`epoch` is asked at every call: a hand-off goes on when a new controller takes over."""
        host = find_host(name)
        if host is None:
            raise HandoffFailed(f"{name} is not running")
        self._name = name
        self._host = host
        self._epoch = epoch
        self._request = request
        self._num_tokens = num_tokens

    def link(self) -> tuple[PoolAddress, str]:
        """Where to write to, and what both sides must have in common."""
        return self._answer(self._host.link.remote(self._epoch()))

    def reserve(self, job: int, transfer_id: str, attempt: int) -> HandoffTarget:
        assert self._request is not None
        reservation = Reservation(
            job=job,
            transfer_id=transfer_id,
            attempt=attempt,
            num_tokens=self._num_tokens,
            max_new_tokens=self._request.max_new_tokens,
            num_samples=self._request.num_samples,
        )
        return self._answer(self._host.reserve.remote(self._epoch(), reservation))

    def commit(self, job: int, manifest: bytes, commit: bytes) -> bytes:
        return self._answer(self._host.commit.remote(self._epoch(), manifest, commit))

    def release(self, job: int, transfer_id: str) -> None:
        """Frees what this transfer has reserved or committed."""
        self._answer(self._host.release.remote(self._epoch(), job, transfer_id))

    def _answer(self, call: Any) -> Any:
        try:
            return ray.get(call, timeout=HANDOFF_TIMEOUT_S)
        except GetTimeoutError:
            raise HandoffFailed(f"{self._name} did not answer within {HANDOFF_TIMEOUT_S:.0f} s") from None
        except RayError as error:
            cause = cause_of(error)
            if isinstance(cause, NoRoom | StaleEpoch):
                raise cause from None
            if isinstance(cause, UserError):
                raise HandoffFailed(str(cause)) from None  # NotReady, say: of that host, not of the one that asks
            lines = str(cause).splitlines() or [type(cause).__name__]
            what = "is gone" if cause is error else "failed"
            raise HandoffFailed(f"{self._name} {what}: {lines[0]}") from None
