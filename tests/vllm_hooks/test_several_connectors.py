"""Manthan next to another connector: what vLLM is told of both, and what is refused."""

import json
from math import inf
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from vllm import AsyncEngineArgs
from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiConnector
from vllm.utils.argparse_utils import FlexibleArgumentParser

from manthan.vllm_hooks.connector import ManthanConnector
from manthan.vllm_hooks.http.hints import checked_params, hints_of, lossy_prefill_tokens
from manthan.vllm_hooks.transfer_config import from_vllm_config, is_on
from manthan.vllm_hooks.worker.half import get_ready

MODEL = str(Path(__file__).parents[1] / "data" / "tiny-llama")
NIXL = {"kv_connector": "NixlConnector", "kv_role": "kv_producer", "engine_id": "prefill-0"}
MANTHAN = {"kv_connector": "ManthanConnector", "kv_role": "kv_both"}
EXAMPLE = {"kv_connector": "ExampleConnector", "kv_role": "kv_consumer"}


def served(transfer: dict[str, Any] | None, *flags: str) -> VllmConfig:
    """What `vllm serve` would start with."""
    others = ["--kv-transfer-config", json.dumps(transfer)] if transfer is not None else []
    parser = AsyncEngineArgs.add_cli_args(FlexibleArgumentParser())
    args = parser.parse_args(["--model", MODEL, "--max-model-len", "1024", *others, *flags])
    AsyncEngineArgs.from_cli_args(args)  # vLLM may do so twice
    return AsyncEngineArgs.from_cli_args(args).create_engine_config()


def entries(config: VllmConfig) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = config.kv_transfer_config.kv_connector_extra_config["connectors"]
    return found


@pytest.mark.parametrize("other", [NIXL, EXAMPLE], ids=["nixl, prefill", "example, decode"])
def test_flags_put_manthan_behind_another_connector(other: dict[str, Any]) -> None:
    config = served(other, "--manthan-policy", "returns", "--manthan-idle-after", "7")
    transfer = config.kv_transfer_config
    assert (transfer.kv_connector, transfer.kv_role) == ("MultiConnector", "kv_both")
    assert transfer.kv_load_failure_policy == "recompute"
    assert transfer.engine_id == other.get("engine_id", transfer.engine_id)
    theirs, ours = entries(config)
    assert (theirs["kv_connector"], theirs["kv_role"]) == (other["kv_connector"], other["kv_role"])
    assert (ours["kv_connector"], ours["kv_role"]) == ("ManthanConnector", "kv_both")
    manthan = from_vllm_config(config)
    assert (manthan.policy.name, manthan.idle.after_s, manthan.codec.name) == ("returns", 7, "wht-5x")
    [_, (connector, of_ours)] = MultiConnector._get_connector_classes_and_configs(config)
    assert connector is ManthanConnector
    assert from_vllm_config(of_ours) == manthan
    assert of_ours.kv_transfer_config.engine_id == transfer.engine_id


def test_a_connector_that_knows_no_groups_has_vllm_do_without() -> None:
    assert served(EXAMPLE, "--manthan-policy", "lru").scheduler_config.disable_hybrid_kv_cache_manager
    assert not served(NIXL, "--manthan-policy", "lru").scheduler_config.disable_hybrid_kv_cache_manager


def test_one_s_own_several_need_not_say_all_of_manthan() -> None:
    manthan = MANTHAN | {"kv_connector_extra_config": {"manthan": {"idle": 9}}}
    config = served(several(manthan, EXAMPLE, kv_load_failure_policy="recompute"))
    assert is_on(config)
    assert (from_vllm_config(config).idle.after_s, from_vllm_config(config).codec.name) == (9, "wht-5x")
    assert entries(config)[0]["kv_load_failure_policy"] == "recompute"


def test_without_flags_other_connectors_are_left_alone() -> None:
    for given in (NIXL, several(EXAMPLE)):
        config = served(given)
        assert not is_on(config)
        assert config.kv_transfer_config.kv_load_failure_policy == "fail"


def several(*connectors: dict[str, Any], **roles: str) -> dict[str, Any]:
    extra = {"kv_connector_extra_config": {"connectors": list(connectors)}}
    return {"kv_connector": "MultiConnector", "kv_role": "kv_both"} | extra | roles


@pytest.mark.parametrize(
    ("transfer", "flags", "why"),
    [
        (
            EXAMPLE | {"kv_connector": "DecodeBenchConnector"},
            (),
            "--kv-transfer-config must not have DecodeBenchConnector next to",
        ),
        (
            several(MANTHAN, MANTHAN),
            (),
            "--kv-transfer-config must not have ManthanConnector next to Manthan's own entry",
        ),
        (None, ("--kv-offloading-size", "1"), "--kv-offloading-size is 1, which replaces Manthan by vLLM's offloading"),
        (
            EXAMPLE,
            ("--kv-offloading-size", "1"),
            "--kv-offloading-size is 1, which replaces Manthan by vLLM's offloading",
        ),
    ],
    ids=["makes KV up", "twice", "offloading", "offloading beside another"],
)
def test_what_cannot_be_together(transfer: dict[str, Any] | None, flags: tuple[str, ...], why: str) -> None:
    with pytest.raises(SystemExit) as refused:
        served(transfer, "--manthan-policy", "lru", *flags)
    assert why in str(refused.value)
    assert "\n" not in str(refused.value)


def test_a_role_of_all_that_lets_vllm_write_where_manthan_loads_is_refused() -> None:
    given = several(MANTHAN, EXAMPLE, kv_role="kv_producer", kv_load_failure_policy="recompute")
    with pytest.raises(SystemExit, match="MultiConnector is kv_producer, but Manthan saves and loads KV"):
        served(given)


def test_an_answer_that_a_proxy_hands_on_says_nothing() -> None:
    said = {"session_id": "A", "pinned": True, "refused": None, "lossy_tokens": 0}
    answer = {"manthan": said, "do_remote_prefill": True}
    assert checked_params(answer, "") == answer

    class Request:
        kv_transfer_params, kv_hints = answer, None

    assert not hints_of(Request()).given
    with_tenant = checked_params(answer, "X-Tenant-ID")
    assert with_tenant == answer | {"manthan": said | {"tenant": ""}}
    Request.kv_transfer_params = with_tenant
    assert set(hints_of(Request()).given) <= {"tenant"}


@pytest.mark.parametrize(
    ("answer", "cached", "tokens"),
    [
        ({"lossy_tokens": 64}, {"remote_prefill_cached_tokens": 96}, 96),
        ({"lossy_tokens": 64, "tenant": "a"}, {}, inf),
        ({"lossy_tokens": 0}, {"remote_prefill_cached_tokens": 96}, 0),
        (None, {"remote_prefill_cached_tokens": 96}, 0),
    ],
    ids=["cached", "unknown", "exact", "no answer"],
)
def test_an_answer_that_a_proxy_hands_on_says_what_is_decoded(
    answer: dict[str, Any] | None, cached: dict[str, int], tokens: float
) -> None:
    said = {} if answer is None else {"manthan": {"session_id": "A", "pinned": True, "refused": None} | answer}
    assert lossy_prefill_tokens({"do_remote_prefill": True, **said, **cached}) == tokens
    assert lossy_prefill_tokens(None) == 0


@pytest.mark.parametrize("others", [0, 1, 2], ids=["alone", "behind one", "behind two"])
def test_a_worker_finds_its_half_beside_other_connectors(others: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM asks several connectors for their handshakes up to the first that has one: Manthan asks its half itself."""
    waited = []
    own = ManthanConnector.__new__(ManthanConnector)
    own.worker = SimpleNamespace(guard=SimpleNamespace(wait=lambda: waited.append(True)))
    several = SimpleNamespace(sub_connectors=[*(SimpleNamespace() for _ in range(others)), own])
    monkeypatch.setattr("vllm.distributed.kv_transfer.get_kv_transfer_group", lambda: several if others else own)
    get_ready(None)
    assert waited == [True]
