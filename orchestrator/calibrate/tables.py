"""From timed steps to the tables of a device profile: seconds meet what the work model counts for the same step."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from longprefill.orchestrator.calibrate.samples import StepSample, TimedStep
from longprefill.orchestrator.costs.profile import Table
from longprefill.partition.generators import generate
from longprefill.partition.operations import LayerPlace, Operation, edge_operations, layer_operations, operation_shape
from longprefill.partition.shapes import LayerShape, MlaShape, ModelShape

TWO_AXES = ("indexer", "attention.dense", "attention.short", "attention.sparse")
"""Operations whose speed depends on the visible keys too; their points lie on a grid of rows by keys."""
SHORTEST_S = 1e-7
"""What the clock cannot see counts as this."""

ShapeKey = tuple[tuple[str, int | str], ...]
Samples = dict[tuple[float, ...], list[float]]
"""Seconds by extents and work."""


@dataclass(frozen=True, slots=True)
class Point:
    """One measured call: `operation` of the work model, at a shape, while `copies` ranks ran the same."""

    operation: Operation
    shape: ShapeKey
    copies: int
    seconds: float


def shape_key(name: str, layer: LayerShape, model: ModelShape) -> ShapeKey:
    """Dimensions of an operation as something to group by."""
    return tuple(sorted(operation_shape(name, layer, model).items()))


def step_points(step: TimedStep, sample: StepSample, model: ModelShape, copies: int) -> list[Point]:
    """What one sample says of every operation. `model` is the reduced model's shape.

    Raises:
        ValueError: the engine ran an operation another number of times than the work model counts.
    """
    layout = generate(step.layout, step.slices, step.num_ranks)
    norms_s = min(sum(layer.get("norms", ())) for layer in sample.layers)
    points: list[Point] = []
    for layer, found in zip(model.layers, sample.layers, strict=True):
        counted: dict[str, list[Operation]] = defaultdict(list)
        for operation in layer_operations(layout, layer, model, LayerPlace())[step.rank].all:
            if _selects(operation, layer):
                counted[operation.name].append(operation)
        output = "mla.output" if isinstance(layer.mixer, MlaShape) else "kda.output"
        measured = dict(found)
        # what an attention layer copies between its spans belongs to it, not to the norms that every layer has
        measured[output] = (sum(found[output]) + sum(found["norms"]) - norms_s,)
        measured["norms"] = (norms_s,)
        for name, seconds in measured.items():
            if name in TWO_AXES and not step.is_on_grid:
                continue
            points += _points(name, counted[name], seconds, shape_key(name, layer, model), copies)
    embed, _ = edge_operations(layout, model, 1, 0)
    return points + _points("embed", [embed], [sample.outside_s], shape_key("embed", model.layers[0], model), copies)


def tables(points: Iterable[Point]) -> tuple[Table, ...]:
    """One table an operation, shape and number of copies: medians of what was measured at the same extents."""
    groups: dict[tuple[str, ShapeKey, int], dict[tuple[float, ...], list[float]]] = defaultdict(
        lambda: defaultdict(list)
    )
    for point in points:
        operation = point.operation
        work = float(operation.flops or operation.num_bytes)
        extents = tuple(float(getattr(operation, axis)) for axis in _axes(operation.name))
        groups[operation.name, point.shape, point.copies][(*extents, work)].append(point.seconds)
    made: list[Table] = []
    for (name, shape, copies), found in groups.items():
        spread = max((max(values) - min(values)) / statistics.median(values) for values in found.values())
        rows = tuple(sorted((*place, statistics.median(values)) for place, values in found.items()))
        made.append(
            Table(op=name, shape=dict(shape), axes=_axes(name), points=rows, copies=copies, spread=round(spread, 4))
        )
    return tuple(made)


def _axes(name: str) -> tuple[str, ...]:
    if name == "kda.fold":
        return ("parts",)
    return ("rows", "keys") if name in TWO_AXES else ("rows",)


def _points(
    name: str, counted: Sequence[Operation], seconds: Sequence[float], shape: ShapeKey, copies: int
) -> list[Point]:
    """Calls in the order of the work model's operations; what the model does not count is left out."""
    if not counted:
        return []
    if len(counted) != len(seconds):
        raise ValueError(f"{name}: {len(seconds)} calls were timed, the work model counts {len(counted)}")
    return [
        Point(operation, shape, copies, max(time_s, SHORTEST_S))
        for operation, time_s in zip(counted, seconds, strict=True)
        if _is_typical(operation, shape)
    ]


def _selects(operation: Operation, layer: LayerShape) -> bool:
    """False for an indexer whose rows all see top-k keys or fewer: the model counts it, the engine leaves it out."""
    if operation.name != "indexer" or not isinstance(layer.mixer, MlaShape) or layer.mixer.indexer is None:
        return True
    return _start(operation) + operation.rows > layer.mixer.indexer.topk


def _is_typical(operation: Operation, shape: ShapeKey) -> bool:
    """Rows of a fragment in which top-k begins are on no grid, and those before it are neither indexed nor chosen."""
    if operation.name in ("indexer", "attention.sparse"):
        return _start(operation) > int(dict(shape)["index_topk"])
    return operation.rows > 0 or operation.parts > 0


def _start(operation: Operation) -> int:
    """Position of the first row, of an operation that tells what its rows see on average."""
    return operation.keys - (operation.rows + 1) // 2
