"""Weights decide what is found in a store that lasts: all their bytes, and nothing of where they lie."""

import json
import shutil
import struct
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from vllm_engine import BLOCK, GPU_BYTES, MODEL, fork_engines

from manthan.vllm_hooks import kv_transfer_config
from manthan.vllm_hooks.queries import METHOD
from manthan.vllm_hooks.worker.weights import (
    PIECE_BYTES,
    Loaded,
    _sums,
    loaded_digest,
    loaded_of,
    tensor_digest,
    watch_model,
)


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


class Start(NamedTuple):
    """What came of an engine that was started and stopped again."""

    found: int
    """Tokens of a prompt that an earlier engine had left."""
    digests: list[str]
    """What each rank has loaded."""


def start(model: Path, disk: Path, **options: Any) -> Start:
    """Start an engine, ask, and stop it when the session is cold. options: further ones of vLLM's."""
    from vllm import LLM, SamplingParams

    fork_engines()
    transfer = kv_transfer_config(
        idle={"after_s": 0.1, "min_tokens": 64},
        tiers={"kind": "disk", "max_bytes": "64MiB", "disk": {"path": str(disk)}},
    )
    llm = LLM(
        str(model),
        block_size=BLOCK,
        num_gpu_blocks_override=64,
        max_model_len=1024,
        enforce_eager=True,
        gpu_memory_utilization=0.2,
        kv_cache_memory_bytes=GPU_BYTES,
        kv_transfer_config=transfer,
        skip_tokenizer_init=True,
        **options,
    )
    client: Any = llm.llm_engine.engine_core
    params = SamplingParams(temperature=0, max_tokens=1, detokenize=False)

    def ask(tokens: list[int]) -> int:
        [output] = llm.generate([{"prompt_token_ids": tokens}], params, use_tqdm=False)
        assert output.num_cached_tokens is not None
        return output.num_cached_tokens

    try:
        found = ask(np.fromfile(Path(MODEL) / "held_tokens.u16", np.uint16)[:600].tolist())
        until = time.monotonic() + 60
        while not json.loads(client.call_utility(METHOD, "state", {"bound": None}))["sessions"]["cold"]:
            assert time.monotonic() < until
            time.sleep(0.05)
        for _ in range(2):  # what is cold is written down with the next steps
            ask([5] * 40)
        return Start(found, llm.collective_rpc(loaded_digest))
    finally:
        client.shutdown()


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return Path(shutil.copytree(MODEL, tmp_path / "model"))


@pytest.mark.slow
def test_other_weights_in_the_same_place_find_nothing(model: Path, tmp_path: Path) -> None:
    (disk := tmp_path / "disk").mkdir()
    found, [digest] = start(model, disk)
    assert found == 0
    assert start(model, disk) == (576, [digest])
    flip(model / "model.safetensors", "model.layers.0.self_attn.v_proj.weight")
    found, [other] = start(model, disk)
    assert found == 0
    assert other != digest


@pytest.mark.slow
def test_each_tensor_counts(model: Path, tmp_path: Path) -> None:
    """Each engine leaves a session that it finds again itself; the next one, of other weights, does not."""
    (disk := tmp_path / "disk").mkdir()
    path = model / "model.safetensors"
    whole, seen = path.read_bytes(), set(start(model, disk).digests)
    for name in (names := tensors(path)):
        path.write_bytes(whole)
        flip(path, name)
        found, [digest] = start(model, disk)
        assert found == 0, name
        assert digest not in seen, name
        seen.add(digest)
    assert start(model, disk) == (576, [digest])
    assert len(names) == 38


@pytest.mark.slow
def test_the_digest_is_the_same_for_each_number_of_ranks(model: Path, tmp_path: Path) -> None:
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
    [digest] = start(model, tmp_path / "one").digests
    assert start(model, tmp_path / "two", tensor_parallel_size=2).digests == [digest] * 2


@pytest.mark.slow
def test_weights_that_lie_in_no_file_count_like_others(model: Path, tmp_path: Path) -> None:
    """A loader that vLLM was given brings them from somewhere else than the model's folder."""
    (disk := tmp_path / "disk").mkdir()
    [digest] = start(model, disk).digests
    source = (model / "model.safetensors").rename(tmp_path / "elsewhere")
    remote = {
        "load_format": "remote",
        "model_loader_extra_config": {"source": str(source)},
        "worker_extension_cls": "remote_weights.Extension",
    }
    assert start(model, disk, **remote) == (576, [digest])
    flip(source, "model.norm.weight")
    found, [other] = start(model, disk, **remote)
    assert found == 0
    assert other != digest


class Model(torch.nn.Module):
    """Keeps nothing of what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.kept = torch.nn.Parameter(torch.ones(3))

    def load_weights(self, weights: Any) -> set[str]:
        return {name for name, _ in weights}


def digest_of(weights: dict[str, torch.Tensor], engine: str = "an engine") -> str:
    loaded, model = Loaded(engine), Model()
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


def test_a_view_of_a_buffer_of_several_tensors_can_be_summed() -> None:
    buffer = torch.arange(40_000, dtype=torch.int32)
    assert list(_sums(buffer[1:].view(torch.uint8))) == list(_sums(buffer[1:].clone().view(torch.uint8)))


def test_each_piece_of_a_large_tensor_counts() -> None:
    numbers = torch.zeros(2 * PIECE_BYTES + 5, dtype=torch.uint8)
    digests = {tensor_digest(numbers)}
    for at in (0, PIECE_BYTES - 1, PIECE_BYTES, len(numbers) - 1):
        numbers[at] = 1
        digests.add(tensor_digest(numbers))
        numbers[at] = 0
    assert len(digests) == 5
    assert tensor_digest(numbers) in digests


def test_where_a_loader_bypasses_the_model_its_tensors_count() -> None:
    digests, model = set(), Model()
    for number in (1, 2, 2):
        model.kept.data[1] = number
        loaded = Loaded("an engine")
        loaded.watch(model, "model")
        digests.add(loaded.digest())
    assert len(digests) == 2


def test_what_is_loaded_later_is_only_counted() -> None:
    loaded, model = Loaded("an engine"), Model()
    loaded.watch(model, "model")
    model.load_weights(iter({"a": torch.ones(3)}.items()))
    before = loaded.digest()
    model.load_weights(iter({"a": torch.zeros(3)}.items()))
    assert (loaded.digest(), loaded.loads) == (before, 2)


def test_weights_that_nobody_saw_are_those_of_no_other_engine() -> None:
    transfers = [SimpleNamespace(engine_id=name) for name in ("a", "a", "b")]
    engines: Any = [SimpleNamespace(kv_transfer_config=each, instance_id="c") for each in transfers]
    digests = [loaded_of(engine).digest() for engine in engines]
    assert digests[0] == digests[1] != digests[2], "two ranks of an engine, and another engine"


def test_weights_that_cannot_be_read_are_loaded_all_the_same() -> None:
    made_up: Any = {"a": torch.empty(3, device="meta")}
    assert digest_of(made_up, "one") == digest_of(made_up, "one") != digest_of(made_up, "another")


def test_a_draft_is_loaded_beside_the_model() -> None:
    """vLLM may have it loaded with a configuration whose model is the draft."""

    def load(first: float) -> str:
        transfer = SimpleNamespace(engine_id="a")
        models = {}
        for runner in ("generate", "draft"):
            config: Any = SimpleNamespace(runner_type=runner, model=runner)
            engine: Any = SimpleNamespace(kv_transfer_config=transfer, model_config=config, instance_id="c")
            watch_model(engine, config, models.setdefault(runner, Model()))
            number = first if runner == "generate" else 1.0
            models[runner].load_weights(iter({"a": torch.tensor([number])}.items()))
        return loaded_of(engine).digest()

    assert load(1.0) == load(1.0) != load(2.0)
