"""Prompts with checkable answers: a table of names and numbers, and a question for one name's number."""

import itertools
import random
from pathlib import Path

MODEL = Path("tests", "data", "tiny-llama")
"""Folder of a model, relative to the repository's root. Scripts run in the root."""
ENTRIES = 16
DIGITS = 4
QUESTION_TOKENS = 16


class Table:
    """Lines `name = 4821`, repeated up to about `tokens` tokens, and questions for a name's number.

    The prompts of all questions begin with the same lines.
    """

    def __init__(self, model: str, tokens: int, seed: str) -> None:
        from tokenizers import Tokenizer

        rng = random.Random(seed)
        self._tokenizer = Tokenizer.from_file(str(Path(model, "tokenizer.json")))
        names = [a + b + c for a in "bcdfghjklmnprstvz" for b in "aeiou" for c in "bcdfghjklmnprstvz"]
        self._values = {name: str(rng.randrange(1000, 10000)) for name in rng.sample(names, ENTRIES)}
        self.lines = self._entries(tokens - len(self._ids("")))

    def question(self, number: int) -> tuple[list[int], str]:
        """Return the token ids of a prompt that ends in a question, and the right answer."""
        line, right = self.lookup(number)
        return self._ids(self.lines + line), right

    def later(self, number: int, tokens: int) -> tuple[list[int], str]:
        """Return about `tokens` token ids that a later turn adds (lines and a question), and the right answer."""
        line, right = self.lookup(number)
        return self._ids("\n" + self._entries(tokens) + line)[len(self._ids("")) :], right

    def _entries(self, tokens: int) -> str:
        """Return the lines, repeated from the first on, of about `tokens` tokens less a question's."""
        lines, count, begin = "", 0, len(self._ids(""))
        for name, value in itertools.cycle(self._values.items()):  # a line has as many tokens alone as among lines
            if count >= tokens - QUESTION_TOKENS:
                break
            line = f"{name} = {value}\n"
            lines += line
            count += len(self._ids(line)) - begin
        return lines

    def lookup(self, number: int) -> tuple[str, str]:
        """Return the text of a question, which follows the table's lines, and the right answer."""
        name = list(self._values)[number % ENTRIES]
        return f"assert {name} == ", self._values[name]

    def text(self, tokens: list[int]) -> str:
        return str(self._tokenizer.decode(tokens))

    def _ids(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text).ids)
