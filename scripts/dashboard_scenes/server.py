"""Serves a scene with the real HTTP side, in a thread of this process."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Self, TypeVar

import uvicorn

from longprefill.orchestrator.api.app import create_app
from longprefill.orchestrator.api.link import PatientController
from longprefill.orchestrator.api.served_model import ServedModel
from longprefill.orchestrator.config import ApiKey, DecodePool, ModelSection, PrefillPool, ServiceConfig, ServiceSection

from .controller import SceneController

DEADLINE_S = 20.0
MODEL = ServedModel(
    name="hybrid-48b",
    vocab_size=1024,
    max_tokens=1 << 20,
    max_prompt_tokens=1 << 20,
    max_new_tokens=4096,
    can_generate=True,
    created_at=0,
    tokenizer=None,
    template=None,
)
Result = TypeVar("Result")


class SceneServer:
    """A context manager; `url` is where the scene is served, on the loopback interface."""

    def __init__(
        self, scene: SceneController, *, keys: Sequence[ApiKey] = (), port: int = 0, trace: bool = True
    ) -> None:
        config = ServiceConfig(
            model=ModelSection(dir="/nowhere", name=MODEL.name),
            service=ServiceSection(state_dir="/nowhere", trace=trace),
            prefill=(PrefillPool(),),
            decode=(DecodePool(),),
            keys=tuple(keys),
        )
        self.scene = scene
        self._app = create_app(config, scene, MODEL)
        self._socket = socket.create_server(("127.0.0.1", port), reuse_port=False)
        self.port: int = self._socket.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        settings = uvicorn.Config(self._app, lifespan="off", ws="none", log_level="error", timeout_graceful_shutdown=1)
        self._server = uvicorn.Server(settings)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = threading.Thread(target=self._run, name="scene server", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        deadline = time.monotonic() + DEADLINE_S
        while not self._server.started:
            if time.monotonic() > deadline or not self._thread.is_alive():
                raise RuntimeError(f"the scene is not served after {DEADLINE_S:g} s")
            time.sleep(0.01)
        return self

    def __exit__(self, *_: object) -> None:
        self._server.should_exit = True
        self._thread.join(DEADLINE_S)
        self._socket.close()

    def do(self, act: Callable[[], Result]) -> Result:
        """Runs `act` where the scene lives."""
        assert self._loop is not None, "it is not served yet"

        async def on_loop() -> Result:
            return act()

        return asyncio.run_coroutine_threadsafe(on_loop(), self._loop).result(DEADLINE_S)

    def patience(self, seconds: float) -> None:
        """How long the HTTP side waits for a controller that is away."""
        service = self._app.state.service
        object.__setattr__(service, "controller", PatientController(self.scene, patience_s=seconds))

    def _run(self) -> None:
        asyncio.run(self._main())

    async def _main(self) -> Any:
        self._loop = asyncio.get_running_loop()
        self.scene.begin()
        await self._server.serve([self._socket])
