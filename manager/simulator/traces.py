"""Request traces: who asked when for which blocks. Two formats are read, see docs/simulate.md."""

import csv
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, NamedTuple, TextIO, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from manthan.manager.config.sentences import first_mistake, must_be, nearest
from manthan.manager.sessions.hints import LONGEST_S, SECONDS, TOOL_NAME, ToolName

MOONCAKE_BLOCK_TOKENS = 512
CSV_BLOCK_TOKENS = 16

CSV_COLUMNS = ("time_s", "session_id", "input_tokens", "output_tokens")
"""Those that must be there."""

_COUNT = "a whole number of tokens, {} or more"
_TIME = "a number of {}, 0 or more"


class TraceError(ValueError):
    """A trace that cannot be read, in one sentence with file, line and field."""


class TracedRequest(NamedTuple):
    """One request of a trace.

    at: seconds. session: what the client called it, if it did. prompt_blocks: how many of the keys are the prompt's.
    keys: of all full blocks: the prompt's, and then the answer's as far as the trace tells. expect_return_s, tool:
    the hints of these names, if the client gave them.
    """

    at: float
    session: str | None
    keys: list[bytes]
    prompt_blocks: int
    input_tokens: int
    output_tokens: int
    expect_return_s: float | None = None
    tool: str = ""


class Trace(NamedTuple):
    """Requests in the order of their arrival. distinct_blocks: all that the trace names, partial ones too."""

    name: str
    block_tokens: int
    requests: list[TracedRequest]
    distinct_blocks: int


_Return = Annotated[float | None, Field(gt=0, le=LONGEST_S, allow_inf_nan=False, description=SECONDS)]
"""As a hint has it, which a replay makes of it."""


class _Line(BaseModel):
    """A field's description completes the sentence "FIELD must be …"."""

    model_config = ConfigDict(frozen=True, extra="ignore")


class MooncakeLine(_Line):
    """A line of the traces that the Mooncake project published with its paper (FAST'25)."""

    timestamp: float = Field(ge=0, allow_inf_nan=False, description=_TIME.format("milliseconds"))
    input_length: int = Field(ge=1, strict=True, description=_COUNT.format(1))
    output_length: int = Field(ge=0, strict=True, description=_COUNT.format(0))
    hash_ids: list[int] = Field(description="a list of whole numbers, one a block of the prompt")
    expect_return_s: _Return = None
    tool: ToolName = Field(default="", description=TOOL_NAME)


class CsvLine(_Line):
    """A line of the CSV format."""

    model_config = ConfigDict(extra="forbid")

    time_s: float = Field(ge=0, allow_inf_nan=False, description=_TIME.format("seconds"))
    session_id: str = Field(default="", description="what the session is called; empty for a request on its own")
    input_tokens: int = Field(ge=1, description=_COUNT.format(1))
    output_tokens: int = Field(ge=0, description=_COUNT.format(0))
    prefix_id: str = Field(default="", description="what the shared beginning is called; empty for none")
    prefix_tokens: int = Field(default=0, ge=0, description=_COUNT.format(0))
    expect_return_s: _Return = None
    tool: ToolName = Field(default="", description=TOOL_NAME)


def read_trace(path: str | Path, block_tokens: int | None = None) -> Trace:
    """A trace from a file: JSON lines as Mooncake's, or CSV; the first line tells.

    block_tokens: of a block; None for 512 (Mooncake) or 16 (CSV). Raises TraceError.
    """
    path = Path(path)
    try:
        with path.open(encoding="utf-8", newline="") as file:
            is_json = file.readline().lstrip().startswith("{")
            file.seek(0)
            if is_json:
                return _read_mooncake(path.name, file, block_tokens or MOONCAKE_BLOCK_TOKENS)
            return _read_csv(path.name, file, block_tokens or CSV_BLOCK_TOKENS)
    except OSError as error:
        raise TraceError(f"{path}: cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise TraceError(f"{path}: is no text: a trace is JSON lines or CSV in UTF-8") from None


# -- Mooncake -------------------------------------------------------------------------------------------


def _read_mooncake(name: str, file: Iterable[str], block_tokens: int) -> Trace:
    keys = _Prefixes(name)
    requests = []
    for number, text in enumerate(file, 1):
        if text.isspace():
            continue
        try:
            values = json.loads(text)
        except ValueError:
            raise TraceError(f"{name}, line {number}: is not valid JSON") from None
        line = _checked(MooncakeLine, values, name, number)
        blocks = -(-line.input_length // block_tokens)
        if len(line.hash_ids) != blocks:
            raise TraceError(
                f"{name}, line {number}: hash_ids must be {blocks} ids, one for each {block_tokens} tokens of the "
                f"input_length {line.input_length}, not {len(line.hash_ids)}"
            )
        full = line.input_length // block_tokens
        prompt = keys.of(line.hash_ids, number)[:full]
        at = line.timestamp / 1000
        said = line.expect_return_s, line.tool
        requests.append(TracedRequest(at, None, prompt, full, line.input_length, line.output_length, *said))
    return _trace(name, block_tokens, requests, len(keys))


class _Prefixes:
    """Block keys by id, and what stood before each: the same id means the same prefix."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._keys: dict[int, tuple[bytes, int | None, int]] = {}  # key, the id before, the line

    def __len__(self) -> int:
        return len(self._keys)

    def of(self, ids: list[int], line: int) -> list[bytes]:
        keys: list[bytes] = []
        before: int | None = None
        for one in ids:
            known = self._keys.get(one)
            if known is None:
                known = self._keys[one] = (b"%d" % one, before, line)
            elif known[1] != before:
                raise TraceError(
                    f"{self._name}, line {line}: hash_ids has {one} {_behind(before)}, but line {known[2]} has it "
                    f"{_behind(known[1])}: an id stands for all of the prompt up to its block"
                )
            keys.append(known[0])
            before = one
        return keys


def _behind(before: int | None) -> str:
    return "first" if before is None else f"after {before}"


# -- CSV ------------------------------------------------------------------------------------------------


@dataclass
class _Text:
    """What a session has said so far, which only grows: the keys of its full blocks."""

    name: str
    prefix: tuple[str, int]
    tokens: int = 0
    rewritten: int = 0
    """How often a prompt was shorter than what had been said: what follows then is another text."""
    keys: list[bytes] = field(default_factory=list)

    def grow(self, tokens: int, block_tokens: int) -> None:
        prefix, length = self.prefix
        for i in range(len(self.keys), tokens // block_tokens):
            shared = (i + 1) * block_tokens <= length
            self.keys.append((f"p {i} {prefix}" if shared else f"s {i} {self.rewritten} {self.name}").encode())
        self.tokens = tokens

    def cut(self, tokens: int, block_tokens: int) -> None:
        self.rewritten += 1
        del self.keys[tokens // block_tokens :]


def _read_csv(name: str, file: TextIO, block_tokens: int) -> Trace:
    texts: dict[str, _Text] = {}
    requests = []
    for number, line in sorted(_csv_lines(name, file), key=lambda pair: pair[1].time_s):
        prefix = (line.prefix_id, line.prefix_tokens)
        text = texts.get(line.session_id) if line.session_id else None
        if text is None:
            text = texts[line.session_id or f"{number}\n"] = _Text(line.session_id or f"{number}\n", prefix)
        if prefix != text.prefix:
            raise TraceError(
                f"{name}, line {number}: prefix_id and prefix_tokens must be {text.prefix} as before in the session "
                f"{line.session_id!r}, not {prefix}"
            )
        if line.input_tokens < text.tokens:
            text.cut(line.input_tokens, block_tokens)
        computed = line.input_tokens + max(0, line.output_tokens - 1)  # the last token's KV is never computed
        text.grow(line.input_tokens + line.output_tokens, block_tokens)
        keys, full = text.keys[: computed // block_tokens], line.input_tokens // block_tokens
        asked = line.session_id or None
        said = line.expect_return_s, line.tool
        requests.append(TracedRequest(line.time_s, asked, keys, full, line.input_tokens, line.output_tokens, *said))
    distinct = {key for request in requests for key in request.keys}
    return _trace(name, block_tokens, requests, len(distinct))


def _csv_lines(name: str, file: TextIO) -> Iterator[tuple[int, CsvLine]]:
    rows = csv.DictReader(file)
    columns = rows.fieldnames or []
    fields = CsvLine.model_fields
    for column in columns:
        if column not in fields:
            raise TraceError(f"{name}, line 1: unknown column {column!r}{nearest(column, fields)}")
    missing = [column for column in CSV_COLUMNS if column not in columns]
    if missing:
        raise TraceError(f"{name}, line 1: there is no column {missing[0]}: {', '.join(CSV_COLUMNS)} are needed")
    for row in rows:
        number = rows.line_num
        if None in row or None in row.values():
            raise TraceError(f"{name}, line {number}: must have {len(columns)} values, one a column")
        line = _checked(CsvLine, {column: value for column, value in row.items() if value}, name, number)
        if bool(line.prefix_id) != bool(line.prefix_tokens):
            raise TraceError(f"{name}, line {number}: prefix_id and prefix_tokens must be given together")
        if line.prefix_tokens > line.input_tokens:
            raise TraceError(
                f"{name}, line {number}: prefix_tokens must be at most input_tokens, which is {line.input_tokens}, "
                f"not {line.prefix_tokens}"
            )
        yield number, line


# -- both -----------------------------------------------------------------------------------------------

_AnyLine = TypeVar("_AnyLine", bound=_Line)


def _checked(model: type[_AnyLine], values: object, name: str, number: int) -> _AnyLine:
    try:
        return model.model_validate(values)
    except ValidationError as error:
        first = first_mistake(error)
    if not first.key:
        needed = [field for field, said in model.model_fields.items() if said.is_required()]
        raise TraceError(f"{name}, line {number}: must be an object with {', '.join(needed)}")
    show = (lambda _: "missing") if first.kind == "missing" else repr
    right = model.model_fields[first.field].description
    raise TraceError(f"{name}, line {number}: {must_be(first.field, right, first.value, show)}")


def _trace(name: str, block_tokens: int, requests: list[TracedRequest], distinct: int) -> Trace:
    if not requests:
        raise TraceError(f"{name}: there are no requests in it")
    return Trace(name, block_tokens, sorted(requests, key=lambda request: request.at), distinct)
