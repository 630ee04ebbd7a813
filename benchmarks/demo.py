"""Eight chats on a KV pool for two: they are compressed while idle, restored on return, and still answered right.

Two servers run in turn with the same tiny model and the same small pool. With Manthan, each chat goes cold: it is idle,
and its blocks are compressed. On return they are decoded. Without Manthan, vLLM has overwritten the chat's blocks
meanwhile and computes the whole prompt again. The exit status is 0 only if every chat was cold, at least 95% of its
full blocks were restored, and its answer was right.

    python benchmarks/demo.py
"""

import contextlib
import os
import random
import re
import statistics
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import yaml
from rich import box
from rich.markup import escape
from rich.progress import Progress, SpinnerColumn, TimeElapsedColumn
from rich.table import Table
from tokenizers import Tokenizer

from manthan.benchmarks.arms import leave_on_signals, make_console, tell_codec
from manthan.benchmarks.server import CHAT_TEMPLATE, Reply, ServerError, VllmServer, codec_used

ROOT = Path(__file__).resolve().parent.parent
MODEL = ROOT / "tests" / "data" / "tiny-llama"
SERVE = f"vllm serve {MODEL.relative_to(ROOT)}"
CONFIG = ROOT / "configs" / "demo.yaml"
LOGS = ROOT / "build" / "demo"
IDLE_AFTER_S = yaml.safe_load(CONFIG.read_text())["idle"]["after_s"]

NAMES = ["alice", "bob", "carol", "dave", "erin", "frank", "grace", "heidi"]
ENTRIES = 64
CODE_TOKENS = 1380  # between table and question; with the table, about 2,000 tokens a chat
BLOCK_TOKENS = 32
POOL_BLOCKS = 144  # two chats of 61 full blocks each, and some spare
ANSWER = {"temperature": 0, "max_tokens": 4}  # four digits
LEAST_RESTORED = 0.95
START_TIMEOUT_S = 300
COLD_TIMEOUT_S = 30

SERVER_FLAGS = [
    *("--block-size", str(BLOCK_TOKENS), "--num-gpu-blocks-override", str(POOL_BLOCKS), "--max-model-len", "4096"),
    *("--chat-template", CHAT_TEMPLATE, "--enable-prompt-tokens-details", "--enforce-eager"),
]
MANTHAN_FLAGS = ["--manthan-policy", "lru", "--manthan-config", str(CONFIG)]

WENT_COLD = re.compile(
    r"Manthan: session (\S+) went cold after ([\d.]+) s idle: (\d+) blocks \(\d+ tokens\), (.+), \d+ encoded"
)
RESTORED = re.compile(r"Manthan: session (\S+) restored (\d+) of \d+ blocks")
IS_ON = re.compile(r"(Manthan is on: .*)$")

console = make_console()


# -- the chats ----------------------------------------------------------------------------------------


@dataclass
class Chat:
    """Chat: a table of `name = 1234` lines, unrelated code, then a lookup in each turn. messages: until now."""

    name: str
    table: dict[str, int]
    lookups: list[str]
    messages: list[dict[str, str]]

    def question(self, turn: int) -> dict[str, str]:
        return {"role": "user", "content": f"\nassert {self.lookups[turn]} == "}

    def right(self, turn: int, reply: Reply) -> bool:
        return reply.text == str(self.table[self.lookups[turn]])


def make_chats() -> list[Chat]:
    """Return the chats. Each has a different table and different code, so that no two chats share a block."""
    tokenizer = Tokenizer.from_file(str(MODEL / "tokenizer.json"))
    code = np.fromfile(MODEL / "held_tokens.u16", dtype=np.uint16)
    syllables = [c + v + d for c in "bcdfghjklmnprstvz" for v in "aeiou" for d in "bcdfghjklmnprstvz"]
    chats = []
    for index, name in enumerate(NAMES):
        rng = random.Random(index)
        table = {key: rng.randrange(1000, 10000) for key in rng.sample(syllables, ENTRIES)}
        start = index * (len(code) // len(NAMES))
        text = "".join(f"{key} = {value}\n" for key, value in table.items())
        text += tokenizer.decode(code[start : start + CODE_TOKENS].tolist())
        chats.append(Chat(name, table, rng.sample(list(table), 2), [{"role": "user", "content": text}]))
    return chats


# -- the server's words -------------------------------------------------------------------------------


@dataclass
class Watch:
    """Prints Manthan's actions from a log. cold: names of chats now cold. restored: blocks last restored, by chat."""

    server: VllmServer
    cold: set[str] = field(default_factory=set)
    restored: dict[str, int] = field(default_factory=dict)

    def look(self) -> None:
        for line in self.server.new_log_lines():
            if found := WENT_COLD.search(line):
                name, idle_s, blocks, sizes = found.groups()
                self.cold.add(name)
                why = "idle" if float(idle_s) >= IDLE_AFTER_S else "memory is short"
                console.print(f"  [cyan]{name:6}[/] went cold after {idle_s} s ({why}): {blocks} blocks saved, {sizes}")
            elif found := RESTORED.search(line):
                self.restored[found[1]] = int(found[2])
                self.cold.discard(found[1])
            elif found := IS_ON.search(line):
                console.print(f"  {found[1]}", markup=False, soft_wrap=True)

    def is_cold(self, name: str) -> bool:
        self.look()
        return name in self.cold


@contextlib.contextmanager
def doing(what: str) -> Iterator[None]:
    """Print `what`, and on a terminal a clock until the end of the context."""
    console.print(f"[bold]{what}[/]")
    columns = SpinnerColumn(), TimeElapsedColumn()
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        progress.add_task("")
        yield


# -- the two runs -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Return:
    """Return of a chat. right: True if the answer was right. restored: number of decoded blocks in Manthan's log."""

    reply: Reply
    right: bool
    was_cold: bool = False
    restored: int = 0

    @property
    def full_blocks(self) -> int:
        return self.reply.prompt_tokens // BLOCK_TOKENS


@dataclass(frozen=True)
class Memory:
    """MiB while all chats are cold. hot: the chats' blocks as bf16. compressed: their size in tiers. pool: vLLM's."""

    hot: float
    compressed: float
    pool: float


def run_with_manthan(chats: list[Chat]) -> tuple[list[Return], Memory]:
    """Run both turns with Manthan, and add the first turns to the chats. Return the second turns, and the memory."""
    log = LOGS / "manthan.log"
    with VllmServer(os.path.relpath(MODEL), [*SERVER_FLAGS, *MANTHAN_FLAGS], log) as server:
        watch = Watch(server)
        start(server, f"{SERVE} --manthan-policy lru --manthan-config configs/demo.yaml")
        first = f"First turn of {len(chats)} chats on a pool for two. Each goes cold before the next one comes: after "
        with doing(f"{first}{IDLE_AFTER_S} s, or sooner if the pool is short of free blocks (memory is short):"):
            watch.look()
            right = 0
            for chat in chats:
                chat.messages.append(chat.question(0))
                reply = server.chat(chat.messages, session_id=chat.name, **ANSWER)
                chat.messages.append({"role": "assistant", "content": reply.text})
                right += chat.right(0, reply)
                server.wait_for(lambda name=chat.name: watch.is_cold(name), COLD_TIMEOUT_S, f"let {chat.name} go cold")
        console.print(f"  {right} of {len(chats)} first answers right")
        memory = measure(server, chats)
        with doing("Each chat comes back with another lookup:"):
            returns = [come_back(server, watch, chat) for chat in chats]
    tell_codec(log, console)
    if "is used until" in codec_used(log):
        console.print("    The guard measures 64 blocks, at most 4 of one step: it needs about 16 prompts.")
    return returns, memory


def come_back(server: VllmServer, watch: Watch, chat: Chat) -> Return:
    watch.look()
    was_cold = chat.name in watch.cold
    watch.restored.pop(chat.name, None)
    reply = server.chat([*chat.messages, chat.question(1)], session_id=chat.name, **ANSWER)
    watch.look()
    result = Return(reply, chat.right(1, reply), was_cold, watch.restored.get(chat.name, 0))
    console.print(
        f"  [green]{chat.name:6}[/] {result.restored} of {result.full_blocks} blocks restored, first token after "
        f"{reply.ttft_s * 1e3:.0f} ms: {chat.lookups[1]} == {reply.text} ({'right' if result.right else 'WRONG'})"
    )
    return result


def measure(server: VllmServer, chats: list[Chat]) -> Memory:
    """Wait until Manthan's metrics show that all blocks of the chats are saved, and return the memory."""
    server.wait_for(lambda: server.metrics().get("vllm:manthan_hot_bytes") == 0, 10, "report that all chats are cold")
    metrics = server.metrics()
    compressed = metrics["vllm:manthan_cold_bytes"] / 2**20
    hot = compressed * metrics["vllm:manthan_compression_ratio"]
    return Memory(hot, compressed, hot / metrics["vllm:manthan_encoded_blocks_total"] * POOL_BLOCKS)


def run_plain(chats: list[Chat]) -> list[Return]:
    """Send the same prompts in the same order to a server without Manthan. Return the second turns' results."""
    with VllmServer(os.path.relpath(MODEL), SERVER_FLAGS, LOGS / "plain.log") as server:
        start(server, f"The same server without Manthan, for comparison: {SERVE}")
        with doing("The same first turns, the same returns:"):
            for chat in chats:
                server.chat(chat.messages[:2], **ANSWER)
            replies = [server.chat([*chat.messages, chat.question(1)], **ANSWER) for chat in chats]
    cached = sum(reply.cached_tokens for reply in replies)
    asked = sum(reply.prompt_tokens for reply in replies)
    console.print(f"  {cached} of {asked} prompt tokens of the returning chats were still in vLLM's prefix cache")
    return [Return(reply, chat.right(1, reply)) for chat, reply in zip(chats, replies, strict=True)]


def start(server: VllmServer, what: str) -> None:
    began = time.monotonic()
    with doing(f"{what}   (log: {server.log.relative_to(ROOT)})"):
        server.wait_until_ready(START_TIMEOUT_S)
    console.print(f"  answers after {time.monotonic() - began:.0f} s")


# -- the result ---------------------------------------------------------------------------------------


def show(chats: list[Chat], with_manthan: list[Return], plain: list[Return]) -> None:
    table = Table(box=box.SIMPLE_HEAD, title="The returning chats", title_justify="left")
    for header in ("session", "before"):
        table.add_column(header)
    for header in ("prompt\ntokens", "tokens\nrestored", "tokens\nrecomputed", "full blocks\nrestored"):
        table.add_column(header, justify="right")
    for header in ("first token,\nManthan", "first token,\nplain vLLM"):
        table.add_column(header, justify="right")
    for header in ("answer,\nManthan", "answer,\nplain vLLM"):
        table.add_column(header)
    for chat, ours, theirs in zip(chats, with_manthan, plain, strict=True):
        table.add_row(
            chat.name,
            "cold" if ours.was_cold else "hot",
            str(ours.reply.prompt_tokens),
            str(ours.restored * BLOCK_TOKENS),
            str(ours.reply.computed_tokens),
            f"{ours.restored}/{ours.full_blocks}",
            f"{ours.reply.ttft_s * 1e3:.0f} ms",
            f"{theirs.reply.ttft_s * 1e3:.0f} ms",
            "[green]right[/]" if ours.right else "[red]WRONG[/]",
            "right" if theirs.right else "WRONG",
        )
    console.print(table)


def verdict(with_manthan: list[Return], plain: list[Return], memory: Memory) -> tuple[bool, str]:
    """Return True if the demo passed, and a line with figures and the causes of a failure."""
    right = sum(result.right for result in with_manthan)
    least = min(result.restored / result.full_blocks for result in with_manthan)
    restored = sum(result.restored for result in with_manthan)
    full = sum(result.full_blocks for result in with_manthan)
    ours, theirs = (statistics.median(r.reply.ttft_s for r in results) for results in (with_manthan, plain))
    wrong = [
        (right < len(with_manthan), "an answer was wrong"),
        (least < LEAST_RESTORED, f"a chat had less than {LEAST_RESTORED:.0%} of its full blocks restored"),
        (not all(r.was_cold for r in with_manthan), "a chat was not cold when it came back"),
        (
            any(r.reply.cached_tokens != r.restored * BLOCK_TOKENS for r in with_manthan),
            "the log and the API disagree on what was restored",
        ),
    ]
    failures = [what for is_so, what in wrong if is_so]
    factor = f"{theirs / ours:.1f} times sooner" if ours < theirs else f"{ours / theirs:.1f} times later"
    line = (
        f"{right} of {len(with_manthan)} answers right, {restored / full:.1%} of full blocks restored ({restored} of "
        f"{full}, never less than {least:.0%} of a chat); median time to first token {ours * 1e3:.0f} ms against "
        f"{theirs * 1e3:.0f} ms without Manthan ({factor}); {memory.hot:.1f} MiB of KV waited as "
        f"{memory.compressed:.1f} MiB of compressed blocks, with a pool of {memory.pool:.1f} MiB."
    )
    return not failures, f"{'FAILED, ' + '; '.join(failures) if failures else 'Passed'}: {line}"


def main() -> int:
    began, load = time.monotonic(), os.getloadavg()[0]
    leave_on_signals()
    LOGS.mkdir(parents=True, exist_ok=True)
    try:
        chats = make_chats()
        with_manthan, memory = run_with_manthan(chats)
        plain = run_plain(chats)
    except ServerError as error:
        console.print(f"\n{error.log_tail}\n", markup=False, soft_wrap=True)
        console.print(f"[red]{escape(str(error))}[/] Its log is {os.path.relpath(error.log)}", soft_wrap=True)
        return 1
    except KeyboardInterrupt:
        console.print("Stopped; the servers are down.")
        return 130
    show(chats, with_manthan, plain)
    console.print(
        f"Took {time.monotonic() - began:.0f} s. The model is tiny (4 M parameters), so that recomputing is cheap: its "
        "times say little about larger models.",
        soft_wrap=True,
    )
    if load > (os.cpu_count() or 1):
        busy = f"The machine was busy before (load {load:.1f}), perhaps only with the set-up: times say little at all."
        console.print(busy, soft_wrap=True)
    passed, line = verdict(with_manthan, plain, memory)
    console.print(f"[bold {'green' if passed else 'red'}]{line}[/]", soft_wrap=True)
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
