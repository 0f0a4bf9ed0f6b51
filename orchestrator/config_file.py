"""A service's configuration from its TOML file: unknown and wrongly typed fields are refused by name."""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Mapping
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any, TypeVar

from longprefill.orchestrator.config import (
    ApiKey,
    ConfigError,
    DecodePool,
    ModelSection,
    PrefillPool,
    SchedulerSection,
    ServiceConfig,
    ServiceSection,
    TlsSection,
)
from longprefill.partition.errors import UserError

MAX_FILE_BYTES = 1 << 20
TABLES = ("model", "service", "tls", "auth", "prefill", "decode", "scheduler")
KINDS: Mapping[str, tuple[str, tuple[type, ...]]] = {
    "int": ("a whole number", (int,)),
    "float": ("a number", (int, float)),
    "str": ("a text", (str,)),
    "bool": ("true or false", (bool,)),
    "LayoutKind": ("a text", (str,)),
    "Mapping[str, float]": ("a table of numbers", (dict,)),
    "Mapping[str, str]": ("a table of texts", (dict,)),
}
"""By a field's annotation: what a person calls it, and what TOML makes of it."""

Section = TypeVar("Section")


def read_service_config(path: str | Path) -> ServiceConfig:
    """The configuration of a file. Relative paths in it are relative to the file.

    Raises:
        ConfigError: it cannot be read, or has an unknown, missing or impossible field.
    """
    path = Path(path).absolute()
    try:
        if path.stat().st_size > MAX_FILE_BYTES:
            raise ConfigError(f"--config {path} has more than {MAX_FILE_BYTES} bytes: is it a configuration?")
        content = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"--config {path} cannot be read: {error.strerror}") from None
    except (UnicodeDecodeError, tomllib.TOMLDecodeError, RecursionError) as error:
        raise ConfigError(f"--config {path} is not TOML: {error}") from None
    try:
        return _config(content, path.parent)
    except UserError as error:
        raise ConfigError(f"--config {path}: {error}") from None


def _config(content: dict[str, Any], folder: Path) -> ServiceConfig:
    _refuse_unknown("the file", content, TABLES)
    for name in ("model", "service"):
        if name not in content:
            raise ConfigError(f"[{name}] is missing")
    model = _paths(_table("[model]", content["model"]), ("dir",), folder)
    service = _paths(_table("[service]", content["service"]), ("state_dir",), folder)
    scheduler = _table("[scheduler]", content.get("scheduler", {}))
    if str(scheduler.get("profile", "")).endswith((".toml", ".json")):  # else the name of a shipped one
        scheduler = _paths(scheduler, ("profile",), folder)
    tls = content.get("tls")
    auth = _table("[auth]", content.get("auth", {}))
    _refuse_unknown("[auth]", auth, ("keys",))
    return ServiceConfig(
        model=_section("[model]", ModelSection, model),
        service=_section("[service]", ServiceSection, service),
        prefill=tuple(_section("[[prefill]]", PrefillPool, pool) for pool in _tables(content, "prefill")),
        decode=tuple(_section("[[decode]]", DecodePool, pool) for pool in _tables(content, "decode")),
        scheduler=_section("[scheduler]", SchedulerSection, scheduler),
        tls=None
        if tls is None
        else _section("[tls]", TlsSection, _paths(_table("[tls]", tls), ("certificate", "key"), folder)),
        keys=tuple(_section("[auth] keys", ApiKey, key) for key in _tables(auth, "keys")),
    )


def _tables(content: Mapping[str, Any], name: str) -> list[dict[str, Any]]:
    given = content.get(name, [])
    if not isinstance(given, list) or not all(isinstance(item, dict) for item in given):
        raise ConfigError(f"{name}: write each as a table of its own, [[{name}]]")
    return given


def _table(where: str, given: object) -> dict[str, Any]:
    if not isinstance(given, dict):
        raise ConfigError(f"{where}: need a table of fields, not {given!r}")
    return dict(given)


def _paths(table: dict[str, Any], names: tuple[str, ...], folder: Path) -> dict[str, Any]:
    """The table with these fields made absolute."""
    return table | {
        name: str(folder / Path(table[name]).expanduser())
        for name in names
        if isinstance(table.get(name), str) and table[name]
    }


def _section(where: str, kind: type[Section], given: dict[str, Any]) -> Section:
    allowed = {item.name: item for item in fields(kind)}  # pyright: ignore[reportArgumentType]
    _refuse_unknown(where, given, tuple(allowed))
    values = {name: _checked(f"{where} {name}", value, str(allowed[name].type)) for name, value in given.items()}
    for name, item in allowed.items():
        if name not in values and item.default is MISSING and item.default_factory is MISSING:
            raise ConfigError(f"{where} {name} is missing")
    return kind(**values)


def _refuse_unknown(where: str, given: Mapping[str, object], allowed: tuple[str, ...]) -> None:
    for name in given:
        if name not in allowed:
            close = difflib.get_close_matches(name, allowed, 1)
            hint = f" (did you mean {close[0]}?)" if close else ""
            raise ConfigError(f"{where}: {name} is unknown{hint}: use {', '.join(allowed)}")


def _checked(where: str, value: object, annotation: str) -> object:
    """The value, when it is of the field's kind; whole numbers pass for fractions."""
    name, kinds = KINDS[annotation.removesuffix(" | None")]
    is_right = isinstance(value, kinds) and (bool in kinds or not isinstance(value, bool))
    if is_right and isinstance(value, dict):
        inner = (str,) if annotation.endswith("str]") else (int, float)
        is_right = all(isinstance(item, inner) and not isinstance(item, bool) for item in value.values())
    if not is_right:
        raise ConfigError(f"{where}={value!r}: need {name}")
    return float(value) if annotation.startswith("float") and isinstance(value, int) else value
