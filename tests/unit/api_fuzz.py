"""Requests as nobody should send them, and what must be true of every answer: no 500, one line in OpenAI's shape, no
growth. scripts/fuzz_service sends 10,000 of them, the tests fewer."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import io
import json
import logging
import random
import resource
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from fastapi import FastAPI

from longprefill.orchestrator.api.app import create_app

from .api_double import ControllerDouble
from .api_support import config_for, served_model

REQUEST_S = 20.0
JOBS = "/v1/prefill/jobs"
REFUSALS = range(400, 500)
EXPECTED = frozenset({200, 202, 204, 400, 401, 403, 404, 405, 408, 409, 413, 414, 415, 422, 429, 431, 499, 503})

VALID: dict[str, dict[str, Any]] = {
    "/v1/completions": {
        "model": "tiny", "prompt": "hello", "max_tokens": 3, "temperature": 0.5, "top_p": 0.9, "n": 2, "stop": ["a"],
        "seed": 3, "logprobs": 2, "stream": True, "stream_options": {"include_usage": True}, "user": "u", "echo": False,
    },
    "/v1/chat/completions": {
        "model": "tiny", "messages": [{"role": "user", "content": "a"}], "max_completion_tokens": 3, "logprobs": True,
        "top_logprobs": 2, "stream": False, "tools": [], "response_format": {"type": "text"}, "temperature": 1,
    },
    JOBS: {
        "prompt": [5, 6, 7], "max_new_tokens": 2, "num_samples": 2, "temperature": 0.0, "top_p": 1.0, "seed": 1,
        "stop": ["x"], "stop_token_ids": [1], "timeout_s": 5, "deadline_s": 5.5, "priority": 2, "keep_snapshot": True,
    },
}  # fmt: skip
PATHS = (
    "/", "/healthz", "/readyz", "/metrics", "/openapi.json", "/v1/models", "/v1/models/tiny", "/v1/cluster", JOBS,
    f"{JOBS}/JOB", f"{JOBS}/JOB/events", f"{JOBS}/JOB/tokens", f"{JOBS}/JOB/result", f"{JOBS}/JOB/trace", "/docs",
    "/v1", "//", "/../..", "/v1/prefill/jobs/", "/v1/completions/x", "/favicon.ico",
)  # fmt: skip
METHODS = ("GET", "POST", "PUT", "PATCH", "DELETE", "HEAD", "OPTIONS", "TRACE", "BREW", "get")
ODD_TEXT = (
    "",
    "\x00",
    "\ud800",
    "☃" * 40,
    "a" * 5000,
    "../../etc/passwd",
    "{{7*7}}",
    "' OR 1=1 --",
    "<|bos|>",
    "\r\nx: y",
)
ODD: tuple[Any, ...] = (
    None, True, False, 0, -1, 1.5, 1e308, -1e308, 2**31, 2**63, 2**64, -(2**63), 10**400, [], {}, [[]], [None], [{}],
    {"a": {"b": [1]}}, [1, "a"], [[1], "a"], ["a"] * 300, list(range(300)), [0] * 5000, *ODD_TEXT,
)  # fmt: skip
NAMES = ("model", "prompt", "messages", "n", "stream", "zzz", "__class__", "", "tools", "suffix", "prompt ", "Model")
TYPES = (
    "application/json", "application/json; charset=utf-16", "text/plain", "application/octet-stream",
    "application/x-npy", "multipart/form-data", "multipart/form-data; boundary=x", "", "image/png", "a/b;;;=", "\xff",
)  # fmt: skip


@dataclass
class Request:
    method: str
    path: str
    query: bytes = b""
    headers: list[tuple[bytes, bytes]] = field(default_factory=list)
    pieces: list[bytes] = field(default_factory=lambda: [b""])
    leaves: bool = False
    """The client hangs up before the answer."""


class Source:
    """Requests from a seed."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self.jobs: list[str] = ["job-000000"]

    def request(self) -> Request:
        draw = self._random
        kind = draw.random()
        if kind < 0.55:
            found = self._json_post()
        elif kind < 0.7:
            found = self._upload()
        else:
            path = draw.choice(PATHS).replace("JOB", draw.choice([*self.jobs[-20:], "nothing", "☃", "%00", "a" * 300]))
            found = Request(draw.choice(METHODS if draw.random() < 0.3 else METHODS[:5]), path)
        self._spoil(found)
        return found

    def _json_post(self) -> Request:
        draw = self._random
        path = draw.choice(list(VALID))
        body = dict(VALID[path])
        for _ in range(draw.choice((0, 0, 0, 1, 1, 2, 4))):
            change = draw.random()
            name = draw.choice(list(body)) if body and draw.random() < 0.8 else draw.choice(NAMES)
            if change < 0.2:
                body.pop(name, None)
            else:
                body[name] = draw.choice(ODD)
        if "messages" in body and draw.random() < 0.4:
            part = {
                "role": draw.choice(("user", "tool", "x", 1)),
                "content": draw.choice(ODD),
                "more": draw.choice(ODD),
            }
            body["messages"] = [part] * draw.choice((1, 2, 50))
        data = bytearray(json.dumps(body).encode())
        damage = draw.random()
        if damage < 0.05:
            del data[draw.randrange(len(data)) :]
        elif damage < 0.12:
            for _ in range(draw.choice((1, 3, 30))):
                data[draw.randrange(len(data))] = draw.randrange(256)
        elif damage < 0.14:
            data = bytearray(b"[" * draw.choice((10, 2000)) + data)
        elif damage < 0.15:
            data = bytearray(draw.randbytes(draw.choice((1, 50, 3000))))
        return Request("POST", path, headers=[(b"content-type", b"application/json")], pieces=[bytes(data)])

    def _upload(self) -> Request:
        draw = self._random
        buffer = io.BytesIO()
        dtype = draw.choice(("int32", "int64", "uint8", ">i2", "float64", "bool", "U3"))
        np.save(buffer, np.asarray([1, 0, 1], dtype=dtype).reshape(draw.choice(((3,), (1, 3), (3, 1)))))
        data = bytearray(draw.choice((b"hello", b"", b"a\xff", buffer.getvalue(), draw.randbytes(60))))
        for _ in range(draw.choice((0, 0, 1, 5))):
            if data:
                data[draw.randrange(len(data))] = draw.randrange(256)
        media_type = draw.choice(TYPES).encode("latin-1")
        if media_type.startswith(b"multipart"):
            name = draw.choice((b"prompt", b"options", b"x", b"\xff"))
            head = b'--x\r\ncontent-disposition: form-data; name="' + name + b'"; filename="a.npy"\r\n\r\n'
            data = bytearray(head + bytes(data) + draw.choice((b"\r\n--x--\r\n", b"\r\n--x\r\n", b"")))
        query = draw.choice((b"", b"max_new_tokens=2", b"stop=a&stop=b", b"max_new_tokens=%ff", b"a=1&a=2", b"&&==%"))
        return Request("POST", JOBS, query, [(b"content-type", media_type)], [bytes(data)])

    def _spoil(self, request: Request) -> None:
        """Odd headers, odd queries, bodies in pieces, clients that leave."""
        draw = self._random
        headers = request.headers
        host = b"127.0.0.1:8000" if draw.random() < 0.97 else draw.choice((b"evil", b"", b"\xff"))
        headers.append((b"host", host))
        if draw.random() < 0.2:
            name = draw.choice((
                b"idempotency-key", b"last-event-id", b"authorization", b"content-length", b"origin", b"x-request-id",
                b"content-type", b"sec-fetch-site", b"transfer-encoding", b"accept", b"range", b"\xff",
            ))  # fmt: skip
            values = (
                b"",
                b"1",
                b"-1",
                b"9" * 400,
                b"\xff\xfe",
                b"a" * 300,
                b"null",
                b"Bearer x",
                b"http://evil",
                b"k1",
            )
            headers.append((name, draw.choice(values)))
        if draw.random() < 0.01:
            headers += [(b"x-%d" % number, b"a") for number in range(150)]
        if draw.random() < 0.15:
            names = (b"after", b"limit", b"before", b"state", b"wait_s", b"x", b"\xff")
            values = (b"", b"1", b"-1", b"99999999999999999999999", b"nan", b"1e400", b"%00", b"\xff", b"done", b"0.01")
            request.query = b"&".join(
                b"%s=%s" % (draw.choice(names), draw.choice(values)) for _ in range(draw.choice((1, 3)))
            )
        if draw.random() < 0.1 and len(request.pieces[0]) > 2:
            whole = request.pieces[0]
            cut = draw.randrange(1, len(whole))
            request.pieces = [whole[:cut], b"", whole[cut:]]
        request.leaves = draw.random() < 0.03


@dataclass
class Report:
    statuses: Counter[int] = field(default_factory=Counter)
    num_requests: int = 0
    num_left: int = 0
    """Clients that hung up."""
    failures: list[str] = field(default_factory=list)
    grown_bytes: int = 0
    """Resident memory from a tenth of the requests to the end."""
    num_tasks_left: int = 0

    def as_json(self) -> dict[str, Any]:
        return {
            "requests": self.num_requests,
            "left": self.num_left,
            "statuses": {str(status): count for status, count in sorted(self.statuses.items())},
            "failures": self.failures,
            "grown_bytes": self.grown_bytes,
            "tasks_left": self.num_tasks_left,
        }


async def fuzz(directory: Path, num_requests: int, seed: int) -> Report:
    """Sends the requests one after the other, some beside each other."""
    model = served_model(directory)
    assert model.tokenizer is not None
    controller = ControllerDouble(model.tokenizer, keep=100)
    config = config_for(directory, max_body_bytes=20_000, max_upload_bytes=20_000, request_timeout_s=30)
    app = create_app(config, controller, model)
    source, report = Source(seed), Report()
    tasks_before = len(asyncio.all_tasks())
    baseline = 0
    with _errors_into(report):
        while report.num_requests < num_requests:
            requests = [source.request() for _ in range(min(8, num_requests - report.num_requests))]
            await asyncio.gather(*(_ask(app, request, report) for request in requests))
            report.num_requests += len(requests)
            source.jobs = list(controller.jobs)[-50:] or source.jobs
            if not baseline and report.num_requests >= num_requests // 10:
                baseline = _resident_bytes()
        await asyncio.gather(*app.state.service.leftovers, return_exceptions=True)
    await asyncio.sleep(0)
    report.num_tasks_left = len(asyncio.all_tasks()) - tasks_before
    report.grown_bytes = _resident_bytes() - baseline
    return report


async def _ask(app: FastAPI, request: Request, report: Report) -> None:
    scope = {
        "type": "http", "asgi": {"version": "3.0", "spec_version": "2.3"}, "http_version": "1.1", "root_path": "",
        "method": request.method, "path": request.path, "raw_path": request.path.encode("utf-8", "replace"),
        "query_string": request.query, "scheme": "http", "headers": request.headers, "client": ("127.0.0.1", 1),
        "server": ("127.0.0.1", 8000),
    }  # fmt: skip
    incoming = [
        {"type": "http.request", "body": piece, "more_body": number < len(request.pieces)}
        for number, piece in enumerate(request.pieces, start=1)
    ]
    if request.leaves:
        incoming = incoming[:-1]
    over = asyncio.Event()
    sent: list[dict[str, Any]] = []

    async def receive() -> dict[str, Any]:
        if incoming:
            return incoming.pop(0)
        if not request.leaves:
            await over.wait()
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        sent.append(message)

    try:
        await asyncio.wait_for(app(scope, receive, send), REQUEST_S)
    except Exception as error:  # noqa: BLE001 - whatever it is, it is a finding
        report.failures.append(f"{request}: {type(error).__name__}: {error}"[:600])
        return
    finally:
        over.set()
    if request.leaves:
        report.num_left += 1
    elif reason := _fault(request, sent, report):
        report.failures.append(f"{request}: {reason}"[:600])


def _fault(request: Request, sent: list[dict[str, Any]], report: Report) -> str | None:
    """What is wrong with an answer."""
    if not sent or sent[0]["type"] != "http.response.start":
        return "no answer"
    status = sent[0]["status"]
    report.statuses[status] += 1
    body = b"".join(message.get("body", b"") for message in sent[1:])
    if status not in EXPECTED:
        return f"status {status}: {body[:200]!r}"
    if status in REFUSALS and request.method != "HEAD":
        try:
            error = json.loads(body)["error"]
        except (ValueError, KeyError, TypeError):
            return f"status {status} without an error in OpenAI's shape: {body[:200]!r}"
        if set(error) != {"message", "type", "param", "code"} or not error["message"] or "\n" in error["message"]:
            return f"an error of another shape: {error}"
    return None


@contextlib.contextmanager
def _errors_into(report: Report) -> Any:
    """What is logged as an error is a failure."""

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            report.failures.append(self.format(record)[-2000:])

    handler = Handler(logging.ERROR)
    logging.getLogger().addHandler(handler)
    try:
        yield
    finally:
        logging.getLogger().removeHandler(handler)


def _resident_bytes() -> int:
    gc.collect()
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
