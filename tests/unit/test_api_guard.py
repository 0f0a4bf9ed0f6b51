"""Keys, tenants, hosts, sizes, clients that leave, a controller that is away."""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
from pathlib import Path
from typing import Any

import pytest

from longprefill.orchestrator.api.link import OWN_KEY, PatientController
from longprefill.orchestrator.api.service import BODIES_AT_ONCE
from longprefill.orchestrator.config import ApiKey

from .api_support import Api, Exchange, messages_of, model_dir, run, until

JOBS = "/v1/prefill/jobs"
KEYS = {"alice": "lp-alice-secret", "bob": "lp-bob-secret", "root": "lp-operator-secret"}


def api_key(tenant: str) -> ApiKey:
    digest = hashlib.sha256(KEYS[tenant].encode()).hexdigest()
    return ApiKey(tenant=tenant, sha256=digest, operator=tenant == "root")


WITH_KEYS: dict[str, Any] = {"keys": tuple(api_key(tenant) for tenant in KEYS)}


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return model_dir(tmp_path_factory.getbasetemp())


def as_tenant(tenant: str) -> dict[str, str]:
    return {"authorization": f"Bearer {KEYS[tenant]}"}


def test_nothing_without_a_key(directory: Path) -> None:
    async def scenario(api: Api) -> None:
        job = (await api.post(JOBS, {"prompt": "a"}, headers=as_tenant("alice"))).json()["id"]
        api.controller.calls.clear()
        document = (await api.get("/openapi.json", headers=as_tenant("bob"))).json()
        asked = 0
        for path, operations in document["paths"].items():
            if path in ("/healthz", "/readyz"):
                continue
            for method in operations:
                for headers in ({}, {"authorization": "Bearer wrong"}, {"authorization": "Basic YTpi"}):
                    address = path.replace("{job}", job).replace("{model}", "tiny")
                    answer = await api.ask(method.upper(), address, headers=headers)
                    assert answer.status_code == 401, (method, path)
                    assert answer.headers["www-authenticate"].startswith("Bearer")
                    asked += 1
        assert asked > 30
        assert api.controller.calls == []
        ready = await api.get("/readyz")
        assert (ready.status_code, ready.json()) == (200, {"status": "ready"})
        assert (await api.get("/healthz")).status_code == 200

    run(directory, scenario, **WITH_KEYS)


def test_tenants_do_not_see_each_other(directory: Path) -> None:
    async def scenario(api: Api) -> None:
        own = {
            tenant: (await api.post(JOBS, {"prompt": "a"}, headers=as_tenant(tenant))).json()["id"] for tenant in KEYS
        }
        for tenant, other in (("alice", "bob"), ("bob", "root")):
            listed = (await api.get(JOBS, headers=as_tenant(tenant))).json()["data"]
            assert [job["id"] for job in listed] == [own[tenant]]
            for tail in ("", "/events", "/tokens", "/result", "/trace"):
                answer = await api.get(f"{JOBS}/{own[other]}{tail}", headers=as_tenant(tenant))
                assert answer.status_code == 404
            assert (await api.ask("DELETE", f"{JOBS}/{own[other]}", headers=as_tenant(tenant))).status_code == 404
            for path in ("/metrics", "/v1/cluster"):
                assert (await api.get(path, headers=as_tenant(tenant))).status_code == 403
        seen = (await api.get(JOBS, headers=as_tenant("root"))).json()["data"]
        assert [job["id"] for job in seen] == list(own.values())[::-1]
        assert (await api.get("/metrics", headers=as_tenant("root"))).text == "longprefill_epoch 1\n"
        assert (await api.get("/v1/cluster", headers=as_tenant("root"))).json()["groups"][0]["name"] == "prefill-0"

    run(directory, scenario, **WITH_KEYS)


def test_secrets_and_prompts_are_never_logged(directory: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)

    async def scenario(api: Api) -> None:
        await api.post(JOBS, {"prompt": "my-prompt"}, headers=as_tenant("alice"))
        await api.get(JOBS, headers={"authorization": "Bearer lp-wrong-secret"})

        async def broken(*_: Any, **__: Any) -> None:
            raise ZeroDivisionError

        api.controller.submit = broken  # type: ignore[method-assign, assignment]
        answer = await api.post(JOBS, {"prompt": "my-prompt"}, headers=as_tenant("alice"))
        assert (answer.status_code, answer.json()["error"]["code"]) == (500, "internal")
        assert "ZeroDivision" not in answer.text

    run(directory, scenario, **WITH_KEYS)
    assert "ZeroDivisionError" in caplog.text, "the failure itself is logged"
    for secret in (*KEYS.values(), "lp-wrong-secret", "my-prompt"):
        assert secret not in caplog.text


def test_pages_of_other_origins_cannot_use_an_open_service(directory: Path) -> None:
    async def scenario(api: Api) -> None:
        for host in ("127.0.0.1:8000", "localhost", "LOCALHOST:80", "[::1]:8000"):
            assert (await api.get("/healthz", headers={"host": host})).status_code == 200, host
        for host in ("evil.example", "127.0.0.1.evil.example", "localhost:8000@evil.example", "", "0.0.0.0:8000"):
            answer = await api.get("/v1/models", headers={"host": host})
            assert (answer.status_code, answer.json()["error"]["code"]) == (403, "wrong_host"), host
        page = {"content-type": "text/plain", "origin": "http://evil.example"}
        assert (await api.ask("POST", JOBS, content=b"a", headers=page)).status_code == 403
        assert (await api.ask("POST", JOBS, content=b"a", headers=page | {"origin": "null"})).status_code == 403
        crossing = {"content-type": "text/plain", "sec-fetch-site": "cross-site"}
        assert (await api.ask("POST", JOBS, content=b"a", headers=crossing)).status_code == 403
        own = {"content-type": "text/plain", "origin": "http://127.0.0.1:8000", "sec-fetch-site": "same-origin"}
        assert (await api.ask("POST", JOBS, content=b"a", headers=own)).status_code == 202

    run(directory, scenario)


def test_headers_of_every_answer(directory: Path) -> None:
    async def scenario(api: Api) -> None:
        for path in ("/healthz", "/nothing", JOBS):
            headers = (await api.get(path)).headers
            assert headers["x-content-type-options"] == "nosniff"
            assert "default-src 'none'" in headers["content-security-policy"]
            assert headers["cache-control"] == "no-store"
            assert "access-control-allow-origin" not in headers

    run(directory, scenario)


def test_methods_and_addresses(directory: Path) -> None:
    async def scenario(api: Api) -> None:
        for method, path, allowed in (
            ("PUT", JOBS, "GET, POST"),
            ("POST", f"{JOBS}/x", "DELETE, GET"),
            ("GET", "/v1/completions", "POST"),
            ("DELETE", "/v1/models/a/b", "GET"),
        ):
            answer = await api.ask(method, path)
            assert (answer.status_code, answer.headers["allow"]) == (405, allowed)
        for path in ("/v1", "/v1/prefill/jobs/", "/docs", "/metrics/", "/../etc/passwd", "/%2e%2e/config.py"):
            answer = await api.get(path)
            assert (answer.status_code, answer.json()["error"]["code"]) == (404, "not_found"), path
        assert (await api.get("/healthz?" + "a" * 9000)).status_code == 414
        assert (await api.get("/healthz", headers={f"x-{n}": "a" for n in range(120)})).status_code == 431
        assert (await api.get("/healthz", headers={"x": "a" * 40_000})).status_code == 431

    run(directory, scenario)


def test_bodies_have_limits(directory: Path) -> None:
    async def pieces(num_bytes: int) -> Any:
        for _ in range(num_bytes // 100):
            yield b'"' + b"x" * 99

    async def scenario(api: Api) -> None:
        json_type, text_type = {"content-type": "application/json"}, {"content-type": "text/plain"}
        for path, headers, most in (
            ("/v1/completions", json_type, 2000),
            (JOBS, json_type, 2000),
            (JOBS, text_type, 5000),
        ):
            declared = await api.ask("POST", path, content=b"x" * (most + 1), headers=headers)
            streamed = await api.ask("POST", path, content=pieces(most + 200), headers=headers)
            lying = await api.ask("POST", path, content=b"x" * (most + 1), headers=headers | {"content-length": "5"})
            for answer in (declared, streamed, lying):
                assert (answer.status_code, answer.json()["error"]["code"]) == (413, "body_too_large")
        assert (await api.ask("POST", JOBS, content=b"x" * 4000, headers=text_type)).status_code == 202
        wrong = await api.ask("POST", JOBS, content=b"x", headers=text_type | {"content-length": "-1"})
        assert wrong.status_code == 400

    run(directory, scenario, max_body_bytes=2000, max_upload_bytes=5000)


@pytest.mark.parametrize(
    "body",
    [
        b"", b"{", b"null", b"[]", b"1", b'"a"', b"{}", b"\xff", b"[" * 100_000, b'{"a":' * 5000, b'{"prompt":NaN}',
        b'{"prompt":"\\ud800","model":"tiny"}', b'{"\\udfff":1}',
        b'{"prompt":"a","model":"tiny","n":' + b"9" * 5000 + b"}",
        b'{"prompt":"a","model":"tiny","metadata":' + b"[" * 40 + b"]" * 40 + b"}", b"\x00", b"\xef\xbb\xbf{}",
        b'{"prompt":"a","model":"tiny","stop":' + json.dumps(["a"] * 10_000).encode() + b"}",
    ],
    ids=lambda body: repr(body[:24]),
)  # fmt: skip
def test_bodies_that_are_no_request(directory: Path, body: bytes) -> None:
    async def scenario(api: Api) -> None:
        for path in ("/v1/completions", "/v1/chat/completions", JOBS):
            answer = await api.ask("POST", path, content=body, headers={"content-type": "application/json"})
            assert answer.status_code == 400
            assert answer.json()["error"]["message"]
            assert len(answer.content) < 1000

    run(directory, scenario)


@pytest.mark.parametrize(
    ("media_type", "path"), [("text/plain", JOBS), ("application/json", JOBS), ("application/json", "/v1/completions")]
)
def test_bodies_at_once_have_a_limit(directory: Path, media_type: str, path: str) -> None:
    headers = {"content-type": media_type}

    async def scenario(api: Api) -> None:
        held = [Exchange(api.app) for _ in range(BODIES_AT_ONCE)]
        tasks = [exchange.start("POST", path, headers) for exchange in held]
        for exchange in held:
            exchange.send(b"x" * 5000, more=True)
        await until(lambda: all(exchange.incoming.empty() for exchange in held))
        refused = await api.ask("POST", path, content=b"x" * 100, headers=headers)
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "unavailable")
        for exchange in held:
            exchange.leave()
        await asyncio.wait_for(asyncio.gather(*tasks), 10)
        assert (await api.ask("POST", path, content=b"x" * 100, headers=headers)).status_code in (202, 400)

    run(directory, scenario, max_body_bytes=5000, max_upload_bytes=5000)


def test_of_a_header_that_comes_twice_the_first_counts(directory: Path) -> None:
    async def scenario(api: Api) -> None:
        types = [("content-type", "application/json"), ("content-type", "text/plain")]
        content = json.dumps({"prompt": "a" * 3000})
        assert (await api.ask("POST", JOBS, content=content, headers=types)).status_code == 413
        assert (await api.ask("POST", JOBS, content=content, headers=types[::-1])).status_code == 202

    run(directory, scenario, max_body_bytes=2000, max_upload_bytes=5000)


def test_media_types(directory: Path) -> None:
    async def scenario(api: Api) -> None:
        for media_type in ("", "text/html", "application/jsonx"):
            answer = await api.ask("POST", "/v1/completions", content=b"{}", headers={"content-type": media_type})
            assert answer.status_code == 415
        spelled = {"content-type": "Application/JSON; charset=utf-8"}
        content = json.dumps({"model": "tiny", "prompt": "a"})
        assert (await api.ask("POST", "/v1/completions", content=content, headers=spelled)).status_code == 200

    run(directory, scenario)


def test_a_body_that_stands_still_is_given_up(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("longprefill.orchestrator.api.guard.BODY_IDLE_S", 0.05)

    async def scenario(api: Api) -> None:
        exchange = Exchange(api.app)
        task = exchange.start("POST", "/v1/completions", {"content-type": "application/json"})
        exchange.send(b'{"model":', more=True)
        assert (await exchange.receive())["status"] == 408
        await task
        gone = Exchange(api.app)
        task = gone.start("POST", JOBS, {"content-type": "text/plain"})
        gone.send(b"abc", more=True)
        gone.leave()
        assert (await gone.receive())["status"] == 400
        await task
        assert not api.controller.jobs

    run(directory, scenario)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("on_disconnect", ["cancel", "continue"])
@pytest.mark.parametrize("with_key", [False, True])
def test_a_client_that_leaves(directory: Path, stream: bool, on_disconnect: str, with_key: bool) -> None:
    """Its job ends or goes on as configured; with an idempotency key it goes on, because the client may come back."""

    async def scenario(api: Api) -> None:
        api.controller.pace = asyncio.Semaphore(2)
        exchange = Exchange(api.app)
        key = {"idempotency-key": "k"} if with_key else {}
        task = exchange.start("POST", "/v1/completions", {"content-type": "application/json", **key})
        exchange.send(json.dumps({"model": "tiny", "prompt": ["a", "b"], "stream": stream}).encode())
        await until(lambda: len(api.controller.jobs) == 2)
        exchange.leave()
        await asyncio.wait_for(task, 10)
        jobs = list(api.controller.jobs.values())
        if on_disconnect == "cancel" and not with_key:
            await until(lambda: all(job.view.state == "cancelled" for job in jobs))
        else:
            for _ in range(40):
                api.controller.pace.release()
            await until(lambda: all(job.view.state == "done" for job in jobs))
            assert "cancel" not in api.controller.calls

    run(directory, scenario, on_disconnect=on_disconnect)


def test_a_client_that_leaves_before_the_answer_begins(directory: Path) -> None:
    async def scenario(api: Api) -> None:
        api.controller.pace = asyncio.Semaphore(0)
        exchange = Exchange(api.app, outgoing=asyncio.Queue(1))
        exchange.outgoing.put_nowait("what the socket has not taken yet")
        task = exchange.start("POST", "/v1/completions", {"content-type": "application/json"})
        exchange.send(json.dumps({"model": "tiny", "prompt": "a", "stream": True}).encode())
        exchange.leave()
        await asyncio.wait_for(task, 10)
        await until(lambda: [job.view.state for job in api.controller.jobs.values()] == ["cancelled"])

    run(directory, scenario)


@pytest.mark.parametrize("stream", [False, True])
def test_a_job_that_fails_ends_the_others_of_its_request(directory: Path, stream: bool) -> None:
    """With an idempotency key too: their tokens would go nowhere."""

    async def scenario(api: Api) -> None:
        api.controller.pace = asyncio.Semaphore(0)
        body = {"model": "tiny", "prompt": ["a", "b"], "stream": stream}
        asking = asyncio.create_task(api.post("/v1/completions", body, headers={"idempotency-key": "k"}))
        await until(lambda: [job.view.state for job in api.controller.jobs.values()] == ["generating"] * 2)
        failing, other = api.controller.jobs.values()
        api.controller.fail(failing, "its group was lost")
        assert "job_failed" in (await asking).text
        await until(lambda: other.view.state == "cancelled")

    run(directory, scenario)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("with_key", [False, True])
def test_a_controller_lost_in_between_costs_no_job_that_is_asked_for_again(
    directory: Path, stream: bool, with_key: bool
) -> None:
    async def scenario(api: Api) -> None:
        object.__setattr__(api.app.state.service, "controller", PatientController(api.controller, patience_s=0.5))
        api.controller.pace = asyncio.Semaphore(0)
        body = {"model": "tiny", "prompt": "a", "stream": stream, "max_tokens": 4}
        headers = {"idempotency-key": "k"} if with_key else {}
        asking = asyncio.create_task(api.post("/v1/completions", body, headers=headers))
        await until(lambda: "tokens" in api.controller.calls)
        api.controller.away = 1_000_000
        api.controller.pace.release()
        assert '"unavailable"' in (await asking).text
        api.controller.away = 0
        (job,) = api.controller.jobs.values()
        if not with_key:
            await until(lambda: job.view.state == "cancelled")
            return
        for _ in range(3):
            api.controller.pace.release()
        again = await api.post("/v1/completions", body, headers=headers)
        assert again.status_code == 200
        assert "error" not in again.text
        assert (job.view.state, len(job.records), len(api.controller.jobs)) == ("done", 4, 1)

    run(directory, scenario)


def test_streams_survive_a_controller_that_is_away(directory: Path) -> None:
    async def scenario(api: Api) -> None:
        whole = (await api.complete(max_tokens=12, seed=1)).json()["choices"][0]["text"]
        api.controller.pace = asyncio.Semaphore(0)
        exchange = Exchange(api.app)
        task = exchange.start("POST", "/v1/completions", {"content-type": "application/json"})
        body = {"model": "tiny", "prompt": "hello", "max_tokens": 12, "seed": 1, "logprobs": 1, "stream": True}
        api.controller.lose_answers = 2
        exchange.send(json.dumps(body).encode())
        text = ""
        while "[DONE]" not in text:
            api.controller.away = 2
            api.controller.pace.release()
            text += (await exchange.receive()).get("body", b"").decode()
        await task
        assert len(api.controller.jobs) == 2, "a submission whose answer was lost was sent again, and known again"
        assert "".join(chunk["choices"][0]["text"] for chunk in messages_of(text)) == whole

    run(directory, scenario)


def test_a_controller_that_stays_away(directory: Path) -> None:
    async def scenario(api: Api) -> None:
        api.controller.away = 1_000_000
        service = api.app.state.service
        object.__setattr__(service, "controller", PatientController(api.controller, patience_s=0.1))
        for answer in (await api.complete(), await api.get(JOBS), await api.get(f"{JOBS}/x/events")):
            assert (answer.status_code, answer.json()["error"]["code"]) == (503, "unavailable")
            assert answer.headers["retry-after"]
        ready = await api.get("/readyz")
        assert (ready.status_code, ready.json()["status"]) == (503, "not ready")
        assert (await api.get("/healthz")).status_code == 200

    run(directory, scenario)


def test_own_keys_are_not_shown(directory: Path) -> None:
    async def scenario(api: Api) -> None:
        await api.submit()
        (view,) = [job.view for job in api.controller.jobs.values()]
        assert (view.request.idempotency_key or "").startswith(OWN_KEY)
        assert OWN_KEY not in (await api.get(JOBS)).text

    run(directory, scenario)
