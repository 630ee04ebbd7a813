"""Prefill and decode in two engines, with Manthan next to the connector that hands KV from one to the other.

That is vLLM's ExampleConnector, which writes a prompt's KV to a folder: those for production need what a CPU has not.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from vllm.config import KVTransferConfig
from vllm_engine import BLOCK, Answer, Engine, Table, running

PREFILL, DECODE = "kv_producer", "kv_consumer"


def other_connector(folder: Path, role: str) -> KVTransferConfig:
    return KVTransferConfig(
        kv_connector="ExampleConnector",
        kv_role=role,
        kv_connector_extra_config={"shared_storage_path": str(folder)},
    )


class Pair:
    """An engine that computes prompts, and one that computes answers."""

    def __init__(self, prefill: Engine, decode: Engine) -> None:
        self.prefill, self.decode = prefill, decode

    def ask(self, prompt: str, session: str) -> tuple[Answer, Answer]:
        """As a proxy does: the one engine computes the prompt, and the other goes on from there."""
        return self.prefill.ask(prompt, session, max_tokens=1), self.decode.ask(prompt, session)

    def wait_until_cold(self, count: int) -> None:
        for engine in (self.prefill, self.decode):
            engine.wait_until_cold(count)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    folder = tmp_path_factory.mktemp("kv")
    options: dict[str, Any] = {"blocks": 131, "idle": 0.3}
    for prefill in running(**options, other_connector=other_connector(folder, PREFILL)):
        for decode in running(**options, other_connector=other_connector(folder, DECODE)):
            yield Pair(prefill, decode)


def handed_over(answer: Answer) -> int:
    """Tokens that ExampleConnector writes: whole blocks, of all tokens but the last two."""
    return (answer.prompt_tokens - 2) // BLOCK * BLOCK


def goes_on(table: Table) -> tuple[str, str]:
    """The conversation's next prompt, some blocks longer, and the right answer."""
    prompt, right = table.question(0)
    said = "".join(f"{asked.removeprefix(table.text)}{value}\n" for asked, value in map(table.question, range(1, 9)))
    asked, wanted = table.question(9)
    return f"{prompt}{right}\n{said}{asked.removeprefix(table.text)}", wanted


@pytest.mark.slow
def test_sessions_go_cold_and_return_on_both_sides(pair: Pair) -> None:
    tables = [Table(900 + seed) for seed in range(3)]
    for n, table in enumerate(tables):
        prompt, right = table.question(0)
        _, answer = pair.ask(prompt, f"session-{n}")
        assert answer.text == right
        assert answer.cached_tokens == handed_over(answer)  # another engine has computed them
    pair.wait_until_cold(3)
    for n, table in enumerate(tables):
        prompt, right = goes_on(table)
        first, second = pair.ask(prompt, f"session-{n}")
        assert first.cached_tokens >= 16 * BLOCK  # restored; what is new was computed, and all of it handed over
        assert second.text == right
        assert second.cached_tokens == handed_over(second)
    for engine in (pair.prefill, pair.decode):
        assert engine.metric("manthan_evictions_total") >= 3
        assert engine.failures() == 0
    pair.prefill.wait(lambda: pair.prefill.metric("manthan_restored_blocks_total") >= 3 * 16, "three restores")
