"""Check of a chat template: the next turn's prompt must repeat the previous turn's tokens.

A turn is a prompt with the model's answer, and a session has the KV of the turn's tokens. The next prompt is rendered
anew from messages. Its tokens find KV up to the first different token. All later tokens are computed again.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

from manthan.manager.config.model import ConfigError
from manthan.manager.doctor.checks import Finding, Grade

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
    """First difference between a turn of `tokens` tokens and the next prompt, which repeats the first `kept` of them.

    of: kind of answer, such as "thinking". before: text of the last tokens before the difference. was, comes: text from
    the difference on, in the turn and in the next prompt. Without a difference, `kept` equals `tokens`.
    """

    of: str
    kept: int
    tokens: int
    before: str
    was: str
    comes: str

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

    thought: Thinking that the model generates before the answer; put between <think> tags if the template does not
    render it after the prompt. Empty for none.
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
    sends back in a separate field, if the template shows this field; and an answer whose thinking the client sends back
    between <think> tags in the content, unless the template shows the field without such tags.
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
