"""Models by name: published configs that come with the package, or a directory's config.json. No weights are needed."""

from __future__ import annotations

from pathlib import Path

from longprefill.partition.errors import ModelError
from longprefill.workers.model.config import ModelConfig
from longprefill.workers.model.families.registry import config_from, read_config, read_object

SHIPPED = Path(__file__).parent / "models"


def shipped_models() -> tuple[str, ...]:
    """Names of the configs that come with the package."""
    return tuple(sorted(path.stem for path in SHIPPED.glob("*.json")))


def find_model(name: str) -> ModelConfig:
    """The config of a shipped name or of a directory with a config.json.

    Raises:
        ModelError: neither, with what there is; or a config that no family takes.
    """
    if Path(name).is_dir():
        return read_config(Path(name))
    if name in shipped_models():
        return config_from(read_object(SHIPPED / f"{name}.json"))
    raise ModelError(f"model {name} is neither a directory with a config.json nor one of {', '.join(shipped_models())}")
