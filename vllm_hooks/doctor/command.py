"""`manthan doctor`: looks at all that a server needs, and names what is wrong, each in one sentence."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated

import typer
from rich.table import Table
from rich.text import Text

from manthan.manager.commands.console import make_console
from manthan.manager.config.model import ConfigError, ManthanConfig
from manthan.manager.config.registered import check_registered
from manthan.manager.config.resolve import resolve_config
from manthan.manager.doctor.disk import check_disk
from manthan.manager.doctor.finding import Finding, Mark
from manthan.manager.doctor.keys import check_keys
from manthan.manager.doctor.memory import check_pinning, check_ram
from manthan.manager.doctor.redis import check_redis
from manthan.manager.doctor.template import TEMPLATE, check_template
from manthan.vllm_hooks.doctor.hashing import check_hashing
from manthan.vllm_hooks.doctor.model import check_model
from manthan.vllm_hooks.doctor.server import Server, check_server
from manthan.vllm_hooks.doctor.tokenizer import load_renderer
from manthan.vllm_hooks.doctor.versions import VLLM_CHECK, check_gpus, check_versions, pinner

MARKS = {
    Mark.OK: ("✓", "green"),
    Mark.SKIPPED: ("–", "dim"),
    Mark.WARNING: ("!", "yellow"),
    Mark.WRONG: ("✗", "bold red"),
}

doctor = typer.Typer(add_completion=False)


@dataclass(frozen=True)
class Patient:
    """What is to be looked at; empty for what is not."""

    model: str
    file: str
    template: str
    server: Server | None
    algorithm: str


@doctor.command()
def examine(
    model: Annotated[
        str, typer.Option(help="Look at this model and its chat template, too: a folder, or a name.")
    ] = "",
    config: Annotated[str, typer.Option(metavar="FILE", help="The YAML file of --manthan-config.")] = "",
    url: Annotated[str, typer.Option(help="Ask this server, too, such as http://127.0.0.1:8000.")] = "",
    api_key: Annotated[str, typer.Option(envvar="VLLM_API_KEY", help="The server's key.", show_envvar=True)] = "",
    chat_template: Annotated[str, typer.Option(metavar="FILE", help="As vLLM's --chat-template, for --model.")] = "",
    algorithm: Annotated[str, typer.Option("--prefix-caching-hash-algo", help="As vLLM's.")] = "sha256",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Look at all that a server needs; exit status 1 if something is wrong.

    With --url or --model it also renders two turns of a chat, and says where their prompts part.
    """
    patient = Patient(model, config, chat_template, Server(url, api_key) if url else None, algorithm)
    found = list(examined(patient))
    is_wrong = any(one.mark is Mark.WRONG for one in found)
    if as_json:
        typer.echo(json.dumps({"healthy": not is_wrong, "findings": [one._asdict() for one in found]}, indent=2))
    else:
        _print(found)
    raise typer.Exit(int(is_wrong))


def examined(patient: Patient) -> Iterator[Finding]:
    """Everything, one after the other; without a configuration that can be read, what needs none."""
    versions = list(check_versions())
    yield from versions
    try:
        resolved = resolve_config(patient.file or None)
        check_registered(resolved)
    except ConfigError as error:
        yield Finding("configuration", Mark.WRONG, str(error))
        return
    config = resolved.config
    yield Finding("configuration", Mark.OK, _said(config, patient.file))
    yield from check_gpus(config)
    yield check_ram(config.cold_store)
    yield check_pinning(config.cold_store, pinner())
    yield check_disk(config)
    yield from check_redis(config)
    yield check_keys(config.cold_store)
    if patient.server is None:
        yield check_hashing(config.cold_store, patient.algorithm)
    else:
        yield from check_server(patient.server, config)
    has_vllm = all(one.mark is Mark.OK for one in versions if one.check == VLLM_CHECK)
    if patient.model and has_vllm:
        yield check_model(patient.model, patient.file or None)
    yield _template(patient)


def _template(patient: Patient) -> Finding:
    try:
        if patient.server is not None and not patient.template:
            return check_template(patient.server)
        if patient.model:
            return check_template(load_renderer(patient.model, patient.template))
    except ConfigError as error:
        return Finding(TEMPLATE, Mark.WRONG, str(error))
    except ImportError as error:
        return Finding(TEMPLATE, Mark.WRONG, f"{error.name} is not installed, which comes with vLLM.")
    return Finding(TEMPLATE, Mark.SKIPPED, "give --model or --url to see whether it rewrites history.")


def _said(config: ManthanConfig, file: str) -> str:
    store = config.cold_store
    return (
        f"policy {config.policy.name}, codec {config.codec.name}, cold store {store.kind} of "
        f"{store.max_bytes.human_readable()}, of {f'{file} and ' if file else 'defaults and '}the environment."
    )


def _print(found: list[Finding]) -> None:
    table = Table(box=None, show_header=False, pad_edge=False)
    for one in found:
        sign, style = MARKS[one.mark]
        table.add_row(Text(sign, style), Text(one.check), Text(one.said, "" if one.mark is not Mark.SKIPPED else "dim"))
    console = make_console()
    console.print(table)
    wrong = sum(one.mark is Mark.WRONG for one in found)
    console.print()
    console.print(Text("Nothing is wrong.", "green") if not wrong else Text(f"Wrong: {wrong}.", "bold red"))
