"""Cache salts: tenants never have the same one, and LoRA adapters are told apart by their content."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import hypothesis.strategies as st
import pytest
from conversation import EXACT, run
from draft_model import TINY
from hypothesis import example, given
from key_files import write_keys
from loaded import load_config
from lora_adapter import make_adapter
from tokenizers import Tokenizer
from vllm.lora.request import LoRARequest
from vllm.v1.kv_hints import KvHintAction, KvHintsEnvelope
from vllm_engine import Table

from manthan.vllm_hooks.compat import Core
from manthan.vllm_hooks.http.salts import MARK, Adapters, Salts, salts_of

SALTS = Salts(b"key", isolate=True)
NAME = st.text("ab\x00\x01-", max_size=4)
SALT = st.none() | NAME.filter(bool)  # vLLM has no empty ones


def said(tenant: str | None) -> dict[str, Any]:
    return {"manthan": {"tenant": tenant}}


def salt_of(params: Any, salt: str | None = None, envelope: KvHintsEnvelope | None = None, of: Salts = SALTS) -> Any:
    return of.of(params, envelope, salt, None, True)


@example("a", "bc", "ab", "c")
@given(NAME.filter(str.isprintable), SALT, NAME.filter(str.isprintable), SALT)
def test_two_tenants_have_no_salt_in_common(tenant: str, salt: str | None, other: str, theirs: str | None) -> None:
    one, another = salt_of(said(tenant), salt), salt_of(said(other), theirs)
    assert (one == another) == ((tenant, salt) == (other, theirs))
    for guess in filter(None, (one, another)):
        if tenant != other:
            assert salt_of(said(other), guess) != one
        assert (salt_of(None, guess) == guess) == (not guess.startswith(MARK))


def test_nobody_s_salt_stays_what_it_is() -> None:
    for params in (None, {}, said(None), said(""), {"manthan": {"pin": True}}):
        assert salt_of(params) is None
        assert salt_of(params, "own") == "own"


def test_who_forges_a_salt_has_one_of_its_own() -> None:
    theirs, open_to_all = salt_of(said("acme")), Salts(b"key", isolate=False)
    for salts in (SALTS, open_to_all):
        assert salt_of(None, theirs, of=salts) not in (theirs, None)
        assert salt_of(None, theirs, of=salts) == salt_of(None, theirs, of=salts)
    assert salt_of(said("acme"), "own", of=open_to_all) == "own"


def test_a_tenant_that_an_orchestrator_names() -> None:
    envelope = KvHintsEnvelope("0.1", "m", [KvHintAction("1", "manthan.hints", "1.0", {"tenant": "acme"})])
    assert salt_of(None, envelope=envelope) == salt_of(said("acme"))
    assert salt_of(said("beta"), envelope=envelope) == salt_of(said("beta"))


def salt(keys: str = "", **store: Any) -> Any:
    """Salt that an engine that starts now gives acme."""
    config = load_config(env={}, flags={"tiers": store | {"disk": "/codes"}, "sealing": keys})
    return salt_of(said("acme"), "own", of=salts_of(config))


def test_salts_last_as_long_as_what_is_stored_by_them(tmp_path: Path) -> None:
    assert salt() != salt()
    assert salt(kind="disk") == salt(kind="disk") == salt(kind="redis")
    keys, others = (str(write_keys(tmp_path / f"{name}.keys", name)) for name in ("ours", "theirs"))
    sealed = salt(kind="disk", keys=keys)
    assert sealed == salt(kind="redis", keys=keys)
    assert sealed not in (salt(kind="disk"), salt(kind="disk", keys=others))


def asked(folder: str, in_place: bool = False) -> LoRARequest:
    return LoRARequest("adapter", 1, folder, load_inplace=in_place)


def test_other_weights_under_the_same_name_are_another_content(tmp_path: Path) -> None:
    found = []
    for name, seed in (("one", 1), ("one", 2), ("elsewhere", 1)):
        folder = make_adapter(tmp_path / name, seed)
        found.append(Adapters().content(asked(folder)))  # of an engine that begins now
    assert found[0] == found[2] != found[1]


def test_files_that_changed_since_the_engine_began_are_nobody_elses(tmp_path: Path) -> None:
    """vLLM may have loaded the old ones or the new ones."""
    folder = make_adapter(tmp_path, seed=1)
    adapters, asked_late = Adapters(), Adapters()
    first = adapters.content(asked(folder))
    assert adapters.content(asked(folder)) == first
    make_adapter(tmp_path, seed=2)
    second = Adapters().content(asked(folder))
    unknown = [each.content(asked(folder)) for each in (adapters, asked_late)]
    assert len({first, second, *unknown}) == 4
    assert adapters.content(asked(folder)) == unknown[0]


@pytest.mark.parametrize("given", [lambda asked: (None, (asked,)), lambda asked: (None, (), {"lora_request": asked})])
def test_files_count_that_are_there_when_an_adapter_is_loaded(given: Any, tmp_path: Path) -> None:
    """Later the path may lead to others, also to files that are older than the engine."""
    one, two = (make_adapter(tmp_path / name, seed) for seed, name in enumerate("ab"))
    current, adapters = tmp_path / "current", Adapters()
    current.symlink_to(one)
    core = object.__new__(Core)
    core._salts, core._tell = SimpleNamespace(adapters=adapters), lambda call, *args: call(*args)
    core._call_workers(lambda *args, **kwargs: [True], "add_lora", *given(asked(str(current))))
    current.unlink()
    current.symlink_to(two)
    assert adapters.content(asked(str(current))) != Adapters().content(asked(two))


@pytest.mark.parametrize("in_place", [False, True])
def test_what_cannot_be_known_is_nobody_elses(in_place: bool, tmp_path: Path) -> None:
    folder = make_adapter(tmp_path / "there", seed=1) if in_place else str(tmp_path / "nowhere")
    assert Adapters().content(asked(folder, in_place)) != Adapters().content(asked(folder, in_place))


@pytest.mark.slow
def test_an_adapter_of_the_same_name_and_path_never_gets_anothers_kv(tmp_path: Path) -> None:
    """Engines one after the other on a disk; the adapter's files are replaced, and put back."""
    text = Table(3).text
    prompts = [Tokenizer.from_file(str(TINY / "tokenizer.json")).encode(text).ids]
    (tmp_path / "cold").mkdir()
    disk = {"tiers": {"kind": "disk", "max_bytes": "128MiB", "disk": {"path": str(tmp_path / "cold")}}}

    def turn(seed: int, manthan: dict[str, Any] | None) -> dict[str, Any]:
        folder = make_adapter(tmp_path / "adapter", seed)
        turns, _ = run(str(TINY), manthan, prompts=prompts, adapter=folder, enable_lora=True, max_lora_rank=8)
        return turns[0]

    first, second, again = (turn(seed, EXACT | disk) for seed in (1, 2, 1))
    plain = turn(2, None)
    assert [each["cached"] > 500 for each in (first, second, again)] == [False, False, True]
    assert second["cached"] == 0
    assert again["tokens"] == first["tokens"]
    assert second["tokens"] == plain["tokens"] != first["tokens"]
    assert second["logprobs"] == plain["logprobs"]
