"""`Client`: a service's prefill jobs from Python. Answers are the service's JSON (docs/guide/service.md), as
dictionaries."""

from __future__ import annotations

import io
import random
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import IO, Any, Self, TypeVar

import httpx
import numpy as np

from longprefill.orchestrator.client.errors import JobNotFound, ServiceRefused, ServiceUnreachable
from longprefill.orchestrator.client.events import messages

JOBS = "/v1/prefill/jobs"
DEFAULT_URL = "http://127.0.0.1:8000"
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.1, 5.0
SILENCE_S = 60.0
"""A stream that says nothing for so long is dead: the service sends heartbeats."""
BUSY = (429, 503)
RESULT_WAIT_S = 20

Result = TypeVar("Result")


class Client:
    """Every call waits out a service that is restarting or busy, for `patience_s` at most, and none is made twice by
    that: submissions carry an idempotency key, streams go on at their last event.

    Raises of all methods:
        ServiceUnreachable: nobody answers.
        ServiceRefused: the service says no; JobNotFound when it does not know the job.
    """

    def __init__(
        self,
        url: str = DEFAULT_URL,
        api_key: str | None = None,
        *,
        patience_s: float = 60.0,
        ca_file: str | None = None,
    ) -> None:
        """`ca_file` is the certificate of a service with one that no public authority signed."""
        self.url = url.rstrip("/")
        if not self.url.startswith(("http://", "https://")):
            raise ServiceUnreachable(f"{url!r} is not the address of a service: use http://HOST:PORT")
        self.patience_s = patience_s
        headers = {} if api_key is None else {"authorization": f"Bearer {api_key}"}
        try:
            verify: Any = True if ca_file is None else httpx.create_ssl_context(verify=ca_file)
            self._http = httpx.Client(
                base_url=self.url, headers=headers, timeout=httpx.Timeout(SILENCE_S, connect=10.0), verify=verify
            )
        except (OSError, httpx.InvalidURL, UnicodeEncodeError) as error:
            raise ServiceUnreachable(f"{self.url} cannot be used: {error}") from None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Closes the connections."""
        self._http.close()

    def submit(
        self, prompt: str | Sequence[int] | np.ndarray | Path, *, idempotency_key: str | None = None, **options: Any
    ) -> dict[str, Any]:
        """Hands a job in and returns it: it is on the service's disk then. A `Path` is a file of UTF-8 text or, as
        NAME.npy, of token ids. Options are those of the guide: max_new_tokens, num_samples, temperature, ..."""
        headers = {"idempotency-key": idempotency_key or f"client-{uuid.uuid4().hex}"}
        is_file = isinstance(prompt, Path)
        is_text = isinstance(prompt, str) or (is_file and prompt.suffix != ".npy")
        headers["content-type"] = "text/plain; charset=utf-8" if is_text else "application/x-npy"
        query = {name: _in_query(value) for name, value in options.items() if value is not None}

        def send() -> dict[str, Any]:
            with _opened(prompt) as content:
                return self._json("POST", JOBS, params=query, headers=headers, content=content)

        return self._patiently(send)

    def job(self, job: str) -> dict[str, Any]:
        """A job as it is now."""
        return self._patiently(lambda: self._json("GET", f"{JOBS}/{_id(job)}"))

    def jobs(self, *, states: Sequence[str] = (), limit: int = 100) -> list[dict[str, Any]]:
        """At most `limit` jobs, newest first."""
        found: list[dict[str, Any]] = []
        before: str | None = None
        while len(found) < limit:
            query: dict[str, Any] = {"limit": min(limit - len(found), 1000), "state": list(states)}
            query |= {} if before is None else {"before": before}
            page = self._patiently(lambda query=query: self._json("GET", JOBS, params=query))
            found += page["data"]
            before = page["last_id"]
            if not page["has_more"]:
                break
        return found

    def cancel(self, job: str) -> dict[str, Any]:
        """Ends a job as cancelled; one that has ended stays as it is."""
        return self._patiently(lambda: self._json("DELETE", f"{JOBS}/{_id(job)}"))

    def result(self, job: str) -> dict[str, Any]:
        """What an ended job made."""
        return self._patiently(lambda: self._json("GET", f"{JOBS}/{_id(job)}/result"))

    def wait(self, job: str, *, timeout_s: float | None = None) -> dict[str, Any]:
        """The result, once the job has ended.

        Raises:
            TimeoutError: it had not after `timeout_s`.
        """
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while True:
            left_s = RESULT_WAIT_S if deadline is None else min(RESULT_WAIT_S, deadline - time.monotonic())
            if left_s < 0:
                raise TimeoutError(f"job {job} had not ended after {timeout_s:g} s")
            query = {"wait_s": left_s}
            try:
                return self._patiently(lambda query=query: self._json("GET", f"{JOBS}/{_id(job)}/result", params=query))
            except ServiceRefused as error:
                if error.code != "conflict":
                    raise

    def events(self, job: str, *, after: int = 0) -> Iterator[dict[str, Any]]:
        """What happened and happens to a job, until its end."""
        return self._follow(f"{JOBS}/{_id(job)}/events", after)

    def tokens(self, job: str, *, after: int = 0) -> Iterator[dict[str, Any]]:
        """What a job generates, token by token, until its end."""
        for batch in self._follow(f"{JOBS}/{_id(job)}/tokens", after):
            yield from batch.get("tokens", ())

    def models(self) -> list[dict[str, Any]]:
        """The models that the service has."""
        return self._patiently(lambda: self._json("GET", "/v1/models"))["data"]

    def cluster(self) -> dict[str, Any]:
        """Groups, workers and nodes; for the operator."""
        return self._patiently(lambda: self._json("GET", "/v1/cluster"))

    def _follow(self, path: str, after: int) -> Iterator[dict[str, Any]]:
        """A stream to its end, taken up again after every break."""
        waiting = _Patience(self.patience_s)
        while True:
            try:
                headers = {"last-event-id": str(after)}
                with self._http.stream("GET", path, headers=headers) as response:
                    if response.status_code == 204:
                        return
                    if response.is_error:
                        response.read()
                        raise _refusal(response)
                    for message in messages(response.iter_lines()):
                        if message.name == "error":
                            raise _refusal_of(message.data, 503)
                        if message.name == "end":
                            return
                        after = after if message.number is None else message.number
                        waiting = _Patience(self.patience_s)
                        yield message.data
                # it ended: with its job, which the next answer says, or with the process behind it
                waiting.pause(None, ServiceUnreachable(f"{self.url} breaks off the stream {path} again and again"))
            except httpx.TransportError as error:
                waiting.pause(None, self._lost(error))
            except ServiceRefused as error:
                if error.status not in BUSY:
                    raise
                waiting.pause(error.retry_after_s, error)

    def _patiently(self, ask: Callable[[], Result]) -> Result:
        waiting = _Patience(self.patience_s)
        while True:
            try:
                return ask()
            except httpx.TransportError as error:
                waiting.pause(None, self._lost(error))
            except ServiceRefused as error:
                if error.status not in BUSY or error.code == "job_failed":
                    raise
                waiting.pause(error.retry_after_s, error)

    def _json(self, method: str, path: str, **arguments: Any) -> dict[str, Any]:
        response = self._http.request(method, path, **arguments)
        if response.is_error:
            raise _refusal(response)
        try:
            return response.json()
        except ValueError:
            raise ServiceUnreachable(f"{self.url} is not a longprefill service: it answers no JSON") from None

    def _lost(self, error: httpx.TransportError) -> ServiceUnreachable:
        reason = str(error) or type(error).__name__
        return ServiceUnreachable(f"{self.url} cannot be reached: {reason}: is longprefill serve running there?")


class _Patience:
    """Pauses that grow, up to an end."""

    def __init__(self, patience_s: float) -> None:
        self._deadline = time.monotonic() + patience_s
        self._pause_s = FIRST_PAUSE_S

    def pause(self, asked_s: float | None, error: Exception) -> None:
        """Waits; raises `error` when there has been enough of that."""
        pause_s = max(asked_s or 0.0, self._pause_s * random.uniform(0.5, 1.0))
        if time.monotonic() + pause_s > self._deadline:
            raise error from None
        time.sleep(pause_s)
        self._pause_s = min(2 * self._pause_s, LONGEST_PAUSE_S)


def _opened(prompt: str | Sequence[int] | np.ndarray | Path) -> IO[bytes]:
    """The bytes to send, to be read once."""
    if isinstance(prompt, Path):
        try:
            return prompt.open("rb")
        except OSError as error:
            raise ServiceRefused(f"prompt file {prompt} cannot be read: {error.strerror}") from None
    if isinstance(prompt, str):
        return io.BytesIO(prompt.encode())
    buffer = io.BytesIO()
    np.save(buffer, np.asarray(prompt, dtype=np.int64), allow_pickle=False)
    buffer.seek(0)
    return buffer


def _in_query(value: Any) -> Any:
    if isinstance(value, bool):
        return "true" if value else "false"
    return list(value) if isinstance(value, (list, tuple)) else str(value)


def _id(job: str) -> str:
    """A job's id as part of an address."""
    if not job or not job.replace("-", "").replace("_", "").isalnum() or not job.isascii():
        raise JobNotFound(f"{job[:64]!r} is not a job's id", status=404, code="job_not_found")
    return job


def _refusal(response: httpx.Response) -> ServiceRefused:
    try:
        given = response.json()
    except ValueError:
        given = None
    is_ours = isinstance(given, dict) and "error" in given
    if not is_ours and response.is_server_error:  # of a gateway before the service
        message = f"status {response.status_code} without an explanation: it is starting, or is another service"
        return ServiceRefused(message, status=503, code="unavailable")
    retry_after = response.headers.get("retry-after", "")
    return _refusal_of(given, response.status_code, float(retry_after) if retry_after.isdigit() else None)


def _refusal_of(given: Any, status: int, retry_after_s: float | None = None) -> ServiceRefused:
    error = given.get("error", {}) if isinstance(given, dict) else {}
    message = error.get("message") or f"the service answered with status {status}"
    code = error.get("code") or ""
    kind = JobNotFound if code == "job_not_found" else ServiceRefused
    return kind(message, status=status, code=code, retry_after_s=retry_after_s)
