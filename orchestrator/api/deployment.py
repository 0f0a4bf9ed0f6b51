"""The HTTP side as a Ray Serve application: `start` it in a Ray that runs, `stop` it.

Serve's proxy listens at the configured address, on the head node only; replicas build the application themselves and
find the controller by its name. Neither loads torch.
"""

from __future__ import annotations

import logging
import socket
import ssl
from pathlib import Path
from typing import Any

from longprefill.orchestrator.config import ConfigError, ServiceConfig
from longprefill.orchestrator.errors import RunFailed

APPLICATION = "longprefill"
MAX_ONGOING, MAX_WAITING = 4096, 1024
"""Requests that a replica holds, streams above all, and that the proxy keeps for it; beyond, the proxy answers 503."""
KEEP_ALIVE_S = 65
HEALTH_PERIOD_S = 5.0


class LazyApp:
    """The ASGI application of a replica, built where it runs: only the configuration travels there."""

    def __init__(self, config: ServiceConfig) -> None:
        self._config = config
        self._app: Any = None

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if self._app is None:
            from longprefill.orchestrator.api.app import create_app
            from longprefill.orchestrator.api.ray_controller import RayController

            self._app = create_app(self._config, RayController())
        await self._app(scope, receive, send)


def start(config: ServiceConfig) -> str:
    """Starts Serve in the Ray of this process and waits until the address answers; its URL.

    The controller need not be there yet: /readyz says when it is. Blocks for seconds: run it in a thread beside the
    start of controller and workers.

    Raises:
        ConfigError: the address is taken or not this machine's, the certificate cannot be read, or the cluster's
            Serve listens elsewhere.
        RunFailed: Serve did not come up.
    """
    port = _checked_port(config)
    options = {"host": config.service.host, "port": port, "keep_alive_timeout_s": KEEP_ALIVE_S, **_tls(config)}

    from ray import serve
    from ray.exceptions import RayError
    from ray.serve.exceptions import RayServeException
    from ray.serve.schema import LoggingConfig

    logging.getLogger("ray.serve").setLevel(logging.WARNING)  # it tells this process's standard error of every step
    quiet = LoggingConfig(log_level="WARNING", enable_access_log=False)
    try:
        serve.start(proxy_location="HeadOnly", http_options=options, logging_config=quiet)
        _check_address(options)
        ingress = serve.deployment(
            name="http",
            num_replicas=config.service.num_replicas,
            max_ongoing_requests=MAX_ONGOING,
            max_queued_requests=MAX_WAITING,
            ray_actor_options={"num_cpus": 0},
            health_check_period_s=HEALTH_PERIOD_S,
            logging_config=quiet,
        )(serve.ingress(LazyApp(config))())
        serve.run(ingress.bind(), name=APPLICATION, route_prefix="/")
    except (RayError, RayServeException, RuntimeError, TimeoutError) as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise RunFailed(f"the HTTP side did not start: {reason}") from error
    return url_of(config, port)


def stop() -> None:
    """Takes the application away; a Serve that runs nothing else ends."""
    from ray import serve

    serve.delete(APPLICATION, _blocking=False)
    if not serve.status().applications.keys() - {APPLICATION}:
        serve.shutdown()


def url_of(config: ServiceConfig, port: int) -> str:
    """Where clients find the service."""
    scheme = "https" if config.tls is not None else "http"
    host = config.service.host
    return f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}"


def _checked_port(config: ServiceConfig) -> int:
    """The port to listen on, known to be free if this machine is where it will be."""
    host, port = config.service.host, config.service.port
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            if config.service.ray_address is not None:
                return port  # the head of a cluster that is joined may be another machine: Serve will say
            raise ConfigError(
                f"[service] host={host!r} port={port} cannot be listened on: {error.strerror}: use another"
            ) from None
        return probe.getsockname()[1]


def _tls(config: ServiceConfig) -> dict[str, str]:
    if config.tls is None:
        return {}
    for name, file in (("certificate", config.tls.certificate), ("key", config.tls.key)):
        if not Path(file).is_file():
            raise ConfigError(f"[tls] {name}={file!r} is not a file")
    try:
        ssl.create_default_context(ssl.Purpose.CLIENT_AUTH).load_cert_chain(config.tls.certificate, config.tls.key)
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(f"[tls] certificate and key do not work together: {error}") from None
    return {"ssl_certfile": config.tls.certificate, "ssl_keyfile": config.tls.key}


def _check_address(wanted: dict[str, Any]) -> None:
    """A cluster has one Serve: one that runs already keeps its own address."""
    from ray.serve.context import _get_global_client

    client = _get_global_client()
    assert client is not None, "Serve was just started"
    found = client.http_config
    for name in ("host", "port", "ssl_certfile"):
        if getattr(found, name) != wanted.get(name):
            raise ConfigError(
                f"Ray Serve runs in this cluster already, with {name}={getattr(found, name)!r} and not "
                f"{wanted.get(name)!r}: configure the same, or end it with serve shutdown"
            )
