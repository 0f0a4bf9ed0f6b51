"""The unchanged `openai` client, and what else connects, against `longprefill serve` on a tiny model."""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
import select
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from longprefill.orchestrator import Client

from .support.command import Command, running
from .support.models import make_model
from .support.sockets import listeners

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(240)]

REPOSITORY = Path(__file__).resolve().parents[2]
KEY = "lp-integration-secret-of-alice"
PROMPT = "An unmistakable sentence that no log may hold"
TEMPLATE = "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}assistant:"
READY_S = 150
CONFIG = """
[model]
dir = "{model}"
name = "tiny"
[service]
state_dir = "{state}"
port = 0
max_new_tokens = 256
[auth]
keys = [{{tenant = "alice", sha256 = "{digest}", operator = true}}]
[[prefill]]
dtype = "fp32"
max_tokens = 2048
[[decode]]
max_tokens = 4096
"""


@dataclass(frozen=True, kw_only=True)
class Service:
    url: str
    command: Command
    openai: openai.OpenAI
    client: Client


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    base = tmp_path_factory.mktemp("service")
    model = make_model(base / "model", "longprefill_hybrid", eos=[])
    words = json.loads((model / "tokenizer_config.json").read_text())
    (model / "tokenizer_config.json").write_text(json.dumps(words | {"chat_template": TEMPLATE}))
    digest = hashlib.sha256(KEY.encode()).hexdigest()
    (base / "service.toml").write_text(CONFIG.format(model=model, state=base / "state", digest=digest))
    with running(["serve", "--config", base / "service.toml"]) as command:
        url = _ready(command)
        with openai.OpenAI(base_url=f"{url}/v1", api_key=KEY, timeout=60) as client, Client(url, KEY) as own:
            yield Service(url=url, command=command, openai=client, client=own)


def _ready(command: Command) -> str:
    """The address in the one line that serve prints."""
    out = command.process.stdout
    assert out is not None
    assert select.select([out], [], [], READY_S)[0], command.error_text()
    line = out.readline().decode()
    found = re.fullmatch(r"ready on (http://127\.0\.0\.1:[0-9]+) in [0-9.]+ s\n", line)
    assert found, (line, command.error_text())
    return found[1]


def complete(service: Service, **options: Any) -> Any:
    """A completion, greedy and of 12 tokens unless said otherwise."""
    asked: dict[str, Any] = {"model": "tiny", "prompt": PROMPT, "max_tokens": 12, "temperature": 0, **options}
    return service.openai.completions.create(**asked)


def test_while_it_starts_and_ends_nothing_says_that_a_job_is_not_there(tmp_path: Path) -> None:
    model = make_model(tmp_path / "model", "longprefill_hybrid", eos=[])
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    config = CONFIG.format(model=model, state=tmp_path / "state", digest=hashlib.sha256(KEY.encode()).hexdigest())
    (tmp_path / "service.toml").write_text(config.replace("port = 0", f"port = {port}"))
    answers: set[tuple[int, str]] = set()
    ended = threading.Event()

    def ask() -> None:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", headers={"authorization": f"Bearer {KEY}"}) as http:
            while not ended.is_set():
                with contextlib.suppress(httpx.TransportError):
                    answer = http.get("/v1/models", timeout=30)
                    answers.add((answer.status_code, answer.json().get("error", {}).get("code", "")))
                time.sleep(0.02)

    asking = threading.Thread(target=ask)
    asking.start()
    try:
        with running(["serve", "--config", tmp_path / "service.toml"]) as command:
            _ready(command)
            command.process.terminate()
            assert command.finish().code == 0
    finally:
        ended.set()
        asking.join()
    assert answers == {(503, "unavailable"), (200, "")}


def test_completions(service: Service) -> None:
    first, second = complete(service), complete(service)
    assert first.choices[0].text == second.choices[0].text
    assert first.choices[0].finish_reason == "length"
    assert first.usage is not None
    assert first.usage.completion_tokens == 12
    assert first.usage.prompt_tokens_details is not None


def test_streaming_says_the_same(service: Service) -> None:
    options = {"n": 2, "temperature": 1.0, "seed": 4, "max_tokens": 20}
    whole = complete(service, **options)
    texts, reasons, usage = ["", ""], [None, None], None
    for chunk in complete(service, **options, stream=True, stream_options={"include_usage": True}):
        for choice in chunk.choices:
            texts[choice.index] += choice.text
            reasons[choice.index] = choice.finish_reason or reasons[choice.index]
        usage = chunk.usage or usage
    assert texts == [choice.text for choice in whole.choices]
    assert texts[0] != texts[1]
    assert reasons == ["length", "length"]
    assert usage == whole.usage


def test_several_prompts_are_what_each_is_alone(service: Service) -> None:
    several = service.openai.completions.create(model="tiny", prompt=[PROMPT, "other"], max_tokens=8, temperature=0)
    assert [choice.index for choice in several.choices] == [0, 1]
    assert several.choices[0].text == complete(service, max_tokens=8).choices[0].text


def test_stop(service: Service) -> None:
    text = complete(service, max_tokens=20).choices[0].text
    stop = text[6:9]
    stopped = complete(service, max_tokens=20, stop=[stop]).choices[0]
    assert stopped.text == text[: text.index(stop)]
    assert stopped.finish_reason == "stop"


def test_logprobs(service: Service) -> None:
    logprobs = complete(service, logprobs=3).choices[0].logprobs
    assert logprobs is not None
    assert len(logprobs.tokens or []) == len(logprobs.token_logprobs or []) == len(logprobs.top_logprobs or []) == 12
    for own, top in zip(logprobs.token_logprobs or [], logprobs.top_logprobs or [], strict=True):
        assert own == pytest.approx(max(top.values())), "greedy takes the likeliest"


def test_chat(service: Service) -> None:
    messages = [{"role": "user", "content": PROMPT}]
    options: dict[str, Any] = {"model": "tiny", "messages": messages, "max_completion_tokens": 10, "temperature": 0}
    whole = service.openai.chat.completions.create(**options, logprobs=True, top_logprobs=2)
    rendered = f"user: {PROMPT}\nassistant:"
    direct = service.openai.completions.create(model="tiny", prompt=rendered, max_tokens=10, temperature=0)
    assert whole.choices[0].message.content == direct.choices[0].text
    assert [len(item.top_logprobs) for item in whole.choices[0].logprobs.content] == [2] * 10
    stream = service.openai.chat.completions.create(**options, stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in stream) == direct.choices[0].text


def test_models(service: Service) -> None:
    assert [model.id for model in service.openai.models.list()] == ["tiny"]
    assert service.openai.models.retrieve("tiny").owned_by == "longprefill"


def test_refusals_are_the_clients_own_errors(service: Service) -> None:
    with pytest.raises(openai.AuthenticationError):
        service.openai.with_options(api_key="wrong").models.list()
    with pytest.raises(openai.NotFoundError):
        service.openai.models.retrieve("gpt")
    with pytest.raises(openai.BadRequestError) as caught:
        complete(service, prompt=[5] * 3000)
    assert caught.value.code == "context_length_exceeded"
    with pytest.raises(openai.BadRequestError) as caught:
        complete(service, frequency_penalty=1)
    assert caught.value.param == "frequency_penalty"


def test_a_job_ends_as_its_events_say(service: Service) -> None:
    job = service.client.submit(PROMPT * 20, max_new_tokens=6, num_samples=2, idempotency_key="one")
    assert service.client.submit(PROMPT * 20, max_new_tokens=6, num_samples=2, idempotency_key="one")["id"] == job["id"]
    events = list(service.client.events(job["id"]))
    assert [event["number"] for event in events] == list(range(1, len(events) + 1))
    states = [event["data"]["state"] for event in events if event["kind"] == "state"]
    assert (states[0], states[-1]) == ("queued", "done")
    result = service.client.result(job["id"])
    assert [len(sample["token_ids"]) for sample in result["samples"]] == [6, 6]
    streamed = [token["token"] for token in service.client.tokens(job["id"]) if token["sample"] == 1]
    assert streamed == result["samples"][1]["token_ids"]
    assert service.client.job(job["id"])["timings"]["ttft_s"] > 0


def test_listening_sockets_are_those_in_the_documentation(service: Service) -> None:
    """Whatever listens is in SECURITY.md's table with its reach; HTTP listens on loopback and nowhere else."""
    table = re.findall(
        r"^\| `([^`]+)` \| (loopback|all|node) \|", (REPOSITORY / "SECURITY.md").read_text(), re.MULTILINE
    )
    found = listeners(service.command.mark, service.command.process.pid)
    assert {(listener.program, listener.reach) for listener in found} <= set(table), found
    port = int(service.url.rpartition(":")[2])
    assert [(listener.program, listener.reach) for listener in found if listener.port == port] == [
        ("ray::ProxyActor", "loopback")
    ]


def test_no_log_holds_a_key_or_a_prompt(service: Service) -> None:
    complete(service)
    files = [path for path in service.command.directory.rglob("*") if path.is_file() and not path.is_socket()]
    assert any(path.suffix in (".log", ".out", ".err") for path in files)
    for path in files:
        content = path.read_bytes()
        assert KEY.encode() not in content, path
        assert PROMPT.encode() not in content, path
    assert KEY not in service.command.error_text()
