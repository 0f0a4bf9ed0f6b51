"""The client and its commands against the service over a real socket, with the controller in memory."""

from __future__ import annotations

import asyncio
import hashlib
import json
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from longprefill.orchestrator import Client, cli
from longprefill.orchestrator.client import JobNotFound, ServiceRefused, ServiceUnreachable
from longprefill.orchestrator.client.events import Message, messages
from longprefill.orchestrator.config import ApiKey
from longprefill.orchestrator.config_file import read_service_config

from .api_running import Running
from .api_support import model_dir

KEY = "lp-client-secret"
DEADLINE_S = 20.0


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return model_dir(tmp_path_factory.getbasetemp())


@pytest.fixture
def running(directory: Path) -> Iterator[Running]:
    service = Running(directory)
    yield service
    service.close()


@pytest.fixture
def command(running: Running, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    """Runs `longprefill ...` in this process: exit code, standard output, standard error."""
    monkeypatch.setenv("LONGPREFILL_URL", running.url)

    def run(*words: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["longprefill", *words])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        captured = capsys.readouterr()
        return int(ended.value.code or 0), captured.out, captured.err

    return run


def test_a_gateway_without_its_service_is_waited_out() -> None:
    asked: list[str] = []

    class Proxy(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.path)
            is_there = len(asked) > 2
            body = json.dumps({"data": [], "last_id": None, "has_more": False}).encode() if is_there else b"Bad Gateway"
            self.send_response(200 if is_there else 502)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the base class's name
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Proxy) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            with Client(f"http://127.0.0.1:{server.server_port}", patience_s=DEADLINE_S) as client:
                assert client.jobs() == []
            assert len(asked) == 3
        finally:
            server.shutdown()


def test_messages_of_a_stream() -> None:
    lines = [": hello", "", "id: 3", "event: step", 'data: {"a":', "data: 1}", "", "data: 2", "", "id: 9", "data: cut"]
    assert list(messages(lines)) == [Message("step", 3, {"a": 1}), Message("message", None, 2)]


def test_a_job_through_the_client(running: Running, tmp_path: Path) -> None:
    (tmp_path / "long.txt").write_text("hello")
    with Client(running.url) as client:
        job = client.submit("hello", max_new_tokens=3, stop=["zz", "yy"], num_samples=2)
        assert job["request"]["stop"] == ["zz", "yy"]
        result = client.wait(job["id"], timeout_s=DEADLINE_S)
        assert [len(sample["token_ids"]) for sample in result["samples"]] == [3, 3]
        assert [event["data"].get("state") for event in client.events(job["id"])][-1] == "done"
        tokens = list(client.tokens(job["id"]))
        assert [token["token"] for token in tokens if token["sample"] == 1] == result["samples"][1]["token_ids"]
        others = [client.submit(form)["id"] for form in ([10, 20], np.arange(5), tmp_path / "long.txt")]
        prompts = [running.controller.jobs[other].tokens_T.tolist() for other in others]
        assert prompts[:2] == [[10, 20], [0, 1, 2, 3, 4]]
        assert prompts[2] == running.controller.jobs[job["id"]].tokens_T.tolist()
        assert [found["id"] for found in client.jobs(limit=3)] == others[::-1]
        assert client.cancel(others[0])["state"] == "done"
        assert client.models()[0]["id"] == "tiny"
        assert client.cluster()["groups"]


def test_refusals(running: Running) -> None:
    with Client(running.url, patience_s=0.3) as client:
        for bad in ("nothing", "../../metrics", "a b", ""):
            with pytest.raises(JobNotFound):
                client.job(bad)
        with pytest.raises(ServiceRefused, match="max_new_tokens=5000: this service generates at most 4096") as caught:
            client.submit("a", max_new_tokens=5000)
        assert (caught.value.status, caught.value.code) == (400, "invalid_value")
        running.controller.max_jobs = 0
        with pytest.raises(ServiceRefused, match="0 jobs wait") as caught:
            client.submit("a")
        assert caught.value.retry_after_s == 3
        running.controller.pace = asyncio.Semaphore(0)
        running.controller.max_jobs = 5
        waiting = client.submit("a", max_new_tokens=2)["id"]
        with pytest.raises(TimeoutError):
            client.wait(waiting, timeout_s=0.2)
    for url in ("http://127.0.0.1:9", "nothing", "http://"):
        with pytest.raises(ServiceUnreachable), Client(url, patience_s=0.2) as client:
            client.jobs()


def test_a_stream_goes_on_behind_a_restart(running: Running) -> None:
    """The service's HTTP process ends and comes back; the controller and its jobs stay."""
    pace = running.controller.pace = asyncio.Semaphore(0)
    with Client(running.url) as client:
        job = client.submit("hello", max_new_tokens=20)["id"]
        stream = client.tokens(job)
        seen = []
        for number in range(20):
            if number in (5, 11):
                running.stop()
                running.start()
            running.call(pace.release)
            seen.append(next(stream))
        assert list(stream) == []
        assert [token["index"] for token in seen] == list(range(20))
        assert [token["token"] for token in seen] == client.result(job)["samples"][0]["token_ids"]


def test_keys_of_the_command_work(
    directory: Path, command: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    code, out, err = command("key", "alice")
    key, line = out.splitlines()
    assert code == 0
    assert key not in err
    service_lines = '[service]\nstate_dir = "s"\nhost = "0.0.0.0"\n'
    (tmp_path / "c.toml").write_text(
        f'[model]\ndir = "{directory}"\n{service_lines}[auth]\nkeys = [{line}]\n[[prefill]]\n'
    )
    (entry,) = read_service_config(tmp_path / "c.toml").keys
    assert entry.sha256 == hashlib.sha256(key.encode()).hexdigest()
    service = Running(directory, keys=(entry, ApiKey(tenant="bob", sha256="0" * 64)))
    monkeypatch.setenv("LONGPREFILL_URL", service.url)
    try:
        code, _, err = command("status")
        assert code == 2
        assert err == "longprefill: this service needs an API key: send it as the header Authorization: Bearer KEY\n"
        monkeypatch.setenv("LONGPREFILL_API_KEY", key)
        assert command("status")[0] == 0
        monkeypatch.setenv("LONGPREFILL_API_KEY", key + "x")
        assert command("status")[0] == 2
    finally:
        service.close()
    code, _, err = command("key", "no tenant")
    assert (code, len(err.splitlines())) == (2, 1)


def test_commands(running: Running, command: Any, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("hello")
    (tmp_path / "a.ids").write_text("1\n2\n")
    np.save(tmp_path / "a.npy", np.asarray([3, 4]))
    code, out, err = command("submit", str(tmp_path / "a.txt"), "--max-new-tokens", "4", "--wait")
    job = err.splitlines()[0].removeprefix("job ")
    assert code == 0
    assert err.splitlines()[-1].endswith("done")
    assert out == running.controller.jobs[job].view.samples[0].text + "\n"
    assert command("result", job)[:2] == (0, out)
    for name, prompt in (("a.ids", [1, 2]), ("a.npy", [3, 4])):
        code, out, _ = command("submit", str(tmp_path / name), "--idempotency-key", name)
        assert running.controller.jobs[out.strip()].tokens_T.tolist() == prompt
        assert command("submit", str(tmp_path / name), "--idempotency-key", name)[1] == out
    code, out, _ = command("status", "--json")
    assert [view["id"] for view in json.loads(out)] == ["job-000002", "job-000001", job]
    assert job in command("status")[1]
    assert "5 tokens, 5 prefilled in 1 steps" in command("status", job)[1]
    assert command("watch", job)[0] == 0
    assert command("cancel", job)[1] == f"{job} done\n"


def test_commands_that_fail(running: Running, command: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.txt").write_text("hello")
    (tmp_path / "bad.txt").write_bytes(b"a\xff")
    running.controller.fails_with = "no [luck]"
    code, out, err = command("submit", str(tmp_path / "a.txt"), "--max-new-tokens", "4", "--wait")
    assert (code, out) == (1, "")
    assert err.splitlines()[-1] == "longprefill: job job-000000 failed: no [luck]"
    assert command("watch", "job-000000")[0] == 1
    assert "failed: no [luck]" in command("status", "job-000000")[1]
    for words in (
        ["submit", str(tmp_path / "nothing")],
        ["submit", str(tmp_path)],
        ["submit", str(tmp_path / "bad.txt")],
        ["submit", str(tmp_path / "a.txt"), "--max-new-tokens", "-1"],
        ["submit", str(tmp_path / "a.txt"), "--priority", "nan"],
        ["status", "nothing"],
        ["status", "--state", "lost"],
        ["status", "--limit", "0"],
        ["cancel", "../x"],
        ["watch"],
    ):
        code, out, err = command(*words)
        assert (code, out, len(err.splitlines())) == (2, "", 1), (words, err)
    monkeypatch.setattr("longprefill.orchestrator.client_command.SHORT_PATIENCE_S", 0.1)
    code, _, err = command("status", "--url", "http://127.0.0.1:9")
    assert code == 2
    assert "is longprefill serve running there?" in err
