"""The configuration of a service, as `longprefill serve --config FILE.toml` reads it (config_file.py).

[model]      dir, name
[service]    host, port, state_dir, limits, timeouts, ray_address, ...
[tls]        certificate, key
[auth]       keys = [{tenant = "...", sha256 = "...", weight = 1.0, max_queued = 100}]
[[prefill]]  pools of prefill groups: name, count, cp, tp, dtype, device, step_tokens, max_tokens, resources, ...
[[decode]]   pools of decode workers: name, count, max_tokens, ...; none: prompts are prefilled only
[scheduler]  policy, step_target_s, profile, snapshot_every_s

Frozen data that pickles, without torch and ray: the HTTP side and the controller are given the same object.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from longprefill.orchestrator.plan import ClusterSettings
from longprefill.orchestrator.scheduler.settings import SchedulerSettings
from longprefill.partition.errors import UserError
from longprefill.partition.generators import LayoutKind

ON_DISCONNECT = ("cancel", "continue")
LOG_FORMATS = ("text", "json")
MAX_GROUPS = 4096
NAME = re.compile(r"[a-z0-9][a-z0-9_-]{0,40}")
TENANT = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@-]{0,63}")
SHA256 = re.compile(r"[0-9a-f]{64}")
LOCAL_TENANT = "local"
"""Who everybody is on a loopback service without keys."""


class ConfigError(UserError):
    """A configuration cannot be used: the file, the field, its value, what is allowed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSection:
    dir: str
    """A published model directory; in a file, relative to the file."""
    name: str | None = None
    """What clients call it."""

    @property
    def served_name(self) -> str:
        return self.name or Path(self.dir).name


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceSection:
    state_dir: str
    """Journal, prompts and snapshots: a directory on a disk that outlives the machine's processes."""
    host: str = "127.0.0.1"
    port: int = 8000
    """0: any free one, which is printed."""
    max_queued: int = 1000
    """Jobs that wait, of all tenants."""
    max_queued_per_tenant: int | None = None
    max_prompt_tokens: int | None = None
    """None: what the model and the pools can hold."""
    max_new_tokens: int = 4096
    """The most that one request may ask for."""
    max_body_bytes: int = 16 << 20
    """Of a JSON request."""
    max_upload_bytes: int = 256 << 20
    """Of an uploaded prompt."""
    request_timeout_s: float = 3600.0
    """The timeout of a job that names none, and the most one may name."""
    drain_timeout_s: float = 30.0
    trace: bool = False
    """Keep spans, so that a job's Chrome trace can be had."""
    log_format: str = "text"
    """Of state_dir/logs/controller.log: text, or json, an object a line."""
    ray_address: str | None = None
    """A Ray cluster to join; None: one of its own on this machine."""
    num_replicas: int = 1
    """Processes that speak HTTP."""
    on_disconnect: str = "cancel"
    """What becomes of a completion whose client leaves: cancel or continue."""
    keep_finished_jobs: int = 10_000
    """Ended jobs that can still be asked for; the oldest go first."""
    keep_finished_s: float = 7 * 86400.0

    def __post_init__(self) -> None:
        _number("service", "port", self.port, 0, 65535)
        for name in ("max_queued", "max_new_tokens", "max_body_bytes", "max_upload_bytes", "num_replicas"):
            _number("service", name, getattr(self, name), 1, 1 << 50)
        for name in ("max_queued_per_tenant", "max_prompt_tokens"):
            if getattr(self, name) is not None:
                _number("service", name, getattr(self, name), 1, 1 << 50)
        _number("service", "num_replicas", self.num_replicas, 1, 256)
        _number("service", "keep_finished_jobs", self.keep_finished_jobs, 0, 10_000_000)
        _number("service", "request_timeout_s", self.request_timeout_s, 1, 7 * 86400)
        _number("service", "drain_timeout_s", self.drain_timeout_s, 0, 86400)
        _number("service", "keep_finished_s", self.keep_finished_s, 0, 10 * 365 * 86400)
        if self.log_format not in LOG_FORMATS:
            raise ConfigError(f"[service] log_format={self.log_format!r}: use {' or '.join(LOG_FORMATS)}")
        if self.on_disconnect not in ON_DISCONNECT:
            raise ConfigError(f"[service] on_disconnect={self.on_disconnect!r}: use {' or '.join(ON_DISCONNECT)}")
        if not self.host or any(character.isspace() for character in self.host):
            raise ConfigError(f"[service] host={self.host!r}: use an address or a host name")
        if not self.state_dir:
            raise ConfigError("[service] state_dir='': name a directory for the journal")

    @property
    def is_loopback(self) -> bool:
        """Whether only this machine can connect."""
        if self.host == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False

    @property
    def tenant_limit(self) -> int:
        return min(self.max_queued_per_tenant or self.max_queued, self.max_queued)


@dataclass(frozen=True, slots=True, kw_only=True)
class TlsSection:
    certificate: str
    key: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiKey:
    """A tenant's key, of which only the hash is kept. A tenant may have several keys."""

    tenant: str
    sha256: str
    """Hexadecimal SHA-256 of the key."""
    weight: float = 1.0
    """Share of the fleet that the tenant is entitled to, relative to the others'."""
    max_queued: int | None = None
    operator: bool = False
    """Sees and cancels every tenant's jobs, reads the metrics and the cluster."""

    def __post_init__(self) -> None:
        if not TENANT.fullmatch(self.tenant):
            raise ConfigError(
                f"[auth] tenant={self.tenant!r}: use 1 to 64 letters, digits and . _ @ -, beginning with a letter or "
                "digit"
            )
        if not SHA256.fullmatch(self.sha256):
            raise ConfigError(
                f"[auth] the sha256 of tenant {self.tenant} is not 64 hexadecimal digits in lower case: make a key "
                "with longprefill key"
            )
        _number("auth", "weight", self.weight, 1e-6, 1e6)
        if self.max_queued is not None:
            _number("auth", "max_queued", self.max_queued, 1, 1 << 50)


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillPool:
    """`count` groups of cp x tp ranks."""

    name: str = "prefill"
    count: int = 1
    cp: int = 1
    tp: int = 1
    expert_parallel: bool = False
    dtype: str = "bf16"
    device: str = "cpu"
    latent_format: str | None = None
    index_format: str | None = None
    layout: LayoutKind = "zigzag"
    step_tokens: int | None = None
    """Steps end on multiples of this; None: they are sized by time."""
    max_tokens: int = 65536
    """Tokens of all jobs that a group holds at once; no prompt can be longer."""
    threads_per_rank: int = 1
    resources: Mapping[str, float] = field(default_factory=dict)
    """What Ray reserves for each rank beside one CPU: GPU, NPU or a label of your own; CPU = 4 reserves four."""
    backends: Mapping[str, str] = field(default_factory=dict)
    """Kernel backend by op, where not the default."""
    collective_timeout_s: float = 120.0
    heartbeat_timeout_s: float = 20.0

    def __post_init__(self) -> None:
        _check_pool("prefill", self.name, self.count, self.max_tokens, self.threads_per_rank, self.resources)
        try:
            self.cluster_settings("")
        except UserError as error:
            raise ConfigError(f"[[prefill]] {self.name}: {_as_fields(str(error))}") from None

    @property
    def num_ranks(self) -> int:
        return self.cp * self.tp

    @property
    def rank_resources(self) -> dict[str, float]:
        return {"CPU": 1.0, **self.resources}

    def cluster_settings(self, model_dir: str, *, trace: bool = False) -> ClusterSettings:
        """What one group of the pool is started with."""
        return ClusterSettings(
            model_dir=model_dir,
            cp=self.cp,
            tp=self.tp,
            expert_parallel=self.expert_parallel,
            dtype=self.dtype,
            latent_format=self.latent_format,
            index_format=self.index_format,
            step_tokens=self.step_tokens,
            max_tokens=self.max_tokens,
            layout=self.layout,
            device=self.device,
            backends=dict(self.backends),
            trace=trace,
            collective_timeout_s=self.collective_timeout_s,
            heartbeat_timeout_s=self.heartbeat_timeout_s,
            threads_per_rank=self.threads_per_rank,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodePool:
    """`count` decode workers. Dtype and cache formats are those of the prefill pools, whose pages they take."""

    name: str = "decode"
    count: int = 1
    device: str = "cpu"
    max_tokens: int = 65536
    """Prompt and generated tokens of all jobs that a worker holds at once."""
    listen: str | None = None
    """Address of the worker's machine at which it takes pages from prefill groups on others, on a free port,
    unencrypted; None: shared memory only."""
    threads_per_rank: int = 1
    resources: Mapping[str, float] = field(default_factory=dict)
    backends: Mapping[str, str] = field(default_factory=dict)
    heartbeat_timeout_s: float = 20.0

    def __post_init__(self) -> None:
        _check_pool("decode", self.name, self.count, self.max_tokens, self.threads_per_rank, self.resources)
        if self.listen is not None:
            try:
                ipaddress.ip_address(self.listen)
            except ValueError:
                raise ConfigError(f"[[decode]] {self.name}: listen={self.listen!r}: use an IP address") from None
        _number("decode", "heartbeat_timeout_s", self.heartbeat_timeout_s, 1, 86400)

    @property
    def rank_resources(self) -> dict[str, float]:
        return {"CPU": 1.0, **self.resources}


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerSection:
    policy: str = "guarded"
    step_target_s: float = 1.0
    """A step takes about this long at most: nothing waits longer for a step border."""
    profile: str | None = None
    """A device profile that steps are estimated with; None: counted work at a nominal rate. Measured steps correct
    either."""
    snapshot_every_s: float | None = None
    """Prefill seconds of a job between its snapshots; None: a job whose group is lost begins again."""

    def __post_init__(self) -> None:
        from longprefill.orchestrator.scheduler.base import POLICIES

        if self.policy not in POLICIES:
            raise ConfigError(f"[scheduler] policy={self.policy!r} is unknown: use {', '.join(POLICIES)}")
        _number("scheduler", "step_target_s", self.step_target_s, 0.01, 3600)
        if self.snapshot_every_s is not None:
            _number("scheduler", "snapshot_every_s", self.snapshot_every_s, 0.1, 86400)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceConfig:
    """Everything that `longprefill serve` is told."""

    model: ModelSection
    service: ServiceSection
    prefill: tuple[PrefillPool, ...]
    decode: tuple[DecodePool, ...] = ()
    scheduler: SchedulerSection = field(default_factory=SchedulerSection)
    tls: TlsSection | None = None
    keys: tuple[ApiKey, ...] = ()
    """[auth] keys."""

    def __post_init__(self) -> None:
        if not self.prefill:
            raise ConfigError("[[prefill]]: name at least one pool of prefill groups")
        names = [pool.name for pool in (*self.prefill, *self.decode)]
        double = next((name for name in names if names.count(name) > 1), None)
        if double is not None:
            raise ConfigError(f"two pools have the name {double!r}: give each [[prefill]] and [[decode]] its own")
        first = self.prefill[0]
        for pool in self.prefill[1:]:
            for name in ("cp", "tp", "dtype", "latent_format", "index_format", "step_tokens", "max_tokens"):
                ours, theirs = getattr(pool, name), getattr(first, name)
                if ours != theirs:
                    raise ConfigError(
                        f"[[prefill]] {pool.name}: {name}={ours!r} and {theirs!r} in {first.name}: a job may run on "
                        "any group, so they must be equal"
                    )
        if not self.service.is_loopback and not self.keys:
            raise ConfigError(
                f"[service] host={self.service.host!r} can be reached from other machines: give [auth] keys (make one "
                "with longprefill key), or use host='127.0.0.1'"
            )
        if len({key.sha256 for key in self.keys}) < len(self.keys):
            raise ConfigError("[auth] two keys have the same sha256: a key belongs to one tenant")
        for name in ("weight", "max_queued"):
            given: dict[str, object] = {}
            for key in self.keys:
                if given.setdefault(key.tenant, getattr(key, name)) != getattr(key, name):
                    raise ConfigError(f"[auth] the keys of tenant {key.tenant} differ in {name}: give all the same")

    @property
    def prefill_groups(self) -> tuple[tuple[str, PrefillPool], ...]:
        """(name, pool) of every group: "prefill-0", "prefill-1", ..."""
        return tuple((f"{pool.name}-{number}", pool) for pool in self.prefill for number in range(pool.count))

    @property
    def decode_workers(self) -> tuple[tuple[str, DecodePool], ...]:
        return tuple((f"{pool.name}-{number}", pool) for pool in self.decode for number in range(pool.count))

    def decode_settings(self, pool: DecodePool) -> ClusterSettings:
        """What a decode worker is started with: dtype and formats are those of the pages that it takes."""
        first = self.prefill[0]
        return ClusterSettings(
            model_dir=self.model.dir,
            dtype=first.dtype,
            latent_format=first.latent_format,
            index_format=first.index_format,
            max_tokens=pool.max_tokens,
            device=pool.device,
            backends=dict(pool.backends),
            trace=self.service.trace,
            heartbeat_timeout_s=pool.heartbeat_timeout_s,
            threads_per_rank=pool.threads_per_rank,
        )

    @property
    def longest_job_tokens(self) -> int:
        """Prompt and generated tokens of the longest job that any group and worker could hold."""
        most = min(pool.max_tokens for pool in self.prefill)
        return min([most, max(pool.max_tokens for pool in self.decode)]) if self.decode else most

    def tenant_limit(self, tenant: str) -> int:
        """Jobs that may wait for a tenant."""
        own = next((key.max_queued for key in self.keys if key.tenant == tenant), None)
        return min(own or self.service.tenant_limit, self.service.max_queued)

    @property
    def tenant_weights(self) -> dict[str, float]:
        return {key.tenant: key.weight for key in self.keys}

    def scheduler_settings(self, max_step_tokens: int) -> SchedulerSettings:
        """For the scheduler; limits of queues are the controller's, which counts tenants too."""
        return SchedulerSettings(
            policy=self.scheduler.policy,
            step_tokens=self.prefill[0].step_tokens,
            step_target_s=self.scheduler.step_target_s,
            max_step_tokens=max_step_tokens,
            tenant_weights=self.tenant_weights,
        )


def _check_pool(
    kind: str, name: str, count: int, max_tokens: int, threads: int, resources: Mapping[str, float]
) -> None:
    if not NAME.fullmatch(name):
        raise ConfigError(f"[[{kind}]] name={name!r}: use lower-case letters, digits, - and _, 41 at most")
    _number(f"[{kind}]", "count", count, 1, MAX_GROUPS)
    _number(f"[{kind}]", "max_tokens", max_tokens, 1, 1 << 32)
    _number(f"[{kind}]", "threads_per_rank", threads, 1, 1024)
    for resource, amount in resources.items():
        if not amount >= 0 or amount > 1e6:
            raise ConfigError(f"[[{kind}]] {name}: resources {resource}={amount}: use 0 or a positive number")


def _number(section: str, name: str, value: float, least: float, most: float) -> None:
    if not least <= value <= most:
        raise ConfigError(f"[{section}] {name}={value}: use {least:g} to {most:.12g}")


def _as_fields(message: str) -> str:
    """A refusal in the words of the command line, in those of the file."""
    return re.sub(r"--([a-z]+(?:-[a-z]+)*)( |\b)", lambda found: found[1].replace("-", "_") + found[2], message)
