"""From counted work to seconds: measured points exactly, utilisation between them, a rate where nothing is measured.

Of the tables that fit an operation (same name or class, same dimensions where the table gives them) the one with most
dimensions counts, then the one whose `copies` comes nearest below the ranks that share the machine. Utilisation is work
over seconds; between points it is linear in the logarithm of each extent. Beyond the largest point it stays; below the
smallest the slope of the first two goes on, at most to constant time. Without a table a `Rate` is a roofline: the
longer of flops at a share of the peak and bytes at a share of the memory's. Without either there is an error, never a
guess.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Mapping, Sequence
from functools import cached_property
from itertools import groupby
from math import ceil, log, log2

from longprefill.orchestrator.costs.profile import DeviceProfile, Link, ProfileError, Rate, Table
from longprefill.partition.operations import OPERATIONS, Operation

Dims = tuple[tuple[str, int | str], ...]
"""Dimensions of an operation, sorted."""
CALIBRATE = "longprefill bench --calibrate FILE.json measures this machine"


class Rates:
    """Seconds of operations on one kind of device, `copies` of whose ranks share a machine.

    `coverage` counts seconds by how they were found: exact, between, beyond (outside the measured range), rate.
    """

    def __init__(self, profile: DeviceProfile, copies: int = 1) -> None:
        self.profile = profile
        self.copies = copies
        self.coverage: defaultdict[str, float] = defaultdict(float)
        self._operations: dict[tuple[str, Dims], OperationRate] = {}

    def of(self, name: str, shape: Dims) -> OperationRate:
        """One operation of one shape: the sorted items of `operations.operation_shape`."""
        key = (name, shape)
        if key not in self._operations:
            self._operations[key] = OperationRate(self, name, shape)
        return self._operations[key]

    def seconds(self, operation: Operation, shape: Dims) -> float:
        """Seconds of one call.

        Raises:
            ProfileError: neither a table nor a rate says how fast the operation is.
        """
        return self.of(operation.name, shape).seconds(operation)

    def rate(self, name: str, shape: Dims) -> Rate:
        """What is known of an operation without a table.

        Raises:
            ProfileError: nothing is.
        """
        kind = OPERATIONS[name]
        rate = self.profile.rates.get(name) or self.profile.rates.get(kind)
        if rate is None:
            dims = ", ".join(f"{name}={value}" for name, value in shape)
            raise ProfileError(
                f"profile {self.profile.name} does not say how fast {name} is ({dims}): it needs "
                f"a table of it, or [rates.{kind}] with flops_per_s and efficiency ({CALIBRATE})"
            )
        return rate

    def roofline(self, operation: Operation, rate: Rate) -> float:
        """The longer of flops and bytes, with what every call costs."""
        compute_s = operation.flops / (rate.flops_per_s * rate.efficiency) if rate.flops_per_s else 0.0
        bandwidth = self.profile.memory_bytes_per_s
        if bandwidth is None and not compute_s:
            raise ProfileError(
                f"profile {self.profile.name} gives {operation.name} no flops_per_s and has no memory_gb_per_s: add one"
            )
        memory_s = operation.num_bytes / (bandwidth * rate.memory_efficiency) if bandwidth else 0.0
        chain_s = rate.chain_s * operation.rows / max(operation.parts, 1)
        return rate.call_s + chain_s + max(compute_s, memory_s)

    def table(self, name: str, shape: Dims) -> Table | None:
        """The measured table that fits best; None: there is none."""
        dims = dict(shape)
        return self._best(name, dims) or self._best(OPERATIONS[name], dims)

    def _best(self, name: str, dims: Mapping[str, int | str]) -> Table | None:
        fitting = [
            table
            for table in self.profile.tables
            if table.op == name and all(dims.get(key) == value for key, value in table.shape.items())
        ]

        def rank(table: Table) -> tuple[int, bool, int]:
            fits = table.copies <= self.copies
            return len(table.shape), fits, table.copies if fits else -table.copies

        return max(fitting, key=rank, default=None)


class OperationRate:
    """Seconds of one operation of one shape on one kind of device."""

    def __init__(self, rates: Rates, name: str, shape: Dims) -> None:
        self._rates = rates
        self._name = name
        self._shape = shape
        self._known: dict[Operation, tuple[str, float]] = {}

    def seconds(self, operation: Operation) -> float:
        """As `Rates.seconds`."""
        if not operation.flops and not operation.num_bytes:
            return 0.0
        found = self._known.get(operation)
        if found is None:
            found = self._known[operation] = self._found(operation)
        kind, seconds = found
        self._rates.coverage[kind] += seconds
        return seconds

    def _found(self, operation: Operation) -> tuple[str, float]:
        if self._table is not None:
            return self._table.seconds(operation)
        return "rate", self._rates.roofline(operation, self._rate)

    @cached_property
    def _table(self) -> _Interpolated | None:
        table = self._rates.table(self._name, self._shape)
        return None if table is None else _Interpolated(table)

    @cached_property
    def _rate(self) -> Rate:
        return self._rates.rate(self._name, self._shape)


class _Interpolated:
    """One table, ready to be asked."""

    def __init__(self, table: Table) -> None:
        self.axes = table.axes
        self._exact = {tuple(point[:-1]): point[-1] for point in table.points}
        self._tree = _tree(sorted(table.points), len(table.axes))

    def seconds(self, operation: Operation) -> tuple[str, float]:
        work = float(operation.flops or operation.num_bytes)
        extents = [float(getattr(operation, axis)) for axis in self.axes]
        exact = self._exact.get((*extents, work))
        if exact is not None:
            return "exact", exact
        rate, is_inside = _rate(self._tree, extents)
        return "between" if is_inside else "beyond", work / rate


class _Axis:
    """Points of one axis: ascending positions, and below each a rate or the next axis."""

    def __init__(self, positions: list[float], below: list[_Axis | float]) -> None:
        self.positions = positions
        self.below = below


def _tree(points: Sequence[Sequence[float]], num_axes: int, axis: int = 0) -> _Axis:
    positions: list[float] = []
    below: list[_Axis | float] = []
    for position, group in groupby(points, key=lambda point: point[axis]):
        members = list(group)
        positions.append(position)
        if axis + 1 < num_axes:
            below.append(_tree(members, num_axes, axis + 1))
        else:
            # several points of one place (other work): their mean utilisation
            below.append(sum(point[-2] / point[-1] for point in members) / len(members))
    return _Axis(positions, below)


def _rate(tree: _Axis | float, extents: Sequence[float]) -> tuple[float, bool]:
    """Utilisation at a place, and whether the place lies inside the measured range of every axis."""
    if not isinstance(tree, _Axis):
        return tree, True
    place, rest = max(extents[0], 1.0), extents[1:]
    positions = tree.positions
    after = bisect_left(positions, place)
    if after < len(positions) and positions[after] == place:
        return _rate(tree.below[after], rest)
    if after == len(positions):
        return _rate(tree.below[-1], rest)[0], False
    if after == 0:
        first, _ = _rate(tree.below[0], rest)
        if len(positions) == 1 or positions[0] <= 0:
            return first, False
        second, _ = _rate(tree.below[1], rest)
        slope = min(max(log(second / first) / log(positions[1] / positions[0]), 0.0), 1.0)
        return first * (place / positions[0]) ** slope, False
    low, is_low_inside = _rate(tree.below[after - 1], rest)
    high, is_high_inside = _rate(tree.below[after], rest)
    start = log(max(positions[after - 1], 1.0))
    share = (log(place) - start) / (log(positions[after]) - start)
    return low + share * (high - low), is_low_inside and is_high_inside


class LinkRates:
    """Seconds of exchanges over one scope's links."""

    def __init__(self, links: Sequence[Link], name: str) -> None:
        self._links = links
        self._name = name

    def seconds(self, pattern: str, scope: str, *, ranks: int, num_bytes: int, messages: int = 1) -> float:
        """Seconds of one call that brings the fullest rank `num_bytes` in `messages`.

        Raises:
            ProfileError: no link of this pattern and scope.
        """
        if ranks <= 1 or not num_bytes:
            return 0.0
        link = self._link(pattern, scope, ranks)
        if link.bytes_per_s is not None:
            return link.latency_s * ceil(log2(ranks)) + link.message_s * messages + num_bytes / link.bytes_per_s
        return _between(link.points, num_bytes)

    def _link(self, pattern: str, scope: str, ranks: int) -> Link:
        for name in (pattern, "any"):
            fitting = [link for link in self._links if link.scope == scope and link.pattern == name]
            if fitting:
                return min(fitting, key=lambda link: abs(log(ranks / (link.ranks or ranks))))
        raise ProfileError(
            f"profile {self._name} has no link of pattern {pattern} and scope {scope}: add [[links]] with latency_s "
            f"and gb_per_s{' or [network] in the cluster file' if scope == 'network' else f' ({CALIBRATE})'}"
        )


def _between(points: Sequence[tuple[float, float]], num_bytes: int) -> float:
    """Measured seconds; between two points by bandwidth, below the first its seconds, beyond the last its bandwidth."""
    after = bisect_left(points, (num_bytes, 0.0))
    if after < len(points) and points[after][0] == num_bytes:
        return points[after][1]
    if after == 0:
        return points[0][1]
    low_bytes, low_s = points[after - 1]
    if after == len(points) or low_bytes <= 0:
        return num_bytes * low_s / low_bytes if low_bytes > 0 else points[min(after, len(points) - 1)][1]
    high_bytes, high_s = points[after]
    share = log(num_bytes / low_bytes) / log(high_bytes / low_bytes)
    low, high = low_bytes / low_s, high_bytes / high_s
    return num_bytes / (low + share * (high - low))
