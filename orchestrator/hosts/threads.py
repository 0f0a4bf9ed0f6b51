"""Which threads of a host's actor serve a method: Ray's concurrency groups, without hiding the method's type."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import ray

F = TypeVar("F", bound=Callable[..., Any])


def served_by(group: str) -> Callable[[F], F]:
    """Marks a method of an actor's class; without an actor it stays what it is."""

    def mark(method: F) -> F:
        marked: Any = ray.method(concurrency_group=group)(method)
        return marked

    return mark
