"""A model's tokenizer and chat template, as transformers has them."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

from manthan.manager.config.model import ConfigError
from manthan.manager.doctor.template import Message

BEGINNING = datetime(2026, 1, 5, 9, 30)
"""When a conversation begins, for templates that say the time."""


@dataclass(frozen=True)
class LocalRenderer:
    """tokenizer: of transformers. template: Jinja. tools: what the model may call, as the template gets it.

    Raises ConfigError for a template that cannot be rendered.
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
    """model: a folder or a name. template: a Jinja file that is used instead of the model's own; empty for that.

    Raises ConfigError for a model without a tokenizer or a template, or a file that cannot be read.
    """
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
