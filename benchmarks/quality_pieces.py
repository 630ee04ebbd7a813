"""Texts for quality.py: pieces of a text, tasks in contexts of any length, and chats about documents."""

import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from manthan.benchmarks.quality_settings import QualityError
from manthan.benchmarks.quality_tasks import TASKS, Task

HELD_OUT = "held_tokens.u16"
"""File of a text in a model's folder: token ids, little-endian uint16."""
QUESTIONS = (
    "Summarize the text above in a few sentences.",
    "What is the text above about?",
    "Which names occur in the text above, and what does it say about them?",
    "Quote the most important passage of the text above, and say why it is important.",
)


@dataclass(frozen=True)
class Piece:
    """Prefix that is compressed and restored, and the rest that follows.

    Tokens of `rest` are scored from the second on, because the first is predicted at the prefix's last token. values:
    indices in `rest` of the answers' tokens. task: name of the task; "" for a piece of a text. context: requested
    tokens of prefix and rest together, for a task; otherwise 0.
    """

    prefix: list[int]
    rest: list[int]
    values: list[int]
    task: str = ""
    context: int = 0

    @property
    def tokens(self) -> list[int]:
        return self.prefix + self.rest


@dataclass(frozen=True)
class Chat:
    """Prompt with a document and a question. end: id of the token that ends an answer; None if there is none."""

    prompt: list[int]
    end: int | None

    def prefix(self, block_size: int) -> int:
        """Return the number of restorable prompt tokens: those of full blocks before the last token."""
        return (len(self.prompt) - 1) // block_size * block_size

    def answer(self, tokens: list[int]) -> list[int]:
        """Return the generated tokens up to the end token, which is included."""
        return tokens[: tokens.index(self.end) + 1] if self.end in tokens else tokens


class Text:
    """Tokens of a text to cut pieces from. A piece begins with the tokenizer's special tokens for a text's start."""

    def __init__(self, model: str, file: Path | None) -> None:
        from transformers import AutoTokenizer

        try:
            self._tokenizer = AutoTokenizer.from_pretrained(model)
        except (OSError, ValueError) as error:
            raise QualityError(f"{model} has no tokenizer that can be read: {str(error).splitlines()[0]}") from None
        self._name = str(file or Path(model, HELD_OUT))
        self._tokens = self._read(model, file)
        whole, plain = self._tokenizer("a").input_ids, self._ids("a")
        self._begin = whole[: whole.index(plain[0])]

    def pieces(self, prefix: int, continuation: int, most: int) -> list[Piece]:
        """Return at most `most` pieces, spread over the text, without overlap.

        Raises QualityError if the text is too short for a piece.
        """
        length = prefix + continuation - len(self._begin)
        count = len(self._tokens) // length
        if not count:
            raise QualityError(
                f"{self._name} has {len(self._tokens):,} tokens, fewer than --prefix {prefix} and --continuation "
                f"{continuation} take: use a longer text, or make these smaller."
            )
        found = []
        for number in np.linspace(0, count, min(most, count), endpoint=False).astype(int):
            tokens = self._begin + self._tokens[number * length : (number + 1) * length].tolist()
            found.append(Piece(tokens[:prefix], tokens[prefix:], []))
        return found

    def task(self, name: str, context: int, block_size: int, seed: int) -> Piece | None:
        """Return a piece with at most `context` tokens: the task's facts in a prefix of filler text, and the questions.

        Return None if the tokenizer cannot tell which tokens are answers, or the context or the text is too short.
        """
        if not self._tokenizer.is_fast:
            return None
        rng = random.Random(f"{name} {context} {seed}")
        task = TASKS[name](rng)
        rest, values = self._asked(task)
        lines = [self._ids(fact) for fact in task.facts]
        length = (context - len(rest)) // block_size * block_size
        filler = length - len(self._begin) - sum(map(len, lines))
        if not 0 <= filler <= len(self._tokens):
            return None
        start = rng.randrange(len(self._tokens) - filler + 1)
        text = self._tokens[start : start + filler]
        cuts = [0 if task.together else int(filler * (i + rng.random()) / len(lines)) for i in range(len(lines))]
        before, after = np.split(text, cuts)[:-1], text[cuts[-1] :]
        spread = [token for part, line in zip(before, lines, strict=True) for token in [*part.tolist(), *line]]
        return Piece(self._begin + spread + after.tolist(), rest, values, name, context)

    def chats(self, count: int, document: int) -> list[Chat]:
        """Return at most `count` chats about passages of `document` tokens, which do not overlap.

        The chats ask QUESTIONS in turn.
        """
        count = min(count, len(self._tokens) // document)
        starts = np.linspace(0, len(self._tokens) // document, count, endpoint=False).astype(int) * document
        return [
            self._chat(self._tokens[start : start + document].tolist(), QUESTIONS[number % len(QUESTIONS)])
            for number, start in enumerate(starts)
        ]

    def _chat(self, passage: list[int], question: str) -> Chat:
        content = f"{self._tokenizer.decode(passage)}\n\n{question}"
        end = self._tokenizer.eos_token_id
        if not self._tokenizer.chat_template:
            return Chat(self._begin + self._ids(f"{content}\n"), end)
        asked = self._tokenizer.apply_chat_template(
            [{"role": "user", "content": content}], add_generation_prompt=True, tokenize=False
        )
        return Chat(self._ids(asked), end)

    def _asked(self, task: Task) -> tuple[list[int], list[int]]:
        """Return tokens of the questions with their answers, and the indices of the answers' tokens."""
        text, spans = task.asked()
        encoded = self._tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        values = [
            index
            for index, (start, end) in enumerate(encoded.offset_mapping)
            if any(start < until and end > since for since, until in spans)
        ]
        return encoded.input_ids, values

    def _ids(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer(text, add_special_tokens=False, verbose=False).input_ids
        return ids

    def _read(self, model: str, file: Path | None) -> NDArray[Any]:
        held_out = Path(model, HELD_OUT)
        if file is None and held_out.is_file():
            return np.fromfile(held_out, "<u2").astype(np.int64)
        if file is None:
            raise QualityError(f"{model} has no text of its own to be measured on: give one, --text FILE (UTF-8).")
        try:
            return np.array(self._ids(file.read_text(encoding="utf-8")), np.int64)
        except UnicodeDecodeError:
            raise QualityError(f"--text {file} is not UTF-8: give it as plain text.") from None
        except OSError as error:
            raise QualityError(f"--text {file} cannot be read: {error.strerror}.") from None
