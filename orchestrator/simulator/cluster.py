"""The file that describes a simulated cluster (TOML). Every table and field has a default; unknown ones are refused.

seed = 0
[fleet]      num_units, devices_per_unit, tp, cache_gib, token_bytes, state_bytes, step_bytes, move_gb_per_s, ...
[scheduler]  policy, step_tokens or step_target_s, max_degree, widen_efficiency, pack_tokens, max_queued
[scheduler.tenant_weights]
[costs]      kind = "quadratic": work_per_s (left out: from --load), scale_tokens
             kind = "work": model (a name or a directory), device (a name or a profile's file), exchange
[[nodes]]    count, devices, device, memory_gib: the machines, which units fill; left out: a machine a unit
[network]    gb_per_s (of one device), node_gb_per_s (shared by a machine's devices), latency_s, message_s
[decode]     num_workers, slots_per_worker, on_nodes, token_s, handoff_gb_per_s, handoff_latency_s
[prefix]     capacity_gib, state_share
[failures]   unit_mtbf_s, node_mtbf_s, decode_mtbf_s, repair_s, most_losses, straggler_share, straggler_factor
[slo]        stretch, base_s
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any, TypeVar

from longprefill.orchestrator.scheduler.settings import FleetSettings, SchedulerSettings
from longprefill.partition.errors import UserError

REPLAY_STEP_TOKENS = 8192
"""Borders of the default cluster's steps."""
GIB, GB = 1 << 30, 1e9
SHORTEST_MTBF_S = 0.001
"""What fails more often does nothing else."""

Section = TypeVar("Section")


class ClusterError(UserError):
    """A cluster file cannot be used."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CostSettings:
    kind: str = "quadratic"
    """quadratic: one formula; work: counted work at a device's rates."""
    work_per_s: float | None = None
    """Of one device; None: what makes the trace offer the wanted load."""
    scale_tokens: int = 131_072
    model: str = "kimi_linear"
    """For counted work: a model's name or directory."""
    device: str | None = None
    """For counted work: a profile's name or file; None: that of [[nodes]], else the example device."""
    exchange: str = "all_gather"

    def __post_init__(self) -> None:
        if self.kind not in ("quadratic", "work"):
            raise ClusterError(f"[costs] kind={self.kind!r} is unknown: use quadratic or work")
        if self.work_per_s is not None and self.work_per_s <= 0:
            raise ClusterError(f"[costs] work_per_s={self.work_per_s}: use a positive number, or leave it out")


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeSettings:
    num_workers: int = 0
    """0: the first token comes with the last step; nothing is handed over."""
    slots_per_worker: int = 64
    on_nodes: bool = False
    """The workers lie on the machines of the units, in turn, and fail with them; else each has a machine of its own."""
    token_s: float = 0.02
    handoff_bytes_per_s: float = 25 * GB
    handoff_latency_s: float = 1e-3

    def __post_init__(self) -> None:
        if self.num_workers < 0 or self.slots_per_worker < 1:
            raise ClusterError(
                f"[decode] num_workers={self.num_workers}, slots_per_worker={self.slots_per_worker}: "
                "need 0 or more workers and 1 or more slots"
            )
        if self.token_s < 0 or self.handoff_latency_s < 0 or self.handoff_bytes_per_s <= 0:
            raise ClusterError("[decode] token_s and handoff_latency_s are 0 or more, handoff_gb_per_s is positive")


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixSettings:
    capacity_bytes: int = 0
    """Of all pages and states that are kept of finished prompts; 0: nothing is."""
    state_share: float = 0.2

    def __post_init__(self) -> None:
        if self.capacity_bytes < 0 or not 0 <= self.state_share < 1:
            raise ClusterError(
                f"[prefix] capacity of {self.capacity_bytes} bytes, state_share={self.state_share}: "
                "need 0 or more bytes and a share from 0 to below 1"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class FailureSettings:
    unit_mtbf_s: float = float("inf")
    """Mean time between failures of one unit; infinite: none."""
    node_mtbf_s: float = float("inf")
    """Of one machine, with all its units, what is cached on it, and its decode workers."""
    decode_mtbf_s: float = float("inf")
    """Of one decode worker, with all that it holds."""
    repair_s: float = 300.0
    most_losses: int = 1000
    """A job is given up when so many of its steps, generations and hand-offs have been lost; the service allows 3."""
    straggler_share: float = 0.0
    """Share of steps that are slow."""
    straggler_factor: float = 1.5

    def __post_init__(self) -> None:
        for name in ("unit_mtbf_s", "node_mtbf_s", "decode_mtbf_s"):
            if not getattr(self, name) >= SHORTEST_MTBF_S:
                raise ClusterError(
                    f"[failures] {name}={getattr(self, name)}: use {SHORTEST_MTBF_S} seconds or more, or leave it out "
                    "for no failures"
                )
        if not 0 <= self.repair_s < float("inf"):
            raise ClusterError(f"[failures] repair_s={self.repair_s}: use seconds from 0 on, and not for ever")
        if self.most_losses < 1:
            raise ClusterError(f"[failures] most_losses={self.most_losses}: need 1 or more")
        if not 0 <= self.straggler_share <= 1 or self.straggler_factor < 1:
            raise ClusterError(
                f"[failures] straggler_share={self.straggler_share}, straggler_factor={self.straggler_factor}: "
                "need a share from 0 to 1 and a factor of 1 or more"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class SloSettings:
    """A job is served well when its first token comes within base_s + stretch times what it takes alone."""

    stretch: float = 5.0
    base_s: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeSettings:
    """Machines of one kind."""

    count: int = 1
    devices: int = 1
    device: str | None = None
    """A profile's name or file; None: that of [costs]."""
    memory_bytes: int | None = None
    """Of one device; None: the profile's."""

    def __post_init__(self) -> None:
        for name in ("count", "devices"):
            if getattr(self, name) < 1:
                raise ClusterError(f"[[nodes]] {name}={getattr(self, name)}: need 1 or more")
        if self.memory_bytes is not None and self.memory_bytes < 1:
            raise ClusterError(f"[[nodes]] memory of {self.memory_bytes} bytes: need 1 or more, or leave it out")


@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkSettings:
    """Between machines; it takes the place of the network links of the profiles."""

    bytes_per_s: float | None = None
    """Received by one device; None: only the machine's own share limits it."""
    node_bytes_per_s: float | None = None
    """Received by all devices of a machine together."""
    latency_s: float = 15e-6
    message_s: float = 0.0

    def __post_init__(self) -> None:
        for name in ("bytes_per_s", "node_bytes_per_s"):
            value = getattr(self, name)
            if value is not None and not 0 < value < float("inf"):
                raise ClusterError(f"[network] {name}={value}: use a positive number")
        if self.bytes_per_s is None and self.node_bytes_per_s is None:
            raise ClusterError("[network] needs gb_per_s (of one device) or node_gb_per_s (shared by a machine's)")
        if not 0 <= self.latency_s < float("inf") or not 0 <= self.message_s < float("inf"):
            raise ClusterError(f"[network] latency_s={self.latency_s}, message_s={self.message_s}: need 0 or more")

    def scaled(self, *, bandwidth: float, latency: float) -> NetworkSettings:
        """So many times as fast and as slow to answer."""
        return NetworkSettings(
            bytes_per_s=None if self.bytes_per_s is None else self.bytes_per_s * bandwidth,
            node_bytes_per_s=None if self.node_bytes_per_s is None else self.node_bytes_per_s * bandwidth,
            latency_s=self.latency_s * latency,
            message_s=self.message_s * latency,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """Everything that a replay needs beside the trace."""

    seed: int = 0
    fleet: FleetSettings = field(default_factory=FleetSettings)
    scheduler: SchedulerSettings = field(default_factory=lambda: SchedulerSettings(step_tokens=REPLAY_STEP_TOKENS))
    costs: CostSettings = field(default_factory=CostSettings)
    decode: DecodeSettings = field(default_factory=DecodeSettings)
    prefix: PrefixSettings = field(default_factory=PrefixSettings)
    failures: FailureSettings = field(default_factory=FailureSettings)
    slo: SloSettings = field(default_factory=SloSettings)
    nodes: tuple[NodeSettings, ...] = ()
    network: NetworkSettings | None = None

    def __post_init__(self) -> None:
        if self.failures.decode_mtbf_s < float("inf") and not self.decode.num_workers:
            raise ClusterError(
                f"[failures] decode_mtbf_s={self.failures.decode_mtbf_s}: [decode] num_workers=0 leaves none to fail: "
                "give a number of workers, or leave it out"
            )

    @property
    def num_devices(self) -> int:
        return self.fleet.num_units * self.fleet.devices_per_unit

    @property
    def node_units(self) -> tuple[tuple[int, ...], ...]:
        """The units of every machine; one that lies on several is there at each."""
        size = self.fleet.devices_per_unit
        devices = [node.devices for node in self.nodes for _ in range(node.count)] or [size] * self.fleet.num_units
        starts = list(accumulate(devices, initial=0))
        return tuple(tuple(range(start // size, -(-end // size))) for start, end in pairwise(starts))


SECTIONS: Mapping[str, type] = {
    "fleet": FleetSettings,
    "scheduler": SchedulerSettings,
    "costs": CostSettings,
    "decode": DecodeSettings,
    "prefix": PrefixSettings,
    "failures": FailureSettings,
    "slo": SloSettings,
    "network": NetworkSettings,
}
UNITS = {"_gib": ("_bytes", GIB), "gb_per_s": ("bytes_per_s", GB)}
"""Fields in bytes may be written in GiB, rates in GB/s."""


def read_cluster(path: Path | None) -> Cluster:
    """The cluster of a file; None: one unit, one formula, steps that end on every 8192nd token.

    Raises:
        ClusterError: the file cannot be read, or has an unknown, missing or impossible field.
    """
    if path is None:
        return Cluster()
    content = _toml(path, "--cluster")
    unknown = sorted(content.keys() - SECTIONS.keys() - {"seed", "nodes"})
    if unknown:
        raise ClusterError(f"--cluster {path}: unknown {', '.join(unknown)}: use seed, {', '.join(SECTIONS)}, nodes")
    seed = content.pop("seed", 0)
    if not isinstance(seed, int):
        raise ClusterError(f"--cluster {path}: seed={seed!r}: use a whole number")
    nodes = content.pop("nodes", [])
    if not isinstance(nodes, list):
        raise ClusterError(f"--cluster {path} nodes={nodes!r}: write [[nodes]]")
    for given in (content.get("costs"), *nodes):
        if isinstance(given, dict) and str(given.get("device")).endswith((".toml", ".json")):
            given["device"] = str(path.parent / str(given["device"]))  # it lies beside the cluster file that names it
    sections = {name: _section(f"--cluster {path} [{name}]", SECTIONS[name], given) for name, given in content.items()}
    kinds = tuple(_section(f"--cluster {path} [[nodes]] {n}", NodeSettings, given) for n, given in enumerate(nodes))
    if kinds:
        is_counted = "num_units" in content.get("fleet", {})
        fleet = _fleet_on(kinds, sections.get("fleet", FleetSettings()), f"--cluster {path}", is_counted=is_counted)
        sections["fleet"] = fleet
    return Cluster(seed=seed, nodes=kinds, **sections)


def _fleet_on(nodes: tuple[NodeSettings, ...], fleet: FleetSettings, where: str, *, is_counted: bool) -> FleetSettings:
    """The fleet's units on the machines of [[nodes]]: as many as there is room for.

    Raises:
        ClusterError: units that do not fill the machines, or another number of them than was given.
    """
    size = fleet.devices_per_unit
    for node in nodes:
        is_spread = len(nodes) == 1 and size % node.devices == 0 and node.devices % fleet.tp == 0
        if node.devices % size and not is_spread:
            raise ClusterError(
                f"{where}: units of devices_per_unit={size}, tp={fleet.tp} do not fill machines of {node.devices} "
                "device(s): use a number that divides them, or of equal machines a multiple"
            )
    num_units = sum(node.count * node.devices for node in nodes) // size
    if num_units < 1 or (is_counted and fleet.num_units != num_units):
        raise ClusterError(
            f"{where}: [fleet] num_units={fleet.num_units} of {size} device(s), [[nodes]] hold {num_units}: "
            "leave num_units out, or make them agree"
        )
    return replace(fleet, num_units=num_units)


def _toml(path: Path, what: str) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ClusterError(f"{what} {path} cannot be read: {error}") from None


def _section(where: str, kind: type[Section], given: object) -> Section:
    if not isinstance(given, dict):
        raise ClusterError(f"{where}: need a table of fields, not {given!r}")
    allowed = {item.name: item for item in fields(kind)}  # pyright: ignore[reportArgumentType]
    values: dict[str, Any] = {}
    for name, value in given.items():
        for ending, (canonical, factor) in UNITS.items():
            if name.endswith(ending) and name.removesuffix(ending) + canonical in allowed:
                if not isinstance(value, int | float):
                    raise ClusterError(f"{where}: {name}={value!r}: use a number")
                name, value = name.removesuffix(ending) + canonical, value * factor
                if canonical == "_bytes":
                    value = int(value)
                break
        if name not in allowed:
            raise ClusterError(f"{where}: {name} is unknown: use {', '.join(sorted(allowed))}")
        values[name] = _checked(f"{where}: {name}", value, str(allowed[name].type))
    try:
        return kind(**values)
    except TypeError as error:
        raise ClusterError(f"{where}: {str(error).partition(') ')[2]}") from None


def _checked(where: str, value: object, annotation: str) -> object:
    """The value, when it is of the field's kind; whole numbers pass for fractions."""
    kinds: dict[str, tuple[type, ...]] = {
        "int": (int,),
        "float": (int, float),
        "str": (str,),
        "bool": (bool,),
        "Mapping": (dict,),
    }
    wanted = kinds[annotation.removesuffix(" | None").partition("[")[0]]
    if not isinstance(value, wanted) or (isinstance(value, bool) and bool not in wanted):
        raise ClusterError(f"{where}={value!r}: need {annotation.removesuffix(' | None')}")
    if isinstance(value, dict) and not all(isinstance(item, int | float) for item in value.values()):
        raise ClusterError(f"{where}={value!r}: need numbers")
    return float(value) if annotation.startswith("float") and isinstance(value, int) else value
