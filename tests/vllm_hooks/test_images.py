"""Multimodal prompts: an image is part of its blocks' keys, and its KV goes cold and returns with the others."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from conversation import EXACT, run
from image_model import make_image_model
from vllm import SamplingParams
from vllm.lora.request import LoRARequest
from vllm.multimodal.inputs import (
    MultiModalBatchedField,
    MultiModalFeatureSpec,
    MultiModalFieldElem,
    MultiModalKwargsItem,
    PlaceholderRange,
)
from vllm.v1.engine import EngineCoreRequest

from manthan.vllm_hooks import compat
from manthan.vllm_hooks.http.hints import CONTENT
from manthan.vllm_hooks.http.salts import Salts

TEXT = "name = 4821\n" * 40
MORE = TEXT + "assert name == "
QUESTIONS = [(0, TEXT), (1, TEXT), (0, MORE), (1, MORE)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return make_image_model(tmp_path_factory.mktemp("model"))


def answers(model: str, manthan: dict[str, Any] | None) -> list[dict[str, Any]]:
    found, _ = run(model, manthan, questions=QUESTIONS)
    return found


@pytest.mark.slow
def test_two_images_in_the_same_place_share_nothing_and_both_return(model: str) -> None:
    ours, hot = answers(model, EXACT), answers(model, None)
    assert [each["cached"] for each in ours[:2]] == [0, 0]
    assert all(each["cached"] > 300 for each in ours[2:])
    assert [each["cached"] for each in ours] == [each["cached"] for each in hot]
    assert [each["tokens"] for each in ours] == [each["tokens"] for each in hot]
    assert [each["logprobs"] for each in ours] == [each["logprobs"] for each in hot]
    assert ours[0]["tokens"] != ours[1]["tokens"]
    assert ours[2]["tokens"] != ours[3]["tokens"]


class Cache:
    """Instead of vLLM's, which keeps what was sent by the name that a client gave it."""

    def __init__(self) -> None:
        self._kept: dict[str, Any] = {}

    def get_and_update_features(self, features: list[MultiModalFeatureSpec]) -> list[MultiModalFeatureSpec]:
        for feature in features:
            feature.data = self._kept.setdefault(str(feature.mm_hash), feature.data)
        return features


class Core:
    """Of an engine core, what makes requests of what comes in."""

    def __init__(self, cache: Cache | None = None) -> None:
        self.mm_receiver_cache = cache
        self.vllm_config = SimpleNamespace(ec_transfer_config=None)

    def preprocess_add_request(self, request: EngineCoreRequest) -> EngineCoreRequest:
        return request


def picture(color: float) -> MultiModalKwargsItem:
    """An image as a processor makes it."""
    pixels = MultiModalFieldElem(torch.full((3, 8, 8), color, dtype=torch.bfloat16), MultiModalBatchedField())
    return MultiModalKwargsItem({"pixel_values": pixels})


def made(core: Core, item: MultiModalKwargsItem | None, name: str, prefix: str = "", **extra: Any) -> EngineCoreRequest:
    """What becomes of a request with an image that its client gave a name."""
    feature = MultiModalFeatureSpec(item, "image", prefix + name, PlaceholderRange(0, 1), name)
    request = EngineCoreRequest(
        "r", [5], [feature], SamplingParams(max_tokens=1, extra_args=extra), None, 0.0, None, None, None, kv_hints=None
    )
    found: EngineCoreRequest = core.preprocess_add_request(request)
    return found


@pytest.fixture
def core() -> Core:
    """Of an engine with a cold store that lasts."""
    core, ours = Core(Cache()), object.__new__(compat.Core)
    ours._core = core
    ours.prepare_requests(Salts(bytes(8), isolate=True), by_content=True)
    return core


def name_of(request: EngineCoreRequest) -> str:
    assert request.mm_features is not None
    return request.mm_features[0].identifier


def test_an_image_is_its_content_whatever_a_client_calls_it(core: Core) -> None:
    cat = name_of(made(core, picture(1), "cat"))
    assert cat == name_of(made(core, picture(1), "dog"))
    assert len({cat, "cat", "dog", name_of(made(core, picture(2), "bird"))}) == 4
    assert made(core, picture(1), "cat").cache_salt is None


def test_an_image_that_was_sent_before_is_its_content_too(core: Core) -> None:
    cat = name_of(made(core, picture(1), "cat"))
    assert name_of(made(core, None, "cat")) == cat


def test_what_an_adapter_makes_of_images_is_told_apart(core: Core) -> None:
    """As vLLM does with --enable-tower-connector-lora."""
    assert name_of(made(core, picture(1), "cat", "style:")) == f"style:{name_of(made(core, picture(1), 'cat'))}"


def test_blocks_of_an_image_that_is_not_at_hand_are_nobody_elses(core: Core) -> None:
    salts = [made(each, None, "cat").cache_salt for each in (core, core)]
    assert salts[0] == salts[1]
    assert str(salts[0]).startswith(f"{CONTENT}unknown-")
    assert Salts(bytes(8), isolate=True).of(None, None, None, None, False) != salts[0]


def test_media_that_another_server_has_encoded_are_nobody_elses(core: Core) -> None:
    """What comes of them may be their sizes alone, which two images have in common."""
    found = made(core, picture(1), "cat", ec_transfer_params={"peer": "there"})
    assert name_of(found) == "cat"
    assert str(found.cache_salt).startswith(f"{CONTENT}unknown-")
    core.vllm_config.ec_transfer_config = object()
    assert made(core, picture(1), "cat").cache_salt == found.cache_salt


def test_salts_hold_adapters_beside_what_tenants_have(tmp_path: Any) -> None:
    salts, adapter = Salts(bytes(8), isolate=True), LoRARequest("adapter", 1, str(tmp_path))
    alone = salts.of(None, None, None, adapter, True)
    assert alone is not None
    assert salts.of(None, None, "secret", adapter, True) == f"{alone}secret"
    assert salts.of(None, None, None, adapter, False) not in (alone, salts.of(None, None, None, None, False))
    assert salts.of(None, None, alone, None, True) != alone  # nobody comes by it
