"""Read request traces: session, time and blocks of each request. docs/simulate.md has the format."""

import json
import lzma
from pathlib import Path
from typing import Annotated, NamedTuple

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from manthan.manager.config.resolve import first_mistake, must_be
from manthan.manager.session.hints import LONGEST_S, NO_HINTS, SECONDS, TOOL_NAME, Hints, PrintableName

MOONCAKE_BLOCK_TOKENS = 512
HASH_NBYTES = 8
"""Bytes of a block hash."""

_COUNT = "a whole number of tokens, {} or more"
_TIME = "a number of {}, 0 or more"


class TraceError(ValueError):
    """Unreadable trace. The message names the file, and the line and field if one is at fault."""


class TracedRequest(NamedTuple):
    """Request of a trace.

    at: arrival in seconds.
    session: session id that the simulated client sends; None for none.
    hashes: block hashes of full blocks, first the prompt's, then the answer's as far as the trace has them.
    prompt_blocks: count of the prompt's hashes.
    expect_return_s, tool: the client's hints, if any.
    stop: reason why the answer ended, such as tool_use.
    agent: session id of the trace's line, which only benchmarks/agents_trace.py uses; empty for none.
    """

    at: float
    session: str | None
    hashes: list[bytes]
    prompt_blocks: int
    input_tokens: int
    output_tokens: int
    expect_return_s: float | None = None
    tool: str = ""
    stop: str = ""
    agent: str = ""

    @property
    def hints(self) -> Hints:
        said = self.expect_return_s
        return NO_HINTS if said is None and not self.tool else Hints(expect_return_s=said, tool=self.tool)

    def asked_blocks(self, block_tokens: int) -> int:
        """Return the number of blocks of the prompt, a partial block included."""
        return -(-self.input_tokens // block_tokens)

    def usable_blocks(self, block_tokens: int) -> int:
        """Return the number of prompt blocks that a cache can serve. vLLM always computes the last prompt token."""
        return min(self.prompt_blocks, (self.input_tokens - 1) // block_tokens)

    def total_blocks(self, block_tokens: int) -> int:
        """Return the number of blocks at the answer's end. The KV of the answer's last token is never computed."""
        return -(-(self.input_tokens + max(0, self.output_tokens - 1)) // block_tokens)


class Trace(NamedTuple):
    """Requests in the order of arrival. distinct_blocks: count of different prompt blocks, partial ones included."""

    name: str
    block_tokens: int
    requests: list[TracedRequest]
    distinct_blocks: int


_Return = Annotated[float | None, Field(gt=0, le=LONGEST_S, allow_inf_nan=False, description=SECONDS)]
"""Hint: seconds until the session's next request."""


class MooncakeLine(BaseModel):
    """Line of the traces that the Mooncake project published with its FAST'25 paper. Fields with defaults are added.

    A field's description completes the sentence "FIELD must be …".
    """

    model_config = ConfigDict(frozen=True, extra="ignore")

    timestamp: float = Field(ge=0, allow_inf_nan=False, description=_TIME.format("milliseconds"))
    input_length: int = Field(ge=1, strict=True, description=_COUNT.format(1))
    output_length: int = Field(ge=0, strict=True, description=_COUNT.format(0))
    hash_ids: list[int] = Field(description="a list of whole numbers, one a block of the prompt")
    expect_return_s: _Return = None
    tool: PrintableName = Field(default="", description=TOOL_NAME)
    stop: str = Field(default="", description="a word, such as tool_use")
    session_id: str = Field(default="", description="a text")


def read_trace(path: str | Path, block_tokens: int = MOONCAKE_BLOCK_TOKENS) -> Trace:
    """Read a trace of JSON lines in Mooncake's format, also compressed as .xz. Raises TraceError."""
    path, prefixes, requests = Path(path), _Prefixes(Path(path).name), []
    name = path.name
    try:
        with (lzma.open if path.suffix == ".xz" else open)(path, "rt", encoding="utf-8") as file:
            lines = file.read().splitlines()
    except (OSError, lzma.LZMAError) as error:
        raise TraceError(f"{path}: cannot be read: {getattr(error, 'strerror', None) or error}") from None
    except UnicodeDecodeError:
        raise TraceError(f"{path}: is no text: a trace is JSON lines in UTF-8") from None
    for number, text in enumerate(lines, 1):
        if not text or text.isspace():
            continue
        line = _checked(text, name, number)
        blocks = -(-line.input_length // block_tokens)
        if len(line.hash_ids) != blocks:
            raise TraceError(
                f"{name}, line {number}: hash_ids must be {blocks} ids, one for each {block_tokens} tokens of the "
                f"input_length {line.input_length}, not {len(line.hash_ids)}"
            )
        full = line.input_length // block_tokens
        prompt = prefixes.of(line.hash_ids, number)[:full]
        said = line.expect_return_s, line.tool, line.stop, line.session_id
        at = line.timestamp / 1000
        requests.append(TracedRequest(at, None, prompt, full, line.input_length, line.output_length, *said))
    if not requests:
        raise TraceError(f"{name}: there are no requests in it")
    return Trace(name, block_tokens, sorted(requests, key=lambda request: request.at), len(prefixes))


def _checked(text: str, name: str, number: int) -> MooncakeLine:
    try:
        return MooncakeLine.model_validate(json.loads(text))
    except ValidationError as error:
        first = first_mistake(error)
    except ValueError:
        raise TraceError(f"{name}, line {number}: is not valid JSON") from None
    fields = MooncakeLine.model_fields
    if not first.key:
        needed = [field for field, said in fields.items() if said.is_required()]
        raise TraceError(f"{name}, line {number}: must be an object with {', '.join(needed)}")
    show = (lambda _: "missing") if first.kind == "missing" else repr
    raise TraceError(
        f"{name}, line {number}: {must_be(first.field, fields[first.field].description, first.value, show)}"
    )


class _Prefixes:
    """Block hashes by a trace's ids. An id stands for a block and all blocks before it, as a block hash does."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._known: dict[int, tuple[bytes, int | None, int]] = {}  # block hash, the id before, the line

    def __len__(self) -> int:
        return len(self._known)

    def of(self, ids: list[int], line: int) -> list[bytes]:
        hashes: list[bytes] = []
        before: int | None = None
        for one in ids:
            known = self._known.get(one)
            if known is None:
                known = self._known[one] = (len(self._known).to_bytes(HASH_NBYTES, "big"), before, line)
            elif known[1] != before:
                raise TraceError(
                    f"{self._name}, line {line}: hash_ids has {one} {_behind(before)}, but line {known[2]} has it "
                    f"{_behind(known[1])}: an id stands for all of the prompt up to its block"
                )
            hashes.append(known[0])
            before = one
        return hashes


def _behind(before: int | None) -> str:
    return "first" if before is None else f"after {before}"
