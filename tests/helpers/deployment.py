"""What is in deploy/, and how a part of it is run here."""

import importlib.util
import shlex
from pathlib import Path
from types import ModuleType
from typing import Any

import yaml

REPO = Path(__file__).parents[2]
DEPLOY = REPO / "deploy"


def load(path: str) -> Any:
    """A YAML file of deploy/."""
    return yaml.safe_load((DEPLOY / path).read_text(encoding="utf-8"))


def alerts() -> list[dict[str, Any]]:
    """The alert rules."""
    return [rule for group in load("prometheus/alerts.yaml")["groups"] for rule in group["rules"]]


def script(path: Path) -> ModuleType:
    """A script of the repository as a module."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def served_with() -> dict[str, list[str]]:
    """What each way to deploy gives `vllm serve`, after the model."""
    engine = load("kubernetes/production-stack.yaml")["servingEngineSpec"]["modelSpec"][0]
    unit = (DEPLOY / "systemd" / "vllm-manthan.service").read_text(encoding="utf-8")
    start = shlex.split(next(line for line in unit.splitlines() if line.startswith("ExecStart=")))
    return {
        "compose": load("compose.yaml")["services"]["vllm"]["command"][1:],
        "production-stack": ["--enable-prefix-caching", *engine["vllmConfig"]["extraArgs"]],
        "systemd": start[3:],
    }
