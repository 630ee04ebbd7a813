"""Prefill and decode in two engines, with Manthan next to NIXL, which hands KV from one to the other over this host."""

import contextlib
import json
import multiprocessing
import time
from collections.abc import Iterator
from typing import Any

import pytest
import vllm_engine
from nixl_library import import_nixl
from vllm import SamplingParams
from vllm.config import KVTransferConfig
from vllm.utils.network_utils import get_open_port
from vllm.v1.engine import utils
from vllm_engine import BLOCK, Engine, Table

from manthan.vllm_hooks.compat import ask_cores
from manthan.vllm_hooks.queries import METHOD

pytestmark = pytest.mark.slow

PREFILL, DECODE = "kv_producer", "kv_consumer"
LEASE_S = 6
"""Seconds for which the prefill engine keeps blocks that nobody fetches."""


def spawn_engines() -> None:
    """Start engines anew, so that each has its own environment."""
    utils.get_mp_context = lambda: multiprocessing.get_context("spawn")


@contextlib.contextmanager
def with_nixl(role: str, is_first: bool = True) -> Iterator[Engine]:
    """An engine with NIXL in front of Manthan, or behind it."""
    nixl: dict[str, Any] = {"kv_connector": "NixlConnector", "kv_role": role, "kv_buffer_device": "cpu"}
    nixl["kv_connector_extra_config"] = {"kv_lease_duration": LEASE_S}
    manthan = {"kv_connector": "ManthanConnector", "kv_role": "kv_both"}
    other_connector = KVTransferConfig(
        kv_connector="MultiConnector",
        kv_role="kv_both",
        kv_connector_extra_config={"connectors": [nixl, manthan] if is_first else [manthan, nixl]},
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(vllm_engine, "fork_engines", spawn_engines)
        patch.setenv("VLLM_NIXL_SIDE_CHANNEL_PORT", str(get_open_port()))
        engine = Engine(131, idle=0.3, other_connector=other_connector)
    yield engine
    engine.stop()


class Answer:
    """Text, and what a proxy is told, of one engine's answer."""

    def __init__(self, output: Any) -> None:
        self.text, self.tokens = output.outputs[0].text, len(output.prompt_token_ids)
        self.params: dict[str, Any] = output.kv_transfer_params or {}

    @property
    def lossy(self) -> int:
        found: int = self.params.get("manthan", {}).get("lossy_tokens", 0)
        return found


def ask(engine: Engine, prompt: str, session: str, params: dict[str, Any], max_tokens: int = 4) -> Answer:
    sampling = SamplingParams(
        temperature=0, ignore_eos=True, max_tokens=max_tokens, extra_args={"kv_transfer_params": params}
    )

    async def answered() -> Any:
        async for output in engine.llm.generate(prompt, sampling, f"{session}-{time.time()}", session_id=session):
            last = output
        return last

    return Answer(engine.run(answered()))


def computed(engine: Engine) -> int:
    """Tokens of prompts that were neither resident nor loaded, by Manthan's count."""
    [state] = engine.run(ask_cores(engine.llm, METHOD, "state", {"bound": None}))
    found: int = json.loads(state)["totals"]["computed_tokens"]
    return found


class Pair:
    """A prefill and a decode engine, and a proxy."""

    def __init__(self, prefill: Engine, decode: Engine) -> None:
        self.prefill, self.decode = prefill, decode

    @property
    def both(self) -> tuple[Engine, Engine]:
        return self.prefill, self.decode

    def compute(self, prompt: str, session: str, **params: Any) -> Answer:
        """Have the prefill engine compute a prompt for another one."""
        return ask(self.prefill, prompt, session, {"do_remote_decode": True} | params, max_tokens=1)

    def ask(self, prompt: str, session: str) -> tuple[Answer, Answer]:
        first = self.compute(prompt, session)
        return first, ask(self.decode, prompt, session, first.params)

    def start_afresh(self) -> None:
        for engine in self.both:
            engine.wait(lambda engine=engine: engine.reset(cold=True), "a reset")
            engine.ask("x")


@pytest.fixture(scope="module")
def engines() -> Iterator[Pair]:
    import_nixl()
    with with_nixl(PREFILL) as prefill, with_nixl(DECODE) as decode:
        yield Pair(prefill, decode)


@pytest.fixture
def pair(engines: Pair) -> Pair:
    engines.start_afresh()
    return engines


def goes_on(table: Table, more: int = 9) -> tuple[str, str]:
    """The conversation's next prompt, some blocks longer, and the right answer."""
    prompt, right = table.question(0)
    said = "".join(f"{asked.removeprefix(table.text)}{value}\n" for asked, value in map(table.question, range(1, more)))
    asked, wanted = table.question(more)
    return f"{prompt}{right}\n{said}{asked.removeprefix(table.text)}", wanted


def test_kv_goes_over_and_is_saved_on_both_sides(pair: Pair) -> None:
    """Blocks that the decode engine was handed are its own then."""
    handed = pair.decode.metric("prompt_tokens_by_source_total", source="external_kv_transfer")
    counted, tables = computed(pair.decode), [Table(900 + seed) for seed in range(3)]
    tokens = 0
    for n, table in enumerate(tables):
        prompt, right = table.question(0)
        _, answer = pair.ask(prompt, f"session-{n}")
        assert answer.text == right
        tokens += answer.tokens
    now = pair.decode.metric("prompt_tokens_by_source_total", source="external_kv_transfer")
    assert now - handed >= tokens - 3
    assert computed(pair.decode) - counted < 3 * BLOCK
    restored = pair.decode.metric("manthan_restored_blocks_total")
    for engine in pair.both:
        engine.wait_until_cold(3)
        assert engine.failures() == 0
    for n, table in enumerate(tables):
        prompt, right = goes_on(table)
        assert pair.decode.ask(prompt, f"session-{n}").text == right  # nobody hands anything over
    assert pair.decode.metric("manthan_restored_blocks_total") - restored >= 3 * 16
    assert pair.decode.metric("manthan_overwritten_blocks_total") == 0


def test_blocks_that_the_other_engine_hands_over_are_not_restored_too(pair: Pair) -> None:
    """They are saved on both sides. Only the prefill engine needs what it saved."""
    table = Table(910)
    pair.ask(table.question(0)[0], "session")
    for engine in pair.both:
        engine.wait_until_cold(1)
    before = [engine.metric("manthan_restored_blocks_total") for engine in pair.both]
    prompt, right = goes_on(table)
    first, second = pair.ask(prompt, "session")
    now = [engine.metric("manthan_restored_blocks_total") for engine in pair.both]
    assert first.params["remote_prefill_cached_tokens"] >= 16 * BLOCK
    assert second.text == right
    assert now[0] - before[0] >= 16
    assert now[1] == before[1]
    for engine in pair.both:
        engine.wait_until_cold(1)
        assert engine.failures() == 0


def test_decoded_kv_that_is_handed_over_is_decoded_kv_there_too(pair: Pair) -> None:
    """The decode engine never encodes it, and serves it to its session only."""
    table, other = Table(920), Table(921)
    pair.compute(table.question(0)[0], "session")
    pair.prefill.wait_until_cold(1)
    prompt, right = goes_on(table)
    encoded = pair.decode.handed
    first, second = pair.ask(prompt, "session")
    assert second.text == right
    assert 16 * BLOCK <= first.lossy < second.lossy  # what is computed behind decoded KV is not exact either
    blocks = pair.decode.ask(other.question(0)[0], "other").full_blocks
    pair.decode.wait(lambda: pair.decode.sessions("cold") >= 1, "a cold session")  # "session" was idle before it
    assert pair.decode.handed - encoded == blocks
    third = pair.decode.ask(prompt, "third")
    assert (third.text, third.cached_tokens) == (right, 0)


def test_blocks_that_nobody_fetches_are_cold_meanwhile(pair: Pair) -> None:
    """vLLM keeps them in the pool until the lease ends. The session is saved in spite of that."""
    table = Table(930)
    pair.compute(table.question(0)[0], "session")
    pair.prefill.wait(lambda: pair.prefill.sessions("cold") == 1, "a cold session")
    assert not pair.prefill.reset()  # the other engine may still fetch them
    pair.prefill.empty_pool()
    restored = pair.prefill.metric("manthan_restored_blocks_total")
    prompt, right = goes_on(table)
    assert pair.prefill.ask(prompt, "session").text == right
    assert pair.prefill.metric("manthan_restored_blocks_total") - restored >= 16
    assert pair.prefill.failures() == 0


@pytest.mark.parametrize("is_cold", [True, False], ids=["cold", "new"])
def test_what_cannot_be_fetched_is_restored_or_computed(pair: Pair, is_cold: bool) -> None:
    table = Table(940 + is_cold)
    if is_cold:
        pair.ask(table.question(0)[0], "session")
        pair.decode.wait_until_cold(1)
    restored = pair.decode.metric("manthan_restored_blocks_total")
    prompt, right = goes_on(table)
    gone = {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_block_ids": [list(range(1, 20))],
        "remote_engine_id": "gone",
        "remote_request_id": "gone-0",
        "remote_host": "localhost",
        "remote_port": get_open_port(),
        "tp_size": 1,
        "remote_num_tokens": 600,
    }
    assert ask(pair.decode, prompt, "session", gone).text == right
    again = pair.decode.metric("manthan_restored_blocks_total") - restored
    assert again >= 16 if is_cold else again == 0
    pair.decode.wait_until_cold(1)
    assert pair.decode.failures() == 0
    assert pair.decode.ask(goes_on(table, 10)[0], "session").cached_tokens >= 16 * BLOCK


def test_manthan_in_front_restores_what_it_has_and_fetches_nothing(engines: Pair) -> None:
    """The prefill engine is told that nobody will fetch its blocks."""
    with with_nixl(DECODE, is_first=False) as decode:
        pair, table = Pair(engines.prefill, decode), Table(950)
        pair.start_afresh()
        assert pair.ask(table.question(0)[0], "session")[1].text == table.question(0)[1]
        for engine in pair.both:
            engine.wait_until_cold(1)
        before = [decode.metric("manthan_restored_blocks_total"), computed(decode)]
        prompt, right = goes_on(table)
        assert pair.ask(prompt, "session")[1].text == right
        assert decode.metric("manthan_restored_blocks_total") - before[0] >= 16
        assert computed(decode) - before[1] > BLOCK  # the rest of the prompt
        for engine in pair.both:
            engine.wait_until_cold(1)
            assert engine.failures() == 0
