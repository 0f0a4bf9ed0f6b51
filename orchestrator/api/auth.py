"""Who is asking: API keys, of which the service knows only hashes."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Sequence
from dataclasses import dataclass

from longprefill.orchestrator.api.errors import ApiError
from longprefill.orchestrator.config import LOCAL_TENANT, ApiKey

CHALLENGE = {"www-authenticate": 'Bearer realm="longprefill"'}


@dataclass(frozen=True, slots=True, kw_only=True)
class Caller:
    tenant: str
    is_operator: bool
    """Sees every tenant's jobs, the metrics and the cluster."""

    @property
    def scope(self) -> str | None:
        """The `tenant` argument of the controller: None is everybody's jobs."""
        return None if self.is_operator else self.tenant


class Authenticator:
    """Finds the caller of a request. Without keys everybody is the operator of a service that only this machine can
    reach (config.py sees to that)."""

    def __init__(self, keys: Sequence[ApiKey]) -> None:
        self._keys = [(bytes.fromhex(key.sha256), key.tenant, key.operator) for key in keys]

    @property
    def needs_key(self) -> bool:
        return bool(self._keys)

    def caller(self, authorization: str | None) -> Caller:
        """The caller of a request with this Authorization header.

        Raises:
            ApiError: 401, no key or an unknown one. It takes as long for every wrong key.
        """
        if not self._keys:
            return Caller(tenant=LOCAL_TENANT, is_operator=True)
        scheme, _, key = (authorization or "").partition(" ")
        if scheme.lower() != "bearer" or not key.strip():
            raise ApiError(
                401,
                "this service needs an API key: send it as the header Authorization: Bearer KEY",
                code="missing_api_key",
                headers=CHALLENGE,
            )
        digest = hashlib.sha256(key.strip().encode("utf-8", "surrogateescape")).digest()
        found: Caller | None = None
        for known, tenant, is_operator in self._keys:
            if hmac.compare_digest(digest, known):  # no early exit: the time says nothing about which key it was
                found = Caller(tenant=tenant, is_operator=is_operator)
        if found is None:
            raise ApiError(401, "the API key is not known to this service", code="invalid_api_key", headers=CHALLENGE)
        return found


def require_operator(caller: Caller) -> None:
    """Raises ApiError (403) for a caller who is not the operator."""
    if not caller.is_operator:
        raise ApiError(
            403,
            f"tenant {caller.tenant} may not see this: it needs a key with operator = true",
            code="operator_only",
        )
