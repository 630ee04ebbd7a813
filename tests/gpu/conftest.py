"""Tests that need a CUDA GPU and vLLM's CUDA build; nothing is collected where there is none."""

import os
from pathlib import Path

import pytest
import torch

os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")  # it would compile for minutes
HERE = Path(__file__).parent
collect_ignore_glob = [] if torch.cuda.is_available() else ["test_*.py"]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.parent == HERE:
            mark = item.get_closest_marker("gpus")
            if mark and torch.cuda.device_count() < mark.args[0]:
                item.add_marker(pytest.mark.skip(reason=f"needs {mark.args[0]} GPUs"))
