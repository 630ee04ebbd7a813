"""Tasks for quality.py: facts in a context, and questions answered only by the facts.

Names and numbers are made up, so that only the context has the answers. Models generate nothing: the right answers are
in the text, and an answer's token is right if it is the likeliest. All questions of a task are scored; the earlier
ones, with their answers, show a model the form of the later answers. Needles and variable tracking are modelled on
"RULER" (Hsieh et al., 2024, arXiv 2404.06654), sums over several steps on GSM8K (Cobbe et al., 2021, arXiv 2110.14168).
"""

import keyword
import random
import re
from collections.abc import Callable, Sequence
from typing import NamedTuple

CONSONANTS, VOWELS = "bcdfghjklmnprstvz", "aeiou"
SYLLABLES = (a + b + c for a in CONSONANTS for b in VOWELS for c in CONSONANTS)
NAMES = [name for name in SYLLABLES if not keyword.iskeyword(name)]  # some are written as variables of Python
ANSWER = re.compile(r"\[(.*?)\]")
"""Answer in a written question; the brackets are not part of the text."""


class Task(NamedTuple):
    """Texts of a task.

    facts: spread over the context in this order, none of them split. questions: with their answers in brackets.
    together: True if all facts stand together at the beginning of the context instead.
    """

    facts: list[str]
    questions: list[str]
    together: bool = False

    def asked(self) -> tuple[str, list[tuple[int, int]]]:
        """Return text of all questions, and spans of the answers in the text."""
        text, spans = "", []
        for part, answer in zip(*_alternating("\n" + "".join(self.questions)), strict=True):
            text += part
            if answer:
                spans.append((len(text), len(text) + len(answer)))
            text += answer
        return text, spans


def _alternating(text: str) -> tuple[list[str], list[str]]:
    parts = ANSWER.split(text)
    return parts[::2], [*parts[1::2], ""]


def _numbers(rng: random.Random, count: int) -> dict[str, int]:
    """Return `count` names, each with a number of four digits."""
    return {name: rng.randrange(1000, 10000) for name in rng.sample(NAMES, count)}


def _shuffled(rng: random.Random, names: Sequence[str]) -> list[str]:
    return rng.sample(names, len(names))


def needle(rng: random.Random) -> Task:
    """Return a task of one fact."""
    ((name, number),) = _numbers(rng, 1).items()
    return Task(
        [f"\nThe number of {name} is {number}. Remember it.\n"], [f"What is the number of {name}? It is [{number}].\n"]
    )


def needles(rng: random.Random, count: int = 32) -> Task:
    """Many facts, and all are asked for."""
    lines = _numbers(rng, count)
    return Task(
        [f"\n{name} = {number}\n" for name, number in lines.items()],
        [f"assert {name} == [{lines[name]}]\n" for name in _shuffled(rng, list(lines))],
    )


def table(rng: random.Random, rows: int = 48) -> Task:
    """Lines of a table, one after another at the beginning of the context."""
    lines = _numbers(rng, rows)
    return Task(
        ["".join(f"{name} = {number}\n" for name, number in lines.items())],
        [f"assert {name} == [{lines[name]}]\n" for name in _shuffled(rng, list(lines))],
        together=True,
    )


def variables(rng: random.Random, chains: int = 8, length: int = 3) -> Task:
    """Rows of `length` variables: the first is a number, each other the one before; asked is each row's last."""
    numbers = _numbers(rng, chains)
    facts = [f"\n{name} = {number}\n" for name, number in numbers.items()]
    names = iter(rng.sample([name for name in NAMES if name not in numbers], chains * (length - 1)))
    ends = {name: name for name in numbers}
    for _ in range(length - 1):
        for first, end in ends.items():
            ends[first] = next(names)
            facts.append(f"\n{ends[first]} = {end}\n")
    last = {ends[name]: number for name, number in numbers.items()}
    return Task(facts, [f"assert {name} == [{last[name]}]\n" for name in _shuffled(rng, list(last))])


def sums(rng: random.Random, chains: int = 8) -> Task:
    """Again and again, coins of three persons, each with a few more than the last; asked are two sums and operands."""
    facts, questions = [], []
    names = iter(rng.sample([name.title() for name in NAMES], 3 * chains))
    for first, second, third in zip(names, names, names, strict=True):
        a, b, c = rng.randrange(10, 50), rng.randrange(2, 10), rng.randrange(2, 10)
        facts += [
            f"\n{first} has {a} coins.\n",
            f"\n{second} has {b} coins more than {first}.\n",
            f"\n{third} has {c} coins more than {second}.\n",
        ]
        questions.append(
            f"{first} has [{a}] coins. {second} has [{a}] + [{b}] = [{a + b}] coins. "
            f"{third} has [{a + b}] + [{c}] = [{a + b + c}] coins.\n"
        )
    return Task(facts, rng.sample(questions, chains))


def code(rng: random.Random, count: int = 12) -> Task:
    """Functions, and a question for each: the same function again, whose arguments and body are to be completed."""
    names = iter(rng.sample(NAMES, 3 * count))
    facts, questions = [], []
    for name, x, y in zip(names, names, names, strict=True):
        n, operator = rng.randrange(10, 100), rng.choice("+-*")
        facts.append(f"\ndef {name}({x}, {y}):\n    return {x} {operator} {n} * {y}\n")
        questions.append(f"def {name}([{x}, {y}]):\n    return [{x} {operator} {n} * {y}]\n\n")
    return Task(facts, rng.sample(questions, count))


TASKS: dict[str, Callable[[random.Random], Task]] = {
    make.__name__: make for make in (needle, needles, table, variables, sums, code)
}
