"""The list of families: complete for both releases of vLLM, printed in docs/compatibility.md, and true where built."""

import ast
from pathlib import Path

import pytest
import vllm
import yaml
from deployment import script
from release import Release, fetched
from small_configs import SMALL, small_config
from vllm.v1 import kv_cache_interface

from manthan.vllm_hooks.doctor.families import LIST, SECTIONS, families, stored
from manthan.vllm_hooks.doctor.model import planned
from manthan.vllm_hooks.groups import SPECS

DOCS = Path(__file__).parents[2] / "docs"
NO_FAMILIES = Path(__file__).parents[1] / "data" / "pooling_and_drafts.yaml"
REGISTRY = "vllm.model_executor.models.registry"
GENERATE = ("_TEXT_GENERATION_MODELS", "_MULTIMODAL_MODELS", "_TRANSFORMERS_SUPPORTED_MODELS")
POOL = (
    *("_EMBEDDING_MODELS", "_LATE_INTERACTION_MODELS", "_REWARD_MODELS"),
    *("_TOKEN_CLASSIFICATION_MODELS", "_SEQUENCE_CLASSIFICATION_MODELS"),
)
NEVER_HELD = {"KVCacheSpec", "AttentionSpec", "UniformTypeKVCacheSpecs"}
"""Specs that no cache of a layer has: base classes, and one that holds those of several layers."""


def registered(release: Release, *tables: str) -> set[str]:
    """Return the names of classes in tables of a release's registry."""
    found = set()
    for table in tables:
        defined = release.module(REGISTRY)
        made = defined.find(table) if defined else None
        assert isinstance(made, ast.Assign)
        assert isinstance(made.value, ast.Dict)
        found |= {key.value for key in made.value.keys if isinstance(key, ast.Constant)}
    return {str(name) for name in found}


def compare(release: Release, kinds: dict[str, set[str]]) -> None:
    """Compare the registry of a release with families, drafts and pooling classes of the list."""
    backend = registered(release, "_TRANSFORMERS_BACKEND_MODELS")
    drafts = {name for name in backend if name.endswith("MTP")}
    pooling = {name for name in backend if "Embedding" in name or "Classification" in name}
    generate = registered(release, *GENERATE) | (backend - drafts - pooling)
    assert generate == kinds["families"]
    assert (pooling | registered(release, *POOL)) - generate == kinds["pooling"]
    assert (drafts | registered(release, "_SPECULATIVE_DECODING_MODELS")) - generate == kinds["drafts"]


def listed_for(release: str) -> dict[str, set[str]]:
    """Return the names in the list for a release: "old" or "new"."""
    found = yaml.safe_load(NO_FAMILIES.read_text(encoding="utf-8"))
    kinds = {
        kind: {*found[kind].split(), *found.get(f"{release} {kind}", "").split()} for kind in ("pooling", "drafts")
    }
    return kinds | {
        "families": {each.name for each in families().values() if each.section != "new" or release == "new"}
    }


def test_the_list_has_each_class_of_the_installed_release() -> None:
    assert vllm.__version__.startswith("0.32")
    compare(Release(Path(vllm.__file__).parents[1]), listed_for("old"))


@pytest.mark.slow
def test_the_list_has_each_class_of_the_next_release() -> None:
    compare(fetched("0.33.0"), listed_for("new"))


def test_a_class_is_listed_once() -> None:
    listed = yaml.safe_load(LIST.read_text(encoding="utf-8"))
    assert sum(len(names.split()) for section in SECTIONS for names in listed[section].values()) == len(families())
    assert listed["uncached"].keys() <= families().keys()


def test_each_spec_of_vllm_has_an_entry() -> None:
    base = kv_cache_interface.KVCacheSpec
    kinds = [each for each in vars(kv_cache_interface).values() if isinstance(each, type) and issubclass(each, base)]
    assert {each.__name__ for each in kinds} - NEVER_HELD == {*SPECS}
    assert {stored(each) for family in families().values() for each in family.caches} <= {
        "coded",
        "bytes",
        "refused",
        "",
    }


def test_the_document_is_what_the_list_says() -> None:
    generator = script(DOCS / "generate.py")
    text = (DOCS / "compatibility.md").read_text(encoding="utf-8")
    parts = generator.DOCUMENTS["compatibility.md"]
    assert text == generator.with_generated(text, parts), "docs/compatibility.md is old: run `make docs`"


def test_few_families_are_refused_or_not_compressed() -> None:
    outcomes = [family.outcome for family in families().values()]
    assert outcomes.count("refused") / len(outcomes) <= 0.03
    assert outcomes.count("bytes") / len(outcomes) <= 0.08


@pytest.mark.parametrize("name", SMALL)
def test_a_built_model_has_the_caches_of_the_list(name: str, tmp_path: Path) -> None:
    _, config = planned(small_config(name, tmp_path))
    kinds = {type(group.kv_cache_spec).__name__ for group in config.kv_cache_groups}
    assert kinds == {f"{cache.partition('/')[0]}Spec" for cache in families()[name].caches}
