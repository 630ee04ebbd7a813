"""`manthan bench concurrency` on two real servers, at a small size."""

from pathlib import Path
from typing import Any

import pytest
from bench_command import is_png, refusal, report, run

from manthan.benchmarks.concurrency import USERS, read_users
from manthan.benchmarks.concurrency_report import all_rate, ratio, user_rate
from manthan.benchmarks.server import VllmServer

TOKENS, REQUESTS, REPEATS = 12, 2, 2


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A run with 1 and 3 users; `folder` is where it is."""
    folder = tmp_path_factory.mktemp("concurrency")
    size = ("--tokens", TOKENS, "--prompt", 300, "--requests", REQUESTS, "--repeats", REPEATS)
    return report(folder, "concurrency", "--users", "3,1", *size, "--idle-after", 0.1) | {"folder": folder}


@pytest.mark.slow
def test_every_user_gets_every_token(found: dict[str, Any]) -> None:
    assert [level["users"] for level in found["levels"]] == [1, 3]
    for level in found["levels"]:
        assert level["turns"].keys() == {"plain", "Manthan"}
        for turns in level["turns"].values():
            assert [turn["tokens"] for turn in turns] == [level["users"] * REQUESTS * TOKENS] * REPEATS
            assert [turn["errors"] for turn in turns] == [0] * REPEATS
            assert all(len(turn["user_rates"]) == level["users"] for turn in turns)


@pytest.mark.slow
def test_rates_are_of_the_time_that_it_took(found: dict[str, Any]) -> None:
    for level in found["levels"]:
        for turn in (turn for turns in level["turns"].values() for turn in turns):
            assert all_rate(turn) * turn["wall_s"] == pytest.approx(turn["tokens"])
            assert all_rate(turn) <= 1.05 * sum(turn["user_rates"])  # nobody waits for others
            assert user_rate(turn) > 0


@pytest.mark.slow
def test_manthan_was_on_and_had_work(found: dict[str, Any]) -> None:
    log = (found["folder"] / "concurrency-manthan.log").read_text()
    assert "Manthan is on: policy lru" in log
    assert "went cold" in log
    assert "Manthan is on" not in (found["folder"] / "concurrency-plain.log").read_text()


@pytest.mark.slow
def test_the_plot_is_drawn_again(found: dict[str, Any]) -> None:
    plot = found["folder"] / "concurrency.png"
    assert is_png(plot)
    plot.unlink()
    result = run("concurrency", "--plot-only", plot.with_suffix(".json"))
    assert result.exit_code == 0, result.output
    assert is_png(plot)
    assert len([line for line in result.output.splitlines() if line.split()[1:2] == ["Manthan"]]) == 2


# -- a server that runs already -------------------------------------------------------------------------


@pytest.mark.parametrize(("prompt", "tokens", "errors"), [(300, 2 * 4, 0), (700, 0, 2)])
def test_a_given_server_is_measured_alone(
    plain_server: VllmServer, tmp_path: Path, prompt: int, tokens: int, errors: int
) -> None:
    size = ("--users", 2, "--tokens", 4, "--prompt", prompt, "--requests", 1, "--repeats", 1)
    (level,) = report(tmp_path, "concurrency", "--base-url", f"{plain_server.url}/v1", *size)["levels"]
    ((turn,),) = level["turns"].values()
    assert level["turns"].keys() == {plain_server.url}
    assert (turn["tokens"], turn["errors"]) == (tokens, errors)
    assert is_png(tmp_path / "concurrency.png")


def test_a_server_that_is_not_there_is_one_sentence(tmp_path: Path) -> None:
    result = run("concurrency", "--base-url", "http://127.0.0.1:1", "--out", tmp_path)
    assert result.exit_code == 1
    assert "The server at http://127.0.0.1:1 did not answer a request" in result.output


# -- arithmetic -----------------------------------------------------------------------------------------


def test_the_ratio_is_that_of_pairs() -> None:
    def turns(*walls: float) -> list[dict[str, float]]:
        return [{"tokens": 100, "wall_s": wall} for wall in walls]

    assert ratio({"turns": {"plain": turns(1, 10, 4), "Manthan": turns(2, 10, 5)}}) == 0.8
    failed = [{"tokens": 0, "wall_s": 1.0}]
    assert ratio({"turns": {"plain": failed, "Manthan": turns(1)}}) is None
    assert ratio({"turns": {"http://there": turns(1)}}) is None


@pytest.mark.parametrize("text", ["0", "1,x", "", "-2", "1001"])
def test_users_must_be_numbers(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "300")
    sentence = f"--users must be whole numbers from 1 to 1000 with commas between, not {text!r}"
    assert sentence in refusal("concurrency", "--users", text)


def test_the_default_is_one_to_25_users() -> None:
    assert read_users(USERS) == [1, 2, 4, 6, 8, 10, 15, 20, 25]
