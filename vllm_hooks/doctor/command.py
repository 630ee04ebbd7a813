"""`manthan doctor`: look at what a server needs, and name what is wrong. It also runs where vLLM is missing."""

import json
import platform
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table
from rich.text import Text

from manthan.manager.commands.console import make_console
from manthan.manager.config.model import ConfigError
from manthan.manager.config.registered import check_registered
from manthan.manager.config.resolve import resolve_config
from manthan.manager.doctor.checks import Finding, Mark, check_disk, check_memlock, check_redis
from manthan.manager.doctor.template import TEMPLATE, Message, Renderer, check_template
from manthan.vllm_hooks.support import VLLM, check_version

MARKS = {
    Mark.OK: ("✓", "green"),
    Mark.SKIPPED: ("–", "dim"),
    Mark.WARNING: ("!", "yellow"),
    Mark.WRONG: ("✗", "bold red"),
}
TIMEOUT_S = 20.0
BEGINNING = datetime(2026, 1, 5, 9, 30)
"""When a conversation begins, for templates that say the time."""

doctor = typer.Typer(add_completion=False)


@doctor.command()
def examine(
    model: Annotated[str, typer.Option(help="Look at this model's chat template, too: a folder, or a name.")] = "",
    config: Annotated[str, typer.Option(metavar="FILE", help="The YAML file of --manthan-config.")] = "",
    url: Annotated[str, typer.Option(help="Ask this server, too, such as http://127.0.0.1:8000.")] = "",
    api_key: Annotated[str, typer.Option(envvar="VLLM_API_KEY", help="The server's key.", show_envvar=True)] = "",
    chat_template: Annotated[str, typer.Option(metavar="FILE", help="As vLLM's --chat-template, for --model.")] = "",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Look at all that a server needs; exit status 1 if something is wrong.

    With --url or --model it also renders two turns of a chat, and says where their prompts part.
    """
    found = list(_examined(model, config, Server(url, api_key) if url else None, chat_template))
    is_wrong = any(one.mark is Mark.WRONG for one in found)
    if as_json:
        typer.echo(json.dumps({"healthy": not is_wrong, "findings": [one._asdict() for one in found]}, indent=2))
    else:
        _print(found)
    raise typer.Exit(int(is_wrong))


def _examined(model: str, file: str, server: "Server | None", template: str) -> Iterator[Finding]:
    yield from _versions()
    try:
        resolved = resolve_config(file or None)
        check_registered(resolved)
    except ConfigError as error:
        yield Finding("configuration", Mark.WRONG, str(error))
        return
    yield check_memlock(resolved.config.cold_store, _has_gpu())
    yield check_disk(resolved.config)
    yield from check_redis(resolved.config)
    if server is not None:
        yield server.check_host()
    try:
        renderer: Renderer | None = server if server is not None and not template else None
        if renderer is None and model:
            renderer = load_renderer(model, template)
        if renderer is not None:
            yield check_template(renderer)
        else:
            yield Finding(TEMPLATE, Mark.SKIPPED, "give --model or --url to see whether it rewrites history.")
    except ConfigError as error:
        yield Finding(TEMPLATE, Mark.WRONG, str(error))
    except ImportError as error:
        yield Finding(TEMPLATE, Mark.WRONG, f"{error.name} is not installed, which comes with vLLM.")


def _versions() -> Iterator[Finding]:
    yield Finding("versions", Mark.OK, f"Python {platform.python_version()}, Manthan {version('manthan-kv')}.")
    try:
        found = version("vllm")
        check_version(found)
    except PackageNotFoundError:
        yield Finding("vLLM", Mark.WRONG, f"it is not installed: pip install 'manthan-kv[vllm]' (vllm{VLLM}).")
    except ConfigError as error:
        yield Finding("vLLM", Mark.WRONG, str(error))
    else:
        yield Finding("vLLM", Mark.OK, f"{found}, of those that are supported ({VLLM}).")


def _has_gpu() -> bool:
    try:
        import torch
    except ImportError:
        return False
    return torch.cuda.is_available()


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


# -- renderers --------------------------------------------------------------------------------------------


class Server:
    """Render chats as a vLLM server does. Raises ConfigError for requests that it does not answer."""

    def __init__(self, url: str, api_key: str = "") -> None:
        self.url = url.rstrip("/").removesuffix("/v1")
        self._headers = {"Content-Type": "application/json"} | (
            {"Authorization": f"Bearer {api_key}"} if api_key else {}
        )
        self._open = urllib.request.build_opener(urllib.request.ProxyHandler({})).open
        self._model = ""

    def check_host(self) -> Finding:
        """Ask Manthan's API under this URL's host name, which a server without a key may refuse."""
        try:
            self._ask("/manthan/state")
        except ConfigError as error:
            return Finding("Host", Mark.WRONG, str(error))
        return Finding("Host", Mark.OK, f"Manthan answers at {self.url}.")

    def render(self, messages: Sequence[Message], *, asks: bool, minutes: int = 0) -> list[int]:
        """`minutes` has no effect, because the server has its own clock."""
        return self._tokenize(messages=list(messages), add_generation_prompt=asks)

    def encode(self, text: str) -> list[int]:
        return self._tokenize(prompt=text, add_special_tokens=False)

    def decode(self, tokens: Sequence[int]) -> str:
        return str(self._json("/detokenize", model=self._name(), tokens=list(tokens))["prompt"])

    def _tokenize(self, **asked: Any) -> list[int]:
        return list(map(int, self._json("/tokenize", model=self._name(), **asked)["tokens"]))

    def _name(self) -> str:
        self._model = self._model or str(self._json("/v1/models")["data"][0]["id"])
        return self._model

    def _json(self, path: str, **body: Any) -> Any:
        try:
            return json.loads(self._ask(path, body))
        except ValueError:
            raise ConfigError(f"what answers at {self.url} is no vLLM server: correct --url.") from None

    def _ask(self, path: str, body: dict[str, Any] | None = None) -> str:
        data = json.dumps(body).encode() if body else None
        try:
            request = urllib.request.Request(self.url + path, data, self._headers)
            with self._open(request, timeout=TIMEOUT_S) as answer:
                return str(answer.read().decode("utf-8", "replace"))
        except urllib.error.HTTPError as error:
            raise ConfigError(f"{self.url}{path} answers {error.code}: {_reason(error)}") from None
        except (OSError, ValueError) as error:
            why = getattr(error, "reason", error)
            raise ConfigError(f"no server answers at {self.url} ({why}): correct --url, or start it.") from None


def _reason(error: urllib.error.HTTPError) -> str:
    """Return what the server says is wrong, or else what the status means."""
    if error.code == 401:
        return "set --api-key."
    if error.code == 404:
        return "not found; a server without Manthan is started with --manthan-policy lru."
    try:
        return str(json.load(error)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return f"{error.reason}."


@dataclass(frozen=True)
class LocalRenderer:
    """Render chats with a tokenizer of Transformers. Raises ConfigError for a template that cannot be rendered.

    tools: what the model may call, as the template gets it.
    """

    tokenizer: Any
    template: str
    tools: tuple[Message, ...] = ()

    def render(self, messages: Sequence[Message], *, asks: bool, minutes: int = 0) -> list[int]:
        from jinja2 import TemplateError

        now = BEGINNING + timedelta(minutes=minutes)
        try:
            text = self.tokenizer.apply_chat_template(
                list(messages),
                chat_template=self.template,
                tools=list(self.tools) or None,
                add_generation_prompt=asks,
                tokenize=False,
                strftime_now=now.strftime,
            )
        except TemplateError as error:
            raise ConfigError(f"the chat template cannot be rendered: {error}") from None
        return self.encode(text)

    def encode(self, text: str) -> list[int]:
        return list(self.tokenizer.encode(text, add_special_tokens=False))

    def decode(self, tokens: Sequence[int]) -> str:
        return str(self.tokenizer.decode(list(tokens), skip_special_tokens=False))


def load_renderer(model: str, template: str = "") -> LocalRenderer:
    """Load a model's tokenizer, with the chat template of a Jinja file or else its own. Raises ConfigError."""
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(model)
    except (OSError, ValueError, ImportError) as error:
        why = str(error).splitlines()[0]
        raise ConfigError(f"--model is {model}, whose tokenizer cannot be loaded: {why}") from None
    try:
        text = Path(template).read_text(encoding="utf-8") if template else tokenizer.chat_template
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--chat-template is {template}, which cannot be read: {error}") from None
    if not isinstance(text, str) or not text:
        raise ConfigError(f"--model is {model}, which has no chat template: name one with --chat-template.")
    return LocalRenderer(tokenizer, text)
