"""What codecs, and quantizers that did not become one, cost a model: the tables and the plot of docs/codec.md.

The KV cache of a prefix of 1,536 tokens is replaced by what a coder gives back; then the model goes on for 512 tokens
of held-out code. Prefixes begin every 512 tokens of the file, so that every continuation is another text. Also recall:
the digits found of tables of 64 lines. All arms see the same pieces, so their differences are paired.

    python benchmarks/experiments/codec_experiment.py [--only PATTERN] [--out FOLDER]
    python benchmarks/experiments/codec_experiment.py --plot-only FOLDER/codec_experiment.json

Run it from the root of the repository. Results of arms that are not measured again are kept, if they are of the same
measurement. One core: about a minute an arm.
"""

import fnmatch
import json
import random
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import numpy as np
import torch
import transformers
import typer
from codec_experiment_arms import Arm, Coder, arms
from rich.box import SIMPLE
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table
from torch import Tensor

from manthan.benchmarks.arms import OUT, make_console, new_report, save_plot, write_report

MODEL = Path("tests", "data", "tiny-llama")
PREFIX, CONTINUATION, ENTRIES = 1536, 512, 64
BASELINE, GOAL, BUDGET = "lloyd3", 0.012, 100


class Piece(NamedTuple):
    """A prefix, what follows, and the positions in it that count; None for all, by loss."""

    prefix: list[int]
    rest: np.ndarray
    digits: np.ndarray | None


class Distortion(NamedTuple):
    """Of keys or values. error: relative mean squared error. slope: <x, x^> / <x, x>, 1 if unbiased."""

    error: float
    slope: float


class Reader:
    """The model, its tokenizer and the held-out text."""

    def __init__(self, path: Path, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self.tokenizer = transformers.AutoTokenizer.from_pretrained(path)
        self.writer = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16).eval()
        self.model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=dtype).eval()
        self.held = np.fromfile(path / "held_tokens.u16", np.uint16).astype(np.int64)

    def pieces(self, stride: int) -> list[Piece]:
        """A piece at every stride tokens of the held-out text."""
        length = PREFIX + CONTINUATION - 1
        texts = (self.held[at : at + length] for at in range(0, len(self.held) - length + 1, stride))
        bos = self.tokenizer.bos_token_id
        return [Piece([bos, *text[: PREFIX - 1].tolist()], text[PREFIX - 1 :], None) for text in texts]

    def tables(self, count: int) -> list[Piece]:
        """Tables of ENTRIES lines `NAME = 4821` with code behind them, and `assert NAME == 4821` for each line."""
        return [self._table(random.Random(seed)) for seed in range(count)]

    def _table(self, rng: random.Random) -> Piece:
        names = [a + b + c for a in "bcdfghjklmnprstvz" for b in "aeiou" for c in "bcdfghjklmnprstvz"]
        table = {name: rng.randrange(1000, 10000) for name in rng.sample(names, ENTRIES)}
        prefix = self.tokenizer("".join(f"{name} = {value}\n" for name, value in table.items())).input_ids
        start = rng.randrange(len(self.held) - PREFIX)
        prefix += self.held[start : start + PREFIX - len(prefix)].tolist()
        text = "\n" + "".join(f"assert {name} == {table[name]}\n" for name in rng.sample(sorted(table), ENTRIES))
        encoded = self.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        starts = {start: i for i, (start, _) in enumerate(encoded.offset_mapping)}
        digits = [starts[found.start() + k] for found in re.finditer(r"\d{4}", text) for k in range(4)]
        return Piece(prefix, np.array(encoded.input_ids), np.array(digits))

    def cache(self, prefix: list[int]) -> tuple[Tensor, Tensor]:
        """Keys and values of all of the prefix but its last token, [layers, heads, tokens, head_dim] of bf16."""
        made = self.writer(torch.tensor([prefix[:-1]]), use_cache=True, logits_to_keep=1).past_key_values.layers
        return torch.stack([layer.keys[0] for layer in made]), torch.stack([layer.values[0] for layer in made])

    def go_on(self, piece: Piece, keys: Tensor, values: Tensor) -> Tensor:
        """Log-probabilities [len(rest), vocabulary] of the tokens that follow the prefix."""
        cache = transformers.DynamicCache()
        for layer, (key, value) in enumerate(zip(keys.to(self.dtype), values.to(self.dtype), strict=True)):
            cache.update(key[None], value[None], layer)
        tokens = torch.tensor([piece.prefix[-1:] + piece.rest[:-1].tolist()])
        scores: Tensor = self.model(tokens, past_key_values=cache).logits[0].float().log_softmax(-1)
        return scores


def coded(code: Coder | None, exact: Tensor) -> tuple[Tensor, Distortion]:
    """What comes back of bf16 vectors, and how far it is off."""
    x = exact.float()
    y = x if code is None else code(x)
    dot, square = (x * y).sum(-1), (x * x).sum(-1)
    return y, Distortion(float(((x - y).square().sum(-1) / square).mean()), float((dot / square).mean()))


@torch.inference_mode()
def measure(reader: Reader, piece: Piece, chosen: list[Arm]) -> Iterator[tuple[str, dict[str, float]]]:
    """Of each arm: nats a token more than with the exact cache, divergence from it, or digits found; distortions."""
    keys, values = reader.cache(piece.prefix)
    exact = reader.go_on(piece, keys, values)
    rest = torch.from_numpy(piece.rest)
    for arm in [None, *chosen]:
        found: dict[str, float] = {}
        scores = exact
        if arm is not None:
            (new_keys, of_keys), (new_values, of_values) = coded(arm.keys, keys), coded(arm.values, values)
            scores = reader.go_on(piece, new_keys, new_values)
            found = {"key_error": of_keys.error, "key_slope": of_keys.slope}
            found |= {"value_error": of_values.error, "value_slope": of_values.slope}
        if piece.digits is not None:
            found = {"recall": float((scores.argmax(-1) == rest)[piece.digits].float().mean())}
        else:
            loss, before = (-each.gather(1, rest[:, None]).mean().item() for each in (scores, exact))
            found["added"] = loss - before if arm else loss
            found["divergence"] = float((exact.exp() * (exact - scores)).sum(-1).mean())
        yield arm.name if arm else "exact", found


def measure_all(reader: Reader, pieces: list[Piece], chosen: list[Arm], console: Console) -> dict[str, Any]:
    """For each arm, a list of what was measured on each piece."""
    results: dict[str, Any] = {name: defaultdict(list) for name in ("exact", *(arm.name for arm in chosen))}
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, TimeRemainingColumn(), console=console) as progress:
        task = progress.add_task("", total=len(pieces) * (len(chosen) + 1))
        for piece in pieces:
            for name, found in measure(reader, piece, chosen):
                progress.update(task, advance=1, description=name)
                for what, figure in found.items():
                    results[name][what].append(figure)
    return results


# -- the report -----------------------------------------------------------------------------------------


def mean(samples: list[float]) -> tuple[float, float]:
    """The mean and its standard error, over pieces."""
    return float(np.mean(samples)), float(np.std(samples, ddof=1) / len(samples) ** 0.5) if len(samples) > 1 else 0.0


def table(report: dict[str, Any]) -> Table:
    found = report["arms"]
    exact, pieces = mean(found["exact"]["added"]), len(found["exact"]["added"])
    caption = (
        f"exact: {exact[0]:.4f} nats a token over {pieces} pieces; ± is a standard error; bytes: of a key and a value"
    )
    made = Table(title="What a coded prefix costs", caption=caption, box=SIMPLE, padding=(0, 1))
    made.add_column("arm")
    for name in ("bytes", "nats added", f"below {BASELINE}", "divergence", "recall", "slope K, V"):
        made.add_column(name, justify="right", no_wrap=True)
    baseline = np.array(found.get(BASELINE, found["exact"])["added"])
    for name, of in found.items():
        if name == "exact":
            continue
        added, less = mean(of["added"]), mean((baseline - of["added"]).tolist())
        made.add_row(
            name,
            f"{of['nbytes']:.1f}" if of["nbytes"] else "",
            f"{added[0]:+.4f} ± {added[1]:.4f}",
            f"{less[0]:+.4f} ± {less[1]:.4f}" if BASELINE in found else "",
            f"{np.mean(of['divergence']):.4f}",
            f"{np.mean(of['recall']):.4f}" if of.get("recall") else "",
            f"{np.mean(of['key_slope']):.3f} {np.mean(of['value_slope']):.3f}",
            style="green" if added[0] <= GOAL and 0 < of["nbytes"] <= BUDGET else "",
        )
    return made


def draw(report: dict[str, Any]) -> Any:
    """Nats added over bits a number, an error bar for each arm that has a size; unrotated ones are far above."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 7), layout="constrained")
    axes = figure.subplots()
    groups, so_far = defaultdict(list), defaultdict(int)
    rows = [(name, of, *mean(of["added"])) for name, of in report["arms"].items()]
    for name, of, added, error in sorted(rows, key=lambda row: row[2]):
        if of.get("nbytes") and "unrotated" not in name:
            bits = of["nbytes"] * 8 / 256
            groups[of["group"]].append((bits + 0.02 * so_far[bits], added, error, name))
            so_far[bits] += 1
    for group, points in groups.items():
        bits, added, errors, names = zip(*points, strict=True)
        axes.errorbar(bits, added, errors, fmt="o", ms=4, capsize=2, label=group)
        for x, y, name in zip(bits, added, names, strict=True):
            axes.annotate(name, (x, y), xytext=(4, 2), textcoords="offset points", fontsize=6)
    axes.axhline(GOAL, color="grey", ls=":", label=f"goal: {GOAL}")
    axes.axvline(BUDGET * 8 / 256, color="grey", ls="--", label="50 bytes for 128 numbers")
    axes.set_ylim(bottom=0)
    axes.set_xlabel(
        "bits a number, scale and side information included; arms of one size stand side by side, best first"
    )
    axes.set_ylabel("nats a token added, mean over pieces ± a standard error")
    axes.set_title("4 M parameters, a prefix of 1,536 tokens coded", loc="left")
    axes.legend(fontsize=8, loc="upper right")
    return figure


def show(report: dict[str, Any], plot: Path, console: Console) -> None:
    console.print(table(report))
    save_plot(draw, report, plot, console)


def earlier(path: Path, arguments: dict[str, Any]) -> dict[str, Any]:
    """The arms in a report of the same measurement, if there is one."""
    if not path.exists():
        return {}
    report: dict[str, Any] = json.loads(path.read_text())
    is_same = all(report["arguments"].get(name) == arguments[name] for name in ("model", "stride", "tables", "dtype"))
    return report["arms"] if is_same else {}


def main(
    context: typer.Context,
    only: Annotated[str, typer.Option(help="Arms or groups, as a shell pattern, by comma.")] = "*",
    stride: Annotated[int, typer.Option(min=1, help="Tokens from the start of one prefix to the next.")] = CONTINUATION,
    recall_tables: Annotated[int, typer.Option("--tables", min=0, help="Tables whose recall is measured.")] = 16,
    dtype: Annotated[str, typer.Option(help="What the model reckons in: float32 or bfloat16.")] = "float32",
    model: Annotated[Path, typer.Option(help="Folder of the model.", exists=True, file_okay=False)] = MODEL,
    out: Annotated[Path, typer.Option(help="Folder for JSON and plot.")] = OUT,
    plot_only: Annotated[Path | None, typer.Option(help="Show and plot this JSON of an earlier run again.")] = None,
) -> None:
    """Measure what each arm costs the model."""
    console = make_console()
    if plot_only is not None:
        return show(json.loads(plot_only.read_text()), plot_only.with_suffix(".png"), console)
    patterns, every = only.split(","), arms()
    chosen = [arm for arm in every if any(fnmatch.fnmatch(name, p) for p in patterns for name in (arm.name, arm.group))]
    if not chosen:
        raise typer.BadParameter(f"--only {only!r} fits none of {', '.join(sorted({arm.group for arm in every}))}.")
    out.mkdir(parents=True, exist_ok=True)
    reader = Reader(model, getattr(torch, dtype))
    results = measure_all(reader, reader.pieces(stride) + reader.tables(recall_tables), chosen, console)
    for arm in chosen:
        results[arm.name] |= {"group": arm.group, "nbytes": arm.nbytes}
    arguments = {**context.params, "model": str(model), "stride": stride, "tables": recall_tables, "dtype": dtype}
    kept = earlier(out / "codec_experiment.json", arguments) | results
    ordered = {name: kept[name] for name in ("exact", *(arm.name for arm in every)) if name in kept}
    path = write_report(new_report("codec_experiment", arguments, [], ordered, {}), out)
    console.print(f"  {path}", soft_wrap=True)
    show(json.loads(path.read_text()), path.with_suffix(".png"), console)


if __name__ == "__main__":
    typer.run(main)
