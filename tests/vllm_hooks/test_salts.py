"""Cache salts of tenants: of any two, whatever their clients send, they are two; and what it means to have none."""

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


@example("a", "bc", "ab", "c")
@given(NAME.filter(str.isprintable), SALT, NAME.filter(str.isprintable), SALT)
def test_two_tenants_have_no_salt_in_common(tenant: str, salt: str | None, other: str, theirs: str | None) -> None:
    one, another = SALTS.of(said(tenant), None, salt, None, True), SALTS.of(said(other), None, theirs, None, True)
    assert (one == another) == ((tenant, salt) == (other, theirs))
    for guess in filter(None, (one, another)):
        if tenant != other:
            assert SALTS.of(said(other), None, guess, None, True) != one
        assert (SALTS.of(None, None, guess, None, True) == guess) == (not guess.startswith(MARK))


def test_nobody_s_salt_stays_what_it_is() -> None:
    for params in (None, {}, said(None), said(""), {"manthan": {"pin": True}}):
        assert SALTS.of(params, None, None, None, True) is None
        assert SALTS.of(params, None, "own", None, True) == "own"


def test_who_forges_a_salt_has_one_of_its_own() -> None:
    theirs = SALTS.of(said("acme"), None, None, None, True)
    assert theirs is not None
    for mine in (SALTS, Salts(b"key", isolate=False)):
        assert mine.of(None, None, theirs, None, True) not in (theirs, None)
        assert mine.of(None, None, theirs, None, True) == mine.of(None, None, theirs, None, True)
    assert Salts(b"key", isolate=False).of(said("acme"), None, "own", None, True) == "own"


def test_a_tenant_that_an_orchestrator_names() -> None:
    envelope = KvHintsEnvelope("0.1", "m", [KvHintAction("1", "manthan.hints", "1.0", {"tenant": "acme"})])
    assert SALTS.of(None, envelope, None, None, True) == SALTS.of(said("acme"), None, None, None, True)
    assert SALTS.of(said("beta"), envelope, None, None, True) == SALTS.of(said("beta"), None, None, None, True)


def salt(keys: str = "", **store: Any) -> str | None:
    """What an engine that starts now gives acme."""
    config = ManthanConfig.model_validate({"tiers": store | {"disk": "/codes"}, "sealing": keys})
    return salts_of(config).of(said("acme"), None, "own", None, True)


def test_salts_last_as_long_as_what_is_stored_by_them(tmp_path: Path) -> None:
    assert salt() != salt()
    assert salt(kind="disk") == salt(kind="disk") == salt(kind="redis")
    keys, others = (str(write_keys(tmp_path / f"{name}.keys", name)) for name in ("ours", "theirs"))
    sealed = salt(kind="disk", keys=keys)
    assert sealed == salt(kind="redis", keys=keys)
    assert sealed not in (salt(kind="disk"), salt(kind="disk", keys=others))
