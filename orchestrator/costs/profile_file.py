"""Device profiles as files: TOML for hands, JSON for `longprefill bench --calibrate`; the same fields in both.

name, source, memory_gib or memory_bytes, memory_gb_per_s or memory_bytes_per_s
[rates.CLASS]   flops_per_s (or tflops_per_s), efficiency, memory_efficiency, call_s, chain_s
[[tables]]      op, shape, axes, points, copies, spread
[[links]]       pattern, scope, ranks, latency_s, message_s, bytes_per_s (or gb_per_s), points
[overheads]     step_s, layer_s, overlap
[measured]      anything: date, commit, machine, versions, seed
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any, TypeVar

from longprefill.orchestrator.costs.profile import (
    CLASSES,
    DeviceProfile,
    Link,
    Overheads,
    ProfileError,
    Rate,
    Table,
)
from longprefill.partition.operations import AXES, OPERATIONS

SHIPPED = Path(__file__).parent / "profiles"
"""Profiles that come with the package, by file name."""
SUFFIXES = (".toml", ".json")
UNITS = {"_gib": ("_bytes", 1 << 30), "gb_per_s": ("bytes_per_s", 1e9), "tflops_per_s": ("flops_per_s", 1e12)}
"""Other spellings of fields."""

Record = TypeVar("Record")


def shipped_profiles() -> tuple[str, ...]:
    """Names of the profiles that come with the package."""
    return tuple(sorted(path.stem for path in SHIPPED.iterdir() if path.suffix in SUFFIXES))


def find_profile(name: str, beside: Path | None = None) -> DeviceProfile:
    """The profile of a name: a shipped one, or a file (with a suffix), which may lie in the directory `beside`.

    Raises:
        ProfileError: there is none of that name; it lists those that exist.
    """
    if not name.endswith(SUFFIXES):
        for suffix in SUFFIXES:
            if name in shipped_profiles() and (SHIPPED / f"{name}{suffix}").exists():
                return read_profile(SHIPPED / f"{name}{suffix}")
        raise ProfileError(
            f"device {name!r} is not known: use {', '.join(shipped_profiles())}, or a profile's FILE.toml or FILE.json "
            "(longprefill bench --calibrate FILE.json measures this machine)"
        )
    path = Path(name)
    if beside is not None and not path.is_absolute():
        path = beside / path
    return read_profile(path)


def read_profile(path: Path) -> DeviceProfile:
    """The profile in a file, TOML or JSON by its suffix.

    Raises:
        ProfileError: unreadable, or an unknown, missing or impossible field, named.
    """
    where = f"profile {path}"
    try:
        text = path.read_text(encoding="utf-8")
        content = json.loads(text) if path.suffix == ".json" else tomllib.loads(text)
    except OSError as error:
        raise ProfileError(f"{where} cannot be read: {error.strerror}: give the path of a profile") from None
    except (UnicodeDecodeError, ValueError, RecursionError) as error:
        raise ProfileError(f"{where} is not valid {path.suffix[1:].upper() or 'TOML'}: {error}") from None
    return profile_from(content, where)


def profile_from(content: object, where: str = "profile") -> DeviceProfile:
    """The profile that a parsed file describes.

    Raises:
        ProfileError: an unknown, missing or impossible field, named.
    """
    given = dict(_mapping(where, content))
    given_rates = _mapping(f"{where} [rates]", given.pop("rates", {}))
    for name in given_rates:
        if name not in CLASSES and name not in OPERATIONS:
            raise ProfileError(f"{where} [rates.{name}] is unknown: use {', '.join(CLASSES)}, or an operation")
    rates = {name: _record(f"{where} [rates.{name}]", Rate, rate) for name, rate in given_rates.items()}
    tables = tuple(_table(f"{where} [[tables]] {n}", item) for n, item in _items(where, given, "tables"))
    links = tuple(
        _record(f"{where} [[links]] {n}", Link, {**item, "points": _points(f"{where} [[links]] {n}", item)})
        for n, item in _items(where, given, "links")
    )
    overheads = _record(f"{where} [overheads]", Overheads, given.pop("overheads", {}))
    measured = _mapping(f"{where} [measured]", given.pop("measured", {}))
    parts = {"rates": rates, "tables": tables, "links": links, "overheads": overheads, "measured": measured}
    return _record(where, DeviceProfile, given, parts)


def write_profile(path: Path, profile: DeviceProfile) -> None:
    """Writes a profile as JSON, in canonical fields.

    Raises:
        OSError: the file cannot be written.
    """
    path.write_text(json.dumps(asdict(profile), indent=1) + "\n", encoding="utf-8")


def _table(where: str, item: Mapping[str, Any]) -> Table:
    op = item.get("op")
    if op not in CLASSES and op not in OPERATIONS:
        raise ProfileError(f"{where}: op={op!r} is unknown: use {', '.join((*OPERATIONS, *CLASSES))}")
    axes = item.get("axes", ["rows"])
    if not isinstance(axes, list) or not axes or any(axis not in AXES for axis in axes) or len(set(axes)) < len(axes):
        raise ProfileError(f"{where}: axes={axes!r}: use a list of {', '.join(AXES)}")
    shape = _mapping(f"{where}: shape", item.get("shape", {}))
    if any(not isinstance(value, int | str) or isinstance(value, bool) for value in shape.values()):
        raise ProfileError(f"{where}: shape={dict(shape)!r}: need whole numbers and words")
    return _record(where, Table, {**item, "axes": tuple(axes), "shape": shape, "points": _points(where, item)})


def _points(where: str, item: Mapping[str, Any]) -> tuple[tuple[float, ...], ...]:
    points = item.get("points", [])
    if not isinstance(points, list) or not all(
        isinstance(point, list) and point and all(_is_number(value) for value in point) for point in points
    ):
        raise ProfileError(f"{where}: points={str(points)[:60]}: need a list of lists of numbers")
    return tuple(tuple(point) for point in points)


def _items(where: str, given: dict[str, Any], name: str) -> list[tuple[int, Mapping[str, Any]]]:
    items = given.pop(name, [])
    if not isinstance(items, list):
        raise ProfileError(f"{where}: {name}={items!r}: need a list of tables")
    return [(n, _mapping(f"{where} [[{name}]] {n}", item)) for n, item in enumerate(items)]


def _mapping(where: str, value: object) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise ProfileError(f"{where}: need a table of fields, not {value!r}")
    return value


def _record(where: str, kind: type[Record], given: object, parts: Mapping[str, object] | None = None) -> Record:
    """The dataclass with the given fields, under any of their spellings, and parts that are ready."""
    allowed = {item.name: str(item.type) for item in fields(kind)}  # pyright: ignore[reportArgumentType]
    values: dict[str, Any] = dict(parts or {})
    for name, value in _mapping(where, given).items():
        field, factor = name, None
        for ending, (canonical, unit) in UNITS.items():
            if name not in allowed and name.endswith(ending) and name.removesuffix(ending) + canonical in allowed:
                field, factor = name.removesuffix(ending) + canonical, unit
        if field not in allowed:
            raise ProfileError(f"{where}: {name} is unknown: use {', '.join(sorted(allowed))}")
        if field in values:
            raise ProfileError(f"{where}: {name} is given twice")
        values[field] = _checked(f"{where}: {name}", value, allowed[field], factor)
    try:
        return kind(**values)
    except TypeError as error:
        raise ProfileError(f"{where}: {str(error).partition(') ')[2]}") from None
    except ProfileError as error:
        raise error if str(error).startswith(where) else ProfileError(f"{where}: {error}") from None


def _checked(where: str, value: object, annotation: str, factor: float | None) -> object:
    """The value in the field's unit, when it is of the field's kind."""
    if value is None and annotation.endswith("None"):
        return None
    wanted = annotation.removesuffix(" | None")
    if wanted == "str" and not isinstance(value, str):
        raise ProfileError(f"{where}={value!r}: need a word")
    if wanted not in ("int", "float"):
        return value
    is_whole = wanted == "int"
    if (
        isinstance(value, bool)
        or not isinstance(value, int | float)
        or (is_whole and factor is None and not isinstance(value, int))
    ):
        raise ProfileError(f"{where}={value!r}: need a {'whole ' if is_whole else ''}number")
    scaled = value * (factor or 1)
    return int(scaled) if is_whole and abs(scaled) < float("inf") else scaled


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
