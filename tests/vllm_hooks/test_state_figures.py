"""Figures of KDA's states and of windows in docs/quality.md: smaller ones lose more, and exact ones nothing."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers.models.kimi_linear")
import state_figures
from state_figures import coded_states, coded_windows, figures, with_kda, with_windows

DOCUMENT = Path(__file__).parents[2] / "docs" / "quality.md"
ROUNDING = 1e-4
"""KL, at most, of a window's KV in bf16 from that in float32."""


def test_the_document_has_every_kind_and_no_unknown_codec() -> None:
    rows = re.findall(
        r"^\| (states of KDA|windows) \| `([^`]+)` \|", DOCUMENT.read_text(encoding="utf-8"), re.MULTILINE
    )
    measured = [(kind, codec) for kind, _, codecs, _ in state_figures.KINDS for codec in codecs]
    assert [row for row in measured if row in rows] == rows
    assert {kind for kind, _ in rows} == {kind for kind, *_ in state_figures.KINDS}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("made", "codecs", "replace", "most"),
    [
        (with_kda, ("state-int8", "state-bf16", "exact"), coded_states, 0.001),
        (with_windows, ("wht-5x", "wht-4x", "exact"), coded_windows, 0.05),
    ],
    ids=["states", "windows"],
)
def test_what_is_smaller_loses_more(
    made: Callable[[], Any], codecs: tuple[str, ...], replace: Callable[..., float], most: float
) -> None:
    small, large, exact = figures(made(), codecs, replace, pieces=1)
    assert small.ratio > large.ratio > exact.ratio
    assert most > small.kl > large.kl > exact.kl >= 0
    assert exact.kl <= (0 if replace is coded_states else ROUNDING)
    assert exact.same > 0.98
