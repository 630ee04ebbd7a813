"""Check the words of docstrings and comments, as a step of `make lint`.

The check fails if too many docstrings begin with a pronoun, if too many of their words are pronouns or fillers, or if a
docstring or comment has a banned word. Names in backticks or before a colon are not prose.
"""

import ast
import io
import re
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

FOLDERS = ("benchmarks", "codec", "manager", "policies", "vllm_hooks")
MOST_ODD, MOST_FILLERS = 0.04, 0.05
"""Bounds: share of docstrings with an odd beginning, and share of fillers among their words."""
ODD = re.compile(
    r"\W*(?:what|whether|who|whose|whom|of|those|that|the same|how|where|which|so|as|its?|ones?|others"
    r"|nobody|everybody|somebody)(?![\w'])",
    re.IGNORECASE,
)
FILLER = re.compile(
    r"(?:its?|they|them|their|that|those|these|this|ones?|others?|who|whose|whom|what|which|nobody|somebody|so|such"
    r"|thereof|beside)"
)
BANNED = re.compile(
    r"\b(?:[Ss]pill\w*|[Ee]lsewhere|[Ww]ishes|[Ss]trangers?|[Oo]rphan\w*|[Ii]nquir\w+|[Ll]ives|[Aa]nchor\w*|[Cc]odes"
    r"|(?<!in[ -])[Pp]laces?|in place of|[Rr]ing|[Ll]anes?|[Bb]eside|[Cc]hains?|[Ll]anding|[Ii]ntake|[Bb]lock keys?)\b"
)
NAMES = re.compile(r"`[^`]*`|\w+(?:, \w+)*:(?=\s)")
"""Text that is no prose: code, and the names of parameters and fields."""


class Prose(NamedTuple):
    """Docstring or comment. is_doc: True for a docstring of a module, class, function or attribute."""

    path: Path
    line: int
    text: str
    is_doc: bool


def docstrings(tree: ast.Module) -> Iterator[ast.Constant]:
    """Yield the strings that are statements: docstrings, also of attributes."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield node.value


def prose_of(path: Path) -> Iterator[Prose]:
    """Yield the docstrings of a file, and the comments of a file with a banned word."""
    source = path.read_text(encoding="utf-8")
    for found in docstrings(ast.parse(source)):
        yield Prose(path, found.lineno, str(found.value), True)
    if any(BANNED.search(after) for after in re.findall(r"#(.*)", source)):  # tokens take long
        for token in tokenize.generate_tokens(io.StringIO(source).readline):
            if token.type == tokenize.COMMENT:
                yield Prose(path, token.start[0], token.string, False)


def faults_of(found: list[Prose]) -> list[str]:
    """Return a line for each fault; none for good prose."""
    faults = [
        f"{each.path}:{each.line}: banned word: {match[0]}"
        for each in found
        for match in BANNED.finditer(NAMES.sub(" ", each.text))
    ]
    docs = [each for each in found if each.is_doc]
    odd = [each for each in docs if ODD.match(each.text)]
    words = [word for each in docs for word in re.findall(r"[a-z']+", each.text.lower())]
    fillers = sum(FILLER.fullmatch(word) is not None for word in words) / max(1, len(words))
    if len(odd) > MOST_ODD * len(docs):
        faults += [f"{each.path}:{each.line}: odd beginning: {each.text.splitlines()[0]}" for each in odd]
        faults.append(f"{len(odd) / len(docs):.1%} of docstrings begin with a pronoun: at most {MOST_ODD:.0%} may")
    if fillers > MOST_FILLERS:
        faults.append(f"{fillers:.1%} of docstrings' words are pronouns and fillers: at most {MOST_FILLERS:.0%} may be")
    return faults


def main() -> None:
    """Check all folders of the package."""
    paths = [path for folder in FOLDERS for path in sorted(Path(folder).rglob("*.py"))]
    faults = faults_of([each for path in paths for each in prose_of(path)])
    print(*faults, sep="\n", end="\n" if faults else "")
    sys.exit(bool(faults))


if __name__ == "__main__":
    main()
