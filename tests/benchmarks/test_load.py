"""`manthan bench load` on real servers, at a small size: who waits for what, mistakes, what is left out."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import typer
from bench_command import is_png, refusal, report, run
from warm_server import warm_server

from manthan.benchmarks import capacity_arms
from manthan.benchmarks.capacity_arms import Memory
from manthan.benchmarks.load_arms import ARMS, LMCACHE, Arms, LMCacheServer, cannot_run
from manthan.benchmarks.load_chats import EXPONENTIAL, FIXED, Made, made_up, writer
from manthan.benchmarks.load_fairness import rows, three_loads
from manthan.benchmarks.load_report import Found
from manthan.benchmarks.load_talk import Asked, Talk
from manthan.benchmarks.load_waits import Lines, explain, read_log
from manthan.benchmarks.server import VllmServer
from manthan.codec import DEFAULT
from manthan.manager.config.model import ManthanConfig

CHATS, TOKENS, TURNS, POOL = 5, 528, 2, 1300
OURS = f"host {DEFAULT}"
MOONCAKE = Path("tests/data/mooncake_conversation_1000.jsonl")
MADE = Made(4, 600, 3, 40, 8, 2.0, FIXED, 1.0, 0)


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Return a run of two arms, and of one that is left out. Its servers are forked."""
    folder = tmp_path_factory.mktemp("load")
    size = ("--chats", CHATS, "--tokens", TOKENS, "--turns", TURNS, "--said", 40, "--answer", 4, "--pool", POOL)
    times = ("--think", 10, "--arrive", 8, "--idle-after", 0.2)  # each is encoded before others take its room
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(capacity_arms, "VllmServer", warm_server)
        return report(folder, "load", "--arms", "plain,offload,host", *size, *times)


def arm(found: dict[str, Any], name: str) -> dict[str, Any]:
    return next(one for one in found["runs"] if one["arm"] == name)


@pytest.fixture(scope="module")
def compared(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Return a run of --fairness with two arms. Its servers are forked."""
    folder = tmp_path_factory.mktemp("fairness")
    size = ("--chats", CHATS, "--tokens", TOKENS, "--turns", TURNS, "--said", 40, "--answer", 4, "--pool", POOL)
    times = ("--think", 4, "--arrive", 4, "--idle-after", 0.2, "--out", folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(capacity_arms, "VllmServer", warm_server)
        result = run("load", "--fairness", "--arms", "plain,host-arrival", *size, *times)
    assert result.exit_code == 0, result.output
    return dict(json.loads((folder / "fairness.json").read_text()))


@pytest.mark.slow
def test_each_server_has_three_loads(compared: dict[str, Any]) -> None:
    assert [one["arm"] for one in compared["runs"]] == ["plain", f"host-arrival {DEFAULT}"]
    assert [one["seed"] for one in compared["runs"]] == [0, 0]
    for one in compared["runs"]:
        assert list(one["loads"]) == ["fits", "one-turn", "outgrows"]
        for name, load in one["loads"].items():
            assert len(load["requests"]) == load["planned"] >= CHATS * TURNS - 1
            assert all(len(asked["gaps_ms"]) == asked["generated_tokens"] - 1 > 0 for asked in load["requests"])
            returns = [asked for asked in load["requests"] if asked["turn"] > 1]
            assert bool(returns) == (name != "one-turn")
            if name == "fits":
                assert all(asked["cached_tokens"] >= 512 for asked in returns)
    plain, ours = (one["loads"]["outgrows"]["requests"] for one in compared["runs"])
    asked = [{(one["chat"], one["turn"]): one["prompt_tokens"] for one in each} for each in (plain, ours)]
    assert asked[0] == asked[1]
    assert sum(one["cached_tokens"] for one in plain) < sum(one["cached_tokens"] for one in ours)
    assert compared["runs"][1]["manthan"]["ordering"] == "arrival"


@pytest.mark.slow
def test_what_outgrows_the_pool_is_restored_and_not_computed(found: dict[str, Any]) -> None:
    plain, ours = Found.of(arm(found, "plain")), Found.of(arm(found, OURS))
    assert CHATS * TOKENS > POOL
    assert plain.not_computed < 0.5 < 0.8 < ours.not_computed
    returns = [one["wait"] for one in arm(found, OURS)["requests"] if one["turn"] > 1]
    assert {wait["found"] for wait in returns} <= {"restored", "hot"}
    restored = [wait for wait in returns if wait["found"] == "restored"]
    assert len(restored) >= CHATS - 2
    assert all(wait["restore"] > 0 and wait["restored_tokens"] >= 512 for wait in restored)
    assert {one["wait"]["found"] for one in arm(found, "plain")["requests"]} <= {"first turn", "recomputed", "cached"}


@pytest.mark.slow
def test_all_arms_are_asked_the_same_and_answer_rightly(found: dict[str, Any]) -> None:
    asked = [{(one["chat"], one["turn"]): one["prompt_tokens"] for one in each["requests"]} for each in found["runs"]]
    assert asked[0] == asked[1]
    assert len(asked[0]) == CHATS * TURNS
    for one in found["runs"]:
        of = Found.of(one)
        assert (of.right, of.checked, of.errors) == (CHATS * TURNS, CHATS * TURNS, 0)
        assert one["pool_blocks"] == -(-POOL // 32)
    assert arm(found, OURS)["manthan"]["tiers"]["max_bytes"] == found["memory"]["store_nbytes"]


# -- a server that runs already -------------------------------------------------------------------------


@pytest.mark.slow
def test_a_trace_is_replayed_on_a_given_server(plain_server: VllmServer, tmp_path: Path) -> None:
    small = ("--shrink", 32, "--speed", 100, "--requests", 12)
    found = report(tmp_path, "load", "--base-url", f"{plain_server.url}/v1", "--trace", MOONCAKE, *small)
    (one,) = found["runs"]
    assert found["left_out"] > 0
    assert one["planned"] == len(one["requests"]) == 12 - found["left_out"]
    assert Found.of(one).errors == 0
    assert is_png(tmp_path / "load.png")


# -- who says what, and when ----------------------------------------------------------------------------


def test_the_same_seed_is_the_same_chats() -> None:
    say = writer(None, 1000, 0)
    chats = made_up(MADE, say)
    assert chats == made_up(MADE, say)
    assert chats != made_up(replace(MADE, seed=1), writer(None, 1000, 1))
    starts = [chat.starts_s for chat in chats]
    assert starts == sorted(starts)
    assert 0 <= starts[0] < starts[-1] <= MADE.arrive_s
    assert [len(turn.said.tokens) for turn in chats[0].turns] == [600, 40, 40]
    assert [turn.pause_s for turn in chats[0].turns] == [0.0, 2.0, 2.0]
    spread = [turn.pause_s for chat in made_up(replace(MADE, thinking=EXPONENTIAL), say) for turn in chat.turns[1:]]
    assert len(set(spread)) == len(spread)
    assert MADE.longest == 600 + 3 * 8 + 2 * 40


# -- against plain vLLM ---------------------------------------------------------------------------------


def test_three_loads_of_as_many_requests_in_the_same_time() -> None:
    made = Made(20, 8192, 3, 128, 64, 6.0, FIXED, 12.0, 0)
    loads = three_loads(made, 5120, 16, 40_000)
    fits, one_turn, outgrows = loads.values()
    assert list(loads) == ["fits", "one-turn", "outgrows"]
    assert outgrows == made
    assert (one_turn.chats, one_turn.turns, one_turn.arrive_s) == (60, 1, 24.0)
    assert fits.chats * (fits.longest // 16 + 2) <= 5120 < made.chats * made.longest // 16
    assert fits.chats * fits.turns >= 60
    assert fits.arrive_s + fits.think_s * (fits.turns - 1) == pytest.approx(24.0)
    assert three_loads(made, 5120, 16, 9000)["fits"].longest <= 9000
    for one in (replace(made, chats=9), replace(made, turns=1)):
        with pytest.raises(typer.BadParameter):
            three_loads(one, 5120, 16, 40_000)


def timed(arm: str, seed: int, first_ms: float, gap_ms: float, ordering: str = "returns") -> dict[str, Any]:
    asked = {"error": "", "ttft_s": first_ms / 1e3, "gaps_ms": [gap_ms, 0.1]}
    lost = asked | {"error": "refused", "ttft_s": 0.0}
    loads = {load: {"requests": [asked, lost]} for load in ("fits", "one-turn", "outgrows")}
    return {"arm": arm, "seed": seed, "loads": loads, "manthan": {"ordering": ordering}}


def test_ratios_are_of_the_same_repeats_and_the_bound_is_for_first_tokens_of_ordered_arms() -> None:
    runs = [
        timed("plain", 0, 100, 10),
        timed("plain", 1, 200, 10),
        timed("host", 0, 300, 12),
        timed("host", 1, 100, 10),
        timed("host-arrival", 0, 104, 10, "arrival"),
        timed("host-arrival", 1, 5000, 10, "arrival"),
        timed("host-arrival", 2, 9000, 99, "arrival"),
    ]
    found = {(row.load, row.what, row.arm): row for row in rows({"runs": runs})}
    assert len(found) == 3 * 2 * 2
    host, arrival = found["fits", "first token", "host"], found["fits", "first token", "host-arrival"]
    assert host.ratios == pytest.approx({"p50": 200 / 150, "p99": 298 / 199})
    assert host.spread["p50"] == pytest.approx((0.5, 3.0))
    assert host.above == ["p50 1.33 (within 120 s)", "p99 1.50 (within 120 s)"]
    assert [said.split()[0] for said in arrival.above] == ["p50", "p99"]
    assert not any("within" in said for said in arrival.above)
    assert found["outgrows", "between tokens", "host"].above == ["p50 1.10", "p99 1.20"]
    assert found["outgrows", "between tokens", "host-arrival"].above == []
    far = replace(host, ours={"p50": 120300.0, "p99": 2100.0})
    assert far.above == ["p50 802.00", "p99 10.55 (within 120 s)"]
    assert host.bound_s == 2 * ManthanConfig().admission_s
    for one in runs:
        one["manthan"]["admission_s"] = 4
    assert [row.bound_s for row in rows({"runs": runs})] == 6 * [8.0, 0.0]


# -- what a wait is made of -----------------------------------------------------------------------------

LOG = """\
INFO 1000.500 [log.py:85] Manthan: session a went cold after 1.1 s idle: 8 blocks (256 tokens), 1.0MiB to 219KiB (4x), 8 encoded in 33 ms
INFO 1002.050 [log.py:105] Manthan: session a restored 8 of 8 blocks (256 tokens) in 20 ms
INFO 1002.070 [log.py:85] Manthan: session c went cold after 0.0 s idle: 8 blocks (256 tokens), 1.0MiB to 219KiB (4x), 8 encoded in 33 ms
INFO 1001.000 [log.py:85] Manthan: session d went cold after 0.0 s idle: 8 blocks (256 tokens), 1.0MiB to 219KiB (4x), 8 encoded in 33 ms
"""  # noqa: E501


def test_a_wait_is_explained_by_the_log(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text(LOG)

    def asked(chat: int, session: str, cached: int, known: int = 260) -> Asked:
        return Asked(chat, session, 2, 2.0, known, 300, 0.1, 0.2, cached, 4, queue_ms=50.0, first_ms=30.0)

    every = [
        asked(0, "a", 256),
        asked(1, "b", 256),
        asked(2, "c", 0),
        asked(3, "d", 0),
        asked(4, "e", 32),
        asked(5, "f", 0, known=0),
    ]
    talk = Talk(1000.0, 3.0, 6, every, [], {})
    waits = explain(talk, read_log(log, talk.began), 32, is_ours=True)
    kinds = [wait.found for wait in waits]
    assert kinds == [
        "restored",
        "hot",
        "going cold",
        "dropped from the store",
        "overwritten before it was encoded",
        "first turn",
    ]
    first = waits[0]
    assert (first.restore, first.compute, first.rest) == (20.0, 30.0, pytest.approx(20.0))
    assert (first.queue, first.after) == (pytest.approx(10.0), pytest.approx(20.0))  # scheduled at 1002.070
    assert (first.restored_tokens, first.missed_tokens, first.evicted) == (256, 0, 1)
    assert first.ahead == 44 + 300 + 300 + 268 + 300
    assert [wait.missed_tokens for wait in waits] == [0, 0, 256, 256, 224, 0]
    plain = explain(talk, Lines({}, {}), 32, is_ours=False)
    assert [wait.found for wait in plain][:3] == ["cached", "cached", "recomputed"]
    assert plain[0].restore is None


# -- arms -----------------------------------------------------------------------------------------------


def test_all_arms_have_the_same_memory(tmp_path: Path) -> None:
    memory = Memory(3 << 30, 64, 1 << 30, 2 << 30)
    redis = {"url": "redis://there", "prefix": "bench:"}
    server = LMCacheServer(5555, 8080, 256)
    told = {"idle.min_tokens": 32}, tmp_path / "profile", False, redis, tmp_path, ["--seed", "1"], server
    arms = Arms(memory, 2000, 4, 1.0, *told)
    made = {kind: arms.make(kind, "klt-8x" if kind == "host" else DEFAULT) for kind in ARMS}
    for kind, one in made.items():
        store = (one.manthan or {}).get("tiers", {})
        held = store.get("max_bytes", 0) + store.get("host_bytes", 0)
        assert one.memory.pool_nbytes + (held or one.memory.store_nbytes) == 3 << 30
        assert one.memory.pool_blocks == (192 if kind == "wide" else 64)
        assert one.kind == kind
        assert {"--seed", "--enable-per-request-metrics"} <= {*one.flags}
    assert made["host"].manthan["codec"]["profile"] == str(tmp_path / "profile")
    assert made["host"].manthan["idle.min_tokens"] == 32
    assert [kind for kind, one in made.items() if "priority" in one.flags] == ["plain-ordered"]
    assert [kind for kind, one in made.items() if (one.manthan or {}).get("ordering")] == ["host-arrival"]
    assert "profile" not in made["redis"].manthan["codec"]
    assert float(made["offload"].flags[-1]) == 2
    assert Path(made["disk"].manthan["tiers.disk.path"]).is_dir()
    connector = json.loads(made["lmcache"].flags[made["lmcache"].flags.index("--kv-transfer-config") + 1])
    assert connector["kv_connector"] == "LMCacheMPConnector"
    more = connector["kv_connector_extra_config"]
    assert (more["lmcache.mp.port"], more["lmcache.mp.autostart"]) == (5555, True)
    words = more["lmcache.mp.autostart.server_args"].split()
    sizes = {flag: float(words[words.index(flag) + 1]) for flag in ("--l1-size-gb", "--chunk-size", "--http-port")}
    assert sizes == {"--l1-size-gb": 2, "--chunk-size": 256, "--http-port": 8080}


def test_lmcache_is_left_out_in_a_sentence_where_it_cannot_be_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "lmcache"
    package.mkdir()
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=":")
    (package / "__init__.py").write_text("raise ImportError('libcudart.so.13: cannot open shared object file')\n")
    said = cannot_run(LMCACHE, on_gpu=True)
    assert said.startswith("Arm lmcache is left out: the package lmcache cannot be imported here (")
    assert said.endswith("libcudart.so.13: cannot open shared object file).")
    folder = package / "integration" / "vllm"
    folder.mkdir(parents=True)
    for file in (package, folder.parent, folder):
        (file / "__init__.py").write_text("")
    (folder / "lmcache_mp_connector.py").write_text("")
    assert cannot_run(LMCACHE, on_gpu=False) == ""


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("--manthan", "{tenants: 3}"), "--manthan must be keys as in docs/configuration.md and their values, not"),
        (
            ("--tokens", "9000"),
            "--tokens 9000 with 3 turns makes prompts of 9448 tokens, but the model has 8192",
        ),
        (("--repeats", "2"), "--repeats needs --fairness"),
        (("--fairness", "--arms", "host"), "--fairness has chats and servers of its own, plain among them"),
        (("--fairness", "--chats", "3"), "fit, and --chats is 3: raise --chats or lower --pool"),
        (("--fairness", "--turns", "1"), "--fairness needs chats of two turns or more, but --turns is 1"),
        (("--trace", "nowhere.jsonl"), "--trace nowhere.jsonl: cannot be read"),
        (("--trace", "README.md"), "--trace README.md, line 1: "),
    ],
)
def test_a_mistake_is_one_sentence(arguments: tuple[str, ...], sentence: str, tmp_path: Path) -> None:
    assert sentence in refusal("load", *arguments, "--out", tmp_path)
