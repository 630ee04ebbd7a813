"""What compression costs the tiny model on a real engine, next to the same pieces with Transformers."""

import json
import random
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from manthan.benchmarks.cli import evaluate
from manthan.benchmarks.engines import Answer, WrongPathError
from manthan.benchmarks.quality_pieces import Text
from manthan.benchmarks.quality_tasks import NAMES
from manthan.benchmarks.quality_vllm import check_origin

MODEL = Path(__file__).parents[1] / "data" / "tiny-llama"
PREFIX, PIECES, CHATS = 512, 2, 3
TASKS, LENGTHS = ("table", "needles"), (1000,)
SETTINGS = ("k3v3", "k3v3 128")


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    out = tmp_path_factory.mktemp("quality")
    sizes = ("--prefix", PREFIX, "--continuation", 256, "--pieces", PIECES)
    sizes += ("--tasks", ",".join(TASKS), "--lengths", ",".join(map(str, LENGTHS)), "--chats", CHATS, "--document", 400)
    words = ("quality", MODEL, "--codec", "k3v3", "--exact", "0,128", "--out", out, *sizes)
    result = CliRunner().invoke(evaluate, list(map(str, words)))
    assert result.exit_code == 0, result.output
    assert "vLLM less Transformers" in result.output
    return json.loads((out / "quality.json").read_text())


@pytest.mark.slow
def test_every_prefix_was_restored_and_not_computed(report: dict[str, Any]) -> None:
    assert list(report["arms"]) == ["vllm", "transformers"]
    for name in SETTINGS:
        arm = report["arms"]["vllm"][name]
        found, text = arm["prefix_tokens_not_computed"], Text(str(MODEL), None)
        tasks = [text.task(task, length, 32, 0) for task in TASKS for length in LENGTHS]
        assert found == [PREFIX] * PIECES + [len(task.prefix) for task in tasks if task]
        assert len(found) == PIECES + 2
        chats = sum(chat.prefix(32) for chat in text.chats(CHATS, 400))
        assert arm["manthan"]["vllm:manthan_restored_blocks_total"] == (sum(found) + chats) / 32
    assert report["arms"]["vllm"]["exact"]["manthan"].get("vllm:manthan_restored_blocks_total", 0) == 0


@pytest.mark.slow
def test_compression_costs_what_is_known_of_it(report: dict[str, Any]) -> None:
    found = report["summary"]["vllm"]
    assert found["exact"]["tasks"]["table 1000"]["mean"] == 1
    assert found["k3v3"]["tasks"]["table 1000"]["mean"] > 0.97
    assert 0.0005 < found["k3v3 128"]["kl"]["mean"] < found["k3v3"]["kl"]["mean"] < 0.03


@pytest.mark.slow
def test_answers_after_a_return_are_beside_those_when_hot(report: dict[str, Any]) -> None:
    found = report["summary"]["vllm"]
    assert found["recomputed"]["answers"] is None
    assert found["exact"]["answers"]["answers"] == CHATS
    assert found["exact"]["answers"]["share"] > 0.8
    for name in SETTINGS:
        assert 0.05 < found[name]["answers"]["share"] <= found["exact"]["answers"]["share"]
    hot = [[answer["hot"] for answer in arm["answers"]] for arm in report["arms"]["vllm"].values() if "answers" in arm]
    assert hot == [hot[0]] * len(hot)  # what is computed does not depend on the codec


@pytest.mark.slow
def test_vllm_and_transformers_agree(report: dict[str, Any]) -> None:
    """Both round to bf16, in other places: what that does to exact KV is their perplexities' difference."""
    vllm, plain = report["summary"]["vllm"], report["summary"]["transformers"]
    assert vllm["exact"]["nll"]["mean"] == pytest.approx(plain["exact"]["nll"]["mean"], abs=0.005)
    for name in SETTINGS:
        assert vllm[name]["added"]["mean"] == pytest.approx(plain[name]["added"]["mean"], abs=0.005)
        assert vllm[name]["kl"]["mean"] == pytest.approx(plain[name]["kl"]["mean"], rel=0.2)


@pytest.mark.parametrize(("cached", "external"), [(0, 0), (512, 0), (480, 480), (512, 480), (544, 512)])
def test_a_prefix_that_was_not_restored_is_no_figure(cached: int, external: int) -> None:
    with pytest.raises(WrongPathError, match=f"{cached} of 512 prefix tokens were not computed, {external} of these"):
        check_origin(Answer(0.0, 768, cached, external), 512, ours=True, what="piece 1")


TASK = """
task: {name}
dataset_path: json
dataset_kwargs: {{data_files: {{test: {file}}}}}
test_split: test
output_type: generate_until
doc_to_text: "{{{{text}}}}"
doc_to_target: "{{{{answer}}}}"
generation_kwargs: {{until: ["\\n"], max_gen_toks: 5}}
metric_list: [{{metric: exact_match, aggregation: mean, higher_is_better: true}}]
"""


@pytest.mark.slow
def test_tasks_of_lm_eval_run_unchanged(tmp_path: Path) -> None:
    """Tables, each with a lookup in it: what returns is restored, and answered as well."""
    pytest.importorskip("lm_eval")
    rng, documents = random.Random(0), []
    for _ in range(4):
        numbers = {name: rng.randrange(1000, 10000) for name in rng.sample(NAMES, 40)}
        (asked, answer), *shown = rng.sample(sorted(numbers.items()), 4)
        text = "".join(f"{name} = {number}\n" for name, number in numbers.items())
        text += "\n" + "".join(f"assert {name} == {number}\n" for name, number in shown) + f"assert {asked} =="
        documents.append({"text": text, "answer": f" {answer}"})
    (tmp_path / "tables.jsonl").write_text("\n".join(map(json.dumps, documents)))
    (tmp_path / "tables.yaml").write_text(TASK.format(name="tables", file=tmp_path / "tables.jsonl"))
    words = ("quality", MODEL, "--lm-eval", "tables", "--lm-eval-data", tmp_path, "--out", tmp_path / "out")
    result = CliRunner().invoke(evaluate, [*map(str, words), "--codec", "wht-4x"])
    assert result.exit_code == 0, result.output
    passes = json.loads((tmp_path / "out" / "lm-eval.json").read_text())["passes"]
    scores = [passes[name]["results"]["tables"]["exact_match,none"] for name in ("computed", "returned")]
    assert scores == [1, 1]
    restored, of = (
        passes["returned"][f"vllm:{name}_total"] for name in ("external_prefix_cache_hits", "prompt_tokens")
    )
    assert restored > 0.9 * of


def test_lm_eval_s_refusals(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("manthan.benchmarks.quality_lm_eval.find_spec", lambda name: None)
    result = CliRunner().invoke(evaluate, ["quality", str(MODEL), "--lm-eval", "gsm8k"])
    assert result.exit_code == 1
    assert "lm_eval is not installed here: `pip install 'lm-eval[api]'`." in result.output
    monkeypatch.setattr("manthan.benchmarks.quality_lm_eval.find_spec", lambda name: name)
    result = CliRunner().invoke(evaluate, ["quality", str(MODEL), "--lm-eval", "x", "--lm-eval-data", "nowhere"])
    assert "--lm-eval-data nowhere is no folder: name the cache of Hugging Face with the tasks' data." in result.output
