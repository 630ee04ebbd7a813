"""Weights decide what is found in a store that lasts: all their bytes, and nothing of where they lie."""

import json
import os
import shutil
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from vllm_engine import MODEL

from manthan.vllm_hooks.worker.weights import Loaded

SCRIPT = """
import json, sys
from vllm import LLM, SamplingParams
from manthan.vllm_hooks import kv_transfer_config
from manthan.vllm_hooks.worker.weights import loaded_digest
model, disk, tokens = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])
transfer = kv_transfer_config(
    min_tokens=64, idle_after_s=0.1, sweep_interval_s=0.05,
    cold_store={"kind": "disk", "max_bytes": "64MiB"}, disk={"path": disk, "sync_s": 0},
)
llm = LLM(
    model, block_size=32, enforce_eager=True, max_model_len=1024, kv_transfer_config=transfer, skip_tokenizer_init=True
)
one = SamplingParams(temperature=0, max_tokens=1, detokenize=False)
def ask(tokens):
    return llm.generate([{"prompt_token_ids": tokens}], one, use_tqdm=False)[0].num_cached_tokens
found = ask(tokens)
half = llm.llm_engine.engine_core.engine_core.scheduler.connector.scheduler
import time
end = time.monotonic() + 30
while not half.manager.usage.cold_blocks and time.monotonic() < end:
    time.sleep(0.1)
    ask([5] * 40)
for _ in range(2):  # what is cold is written down with the next steps
    ask([5] * 40)
    time.sleep(0.5)
print("FOUND", json.dumps([found, half.manager.usage.cold_blocks, llm.collective_rpc(loaded_digest)]))
llm.llm_engine.engine_core.shutdown()
"""


def tensors(path: Path) -> dict[str, tuple[int, int]]:
    """Where each tensor of a safetensors file lies."""
    data = path.read_bytes()
    (size,) = struct.unpack("<Q", data[:8])
    head = json.loads(data[8 : 8 + size])
    return {
        n: (8 + size + t["data_offsets"][0], 8 + size + t["data_offsets"][1]) for n, t in head.items() if n[0] != "_"
    }


def flip(path: Path, name: str) -> None:
    """Change the sign of a tensor's last number."""
    data = bytearray(path.read_bytes())
    data[tensors(path)[name][1] - 1] ^= 0x80
    path.write_bytes(data)


def start(model: Path, disk: Path) -> tuple[int, int, str]:
    """What an engine finds of a prompt that an earlier one left; then how many blocks are cold, and what it loaded."""
    tokens = np.fromfile(Path(MODEL) / "held_tokens.u16", np.uint16)[:600].tolist()
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(model), str(disk), json.dumps(tokens)],
        env=os.environ | {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("FOUND")]
    assert lines, done.stdout[-2000:] + done.stderr[-3000:]
    found, cold, digests = json.loads(lines[-1][6:])
    return found, cold, digests[0]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return Path(shutil.copytree(MODEL, tmp_path / "model"))


def test_other_weights_in_the_same_place_find_nothing(model: Path, tmp_path: Path) -> None:
    (disk := tmp_path / "disk").mkdir()
    found, cold, digest = start(model, disk)
    assert (found, cold > 0) == (0, True)
    assert start(model, disk)[::2] == (576, digest)
    flip(model / "model.safetensors", "model.layers.0.self_attn.v_proj.weight")
    found, _, other = start(model, disk)
    assert found == 0
    assert other != digest


@pytest.mark.slow
def test_each_tensor_counts(model: Path, tmp_path: Path) -> None:
    (disk := tmp_path / "disk").mkdir()
    _, cold, digest = start(model, disk)
    assert cold
    path, seen = model / "model.safetensors", {digest}
    whole = path.read_bytes()
    for name in (names := tensors(path)):
        path.write_bytes(whole)
        flip(path, name)
        found, _, other = start(model, disk)
        assert found == 0, name
        assert other not in seen, name
        seen.add(other)
    assert len(names) == 38


class Model(torch.nn.Module):
    """Keeps nothing of what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.kept = torch.nn.Parameter(torch.ones(3))

    def load_weights(self, weights: Any) -> set[str]:
        return {name for name, _ in weights}


def digest_of(weights: dict[str, torch.Tensor]) -> str:
    loaded, model = Loaded(), Model()
    loaded.watch(model, "model")
    model.load_weights(iter(weights.items()))
    assert loaded.loads == 1
    return loaded.digest()


def test_the_digest_is_of_names_shapes_dtypes_and_all_bytes_in_any_order() -> None:
    a, b = torch.arange(6.0), torch.ones(4, dtype=torch.bfloat16)
    right = digest_of({"a": a, "b": b})
    assert right == digest_of({"b": b.clone(), "a": a.clone()})
    last = a.clone()
    last[-1] = torch.nextafter(last[-1], torch.tensor(0.0))
    others = [{"a": last, "b": b}, {"a": a.view(2, 3), "b": b}, {"a": a, "b": b.view(torch.float16)}, {"a": b, "b": a}]
    assert len({right, *map(digest_of, others)}) == 5


def test_where_a_loader_bypasses_the_model_its_tensors_count() -> None:
    loaded, model = Loaded(), Model()
    loaded.watch(model, "model")
    before = loaded.digest()
    model.kept.data[1] = 2
    assert loaded.digest() != before
