"""Checks of `manthan doctor` without vLLM: machine, key files, Redis, chat template. Each finding is one sentence.

The next turn's prompt must repeat the previous turn's tokens. A turn is a prompt with the model's answer, and a session
has the KV of the turn's tokens. A chat template renders the next prompt anew from messages. The prompt's tokens find KV
up to the first different token. All later tokens are computed again.
"""

import os
import re
import resource
import shutil
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from datetime import datetime, timedelta
from enum import StrEnum, auto
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

from redis.exceptions import RedisError

from manthan.manager.config.model import ConfigError, ManthanConfig, TiersConfig
from manthan.manager.config.resolve import human_bytes
from manthan.manager.tiers.disk import FolderBusyError, check_folder
from manthan.manager.tiers.redis import check, connect, pipelined
from manthan.manager.tiers.sealed import keys_of

MOUNTS = Path("/proc/self/mounts")
IN_RAM = ("tmpfs", "ramfs", "devtmpfs")
REMOTE = ("nfs", "cifs", "smb", "9p", "ceph", "glusterfs", "lustre", "beegfs", "gpfs", "afs", "fuse.")
"""Prefixes of the names of file systems whose files are on other machines."""
REDIS_COMMANDS = "DEL, HSET f 1, HGET f, PEXPIREAT 1, SET 1 PX 1000, GET, STRLEN, EXISTS, UNLINK"
"""Commands that engines send to Redis. `check_redis` tries each, with a key inserted behind the command's name."""


class Grade(StrEnum):
    """Outcome of a check."""

    OK = auto()
    SKIPPED = auto()  # there is nothing to check
    WARNING = auto()  # Manthan works, but badly
    WRONG = auto()  # Manthan fails


class Finding(NamedTuple):
    """Result of a check. said: one sentence; if something is wrong, it says what to do."""

    check: str
    mark: Grade
    said: str


def check_machine(config: ManthanConfig, has_gpu: bool) -> Iterator[Finding]:
    """Check what the configuration needs of this machine, and of Redis."""
    yield check_memlock(config.tiers, has_gpu)
    yield check_disk(config)
    yield check_keys(config)
    yield from check_redis(config)


def check_memlock(store: TiersConfig, has_gpu: bool) -> Finding:
    """Check that the limit for locked memory (memlock) allows the RAM that Manthan pins (page-locks) for a GPU."""
    wanted = store.max_bytes if store.kind == "host" else store.host_bytes
    if not has_gpu or not wanted:
        why = "no compressed blocks are kept in RAM" if has_gpu else "there is no GPU"
        return Finding("memlock", Grade.SKIPPED, f"{why}, so that no RAM is pinned.")
    limit, size = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0], human_bytes(wanted)
    if limit == resource.RLIM_INFINITY or limit >= wanted:
        return Finding("memlock", Grade.OK, f"the limit allows the {size} that are pinned for the GPU.")
    return Finding(
        "memlock",
        Grade.WARNING,
        f"the limit is {human_bytes(limit)}, but {size} of RAM are pinned for the GPU, and some drivers keep to the "
        "limit: raise it (ulimit -l unlimited, LimitMEMLOCK=infinity, --ulimit memlock=-1).",
    )


def check_disk(config: ManthanConfig) -> Finding:
    """Check that the folder of a disk tier exists, can be written, is on a local disk, and has enough room."""
    store, path = config.tiers, config.tiers.disk.path
    if not store.is_on_disk:
        return Finding("disk", Grade.SKIPPED, f"tiers.kind is {store.kind}, which keeps nothing on a disk.")
    busy = ""
    try:
        check_folder(path)
    except FolderBusyError:
        busy = "; a server uses it now"
    except ConfigError as error:
        return Finding("disk", Grade.WRONG, str(error))
    kind = file_system(Path(path))
    budget = store.disk_bytes or store.max_bytes
    files = (Path(folder) / name for folder, _, names in os.walk(path) for name in names)
    taken = sum(file.lstat().st_blocks * 512 for file in files if file.exists())
    free = shutil.disk_usage(path).free
    room, size = human_bytes(taken + free), human_bytes(budget)
    if kind in IN_RAM:
        why = f"on {kind}, which is RAM and empty after a restart: name a folder on a disk"
    elif kind.startswith(REMOTE):
        why = f"on {kind}, which is not of this machine: name a folder on a local file system"
    elif taken + free < budget:
        why = f"too small: {room} for {size} of compressed blocks; lower that, or make room"
    else:
        said = f"{path} is a folder on {kind} with {human_bytes(free)} free, for {size} of compressed blocks{busy}."
        return Finding("disk", Grade.OK, said)
    return Finding("disk", Grade.WRONG, f"tiers.disk.path is {path!r}, which is {why}.")


def check_keys(config: ManthanConfig) -> Finding:
    """Check that the file of keys, by which blocks outside the process are sealed, can be used."""
    path = config.sealing.key_file
    if not path:
        return Finding("keys", Grade.SKIPPED, "sealing.key_file is empty, so that blocks are not sealed.")
    try:
        count = len(keys_of(config.sealing))
    except ConfigError as error:
        return Finding("keys", Grade.WRONG, str(error))
    return Finding("keys", Grade.OK, f"{path} has {count} keys; the first one seals new blocks.")


def file_system(path: Path) -> str:
    """Return the type of the file system that has a folder, such as ext4; empty if no mount point has the folder."""
    real, best, kind = path.resolve(), -1, ""
    for line in MOUNTS.read_text(errors="replace").splitlines():
        _, at, name, *_ = line.split(" ")
        mount = Path(re.sub(r"\\([0-7]{3})", lambda octal: chr(int(octal[1], 8)), at))  # a space in a name is \040
        if real.is_relative_to(mount) and len(mount.parts) >= best:  # a later mount hides an earlier one
            best, kind = len(mount.parts), name
    return kind


def check_redis(config: ManthanConfig) -> Iterator[Finding]:
    """Check that Redis answers, accepts the engines' commands, and does not refuse writes when it is full."""
    redis = config.tiers.redis
    if not config.tiers.is_shared:
        yield Finding("Redis", Grade.SKIPPED, f"tiers.kind is {config.tiers.kind}, which does not use Redis.")
        return
    try:
        with closing(connect(redis)) as client:
            said = check(client, redis)
            key = f"{redis.prefix}doctor"
            commands = [command.split() for command in REDIS_COMMANDS.split(", ")]
            pipelined(client, [(command, key, *more) for command, *more in commands])
    except ConfigError as error:
        yield Finding("Redis", Grade.WRONG, str(error))
        return
    except RedisError as error:
        yield Finding("Redis", Grade.WRONG, f"Redis at {redis.url} refuses a command that engines send: {error}.")
        return
    yield Finding("Redis", Grade.OK, f"{redis.url} answers, and takes keys that begin with {redis.prefix}.")
    yield Finding("Redis memory", Grade.WARNING if said else Grade.OK, said or "Redis evicts when it is full.")


# -- chat templates ---------------------------------------------------------------------------------------

TEMPLATE = "chat template"
Message: TypeAlias = dict[str, Any]

QUESTION = "Which city is the capital of France? Answer in one sentence."
THOUGHT = "The user asks for a capital. Of France that is Paris, so I say so in one sentence."
ANSWER = "The capital of France is Paris."
NEXT = "And which one is that of Italy?"
THOUGHT_KEYS = ("reasoning_content", "reasoning", "thinking")
"""Fields of a message in which templates look for the model's thinking."""
A_DAY = 27 * 60  # minutes until the next turn, on another day and at another hour
BEGINNING = datetime(2026, 1, 5, 9, 30)  # time of the first turn, for templates that show a date
AROUND = 8  # number of tokens shown before the first difference, and from there on


@dataclass(frozen=True)
class Renderer:
    """Chat template and tokenizer of a model. tools: definitions of functions for the template."""

    tokenizer: Any
    template: str
    tools: tuple[Message, ...] = ()

    def render(self, messages: Sequence[Message], *, asks: bool, minutes: int = 0) -> list[int]:
        """Return the tokens of a conversation. Raises ConfigError for an unusable template.

        asks: True to add the generation prompt. minutes: minutes from BEGINNING to the time that the template shows.
        """
        from jinja2 import TemplateError

        try:
            text = self.tokenizer.apply_chat_template(
                list(messages),
                chat_template=self.template,
                tools=list(self.tools) or None,
                add_generation_prompt=asks,
                tokenize=False,
                strftime_now=(BEGINNING + timedelta(minutes=minutes)).strftime,
            )
        except TemplateError as error:
            raise ConfigError(f"the chat template cannot be rendered: {error}") from None
        return self.encode(text)

    def encode(self, text: str) -> list[int]:
        return list(self.tokenizer.encode(text, add_special_tokens=False))

    def decode(self, tokens: Sequence[int]) -> str:
        return str(self.tokenizer.decode(list(tokens), skip_special_tokens=False))


class Parting(NamedTuple):
    """First difference between a turn and the next prompt."""

    of: str  # kind of answer, such as "thinking"
    kept: int  # number of the turn's first tokens that the next prompt repeats; all without a difference
    tokens: int  # number of the turn's tokens
    before: str  # text of the last tokens before the difference
    was: str  # text from the difference on, in the turn
    comes: str  # text from the difference on, in the next prompt

    @property
    def rewrites(self) -> bool:
        """True if the next prompt differs before the turn's last token, which may merge with the text after it."""
        return self.kept < self.tokens - 1


def common(first: Sequence[int], second: Sequence[int]) -> int:
    """Return the number of equal tokens before the first difference."""
    pairs = zip(first, second, strict=False)
    return next((at for at, (one, other) in enumerate(pairs) if one != other), min(len(first), len(second)))


def _turn(renderer: Renderer, messages: Sequence[Message], answer: Message, thought: str) -> list[int]:
    """Return a turn's tokens: those of the prompt, and those that the model generates.

    thought: Thinking before the answer; empty for none. Put between <think> tags if the template does not show it.
    """
    prompt = renderer.render(messages, asks=True)
    asked, shown = renderer.decode(prompt), renderer.decode(renderer.render([*messages, answer], asks=False))
    final = answer["content"].rpartition("</think>")[2].lstrip()
    if shown.startswith(asked) and thought in shown[len(asked) :]:
        text = shown[len(asked) : shown.rfind(final) + len(final)]  # as the template writes the answer
    else:
        opened = "" if asked.rstrip().endswith("<think>") else "<think>\n"
        text = f"{opened}{thought}\n</think>\n\n{final}" if thought else final
    return [*prompt, *renderer.encode(text)]


def partings(renderer: Renderer) -> list[Parting]:
    """Return the first difference between a turn and the next prompt for each kind of answer.

    Kinds are: a plain answer; a plain answer with the next turn on another day; an answer whose thinking the client
    sends back in a separate field, if the template shows the field; and an answer whose thinking the client sends back
    between <think> tags, unless the template shows the field without tags.
    """
    asked, then = [{"role": "user", "content": QUESTION}], {"role": "user", "content": NEXT}
    plain = {"role": "assistant", "content": ANSWER}
    apart = plain | dict.fromkeys(THOUGHT_KEYS, THOUGHT)
    within = plain | {"content": f"<think>\n{THOUGHT}\n</think>\n\n{ANSWER}"}
    shown = renderer.decode(renderer.render([*asked, apart], asks=False))
    tried = [("plain answers", plain, "", 0), ("the next turn on another day", plain, "", A_DAY)]
    if THOUGHT in shown:
        tried.append(("thinking", apart, THOUGHT, 0))
    if THOUGHT not in shown or "<think>" in shown:  # not if thinking is in a separate channel
        tried.append(("thinking within the answer", within, THOUGHT, 0))
    found = []
    for of, answer, thought, minutes in tried:
        again = renderer.render([*asked, answer, then], asks=True, minutes=minutes)
        turn = _turn(renderer, asked, answer, thought)
        kept = common(turn, again)
        texts = turn[max(0, kept - AROUND) : kept], turn[kept : kept + AROUND], again[kept : kept + AROUND]
        found.append(Parting(of, kept, len(turn), *map(renderer.decode, texts)))
    return found


def check_template(renderer: Renderer) -> Finding:
    """Check that the next prompt repeats the turn before it, for each kind of answer."""
    found = partings(renderer)
    rewritten = sorted((one for one in found if one.rewrites), key=lambda one: one.kept / one.tokens)
    if not rewritten:
        tried = ", ".join(one.of for one in found)
        return Finding(TEMPLATE, Grade.OK, f"the next prompt repeats the turn before it, token by token ({tried}).")
    worst = rewritten[0]
    also = ", ".join(f"{one.of}: {one.kept} of {one.tokens}" for one in found if one.rewrites and one is not worst)
    return Finding(
        TEMPLATE,
        Grade.WRONG,
        f"it rewrites history (case: {worst.of}): the next prompt repeats {worst.kept} of a turn's {worst.tokens} "
        f"tokens, up to {worst.before!r}, and goes on with {worst.comes!r} where {worst.was!r} was"
        f"{f' (also: {also})' if also else ''}; "
        "each turn computes all later tokens again: use a template that only appends (--chat-template).",
    )


def load_renderer(model: str, template: str = "") -> Renderer:
    """Load a model's tokenizer, and its chat template or the one in the Jinja file `template`. Raises ConfigError."""
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
    if template and not text:
        raise ConfigError(f"--chat-template is {template}, which is empty: name a file with a Jinja template.")
    if not isinstance(text, str) or not text:
        some = "has several chat templates" if text else "has no chat template"
        raise ConfigError(f"--model is {model}, which {some}: name a file with one by --chat-template.")
    return Renderer(tokenizer, text)
