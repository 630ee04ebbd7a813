"""Log lines: the name of a session cannot end a line, nor tell a terminal what to do."""

import logging

import logged
import pytest

from manthan.manager.events import Evicted, Restored
from manthan.manager.session.blocks import GroupShape, MemoryShape
from manthan.vllm_hooks.telemetry.log import tell_eviction, tell_restore

SHAPE = MemoryShape({0: GroupShape(16, 500, {0: 100})})


@pytest.fixture
def lines(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
    caplog.set_level(logging.INFO, "vllm.manthan")
    name = "alice\n\x1b[2Jroot: all is well\x9b\u202e"
    tell_eviction(Evicted(name, 1, 0, 16, 500, 1, 100, 100, 0, 1.0, 0.1, False))
    tell_restore(Restored(name, 1, 1, 0, 100, 0.1, [], "r"), SHAPE)
    return sorted({*caplog.messages})  # each comes twice where other tests have changed handlers


def test_what_was_encoded_before_and_why_so_soon_is_said() -> None:
    with logged.said(logging.INFO) as said:
        tell_eviction(Evicted("a", 62, 0, 1984, 62, 1, 1, 15, 0, 0.1, 0.005, True))
        tell_eviction(Evicted("a", 62, 0, 1984, 62, 62, 15, 15, 1, 2.0, 0.005, False))
        tell_eviction(Evicted("a", 62, 0, 1984, 62, 62, 15, 15, 0, 2.0, 0.0, False))
    assert said[0].endswith("1 encoded in 5 ms, 61 before, because memory was short")
    assert said[1].endswith("62 encoded in 5 ms, 1 with tokens kept exact")
    assert said[2].endswith("(4.13x), 62 encoded ahead")


def test_names_are_escaped(lines: list[str]) -> None:
    assert len(lines) == 2
    assert all("session alice\\n\\x1b[2Jroot: all is well\\x9b\\u202e " in line for line in lines)
    assert all(line.isprintable() for line in lines)
