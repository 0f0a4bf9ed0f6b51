"""The embedded Ray: a private local instance for one `LocalCluster`, with its noise and its surprises turned off."""

from __future__ import annotations

import logging
import os
import secrets

import ray

from longprefill.partition.errors import UserError

OBJECT_STORE_BYTES = 128 << 20
"""Ray carries control only: prompts and logits of a few megabytes."""


def start_local_ray(num_cpus: int) -> None:
    """Starts a private Ray with `num_cpus` logical CPUs (they bound nothing; ranks are counted, cores are shared).

    Raises:
        UserError: this process already runs Ray.
    """
    if ray.is_initialized():
        raise UserError(
            "Ray is already running in this process: close the other LocalCluster or call ray.shutdown() first"
        )
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    # with a token given, Ray neither reads nor writes one under HOME, which may not be writable
    os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(16))
    # it announces token authentication on every start; RAY_AUTH_MODE would silence it, but is read when ray is imported
    logging.getLogger("ray._private.authentication.authentication_token_setup").setLevel(logging.ERROR)
    ray.init(
        address="local",
        num_cpus=num_cpus,
        num_gpus=0,
        include_dashboard=False,
        log_to_driver=False,
        logging_level=logging.ERROR,
        object_store_memory=OBJECT_STORE_BYTES,
        configure_logging=False,
    )


def worker_environment(num_threads: int) -> dict[str, str]:
    """Environment of a worker process: passive waiting, or ranks that share cores spin each other to death."""
    return {
        "OMP_NUM_THREADS": str(num_threads),
        "MKL_NUM_THREADS": str(num_threads),
        "OMP_WAIT_POLICY": "PASSIVE",
        "KMP_BLOCKTIME": "0",
        "PYTHONSAFEPATH": "1",
        "TORCH_DEVICE_BACKEND_AUTOLOAD": "0",
    }
