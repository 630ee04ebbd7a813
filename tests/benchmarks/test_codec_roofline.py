"""The instruction roofline: counters and figures of the same passes are put together, whatever their units."""

import csv
import io
from pathlib import Path
from typing import Any

import pytest
import typer

from manthan.benchmarks import codec_roofline as roofline

COPY = 4e12


def counters(path: Path, kernels: list[tuple[str, str, int]]) -> Path:
    """As ncu writes them. kernels: name, stream, warp instructions; a microsecond each, half of it on tensor cores."""
    out = io.StringIO()
    rows = csv.writer(out, quoting=csv.QUOTE_ALL)
    rows.writerow(["ID", "Kernel Name", "Stream", "Metric Name", "Metric Unit", "Metric Value"])
    for i, (name, stream, instructions) in enumerate(kernels):
        for metric, unit, value in (
            (roofline.INSTRUCTIONS, "inst", f"{instructions:,}"),
            (roofline.PER_CYCLE, "inst/cycle", "528"),
            (roofline.CLOCK, *(("Ghz", "2.00") if i % 2 else ("cycle/nsecond", "2.00"))),
            (roofline.TENSOR, "%", "50.0"),
            (roofline.DRAM, "Mbyte", "1.5"),
            (roofline.TIME, "us", "1"),
        ):
            rows.writerow([str(i), name, stream, metric, unit, value])
    path.write_text("==PROF== Connected to process 7\n" + out.getvalue())
    return path


def figures(*operations: str) -> dict[str, Any]:
    """Of passes over 1,000 vectors and 4,000 bytes, a microsecond each."""
    one = {"codec": "k3v3", "heads": 8, "head_dim": 64, "vectors": 1000, "nbytes": 4000, "median": 1.0, "of_copy": 0.5}
    return {"copy_bytes_s": COPY, "machine": "here", "results": [one | {"operation": each} for each in operations]}


def test_kernels_of_a_pass_are_added_up(tmp_path: Path) -> None:
    kernels = [("round", "7", 1000), ("words", "7", 3000), ("verify", "13", 5), ("decode", "14", 2000)]
    passes = roofline.launches(counters(tmp_path / "counters.csv", kernels))
    assert [len(kernels) for kernels in passes] == [2, 1, 1]
    encode, decode = roofline.points(figures("encode", "verify", "decode"), passes)
    assert (encode.operation, decode.operation) == ("encode", "decode")
    assert encode.per_vector == pytest.approx(4)
    assert encode.intensity == pytest.approx(1)
    assert encode.rate == pytest.approx(4)  # 4,000 in a microsecond
    assert roofline.roof(passes) == pytest.approx(1056e9)
    assert encode.issued == pytest.approx(4e9 / 1056e9)
    assert encode.tensor == pytest.approx(0.5)


def test_counters_of_other_passes_are_refused(tmp_path: Path) -> None:
    passes = roofline.launches(counters(tmp_path / "counters.csv", [("encode", "7", 1000)]))
    with pytest.raises(typer.BadParameter, match="1 passes were counted, and 2 measured"):
        list(roofline.points(figures("encode", "decode"), passes))


def test_the_plot_has_every_codec(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    passes = roofline.launches(counters(tmp_path / "counters.csv", [("encode", "7", 900), ("decode", "8", 400)]))
    report = figures("encode", "decode")
    report |= {"points": list(roofline.points(report, passes)), "roof": roofline.roof(passes)}
    labels = roofline.draw(report).axes[0].get_legend_handles_labels()[1]
    assert labels == ["k3v3 encode", "k3v3 decode"]
