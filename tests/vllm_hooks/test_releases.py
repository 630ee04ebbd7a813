"""Each name of vLLM that Manthan uses is there in both releases. 0.33 is read, because it runs on no CPU."""

import importlib
import inspect
import pkgutil
from pathlib import Path

import pytest
import vllm
from release import Release, fetched, names_used

from manthan.vllm_hooks.compat import DIFFERENCES, READS, WRAPPED
from manthan.vllm_hooks.support import RELEASES

NEXT = "0.33.0"
SITE = Path(vllm.__file__).parents[1]
ATTRIBUTES = [f"{owner}.{name}" for owner, names in READS.items() for name in names]


@pytest.fixture(scope="module")
def release() -> Release:
    return fetched(NEXT)


def test_names_are_collected() -> None:
    used = names_used()
    assert ("vllm.v1.core.block_pool", "BlockPool") in used
    assert ("vllm.v1.engine.core", "") in used
    assert len(used) > 100


@pytest.mark.parametrize(("module", "name"), names_used())
def test_the_installed_release_has_each_name(module: str, name: str) -> None:
    found = importlib.import_module(module)
    assert not name or hasattr(found, name) or importlib.import_module(f"{module}.{name}")


@pytest.mark.parametrize("path", ATTRIBUTES)
def test_the_installed_release_has_each_attribute(path: str) -> None:
    owner, _, name = path.rpartition(".")
    made = pkgutil.resolve_name(owner)
    bases = [base for base in getattr(made, "__mro__", ()) if base.__module__.startswith("vllm")]
    assert hasattr(made, name) or any(
        f"self.{name}" in (text := inspect.getsource(base)) or f"\n    {name}: " in text for base in bases
    )


def test_names_that_are_not_there_are_found_missing() -> None:
    release = Release(SITE)
    assert release.has("vllm.v1.core.block_pool", "BlockPool")
    assert not release.has("vllm.v1.core.block_pool", "NoPool")
    assert not release.has("vllm.v1.no_module", "")
    assert release.member("vllm.v1.core.block_pool.BlockPool.touch")
    assert not release.member("vllm.v1.core.block_pool.BlockPool.no_method")


@pytest.mark.parametrize("path", [*ATTRIBUTES, *WRAPPED])
def test_reading_finds_what_running_finds(path: str) -> None:
    assert Release(SITE).member(path)


@pytest.mark.slow
def test_the_next_release_has_each_name(release: Release) -> None:
    assert [f"{module}.{name}" for module, name in names_used() if not release.has(module, name)] == []


@pytest.mark.slow
def test_the_next_release_has_each_attribute(release: Release) -> None:
    assert [path for path in (*ATTRIBUTES, *WRAPPED) if not release.member(path)] == []


@pytest.mark.slow
def test_the_next_release_has_the_parameters_of_what_is_replaced(release: Release) -> None:
    installed = Release(SITE)
    assert [path for path in WRAPPED if release.parameters(path) != installed.parameters(path)] == []


@pytest.mark.slow
def test_the_next_release_plans_caches_as_it_is_asked_to(release: Release) -> None:
    utils, planning = "vllm.v1.core.kv_cache_utils", "vllm.v1.core.kv_cache_planning"
    arguments = ["vllm_config", "kv_cache_specs", "available_memory"]
    assert Release(SITE).parameters(f"{utils}.get_kv_cache_configs") == arguments
    assert not release.has(utils, "get_kv_cache_configs")
    assert release.parameters(f"{planning}.get_kv_cache_configs") == [*arguments, "global_kv_cache_groups"]
    assert release.parameters(f"{planning}.get_global_kv_cache_groups") == arguments[:2]


def test_each_difference_is_said_of_both_releases() -> None:
    assert RELEASES == ("0.32", "0.33")
    assert len({each.what for each in DIFFERENCES}) == len(DIFFERENCES)
    assert all(all(each) for each in DIFFERENCES)
