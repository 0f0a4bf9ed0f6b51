"""What a service, or its absence, answers."""

from __future__ import annotations

from longprefill.partition.errors import UserError


class ServiceUnreachable(UserError):
    """Nothing answers at the address, or it stopped answering."""


class ServiceRefused(UserError):
    """The service answered with a refusal; the message is its own."""

    def __init__(self, message: str, *, status: int = 0, code: str = "", retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.retry_after_s = retry_after_s

    def __reduce__(self) -> tuple[object, ...]:
        return _remake, (type(self), str(self), self.status, self.code, self.retry_after_s)


class JobNotFound(ServiceRefused):
    """There is no such job for this key."""


def _remake(
    kind: type[ServiceRefused], message: str, status: int, code: str, retry_after_s: float | None
) -> ServiceRefused:
    return kind(message, status=status, code=code, retry_after_s=retry_after_s)
