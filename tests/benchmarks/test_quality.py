"""What compression costs the tiny model, with Transformers: what must hold of the figures, the report, and refusals."""

import inspect
import json
import keyword
import random
import re
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import AutoTokenizer
from typer.testing import CliRunner

from manthan.benchmarks.cli import evaluate
from manthan.benchmarks.quality import main
from manthan.benchmarks.quality_answers import Agreement
from manthan.benchmarks.quality_blocks import CodedPrefix
from manthan.benchmarks.quality_pieces import Chat, Text
from manthan.benchmarks.quality_settings import (
    PEERS,
    QualityError,
    Setting,
    Shape,
    parse_settings,
)
from manthan.benchmarks.quality_tasks import NAMES, TASKS
from manthan.codec import BlockFormat, BlockShape, codec_names, registry
from manthan.codec.registry import needs_profile
from manthan.manager.cli import app
from manthan.manager.config.model import CodecConfig

MODEL = Path(__file__).parents[1] / "data" / "tiny-llama"
SHAPE = Shape(layers=4, heads=2, head_dim=128, vocabulary=8192, positions=8192)


@pytest.fixture(autouse=True)
def _no_codec_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep others' codecs out of the tests that follow in this process."""
    monkeypatch.setattr(registry, "PRESETS", dict(registry.PRESETS))


def run(*arguments: object) -> Any:
    return CliRunner().invoke(evaluate, ["quality", *map(str, arguments)])


def test_a_short_run_has_figures_and_a_plot(tmp_path: Path) -> None:
    """Little text: what is left out above is measured in `make test-all`. Others' codecs are compared with."""
    sizes = ("--prefix", 128, "--continuation", 64, "--pieces", 2, "--dtype", "float32")
    more = ("--tasks", "needles", "--lengths", "700,8192", "--chats", 2, "--document", 100)
    codecs = ("--codec", "k3v3,exact,kvarn,fp8", "--exact", "0")
    result = run(MODEL, "--engine", "transformers", *codecs, *sizes, *more, "--out", tmp_path)
    assert result.exit_code == 0, result.output
    assert "  transformers: the model is loaded\n" in result.output  # a line, where there is no terminal
    assert "ratio at 8,192 tokens" in result.output
    found = json.loads((tmp_path / "quality.json").read_text())["summary"]["transformers"]
    assert 0.0005 < found["k3v3"]["kl"]["mean"] < 0.05
    assert abs(found["recomputed"]["kl"]["mean"]) < 1e-4
    assert 0 < found["last bit"]["kl"]["mean"] < 1e-4
    assert list(found["k3v3"]["tasks"]) == ["needles 700"]  # 8,192 and one are more than the model takes
    assert found["k3v3"]["answers"]["answers"] == 2
    assert 1e-6 < found["fp8"]["kl"]["mean"] < found["kvarn"]["kl"]["mean"] < 1
    coded = found["exact, encoded"]
    assert coded["kl"]["mean"] == pytest.approx(0, abs=1e-6)
    assert coded["ratio"] == pytest.approx(1, abs=0.01)
    assert (tmp_path / "quality.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_others_codes_lose_less_with_more_bits(tmp_path: Path) -> None:
    sizes = (
        "--prefix",
        128,
        "--continuation",
        64,
        "--pieces",
        2,
        "--dtype",
        "float32",
        "--tasks",
        "none",
        "--chats",
        0,
    )
    result = run(MODEL, "--engine", "transformers", "--codec", ",".join(PEERS), *sizes, "--out", tmp_path)
    assert result.exit_code == 0, result.output
    found = json.loads((tmp_path / "quality.json").read_text())["summary"]["transformers"]
    losses = {peer: found[f"{peer} 4"]["kl"]["mean"] for peer in PEERS}
    assert all(1e-6 < loss < 1 and found[f"{peer} 4"]["ratio"] > 1.9 for peer, loss in losses.items())
    assert losses["turboquant-4bit"] < losses["turboquant-3bit"]
    assert losses["kvtc-4bit"] < losses["kvtc-2bit"]


# -- sizes and scores -----------------------------------------------------------------------------------


def coded(codec: str, blocks: int) -> CodedPrefix:
    """Of random KV of the tiny model's shape."""
    rng = np.random.default_rng(0)
    shape = (SHAPE.layers, SHAPE.heads, 32 * blocks, SHAPE.head_dim)
    keys, values = ((rng.standard_normal(shape, np.float32).view(np.uint32) >> 16).astype(np.uint16) for _ in range(2))
    form = BlockFormat(codec, BlockShape(SHAPE.layers, SHAPE.heads, 32, SHAPE.head_dim), bytes(16))
    return CodedPrefix(form, (keys, values), ThreadPoolExecutor(2))


def test_bytes_are_those_of_encoded_blocks_exact_tokens_in_them() -> None:
    token, head = 800, 128 + 64  # of encoded numbers; of a header and a section
    encoded = 32 * token + head + 64
    first, exact = 4 * 4096 + 28 * token + head + 128, 32 * 4096 + head
    prefix = coded("k3v3", 8)
    assert prefix.nbytes(Setting("k3v3")) == 8 * encoded
    assert prefix.long_nbytes(Setting("k3v3")) == 256 * encoded
    assert prefix.nbytes(Setting("k3v3", 4)) == 7 * encoded + first
    assert prefix.long_nbytes(Setting("k3v3", 4)) == 255 * encoded + first
    assert prefix.nbytes(Setting("k3v3", 256)) == 8 * exact
    assert prefix.long_nbytes(Setting("k3v3", 256)) == 248 * encoded + 8 * exact  # not in the prefix


def test_an_answer_counts_up_to_its_first_difference() -> None:
    hot = [1, 2, 3, 4]
    answers = [{"hot": hot, "later": later} for later in (hot, [1, 2, 9, 4], [1, 2, 3], [9, 2, 3, 4], [1, 2, 3, 4, 5])]
    assert Agreement.of(answers) == Agreement(1, 5, (1 + 0.5 + 0.75 + 0 + 1) / 5)
    assert Agreement.of([]) is None
    chat = Chat(list(range(65)), end=2)
    assert chat.answer([5, 2, 7, 2]) == [5, 2]
    assert chat.answer([5, 7]) == [5, 7]
    assert (chat.prefix(32), Chat(list(range(64)), None).prefix(32)) == (64, 32)  # the last token is always computed


def test_others_codecs_need_a_clone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "manthan.benchmarks.peers.kvarn", None)
    with pytest.raises(QualityError, match=r"kvarn, turboquant-3bit.* need a clone of Manthan: they are not in"):
        parse_settings("wht-5x,kvarn", "0+0", 128)


def test_the_product_s_codec_is_measured_unless_some_are_named() -> None:
    assert parse_settings("auto", "4", 128) == [Setting("wht-5x", 4)]
    defaults = inspect.signature(main).parameters
    assert (defaults["codec"].default, defaults["exact"].default) == ("auto", str(CodecConfig().sink_tokens))

    without_profile = [name for name in codec_names() if not needs_profile(name)]
    assert (
        [setting.codec for setting in parse_settings("all", "0", 128)]
        == without_profile
        == ["wht-5x", "wht-4x", "k3v3"]
    )
    assert parse_settings("exact", "0", 128)[0].name == "exact, encoded"  # "exact" is what is not encoded
    assert parse_settings("wht-5x, k3v3", "0, 4", 128) == [
        Setting("wht-5x"), Setting("wht-5x", 4), Setting("k3v3"), Setting("k3v3", 4)
    ]  # fmt: skip


def test_needles_are_spread_over_a_long_context_and_all_looked_up() -> None:
    tokenizer, text = AutoTokenizer.from_pretrained(MODEL), Text(str(MODEL), None)
    piece = text.task("needles", 4000, 32, 0)
    assert piece is not None
    assert (piece.task, piece.context) == ("needles", 4000)
    assert len(piece.prefix) % 32 == 0
    assert 4000 - 32 < len(piece.tokens) <= 4000
    context, lookups = tokenizer.decode(piece.prefix), tokenizer.decode(piece.rest)
    asked = re.findall(r"assert (\w+) == (\d+)", lookups)
    assert len(asked) == 32
    places = [context.index(f"\n{name} = {value}\n") / len(context) for name, value in asked]
    assert np.histogram(places, 4, (0, 1))[0].min() >= 6
    assert len(piece.values) == 4 * 32
    assert text.task("needles", 70000, 32, 0) is None  # more than the text has


@pytest.mark.parametrize("name", TASKS)
def test_a_task_s_answers_are_in_its_context_and_are_what_is_scored(name: str) -> None:
    tokenizer, text = AutoTokenizer.from_pretrained(MODEL), Text(str(MODEL), None)
    piece, task = text.task(name, 2000, 32, 1), TASKS[name](random.Random(f"{name} 2000 1"))
    assert piece is not None
    context = tokenizer.decode(piece.prefix)
    assert all(fact in context for fact in task.facts)
    questions, spans = task.asked()
    answers = [questions[start:end] for start, end in spans]
    assert tokenizer.decode(piece.rest) == questions
    assert "[" not in questions
    scored = tokenizer.decode([piece.rest[index] for index in piece.values])
    assert re.sub(r"\s", "", "".join(answers)) in re.sub(r"\s", "", scored) or name in ("sums", "code")  # merged tokens
    if name not in ("sums", "code"):
        assert all(answer in "".join(task.facts) for answer in answers)
    assert text.task(name, 2000, 32, 1) == piece != text.task(name, 2000, 32, 2)


def test_a_name_can_be_a_variable_of_python() -> None:
    assert len(NAMES) > 1400
    assert not any(map(keyword.iskeyword, NAMES))


def test_sums_are_right_and_variables_lead_to_their_numbers() -> None:
    task = TASKS["sums"](random.Random(0))
    for a, b, c in re.findall(r"\[(\d+)\] \+ \[(\d+)\] = \[(\d+)\]", "".join(task.questions)):
        assert int(a) + int(b) == int(c)
    task = TASKS["variables"](random.Random(0))
    values: dict[str, str] = {}
    for name, value in re.findall(r"(\w+) = (\w+)", "".join(task.facts)):
        values[name] = values.get(value, value)
    asked = dict(re.findall(r"assert (\w+) == \[(\d+)\]", "".join(task.questions)))
    assert len(asked) == 8
    assert asked == {name: values[name] for name in asked}


# -- refusals -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ((), "MODEL is missing: a folder or the name of a model on the Hugging Face Hub."),
        (("nowhere",), "nowhere is no model that can be read: "),
        (
            (MODEL, "--prefix", 500),
            "--prefix 500 is no multiple of the block size 32, and only full blocks go cold: use "
            "480, or another --block-size.",
        ),
        ((MODEL, "--prefix", 8192), "takes 8,192 tokens, and a piece has 8,705 "),
        ((MODEL, "--prefix", 64000), "held_tokens.u16 has 60,000 tokens, fewer than --prefix 64000 "),
        ((MODEL, "--codec", "k3v4"), "--codec k3v4: codec 'k3v4' is unknown: did you mean 'k3v3'?"),
        ((MODEL, "--lengths", "far"), "--lengths far is no list of lengths in tokens, such as 2000,8000."),
        (
            (MODEL, "--tasks", "needle,haystack"),
            "--tasks needle,haystack: 'haystack' is none of needle, needles, table, ",
        ),
        ((MODEL, "--codec", "kvarn", "--engine", "vllm"), "kvarn cannot be measured on an engine: use --engine "),
        ((MODEL, "--exact", "4+1"), "--exact 4+1: '4+1' is not a number of tokens, such as 4 (0 for none)."),
        ((MODEL, "--text", "nowhere.txt"), "--text nowhere.txt cannot be read: No such file or directory."),
        ((MODEL, "--text", MODEL / "model.safetensors"), "is not UTF-8: give it as plain text."),
        (("--plot-only", MODEL / "config.json"), "is not a report of this benchmark."),
        (("--plot-only", MODEL / "README.md"), "README.md cannot be read: "),
    ],
)
def test_what_cannot_be_measured_is_refused_in_one_sentence(arguments: tuple[object, ...], sentence: str) -> None:
    result = run(*arguments)
    assert result.exit_code == 1
    assert result.stdout == ""
    assert sentence in result.stderr
    assert result.stderr.count("\n") == 1


@pytest.mark.slow
def test_codecs_that_take_a_profile_are_measured_with_it(tmp_path: Path) -> None:
    """The one that is named, or else that of the cache folder."""
    profile, out = tmp_path / "p.safetensors", tmp_path / "out"
    made = CliRunner().invoke(app, ["calibrate", str(MODEL), "--tokens", "4096", "--out", str(profile)])
    assert made.exit_code == 0, made.output
    sizes = ("--prefix", 256, "--continuation", 64, "--pieces", 1, "--tasks", "none", "--chats", 0)
    words = (MODEL, "--engine", "transformers", "--codec", "klt-5x,klt-12x,k3v3", "--exact", "4", *sizes)
    result = run(*words, "--profile", profile, "--out", out)
    assert result.exit_code == 0, result.output
    found = json.loads((out / "quality.json").read_text())["summary"]["transformers"]
    assert found["klt-5x 4"]["kl"]["mean"] < found["k3v3 4"]["kl"]["mean"]
    assert found["klt-5x 4"]["kl"]["mean"] < found["klt-12x 4"]["kl"]["mean"] < 0.05
    assert 4.3 < found["klt-5x 4"]["ratio"] < found["klt-12x 4"]["ratio"]
    refused = run(*words, "--profile", tmp_path / "none", "--out", out)
    assert refused.exit_code == 1
    assert re.search(r"^--profile .*none: the profile .*none cannot be read: No such file", refused.output)
