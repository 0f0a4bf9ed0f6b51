"""Pools that end with their test."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from longprefill.comms.transport.holder import Pool, create_pool


@pytest.fixture
def make_pool(tmp_path: Path) -> Iterator[Callable[..., Pool]]:
    made = []

    def make(num_bytes: int, label: str = "test") -> Pool:
        pool = create_pool(num_bytes, label=label, directory=tmp_path)
        made.append(pool)
        return pool

    yield make
    for pool in made:
        pool.close()
        pool.unlink()
