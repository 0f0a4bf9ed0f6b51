"""The service over a real socket, in a thread of this process, with the controller in memory."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import uvicorn

from longprefill.orchestrator.api.app import create_app

from .api_double import ControllerDouble
from .api_support import config_for, model_for

DEADLINE_S = 20.0


class Running:
    """A service in a thread of this process, at an address of its own, that can go away and come back."""

    def __init__(self, directory: Path, **settings: Any) -> None:
        self._config = config_for(directory, **settings)
        model = model_for(directory, self._config)
        assert model.tokenizer is not None
        self.controller = ControllerDouble(model.tokenizer)
        self._model = model
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._socket.getsockname()[1]}"
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self._thread.start()
        self.start()

    def start(self) -> None:
        app = create_app(self._config, self.controller, self._model)
        self._server = uvicorn.Server(uvicorn.Config(app, lifespan="off", log_config=None, timeout_graceful_shutdown=0))
        self._task = asyncio.run_coroutine_threadsafe(self._server.serve([self._socket.dup()]), self.loop)
        wait_for(lambda: self._server.started)

    def stop(self) -> None:
        self._server.should_exit = True
        self._task.result(DEADLINE_S)

    def close(self) -> None:
        self.stop()
        self._socket.close()
        asyncio.run_coroutine_threadsafe(_end_other_tasks(), self.loop).result(DEADLINE_S)
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(DEADLINE_S)
        self.loop.close()

    def call(self, action: Callable[[], Any]) -> None:
        self.loop.call_soon_threadsafe(action)


async def _end_other_tasks() -> None:
    """Jobs that no client waited for; left behind, they would be told as lost in another test."""
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline, "it did not come true"
        time.sleep(0.01)
