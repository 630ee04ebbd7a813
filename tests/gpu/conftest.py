"""Tests that need a CUDA GPU and vLLM's CUDA build; everywhere else they are skipped."""

import os
from pathlib import Path

import pytest
import torch

os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")  # it would compile for minutes
HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.parent == HERE:
            mark = item.get_closest_marker("gpus")
            needed = mark.args[0] if mark else 1
            if torch.cuda.device_count() < needed:
                item.add_marker(pytest.mark.skip(reason=f"needs {needed} CUDA GPU"))
