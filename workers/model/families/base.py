"""What a family is: a config reader, and for every canonical parameter the stored tensors that it is made of."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from longprefill.workers.model.config import ModelConfig
from longprefill.workers.model.parameters import Shape


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One stored tensor and the rows of a canonical parameter that it fills."""

    names: tuple[str, ...]
    """Spellings, the published one first; a leading `model.` stands for any of the family's `body_prefixes`."""
    shape: Shape
    """What it must have, apart from dimensions of size 1. The first dimension counts rows."""
    row: int
    """First row that it fills."""
    expert: int | None = None
    """Fill rows of this expert's matrix (the parameter's first dimension counts experts); None: of the parameter."""
    can_be_longer: bool = False
    """The stored tensor may have more rows; the first ones are live."""


Alternative = tuple[Part, ...]
"""Parts that together fill a parameter."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Location:
    """Where a canonical parameter is: the first alternative whose tensors are all there holds it. The first is the one
    that `checkpoint.py` writes."""

    shape: Shape
    alternatives: tuple[Alternative, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """One row of the registry."""

    model_type: str
    """As in config.json."""
    read_config: Callable[[Mapping[str, Any]], ModelConfig]
    """From the parsed config.json. Raises `ModelError`."""
    locate: Callable[[ModelConfig], dict[str, Location]]
    """One `Location` for every name of `parameter_shapes(config)`."""
    body_prefixes: tuple[str, ...] = ("model.", "")
    """What tensors of the body (all but the head) may begin with, the published prefix first."""
    foreign_prefixes: tuple[str, ...] = ()
    """Beginnings of tensors that belong to parts which are not read, as a vision tower."""

    def spellings(self, name: str) -> tuple[str, ...]:
        """Every name under which the tensor that `Part.names` calls `name` may be stored, the published one first."""
        if not name.startswith("model."):
            return (name,)
        return tuple(prefix + name.removeprefix("model.") for prefix in self.body_prefixes)
