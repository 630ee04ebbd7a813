"""Tests that need a CUDA GPU and vLLM's CUDA build; everywhere else they are skipped."""

import os

import pytest
import torch

os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")  # it would compile for minutes
HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    missing = "no CUDA GPU here" if not torch.cuda.is_available() else None
    for item in items:
        if missing and item.path.parent == HERE:
            item.add_marker(pytest.mark.skip(reason=missing))
        elif item.get_closest_marker("gpus") and torch.cuda.device_count() < 2:
            item.add_marker(pytest.mark.skip(reason="one GPU only"))
