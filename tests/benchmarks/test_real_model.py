"""The real models: how they are made, that they are what they should be, and what codecs cost them."""

import json
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import pytest
import torch
import typer
from click.testing import Result
from real_models import biased_model, real_model
from transformers import AutoModelForCausalLM, AutoTokenizer
from typer.testing import CliRunner

from manthan.benchmarks import real_model as making
from manthan.benchmarks.cli import evaluate
from manthan.manager.cli import app

command = typer.Typer()
command.command()(making.main)


def run(*arguments: object, **environment: str) -> Result:
    return CliRunner().invoke(command, [str(argument) for argument in arguments], env=environment)


# -- making them ----------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_script_says_where_they_are() -> None:
    out = Path(real_model()).parent
    result = run("--out", out)
    assert result.exit_code == 0, result.stderr
    assert result.stdout.split() == [str(out / making.PLAIN), str(out / making.BIASED)]


# -- what they are --------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(("folder", "kind"), [(real_model, "llama"), (biased_model, "qwen2")])
def test_it_knows_the_capital_of_france(folder: Any, kind: str) -> None:
    model = AutoModelForCausalLM.from_pretrained(folder(), dtype=torch.float32)  # bf16 is coarse for biased keys
    tokenizer = AutoTokenizer.from_pretrained(folder())
    assert model.config.model_type == kind
    chat = [{"role": "user", "content": "What is the capital of France?"}]
    asked = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    told = model.generate(**asked, max_new_tokens=16, do_sample=False)[0, asked["input_ids"].shape[1] :]
    assert tokenizer.decode(told, skip_special_tokens=True) == "The capital of France is Paris."


# -- what codecs cost them ------------------------------------------------------------------------------

SIZES = ("--prefix", 1536, "--continuation", 256, "--pieces", 2, "--tasks", "table", "--lengths", 2200)

TABLE = "table 2200"


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The Python language reference, which comes with Python."""
    file = tmp_path_factory.mktemp("text") / "text.txt"
    file.write_text("\n".join(topics.values()))
    return file


def quality(model: str, text: Path, out: Path, engine: str, *arguments: object) -> dict[str, Any]:
    command = ["quality", model, "--text", text, "--out", out, "--engine", engine, *arguments]
    result = CliRunner().invoke(evaluate, list(map(str, command)))
    assert result.exit_code == 0, result.output
    found: dict[str, Any] = json.loads((out / "quality.json").read_text())["summary"][engine]
    return found


@pytest.mark.slow
def test_what_codecs_cost_the_real_model(text: Path, tmp_path: Path) -> None:
    settings = ("--codec", "k3v3,wht-4x", "--exact", "4", "--chats", 2)
    found = quality(real_model(), text, tmp_path, "transformers", *settings, *SIZES)
    assert found["exact"]["tasks"][TABLE]["mean"] > 0.6
    assert found["recomputed"]["kl"]["mean"] < 0.002
    assert found["wht-4x 4"]["kl"]["mean"] < 0.5 * found["k3v3 4"]["kl"]["mean"] < 0.05
    assert found["exact"]["answers"]["share"] > 0.3  # two chats


@pytest.mark.slow
def test_biased_keys_break_codes_of_single_vectors(text: Path, tmp_path: Path) -> None:
    """And the model itself works: what is lost is the codec's doing."""
    settings = ("--codec", "k3v3", "--exact", "4", "--chats", 0)
    found = quality(biased_model(), text, tmp_path, "transformers", *settings, *SIZES)
    assert found["exact"]["nll"]["mean"] < 3
    assert found["k3v3 4"]["kl"]["mean"] > 1


BLOCKS = ("--block-size", 16, "--chats", 0)


@pytest.mark.slow
@pytest.mark.parametrize(("folder", "most"), [(real_model, 0.008), (biased_model, 0.010)])
def test_what_the_default_loses(folder: Any, most: float, text: Path, tmp_path: Path) -> None:
    settings = ("--codec", "wht-5x", "--exact", "4", *BLOCKS)
    found = quality(folder(), text, tmp_path, "transformers", *settings, *SIZES)
    ours, lost = found["wht-5x 4"], found["exact"]["tasks"][TABLE]["mean"] - found["wht-5x 4"]["tasks"][TABLE]["mean"]
    assert ours["ratio_long"] > 4.75
    assert ours["kl"]["mean"] < most
    assert lost < 0.05  # one table


@pytest.mark.slow
@pytest.mark.parametrize(("folder", "coarse"), [(real_model, 0.06), (biased_model, 0.10)])
def test_what_calibrated_codecs_lose(folder: Any, coarse: float, text: Path, tmp_path: Path) -> None:
    """With a profile of fewer tokens than the command takes by itself. coarse: most that klt-12x may lose."""
    profile = tmp_path / "p.safetensors"
    made = CliRunner().invoke(app, ["calibrate", folder(), "--tokens", "8192", "--out", str(profile)])
    assert made.exit_code == 0, made.output
    bounds = {"klt-5x": (4.8, 0.004, 0.02), "klt-8x": (7.5, 0.012, 0.04), "klt-12x": (11, 0.05, coarse)}
    settings = ("--codec", ",".join(bounds), "--exact", "4", "--profile", profile, *BLOCKS)
    # In bf16 the model itself rounds keys with a large mean, and a single context has few answers.
    settings += ("--samples", 4, "--dtype", "float32")
    found = quality(folder(), text, tmp_path, "transformers", *settings, *SIZES)
    for codec, (ratio, kl, lost) in bounds.items():
        assert found[f"{codec} 4"]["ratio_long"] > ratio
        assert found[f"{codec} 4"]["kl"]["mean"] < kl
        assert found["exact"]["tasks"][TABLE]["mean"] - found[f"{codec} 4"]["tasks"][TABLE]["mean"] < lost
