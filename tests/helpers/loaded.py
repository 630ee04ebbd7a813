"""Configurations for tests."""

from collections.abc import Mapping
from pathlib import Path

from manthan.manager.config.model import ManthanConfig
from manthan.manager.config.resolve import resolve_config


def load_config(
    path: str | Path | None = None,
    *,
    env: Mapping[str, str] | None = None,
    flags: Mapping[str, object] | None = None,
) -> ManthanConfig:
    """Return the configuration alone; see `resolve_config`."""
    return resolve_config(path, env=env, flags=flags).config
