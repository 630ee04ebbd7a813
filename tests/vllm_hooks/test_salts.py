"""Cache salts of tenants: two tenants never have the same, whatever their clients send."""

from pathlib import Path
from typing import Any

import hypothesis.strategies as st
from hypothesis import example, given
from key_files import write_keys
from vllm.v1.kv_hints import KvHintAction, KvHintsEnvelope

from manthan.manager.config.resolve import ManthanConfig
from manthan.vllm_hooks.http.salts import MARK, Salts, salts_of

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
    config = ManthanConfig.model_validate({"tiers": store | {"disk": "/codes"}, "sealing": keys})
    return salt_of(said("acme"), "own", of=salts_of(config))


def test_salts_last_as_long_as_what_is_stored_by_them(tmp_path: Path) -> None:
    assert salt() != salt()
    assert salt(kind="disk") == salt(kind="disk") == salt(kind="redis")
    keys, others = (str(write_keys(tmp_path / f"{name}.keys", name)) for name in ("ours", "theirs"))
    sealed = salt(kind="disk", keys=keys)
    assert sealed == salt(kind="redis", keys=keys)
    assert sealed not in (salt(kind="disk"), salt(kind="disk", keys=others))
