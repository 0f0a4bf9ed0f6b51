"""A device as data: peaks, rates, measured tables, links, fixed overheads. Everything in seconds, bytes and flops.

Two kinds of knowledge, which may be mixed in one profile: `Rate`s (a share of a datasheet peak, for a class of
operations) and `Table`s (seconds of an operation, measured point by point). `rates.py` says which one counts when.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from math import isfinite

from longprefill.partition.errors import UserError

CLASSES = ("gemm", "attention", "indexer", "scan", "moe", "memory")
"""Classes of operations: what a rate is given for. `memory`: bound by bytes (norms, conv, residuals, codecs)."""
PATTERNS = ("all_gather", "exchange", "send", "transport", "any")
"""How bytes cross ranks: all to all, parts by receiver, one to the next, pages to a decode worker. `any` stands for
each that has no link of its own."""
SCOPES = ("node", "network")
"""Between devices of one machine, and between machines."""

Shape = Mapping[str, int | str]


class ProfileError(UserError):
    """A device profile cannot be used, or does not say what is asked."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rate:
    """Sustained share of a peak for a class or an operation, plus what every call costs."""

    flops_per_s: float
    """Datasheet peak of the unit that does the work; 0: the class is bound by bytes alone."""
    efficiency: float = 1.0
    """Share of the peak that is sustained."""
    memory_efficiency: float = 0.8
    """Share of `DeviceProfile.memory_bytes_per_s` that the operation's traffic sustains."""
    call_s: float = 0.0
    """Seconds of every call whatever its size."""
    chain_s: float = 0.0
    """Seconds of each row of a fragment that come one after another whatever runs beside them: a recurrence's chain,
    which more sequences shorten and more heads do not."""

    def __post_init__(self) -> None:
        _refuse_impossible("rate", self)
        for name in ("efficiency", "memory_efficiency"):
            if not 0 < getattr(self, name) <= 1:
                raise ProfileError(f"rate: {name}={getattr(self, name)}: use a share above 0, up to 1")


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """Measured seconds of one operation (or class) at one shape, by the extents on `axes`."""

    op: str
    """A name of `partition.operations.OPERATIONS`, or a class."""
    shape: Shape
    """Dimensions the points were measured with. A dimension that is left out fits any value."""
    axes: tuple[str, ...]
    """Of `rows`, `keys`, `parts`: the extents that differ between points."""
    points: tuple[tuple[float, ...], ...]
    """(extent for each axis, counted work, seconds). Work is flops, or bytes for operations without flops."""
    copies: int = 1
    """Ranks that ran the same at once on the machine."""
    spread: float = 0.0
    """(largest - smallest) / median of the repeats, the worst point."""

    def __post_init__(self) -> None:
        if not self.points:
            raise ProfileError(f"table {self.op}: a table needs points")
        for point in self.points:
            if len(point) != len(self.axes) + 2:
                raise ProfileError(f"table {self.op}: point {list(point)} needs {', '.join(self.axes)}, work, seconds")
            if not all(isfinite(value) for value in point) or min(point) < 0 or point[-1] <= 0:
                raise ProfileError(f"table {self.op}: point {list(point)}: need 0 or more, and seconds above")
        if self.copies < 1:
            raise ProfileError(f"table {self.op}: copies={self.copies}: need 1 or more")


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """One pattern of communication: measured points, or latency and bandwidth."""

    pattern: str
    scope: str
    ranks: int | None = None
    """Ranks that took part in the measurement; None: the formula holds for any number."""
    latency_s: float = 0.0
    """Of a call, for each doubling of its ranks."""
    message_s: float = 0.0
    """Of each message that a rank receives."""
    bytes_per_s: float | None = None
    """Received by one rank while all receive; None: see `points`."""
    points: tuple[tuple[float, float], ...] = ()
    """(bytes received by the fullest rank, seconds of the call), ascending."""

    def __post_init__(self) -> None:
        if self.pattern not in PATTERNS:
            raise ProfileError(f"link: pattern={self.pattern!r}: use {', '.join(PATTERNS)}")
        if self.scope not in SCOPES:
            raise ProfileError(f"link {self.pattern}: scope={self.scope!r}: use {' or '.join(SCOPES)}")
        _refuse_impossible(f"link {self.pattern}", self)
        if (self.bytes_per_s is None) == (not self.points):
            raise ProfileError(f"link {self.pattern}: give either bytes_per_s (with latency_s) or points")
        if self.bytes_per_s is not None and self.bytes_per_s <= 0:
            raise ProfileError(f"link {self.pattern}: bytes_per_s={self.bytes_per_s}: use a positive number")
        for before, after in zip(self.points, self.points[1:], strict=False):
            if after[0] <= before[0]:
                raise ProfileError(f"link {self.pattern}: points must ascend in bytes, {after[0]:g} does not")
        if any(num_bytes < 0 or seconds <= 0 for num_bytes, seconds in self.points):
            raise ProfileError(f"link {self.pattern}: points are [bytes, seconds], seconds above 0")


@dataclass(frozen=True, slots=True, kw_only=True)
class Overheads:
    """Host work that no operation contains, in seconds."""

    step_s: float = 0.0
    """Of every step: the control call, the layout, the reply."""
    layer_s: float = 0.0
    """Of every layer and step."""
    overlap: float = 1.0
    """Share of the cache-row gather that runs while the rank computes: 1 hides all that fits behind the query side."""

    def __post_init__(self) -> None:
        _refuse_impossible("overheads", self)
        if self.overlap > 1:
            raise ProfileError(f"overheads: overlap={self.overlap}: use a share from 0 to 1")


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceProfile:
    """One kind of device and how it is connected."""

    name: str
    source: str
    """Where the numbers are from: a datasheet and assumed efficiencies, a publication, or a measurement."""
    memory_bytes: int | None = None
    """Of one device; None: not limited here."""
    memory_bytes_per_s: float | None = None
    """Datasheet peak; None: no operation is bound by it."""
    rates: Mapping[str, Rate] = field(default_factory=dict)
    """By class or operation."""
    tables: tuple[Table, ...] = ()
    links: tuple[Link, ...] = ()
    overheads: Overheads = field(default_factory=Overheads)
    measured: Mapping[str, object] = field(default_factory=dict)
    """What a measurement tells of itself: date, commit, machine, versions, seed, repeats. Not read by anything."""

    def __post_init__(self) -> None:
        if not self.name:
            raise ProfileError("profile: name is empty: give it one")
        for what in ("memory_bytes", "memory_bytes_per_s"):
            value = getattr(self, what)
            if value is not None and not 0 < value < float("inf"):
                raise ProfileError(f"profile {self.name}: {what}={value}: use a positive number, or leave it out")


def scaled_link(link: Link, *, bandwidth: float = 1.0, latency: float = 1.0) -> Link:
    """The link so many times as fast and as slow to answer. Measured points scale by their bytes."""
    return replace(
        link,
        latency_s=link.latency_s * latency,
        message_s=link.message_s * latency,
        bytes_per_s=None if link.bytes_per_s is None else link.bytes_per_s * bandwidth,
        points=tuple((num_bytes * bandwidth, seconds) for num_bytes, seconds in link.points),
    )


def with_links(profile: DeviceProfile, *, bandwidth: float = 1.0, latency: float = 1.0) -> DeviceProfile:
    """The profile with all its links scaled."""
    return replace(
        profile, links=tuple(scaled_link(link, bandwidth=bandwidth, latency=latency) for link in profile.links)
    )


def _refuse_impossible(where: str, record: object) -> None:
    """Raises ProfileError for a negative, infinite or missing number in any numeric field."""
    for item in fields(record):  # pyright: ignore[reportArgumentType]
        value = getattr(record, item.name)
        if isinstance(value, int | float) and not 0 <= value < float("inf"):
            raise ProfileError(f"{where}: {item.name}={value}: need 0 or more")
