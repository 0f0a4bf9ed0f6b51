"""What every controller here is made of."""

from __future__ import annotations

from pathlib import Path

import pytest

from longprefill.orchestrator.config import ServiceConfig

from .cases import make_config, make_model
from .cluster_double import ClusterDouble


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture
def config(model: Path, tmp_path: Path) -> ServiceConfig:
    return make_config(model, tmp_path / "state", trace=True)


@pytest.fixture
def cluster() -> ClusterDouble:
    return ClusterDouble()
