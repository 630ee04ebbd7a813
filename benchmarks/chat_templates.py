"""Share of a conversation's KV that the next prompt can use again, for several ways to treat earlier messages.

    python benchmarks/chat_templates.py MODEL

The chat templates behave like common ones; the tokenizer is MODEL's. No engine runs. Tokens at the beginning of a
prompt that equal those of the prompt and answer before it are counted, in full blocks.
"""

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from statistics import mean
from typing import Annotated, Any, NamedTuple

import typer
from rich.table import Table

from manthan.manager.commands import make_console
from manthan.manager.doctor import Message, Renderer, common

BETWEEN_MINUTES = 7
"""Thinking time of a user."""
PROSE = (
    "The station keeps its records in a long table and each of them names a harbour a ship a day and what it carried "
    "so that whoever asks later which of them came first or had the heaviest load can be told without another look"
)

# -- templates ----------------------------------------------------------------------------------------------

TURN = "<|im_start|>{{ m.role }}\n{{ CONTENT }}<|im_end|>\n"
ASK = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
THINKS = "{% if m.reasoning_content %}<think>\n{{ m.reasoning_content }}\n</think>\n\n{% endif %}"


def chatml(content: str = "{{ m.content }}", before: str = "", ask: str = ASK) -> str:
    """Return a ChatML template. content: Jinja for a message's text. before, ask: Jinja around all messages."""
    return before + "{% for m in messages %}" + TURN.replace("{{ CONTENT }}", content) + "{% endfor %}" + ask


KEEPS = chatml(THINKS + "{{ m.content }}")
SINCE_LAST_QUESTION = (
    "{% set at = namespace(last=0) %}{% for m in messages %}{% if m.role == 'user' %}{% set at.last = loop.index0 %}"
    "{% endif %}{% endfor %}"
)
DROPS_BEFORE_QUESTION = chatml(
    "{% if loop.index0 > at.last %}" + THINKS + "{% endif %}{{ m.content }}", before=SINCE_LAST_QUESTION
)
DROPS_ALL = chatml("{{ m.content.split('</think>')[-1] }}", ask=ASK.replace("{% endif %}", "<think>\n{% endif %}"))
CHANNELS = (
    "{% for m in messages %}{% if m.role == 'assistant' %}{% if loop.last and m.reasoning_content %}"
    "<|start|>assistant<|channel|>analysis<|message|>{{ m.reasoning_content }}<|end|>{% endif %}"
    "<|start|>assistant<|channel|>final<|message|>{{ m.content }}<|end|>{% else %}"
    "<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant{% endif %}"
)
TIME = "<|im_start|>system\nIt is {{ strftime_now('%H:%M on %d %B %Y') }}.<|im_end|>\n"
DATE = TIME.replace("%H:%M on ", "")
TIME_AT_END = chatml(ask="{% if add_generation_prompt %}" + TIME + "<|im_start|>assistant\n{% endif %}")
TOOLS = (
    "{% if tools %}<|im_start|>system\n{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}<|im_end|>\n{% endif %}"
)
TRIMS = chatml("{{ m.content | trim }}")
ONE_SPACE = chatml("{{ m.content.split() | join(' ') }}")
CALLS = chatml(
    "{{ m.content }}{% for call in m.tool_calls or [] %}<tool_call>\n{{ call.function | tojson }}\n</tool_call>"
    "{% endfor %}"
)


# -- the model's text ---------------------------------------------------------------------------------------


def plain(message: Message) -> str:
    return str(message["content"])


def tagged(message: Message) -> str:
    return f"<think>\n{message['reasoning_content']}\n</think>\n\n{message['content']}"


def tagged_behind_prompt(message: Message) -> str:
    """The prompt has opened the thinking already."""
    return tagged(message).removeprefix("<think>\n")


def in_channels(message: Message) -> str:
    thought, answer = message["reasoning_content"], message["content"]
    return f"<|channel|>analysis<|message|>{thought}<|end|><|start|>assistant<|channel|>final<|message|>{answer}"


def loosely(message: Message) -> str:
    """Return the text with white space as models write it: two spaces after a full stop, two newlines at the end."""
    return f"{message['content'].replace('. ', '.  ')}\n\n"


def called(message: Message) -> str:
    """Return the text with its tool call, if any, in compact JSON, unlike the template's."""
    if not message.get("tool_calls"):
        return plain(message)
    call = message["tool_calls"][0]["function"]
    text = json.dumps({"name": call["name"], "arguments": call["arguments"]}, separators=(",", ":"))
    return f"{message['content']}<tool_call>\n{text}\n</tool_call>"


def called_alike(message: Message) -> str:
    """Return the text with its tool call, if any, exactly as the template writes it."""
    if not message.get("tool_calls"):
        return plain(message)
    text = json.dumps(message["tool_calls"][0]["function"], ensure_ascii=False)
    return f"{message['content']}<tool_call>\n{text}\n</tool_call>"


# -- behaviours ----------------------------------------------------------------------------------------------


def as_it_was(message: Message) -> Message:
    return message


def without_thinking(message: Message) -> Message:
    """Return the message of a client that does not know `reasoning_content`."""
    return {key: value for key, value in message.items() if key != "reasoning_content"}


def within(message: Message) -> Message:
    """Return the message with its thinking in the content, between <think> tags."""
    return without_thinking(message) | {"content": tagged(message)} if "reasoning_content" in message else message


def with_white_space(message: Message) -> Message:
    return message | {"content": loosely(message)} if message["role"] == "assistant" else message


@dataclass(frozen=True)
class Behaviour:
    """Treatment of messages by a chat template, a model and a client.

    Args:
        name: what the template or the client does.
        template: the chat template.
        says: returns the text that the model generates for a message.
        sends: returns a message as the client sends it in later prompts.
        tools: number of tools that each question after the first adds to the two at the beginning.
        has_calls: True if each answer follows a tool call.
    """

    name: str
    template: str
    says: Callable[[Message], str] = tagged
    sends: Callable[[Message], Message] = as_it_was
    tools: int = 0
    has_calls: bool = False


BEHAVIOURS = (
    Behaviour("keeps all, thinking too", KEEPS),
    Behaviour("keeps all; the client sends no thinking back", KEEPS, sends=without_thinking),
    Behaviour("drops thinking before the last question (Qwen3)", DROPS_BEFORE_QUESTION),
    Behaviour("drops all before </think> (DeepSeek-R1)", DROPS_ALL, tagged_behind_prompt, within),
    Behaviour("drops the analysis channel of earlier turns (gpt-oss)", CHANNELS, in_channels),
    Behaviour("the date at the front, the same day", chatml(before=DATE), plain),
    Behaviour("the time at the front", chatml(before=TIME), plain),
    Behaviour("the time at the end", TIME_AT_END, plain),
    Behaviour("tools at the front, always the same", chatml(before=TOOLS), plain),
    Behaviour("tools at the front, one more each turn", chatml(before=TOOLS), plain, tools=1),
    Behaviour("trims answers", TRIMS, loosely, with_white_space),
    Behaviour("makes all white space one space", ONE_SPACE, loosely, with_white_space),
    Behaviour("tool calls, written by the template as by the model", CALLS, called_alike, has_calls=True),
    Behaviour("tool calls, written by the template with other spaces", CALLS, called, has_calls=True),
)


class Turn(NamedTuple):
    """Prompt for the model's next message: tool call or answer.

    tokens: number of tokens of the prompt and message before, in full blocks. kept: number of these that begin this
    prompt, in full blocks. prompt: number of this prompt's tokens.
    """

    tokens: int
    kept: int
    prompt: int


def turns(tokenizer: Any, behaviour: Behaviour, lengths: "Lengths", count: int, block: int) -> Iterator[Turn]:
    """Yield the prompts of all of the model's messages but the first."""
    history: list[Message] = []
    before: list[int] = []
    for number, messages in enumerate(conversation(lengths, count, behaviour.has_calls)):
        tools = tuple(tool(at) for at in range(2 + behaviour.tools * number))
        renderer = Renderer(tokenizer, behaviour.template, tools)
        for message in messages:
            if message["role"] == "assistant":
                prompt = renderer.render(history, asks=True, minutes=BETWEEN_MINUTES * number)
                if before:
                    kept = common(before, prompt)
                    yield Turn(len(before) // block * block, kept // block * block, len(prompt))
                before = [*prompt, *renderer.encode(behaviour.says(message))]
            history.append(behaviour.sends(message))


class Lengths(NamedTuple):
    """Number of words in each part of a conversation."""

    system: int = 200
    question: int = 40
    thought: int = 200
    answer: int = 120


def conversation(lengths: Lengths, count: int, has_calls: bool) -> Iterator[list[Message]]:
    """Yield the messages from a question to its answer, with a tool call between if `has_calls`.

    The first list begins with a system prompt.
    """
    first = [{"role": "system", "content": text(lengths.system, 0)}]
    for number in range(1, count + 1):
        messages: list[Message] = [{"role": "user", "content": text(lengths.question, number)}]
        if has_calls:
            function = {"name": "look_up", "arguments": {"ship": f"ship {number}", "day": number}}
            call = {"type": "function", "function": function}
            messages.append({"role": "assistant", "content": "", "tool_calls": [call]})
            messages.append({"role": "tool", "content": text(lengths.question, 200 + number)})
        answer, thought = text(lengths.answer, 5 * number), text(lengths.thought, 3 * number)
        messages.append({"role": "assistant", "content": answer, "reasoning_content": thought})
        yield [*first, *messages]
        first = []


def text(words: int, seed: int) -> str:
    """Return sentences, of which the last has the seed's number."""
    some = PROSE.split()
    chosen = [some[(seed * 7 + at * (seed % 5 + 1)) % len(some)] for at in range(words)]
    return " ".join(f"{word}." if at % 12 == 11 else word for at, word in enumerate(chosen)) + f" {seed}."


def tool(number: int) -> Message:
    parameters = {"type": "object", "properties": {"ship": {"type": "string"}, "day": {"type": "integer"}}}
    described = {"name": f"look_up_{number}", "description": text(20, number), "parameters": parameters}
    return {"type": "function", "function": described}


class Result(NamedTuple):
    """Means over all prompts of a conversation but the first, except `last`.

    kept: share of the KV before, in full blocks, that the prompt can use. last: the same of the last prompt alone.
    computed: number of prompt tokens that are not kept.
    """

    name: str
    kept: float
    last: float
    computed: float


def measure(tokenizer: Any, behaviour: Behaviour, lengths: Lengths, count: int, block: int) -> Result:
    found = list(turns(tokenizer, behaviour, lengths, count, block))
    shares = [turn.kept / turn.tokens if turn.tokens else 0.0 for turn in found]
    return Result(behaviour.name, mean(shares), shares[-1], mean(turn.prompt - turn.kept for turn in found))


def main(
    model: Annotated[str, typer.Argument(help="Model of the tokenizer: a folder, or a name.")],
    count: Annotated[int, typer.Option("--turns", min=2)] = 8,
    block_size: Annotated[int, typer.Option(min=1, help="As vLLM's --block-size.")] = 16,
    as_json: Annotated[bool, typer.Option("--json")] = False,
) -> None:
    """Print the share of a conversation's KV that the next prompt can use again, as a table or JSON."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    results = [measure(tokenizer, each, Lengths(), count, block_size) for each in BEHAVIOURS]
    if as_json:
        typer.echo(json.dumps([each._asdict() for each in results], indent=2))
        return
    _print(results)


def _print(results: Sequence[Result]) -> None:
    table = Table("behaviour", "used again", "by the last prompt", "tokens computed a prompt", box=None)
    for each in results:
        table.add_row(each.name, f"{each.kept:.1%}", f"{each.last:.1%}", f"{each.computed:.0f}")
    make_console().print(table)


if __name__ == "__main__":
    typer.run(main)
