"""`manthan doctor`: checks what a server with Manthan needs, and reports findings. Runs without vLLM, too."""

import json
import logging
import os
import platform
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table
from rich.text import Text

from manthan.manager.commands import make_console
from manthan.manager.commands.sessions import KEY_ENV, AskError, ask, measuring
from manthan.manager.config.model import ConfigError
from manthan.manager.config.resolve import check_registered, human_bytes, resolve_config
from manthan.manager.doctor import TEMPLATE, Finding, Grade, check_machine, check_template, load_renderer
from manthan.vllm_hooks.support import VLLM, check_version

LOGGING = "VLLM_LOGGING_LEVEL"
MARKS = {
    Grade.OK: ("✓", "green"),
    Grade.SKIPPED: ("–", "dim"),
    Grade.WARNING: ("!", "yellow"),
    Grade.WRONG: ("✗", "bold red"),
}

doctor = typer.Typer(add_completion=False)


@doctor.command()
def examine(
    model: Annotated[str, typer.Argument(help="Look at this model, too: a folder, or a name.")] = "",
    config: Annotated[str, typer.Option(metavar="FILE", help="The YAML file of --manthan-config.")] = "",
    url: Annotated[str, typer.Option(help=f"Ask this server, too; its API key is read from {KEY_ENV}.")] = "",
    chat_template: Annotated[str, typer.Option(metavar="FILE", help="As vLLM's --chat-template, for MODEL.")] = "",
    block_size: Annotated[int | None, typer.Option(metavar="N", help="As vLLM's --block-size, for MODEL.")] = None,
    of_families: Annotated[
        bool, typer.Option("--families", help="Only list how the KV of model families is stored.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Check what a server needs. The exit status is 1 if something is wrong.

    With MODEL, also build the model without weights, and say how its KV caches are stored. Then render two turns of a
    chat, and say from where on the second prompt differs from the first turn.
    """
    if of_families:
        from manthan.vllm_hooks.doctor.families import families  # needs torch, as vLLM does

        typer.echo("\n".join(sorted(map(str, families().values()), key=str.lower)))
        return
    found = list(_examined(model, config, url, chat_template, block_size))
    is_wrong = any(one.mark is Grade.WRONG for one in found)
    if as_json:
        typer.echo(json.dumps({"healthy": not is_wrong, "findings": [one._asdict() for one in found]}, indent=2))
    else:
        _print(found)
    raise typer.Exit(int(is_wrong))


def _examined(model: str, file: str, url: str, template: str, block_size: int | None) -> Iterator[Finding]:
    yield from _versions()
    try:
        resolved = resolve_config(file or None)
        check_registered(resolved)
    except ConfigError as error:
        yield Finding("configuration", Grade.WRONG, str(error))
        return
    if url:
        yield from _check_server(url)
    if url and not file:
        yield Finding("machine", Grade.SKIPPED, "a server cannot report memlock and disk: on its host, add --config.")
    else:
        has_gpu = find_spec("torch") is not None and import_module("torch").cuda.is_available()
        yield from check_machine(resolved.config, has_gpu)
    if not model:
        yield Finding(TEMPLATE, Grade.SKIPPED, "give MODEL to see whether its template rewrites history.")
        return
    if find_spec("torch"):  # else `_versions` has said that vLLM is missing
        with _quiet():
            from manthan.vllm_hooks.doctor.model import check_model

            yield from check_model(model, file or None, block_size)
    if Path(model).is_dir() and not any(Path(model).glob("*token*")):
        yield Finding(TEMPLATE, Grade.SKIPPED, f"{model} has no tokenizer.")
        return
    try:
        yield check_template(load_renderer(model, template))
    except ConfigError as error:
        yield Finding(TEMPLATE, Grade.WRONG, str(error))
    except ImportError as error:
        yield Finding(TEMPLATE, Grade.WRONG, f"{error.name} is not installed, which comes with vLLM.")


@contextmanager
def _quiet() -> Iterator[None]:
    """Send output of libraries to standard error, so that standard output has the findings only.

    vLLM logs errors only, unless VLLM_LOGGING_LEVEL is set.
    """
    kept, level = os.dup(1), os.environ.get(LOGGING)
    logger = logging.getLogger("vllm")
    before = logger.level
    os.environ.setdefault(LOGGING, "ERROR")
    logger.setLevel(os.environ[LOGGING].upper())  # some warnings come before vLLM reads the variable
    os.dup2(2, 1)
    try:
        yield
    finally:
        if level is None:
            del os.environ[LOGGING]
        logger.setLevel(before)
        os.dup2(kept, 1)
        os.close(kept)


def _versions() -> Iterator[Finding]:
    yield Finding("versions", Grade.OK, f"Python {platform.python_version()}, Manthan {version('manthan-kv')}.")
    try:
        found = version("vllm")
        check_version(found)
    except PackageNotFoundError:
        how = f"pip install '.[vllm]' (vllm{VLLM}) in a clone of the repository"
        yield Finding("vLLM", Grade.WRONG, f"it is not installed: {how}.")
    except ConfigError as error:
        yield Finding("vLLM", Grade.WRONG, str(error))
    else:
        yield Finding("vLLM", Grade.OK, f"{found} is a supported release ({VLLM}).")


def _print(found: list[Finding]) -> None:
    table = Table(box=None, show_header=False, pad_edge=False)
    for one in found:
        sign, style = MARKS[one.mark]
        table.add_row(Text(sign, style), Text(one.check), Text(one.said, "dim" if one.mark is Grade.SKIPPED else ""))
    wrong = sum(one.mark is Grade.WRONG for one in found)
    said = Text(f"\nWrong: {wrong}.", "bold red") if wrong else Text("\nNothing is wrong.", "green")
    make_console().print(table, said, sep="\n")


def _check_server(url: str) -> Iterator[Finding]:
    """Ask Manthan's API at this URL for state and settings.

    A server without an API key may refuse the URL's host name.
    """
    try:
        state, config = ask(url, "/state"), ask(url, "/config")
    except AskError as error:
        yield Finding("Host", Grade.WRONG, str(error))
        return
    yield Finding("Host", Grade.OK, f"Manthan answers at {url}.")
    policy, store, name = state["policy"], state["store"], config["codec.name"]["value"]
    options = "".join(f", {option} {value}" for option, value in policy["options"].items())
    idle = f"sessions are idle after {config['idle.after_s']['value']:g} s"
    yield Finding("policy", Grade.OK, f"that server has {policy['name']}{options}; {idle}.")
    if waits := measuring(store):
        yield Finding("codec", Grade.OK, f"{waits}.")
    elif (verdict := store["verdict"]) in ("none", "faithful"):
        yield Finding("codec", Grade.OK, f"that server has {name}; the guard's verdict: {verdict}.")
    else:
        said = f"that server has {name}, which is {verdict}, so it uses {store['codec']}."
        yield Finding("codec", Grade.WARNING, said)
    tiers = ", ".join(
        f"{tier['name']} with {human_bytes(tier['used_bytes'])} of {human_bytes(tier['budget_bytes'])}"
        for tier in store["tiers"]
    )
    if store["up"]:
        yield Finding("tiers", Grade.OK, f"that server has {tiers}.")
        return
    where = config[f"tiers.{store['kind']}.{'url' if store['kind'] == 'redis' else 'path'}"]["value"]
    why = f"its {store['kind']} at {where} does not answer: sessions are computed again until it does"
    yield Finding("tiers", Grade.WRONG, f"that server has {tiers}, and {why}.")
