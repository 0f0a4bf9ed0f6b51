"""The application over the controller in memory, asked in this process."""

from __future__ import annotations

import asyncio
import functools
import json
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import httpx
from fastapi import FastAPI
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from longprefill.orchestrator.api.app import create_app
from longprefill.orchestrator.api.served_model import ServedModel, read_served_model
from longprefill.orchestrator.config import ApiKey, DecodePool, ModelSection, PrefillPool, ServiceConfig, ServiceSection
from longprefill.workers.model.sizes import RAW_CONFIGS
from longprefill.workers.model.vocabulary import BOS_TOKEN, EOS_TOKEN

from .api_double import ControllerDouble

SCENARIO_S = 60.0
TEMPLATE = (
    "{% for message in messages %}<|bos|>{{ message['role'] }}: {{ message['content'] }}{{ '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)


@functools.cache
def model_dir(base: Path) -> Path:
    """A model directory without weights: what the HTTP side reads."""
    directory = base / "tiny"
    directory.mkdir()
    tokenizer = byte_tokenizer()
    tokenizer.save(str(directory / "tokenizer.json"))
    raw = dict(RAW_CONFIGS["longprefill_hybrid", "tiny"]) | {"vocab_size": tokenizer.get_vocab_size()}
    (directory / "config.json").write_text(json.dumps(raw))
    words = {"bos_token": "<|bos|>", "eos_token": {"content": "<|eos|>"}, "chat_template": TEMPLATE}
    (directory / "tokenizer_config.json").write_text(json.dumps(words))
    return directory


def byte_tokenizer() -> Tokenizer:
    """Two special tokens and every byte: ready at once, where a trained one takes seconds."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {piece: number for number, piece in enumerate([BOS_TOKEN, EOS_TOKEN, *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([BOS_TOKEN, EOS_TOKEN])
    return tokenizer


@functools.cache
def served_model(directory: Path) -> ServedModel:
    return read_served_model(config_for(directory))


def model_for(directory: Path, config: ServiceConfig) -> ServedModel:
    """The model with the limits of a configuration, its tokenizer read once."""
    return replace(served_model(directory), max_new_tokens=config.service.max_new_tokens)


def config_for(directory: Path, *, keys: tuple[ApiKey, ...] = (), **service: Any) -> ServiceConfig:
    return ServiceConfig(
        model=ModelSection(dir=str(directory)),
        service=ServiceSection(state_dir="/nowhere", **service),
        prefill=(PrefillPool(max_tokens=4096),),
        decode=(DecodePool(max_tokens=4096),),
        keys=keys,
    )


@dataclass
class Api:
    app: FastAPI
    controller: ControllerDouble
    model: ServedModel
    host: str = "127.0.0.1:8000"
    headers: dict[str, str] = field(default_factory=dict)

    async def ask(self, method: str, path: str, **arguments: Any) -> httpx.Response:
        transport = httpx.ASGITransport(self.app, raise_app_exceptions=True)
        async with httpx.AsyncClient(transport=transport, base_url=f"http://{self.host}", headers=self.headers) as http:
            return await http.request(method, path, **arguments)

    async def get(self, path: str, **arguments: Any) -> httpx.Response:
        return await self.ask("GET", path, **arguments)

    async def post(self, path: str, body: Any = None, **arguments: Any) -> httpx.Response:
        return await self.ask("POST", path, json=body, **arguments)

    def complete(self, **parameters: Any) -> Awaitable[httpx.Response]:
        return self.post("/v1/completions", {"model": "tiny", "prompt": "hello", **parameters})

    def chat(self, **parameters: Any) -> Awaitable[httpx.Response]:
        messages = [{"role": "user", "content": "hello"}]
        return self.post("/v1/chat/completions", {"model": "tiny", "messages": messages, **parameters})

    def submit(self, **parameters: Any) -> Awaitable[httpx.Response]:
        return self.post("/v1/prefill/jobs", {"prompt": "hello", **parameters})


def run(directory: Path, scenario: Callable[[Api], Awaitable[None]], **settings: Any) -> None:
    """Runs `scenario` against a fresh service; `settings` are those of its configuration."""
    given = settings.pop("model", None)
    config = config_for(directory, **settings)
    model = given or model_for(directory, config)

    async def inside() -> None:
        assert model.tokenizer is not None
        controller = ControllerDouble(model.tokenizer)
        api = Api(create_app(config, controller, model), controller, model)
        await asyncio.wait_for(scenario(api), SCENARIO_S)

    asyncio.run(inside())


@dataclass
class Exchange:
    """One request in single ASGI messages, for what a client library hides: slow bodies, early leaving."""

    app: FastAPI
    incoming: asyncio.Queue[Any] = field(default_factory=asyncio.Queue)
    outgoing: asyncio.Queue[Any] = field(default_factory=asyncio.Queue)

    def start(self, method: str, path: str, headers: dict[str, str] | None = None) -> asyncio.Task[None]:
        given = {"host": "127.0.0.1:8000", **(headers or {})}
        scope = {
            "type": "http", "asgi": {"version": "3.0", "spec_version": "2.3"}, "http_version": "1.1", "method": method,
            "path": path, "raw_path": path.encode(), "query_string": b"", "root_path": "", "scheme": "http",
            "headers": [(name.encode(), value.encode()) for name, value in given.items()],
            "client": ("127.0.0.1", 1), "server": ("127.0.0.1", 8000),
        }  # fmt: skip
        return asyncio.ensure_future(self.app(scope, self.incoming.get, self.outgoing.put))

    def send(self, body: bytes, *, more: bool = False) -> None:
        self.incoming.put_nowait({"type": "http.request", "body": body, "more_body": more})

    def leave(self) -> None:
        self.incoming.put_nowait({"type": "http.disconnect"})

    async def receive(self) -> dict[str, Any]:
        return await asyncio.wait_for(self.outgoing.get(), 10)


def messages_of(text: str) -> list[dict[str, Any]]:
    """The data of server-sent events, without [DONE]."""
    found = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: ")]
    return [json.loads(item) for item in found if item != "[DONE]"]


async def until(condition: Callable[[], bool], seconds: float = 10.0) -> None:
    """Waits for a condition."""
    deadline = asyncio.get_running_loop().time() + seconds
    while not condition():
        assert asyncio.get_running_loop().time() < deadline, "it did not come true"
        await asyncio.sleep(0.005)
