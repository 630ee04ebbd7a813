"""Multimodal prompts: an image is part of its blocks' keys, and its KV goes cold and returns with the others."""

import uuid
from typing import Any

import pytest
from conversation import EXACT, told
from image_model import make_image_model
from PIL import Image
from vllm.entrypoints.scale_out.token_in_token_out import mm_features
from vllm.entrypoints.scale_out.token_in_token_out.protocol import MultiModalFeatures
from vllm.multimodal import hasher
from vllm.multimodal.parse import ImageProcessorItems, MultiModalDataItems
from vllm.multimodal.processing.inputs import ProcessorInputs

from manthan.vllm_hooks.compat import hash_features_by_content, hash_media_by_content
from manthan.vllm_hooks.http.hints import RequestHintError, no_content

TEXT = "name = 4821\n" * 40
MORE = TEXT + "assert name == "
QUESTIONS = [(0, TEXT), (1, TEXT), (0, MORE), (1, MORE)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return make_image_model(tmp_path_factory.mktemp("model"))


def answers(model: str, manthan: dict[str, Any] | None) -> list[dict[str, Any]]:
    found, _ = told("image_sessions.py", {"model": model, "manthan": manthan, "questions": QUESTIONS})
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


@pytest.fixture
def by_content(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in the server of an engine with a cold store that lasts."""
    monkeypatch.setattr(ProcessorInputs, "get_mm_hashes", vars(ProcessorInputs)["get_mm_hashes"])
    monkeypatch.setattr(hasher, "_get_image_id_bytes", hasher._get_image_id_bytes)
    monkeypatch.setattr(mm_features, "mm_kwargs_from_features", mm_features.mm_kwargs_from_features)
    hash_media_by_content(no_content)
    hash_features_by_content(no_content)


def picture(color: str, image_id: uuid.UUID | None = None) -> Image.Image:
    image = Image.new("RGB", (8, 8), color)
    if image_id is not None:
        image.getexif()[Image.ExifTags.Base.ImageID] = image_id
    return image


def hash_of(image: Image.Image | None, name: str | None = None) -> str:
    items = MultiModalDataItems({"image": ImageProcessorItems([image])})
    [found] = ProcessorInputs([], items, {"image": [name]}).get_mm_hashes("model", "sha256")["image"]
    return found


@pytest.mark.usefixtures("by_content")
def test_an_image_is_its_content_whatever_a_client_calls_it() -> None:
    red, blue, same = picture("red"), picture("blue"), uuid.uuid4()
    assert hash_of(red, "cat") == hash_of(red, "dog") == hash_of(red) == hash_of(picture("red", same))
    assert len({hash_of(red, "cat"), hash_of(picture("blue", same)), hash_of(picture("green", same))}) == 3
    assert hash_of(blue, "cat") == hash_of(blue)


@pytest.mark.usefixtures("by_content")
def test_a_name_without_content_is_refused() -> None:
    with pytest.raises(RequestHintError, match=r"^an image or the like is named without its content, .*: send it$"):
        hash_of(None, "cat")


def features(*items: str | None) -> MultiModalFeatures:
    """Images as another server has prepared them, all by the same name."""
    spans = [{"offset": at, "length": 1} for at in range(len(items))]
    return MultiModalFeatures(
        mm_hashes={"image": ["cat"] * len(items)},
        mm_placeholders={"image": spans},
        kwargs_data={"image": list(items)},
    )


@pytest.mark.usefixtures("by_content")
def test_nor_is_what_another_server_has_prepared_what_a_client_calls_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mm_features, "decode_mm_kwargs_item", lambda item: item)
    sent = features("red", "blue", "red")
    mm_features.mm_kwargs_from_features(sent)
    red, blue, again = sent.mm_hashes["image"]
    assert red == again != blue
    assert "cat" not in (red, blue)
    with pytest.raises(RequestHintError, match="is named without its content"):
        mm_features.mm_kwargs_from_features(features("red", None))
