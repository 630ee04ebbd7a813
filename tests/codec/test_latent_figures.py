"""Figures of latents in docs/quality.md: sizes are those of the codec, and a profile loses less at a smaller size."""

import re
from pathlib import Path

import latent_figures
import pytest
from latent_figures import ARMS, BF16, DEEPSEEK, DS_MLA, FP8, Arm, of_arm
from latent_model import INDEX

from manthan.codec.registry import needs_profile

pytest.importorskip("transformers")
DOCUMENT = Path(__file__).parents[2] / "docs" / "quality.md"


def told() -> dict[str, list[float]]:
    """Figures of the document's table by arm."""
    rows = re.findall(r"^\| ((?:bf16|fp8)[^|]*) \|(.*)\|$", DOCUMENT.read_text(encoding="utf-8"), re.MULTILINE)
    return {name: [float(cell.strip(" %")) for cell in cells.split("|")] for name, cells in rows}


UNCALIBRATED = [arm for arm in ARMS if not needs_profile(arm.codec) and arm.name in told()]
"""Arms of the document whose size no profile decides."""


@pytest.mark.parametrize("arm", UNCALIBRATED, ids=lambda arm: arm.name)
def test_the_document_has_the_sizes_of_deepseek_v3(arm: Arm) -> None:
    form = of_arm(arm, DEEPSEEK, None)
    assert form is not None
    assert told()[arm.name][1] == pytest.approx(form.shape.nbytes / form.expected_nbytes(0), abs=0.006)


def test_the_document_has_all_number_formats_and_no_unknown_arm() -> None:
    measured = [name for name in told() if "instead of" not in name]
    assert set(measured) <= {arm.name for arm in ARMS}
    assert {name.split(",")[0] for name in measured} >= {"bf16", "fp8", "fp8_ds_mla"}


@pytest.mark.slow
def test_a_profile_loses_less_at_a_smaller_size(tmp_path: Path) -> None:
    arms = [Arm(BF16, "wht-5x"), Arm(BF16, "klt-8x"), Arm(BF16, "wht-5x", INDEX), Arm(FP8, "wht-5x")]
    arms += [Arm(DS_MLA, "wht-5x"), Arm(DS_MLA, "klt-8x")]
    *rounding, plain, calibrated, beside, fp8, scaled, scaled_calibrated = latent_figures.figures(tmp_path, arms, 1)
    assert all(each.kl > 0 for each in rounding)
    assert 0 < calibrated.kl < plain.kl / 2
    assert calibrated.ratio > 1.3 * plain.ratio
    assert (beside.kl, beside.same) == (plain.kl, plain.same), "bytes are as they were"
    own = 1152 / plain.ratio
    assert beside.ratio == pytest.approx((1152 + INDEX) / (own + INDEX), rel=0.02)
    assert 0 < fp8.kl < 2 * plain.kl
    assert fp8.ratio > 1.8
    assert 0 < scaled.kl < 2 * plain.kl
    assert scaled.ratio > 1.6
    assert 0 < scaled_calibrated.kl < scaled.kl / 2
    assert scaled_calibrated.ratio > 1.2 * scaled.ratio
    for each in (plain, calibrated, beside, fp8, scaled):  # fp8's rounding is not in the profile, and costs bits
        assert each.ratio == pytest.approx(each.deepseek, rel=0.15)
