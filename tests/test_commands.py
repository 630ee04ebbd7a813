"""Every command line in the documents is run by `make test-all`, or it is said why not.

helpers/documents.py says what counts as a command and how one is marked that needs a GPU; commands.yaml says how the
others are run.
"""

import ast
import re
import shlex
import subprocess
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from documents import PROGRAMS, REPO, Command, commands, documents, paragraphs, program
from reader import Reader
from redis_server import RedisServer
from typer.main import get_command
from warm_server import warm_server

from manthan.benchmarks.server import VllmServer
from manthan.manager.cli import app

TABLE: dict[str, Any] = yaml.safe_load(Path(__file__).with_name("commands.yaml").read_text(encoding="utf-8"))
FOUND = [command for path in documents() for command in commands(path)]
OURS = [command for command in FOUND if not command.needs_gpu]
ALONE = ("manthan", "redis-server", "redis-cli", "openssl", "printf")
"""Programs whose commands are run as they stand ..."""
GROUPS = ("bench", "eval")
"""... but for these groups of `manthan`, which need a line in the table."""
MOST_SERVERS = 3
NAMESPACE = "tiny-llama-913cc63426b1"
"""What the documents show of a Redis that engines have used."""
HTTP = "http://127.0.0.1:8000"
ANSWERED_S = 600.0


def first(command: Command) -> str:
    return program(command.text)


def runs_alone(command: Command) -> bool:
    return first(command) in ALONE and not (first(command) == "manthan" and {*command.words[1:2]} & {*GROUPS})


def entry(table: str, command: Command) -> str | None:
    """Return the entry in commands.yaml for commands that begin as this one does."""
    return next((said for begin, said in TABLE[table].items() if f"{command.text} ".startswith(f"{begin} ")), None)


def has_a_test_or_a_reason(command: Command) -> bool:
    return entry("tested", command) is not None or entry("elsewhere", command) is not None


def is_served(command: Command) -> bool:
    """True if it starts a server, or is run next to one."""
    return "vllm serve " in command.text or first(command) == "curl" or is_about_sessions(command)


def is_about_sessions(command: Command) -> bool:
    return bool(re.search(rf"{NAMESPACE}|manthan:\*:session", command.text))


def is_mention(command: Command) -> bool:
    """`manthan calibrate` within a paragraph, without what it must be given."""
    if not command.inline or first(command) != "manthan":
        return command.inline and command.text == "vllm serve"
    found: Any = get_command(app)
    words = command.words[1:]
    while words and hasattr(found, "commands"):
        found, words = found.get_command(None, words[0]), words[1:]
        assert found, f"{command}: `manthan` has no such command"
    needed = [param for param in found.params if param.required]
    return hasattr(found, "commands") or (not words and bool(needed))


# -- what there is ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", documents(), ids=lambda path: path.relative_to(REPO).as_posix())
def test_fences_say_what_they_hold(path: Path) -> None:
    for paragraph in paragraphs(path.read_text(encoding="utf-8")):
        where = f"{path.name}:{paragraph.line}"
        assert paragraph.kind != "no language", f"{where}: write ```sh, ```console or ```text instead of ```"
    for command in commands(path):
        word = first(command)
        assert word in PROGRAMS or re.match(r"[A-Z_]+=", command.text), (
            f"{command}: '{word}' is no program that documents use; if this is no command, write ```text"
        )


@pytest.mark.parametrize("command", OURS, ids=str)
def test_it_is_run_or_it_is_said_why_not(command: Command) -> None:
    known = has_a_test_or_a_reason(command) or entry("run", command) is not None
    known = known or is_served(command) or is_mention(command)
    assert known or runs_alone(command) or first(command) == "pytest", (
        f"{command}: nothing runs this. Add it to `run`, `tested` or `elsewhere` in tests/commands.yaml, or write "
        "`# needs a GPU` behind it."
    )


@pytest.mark.parametrize("command", [one for one in FOUND if first(one) == "pytest"], ids=str)
def test_what_pytest_is_given_exists(command: Command) -> None:
    """Also where it needs a GPU: all files and folders."""
    paths = [word.partition("::")[0] for word in command.words if word.startswith("tests")]
    assert paths
    assert [path for path in paths if not (REPO / path).exists()] == []


@pytest.mark.parametrize("table", ["run", "tested", "elsewhere"])
def test_the_table_has_no_command_that_no_document_has(table: str) -> None:
    texts = [f"{command.text} " for command in FOUND]
    assert [begin for begin in TABLE[table] if not any(text.startswith(f"{begin} ") for text in texts)] == []


def of_manthan() -> list[Command]:
    """Those for a GPU too."""
    found = [one for one in FOUND if first(one) == "manthan" and "--install-completion" not in one.words]
    return [one for one in found if not is_mention(one)]


@pytest.mark.parametrize("command", of_manthan(), ids=str)
def test_manthan_takes_these_arguments(command: Command) -> None:
    """Also where nothing runs them: names and types of options and arguments."""
    words = shlex.split(re.split(r" (?:\||>|&&|2>) ?", command.text)[0])
    words = words[next(n for n, word in enumerate(words) if program(word) == "manthan") + 1 :]
    found: Any = get_command(app)
    while hasattr(found, "commands"):
        assert words[:1], f"{command}: {found.name} needs a command"
        name, found, words = words[0], found.get_command(None, words[0]), words[1:]
        assert found, f"{command}: there is no {name}"
    found.make_context("manthan", words)


@pytest.mark.parametrize("command", TABLE["tested"])
def test_the_test_that_runs_it_exists(command: str) -> None:
    file, _, name = TABLE["tested"][command].partition("::")
    tree = ast.parse((REPO / file).read_text(encoding="utf-8"))
    assert name in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


# -- commands that run by themselves ----------------------------------------------------------------------


@pytest.fixture(scope="module")
def readers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Reader]]:
    """One for each document, made when it is asked for the first time."""

    class Readers(dict[str, Reader]):
        def __missing__(self, document: str) -> Reader:
            self[document] = Reader(tmp_path_factory.mktemp("reader"), TABLE["replace"], TABLE["files"])
            return self[document]

    made = Readers()
    yield made
    for reader in made.values():
        reader.leave()


def by_themselves() -> list[Command]:
    """In the order of the documents; what several have is run once."""
    found: dict[str, Command] = {}
    for command in OURS:
        is_left = has_a_test_or_a_reason(command) or is_served(command) or is_mention(command)
        if not is_left and (entry("run", command) is not None or runs_alone(command)):
            found.setdefault(command.text, command)
    return list(found.values())


@pytest.mark.slow
@pytest.mark.parametrize("command", by_themselves(), ids=str)
def test_it_succeeds(command: Command, readers: Mapping[str, Reader]) -> None:
    readers[command.document].types(command.text, entry("run", command) or "")


def test_a_clone_is_all_that_the_demo_needs(tmp_path: Path) -> None:
    """What `make demo` runs in a clone, but for the environment that it makes first: files that git has."""
    if not (REPO / ".git").exists():
        pytest.skip("this is not a clone")
    subprocess.run(["git", "clone", "-q", "--no-hardlinks", REPO, tmp_path / "manthan"], check=True, timeout=60)
    # Not as a part of `make test`, which would have make say so in what it prints.
    recipe = subprocess.run(
        ["env", "-u", "MAKELEVEL", "-u", "MAKEFLAGS", "make", "-n", "demo"],
        cwd=tmp_path / "manthan",
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    ).stdout
    assert re.search(r"\.ci/setup_venv\.sh", recipe)
    assert recipe.strip().endswith("python benchmarks/demo.py")
    for script in re.findall(r"(?:\.ci|benchmarks)/\w+\.\w+", recipe):
        assert (tmp_path / "manthan" / script).exists()


# -- servers ----------------------------------------------------------------------------------------------


Serve = dict[str, str]
"""Flags of `vllm serve`, and variables, with their values."""
REDIS_FLAG = "--manthan-redis-url"


def serve(command: Command) -> Serve:
    """Return what a document has, with the table's flags."""
    at = command.words.index("serve")
    found: Serve = dict(TABLE["server_flags"])
    name = ""
    for word in command.words[at + 2 :]:
        if word.startswith("--"):
            name = word
            found[name] = ""
        else:
            found[name] = f"{found[name]} {word}".strip()
    found |= {name: value for name, value in TABLE["server_values"].items() if name in found}
    if "redis" not in command.text:
        del found[REDIS_FLAG]
    return found | dict(word.split("=", 1) for word in command.words[: at - 1])


def servers() -> list[Serve]:
    """Return few servers with all flags of the documents. One does for all commands that do not contradict another."""
    asked = [serve(c) for c in OURS if "vllm serve " in c.text and not has_a_test_or_a_reason(c)]
    found: list[Serve] = []
    for one in sorted(asked, key=lambda one: (-len(one), sorted(one.items()))):
        for other in found:
            if all(other.get(name, value) == value for name, value in one.items()):
                other |= one
                break
        else:
            found.append(one)
    return found


def name_of(one: Serve) -> str:
    added = sorted(one.items() - TABLE["server_flags"].items())
    return " ".join(f"{name} {value}".strip() for name, value in added) or "plain"


@pytest.fixture
def redis_server(tmp_path: Path) -> Iterator[RedisServer]:
    with RedisServer(tmp_path) as server:
        yield server


def test_there_are_few_servers() -> None:
    assert 0 < len(servers()) <= MOST_SERVERS, "give a command in the documents the flags that another has"


@pytest.mark.slow
@pytest.mark.parametrize("one", servers(), ids=name_of)
def test_a_server_answers(one: Serve, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    reader = Reader(tmp_path / "reader", TABLE["replace"], TABLE["files"])
    if REDIS_FLAG in one:
        reader.use_redis(request.getfixturevalue("redis_server"))
    flags = [f"{name} {value}" for name, value in sorted(one.items()) if name.startswith("--")]
    words = shlex.split(" ".join(reader.typed(flag, {"FOLDER": str(tmp_path)}) for flag in flags))
    variables = {name: value for name, value in one.items() if not name.startswith("--")}
    model = str(REPO / TABLE["replace"]["MODEL"])
    with VllmServer(model, words, tmp_path / "log", variables) as server:
        server.wait_until_ready(ANSWERED_S)
        for name in ("alice", "bob"):
            body = {"model": model, "prompt": f"def {name}():\n" * 80, "max_tokens": 4, "session_id": name}
            answer = httpx.post(f"{server.url}/v1/completions", json=body, timeout=60).raise_for_status().json()
            assert answer["usage"]["completion_tokens"] == 4
        assert ("Manthan is on: " in server.log.read_text()) == is_manthan(one)
        if REDIS_FLAG in one and "--manthan-idle-after" in one:
            wait_until_cold(server)
            look_into_redis(reader)
        elif one == speaks_http():
            for command in OURS:
                if first(command) == "curl":
                    answer = reader.types(command.text, more={"MODEL": model, HTTP: server.url})
                    assert not answer.startswith('{"error"'), answer


def is_manthan(one: Serve) -> bool:
    return any(name.startswith("--manthan") for name in one)


def speaks_http() -> Serve:
    """Return the server that `curl` commands ask."""
    return next(one for one in servers() if is_manthan(one) and REDIS_FLAG not in one)


@pytest.mark.slow
def test_one_session_goes_cold_and_comes_back(tmp_path: Path) -> None:
    served, asked = [c for c in OURS if c.document == "docs/deployment.md" and re.search("--num-gpu|for name", c.text)]
    reader = Reader(tmp_path / "reader", {}, {})
    model = str(REPO / "tests" / "data" / "tiny-llama")
    with warm_server(model, served.words[served.words.index("serve") + 2 :], tmp_path / "log") as server:
        server.wait_until_ready(ANSWERED_S)
        reader.types(asked.text.replace("tests/data/tiny-llama", model), more={HTTP: server.url})
        server.kill()
    cold = re.findall(r"session (\w+) (?:went cold|(restored) ([1-9]\d*) of \3 blocks)", server.log.read_text())
    assert [found[:2] for found in cold[:4]] == [("alice", ""), ("bob", ""), ("carol", ""), ("alice", "restored")]


def wait_until_cold(server: VllmServer) -> None:
    def is_cold() -> bool:
        return re.search(r'manthan_sessions\{.*state="cold"\} 2', httpx.get(f"{server.url}/metrics").text) is not None

    server.wait_for(is_cold, 60, "show two cold sessions")
    time.sleep(0.5)  # the hashes in Redis follow


def look_into_redis(reader: Reader) -> None:
    """What the documents show of a Redis that holds sessions, with this one's names and keys."""
    names = reader.types("redis-cli --scan --pattern 'manthan:*:session:*'").split()
    (namespace,) = {re.findall(r"{(.*)}", name)[0] for name in names}
    for command in OURS:
        if is_about_sessions(command):
            text = command.text.replace(NAMESPACE, namespace)
            assert "alice" in reader.types(text) or "TTL" in text, text
