"""Check the words of docstrings, comments, messages and documents, as a step of `make lint`.

The check fails if too many docstrings of the package begin with a pronoun, if too many of their words are pronouns or
fillers, or if any of these texts has a banned word. Code in them is not prose.
"""

import ast
import io
import re
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

PACKAGE = ("benchmarks", "codec", "manager", "policies", "vllm_hooks")
OTHERS = (".ci", "configs", "deploy", "docs", "tests")
"""Folders of which only banned words are checked."""
COMMENTS = {".c": "//", ".cu": "//", ".js": "//", ".lua": "--", ".sh": "#", ".yaml": "#"}
"""Beginning of a comment, by the suffix of files of which only comments are checked."""
DOCUMENTS = ("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md")
"""Documents in the root; those in docs/ are checked too."""
RIGHT = {".cu": re.compile(r"lanes?")}
"""Banned words that are right in files with a suffix: `lane` is CUDA's for a thread's position in its warp."""
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
    r"|(?<!in[\s-])[Pp]laces?|[Ii]n\s+place\s+of|[Rr]ing|[Ll]anes?|[Bb]eside|[Cc]hains?|[Ll]anding|[Ii]ntake"
    r"|[Bb]lock keys?)\b"
)
NAMES = re.compile(r"`[^`]*`|\w+(?:, \w+)*:(?=\s)")
"""Text of a docstring or comment that is no prose: code, and the names of parameters and fields."""
CODE = re.compile(r"`[^`]*`")
"""Text of a message that is no prose."""
MARKUP = re.compile(
    r"^ *```.*?^ *```|(?<!`)(`+)(?!`)(?:(?!\n\n).)+?(?<!`)\1(?!`)|(?<=\])\([^)\n]*\)", re.MULTILINE | re.DOTALL
)
"""Text of a document that is no prose: code in fences or backticks, and targets of links."""


class Prose(NamedTuple):
    """A docstring, comment, message or document, from a line of a file on.

    code: pattern of text that is no prose. is_doc: True for a docstring of a module, class, function or attribute.
    """

    path: Path
    line: int
    text: str
    code: re.Pattern[str] = NAMES
    is_doc: bool = False


def docstrings(tree: ast.Module) -> Iterator[ast.Constant]:
    """Yield the strings that are statements: docstrings, also of attributes."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield node.value


def messages(tree: ast.Module) -> Iterator[ast.Constant]:
    """Yield the strings with a space, but for docstrings: texts of log calls, errors and what commands print."""
    docs = {id(each) for each in docstrings(tree)}
    for node in ast.walk(tree):
        is_text = isinstance(node, ast.Constant) and isinstance(node.value, str) and " " in node.value
        if is_text and id(node) not in docs:
            yield node


def prose_of(path: Path, has_messages: bool = True) -> Iterator[Prose]:
    """Yield the prose of a file: a document; docstrings, comments and messages of Python; comments of other files."""
    source = path.read_text(encoding="utf-8")
    if path.suffix == ".md":
        yield Prose(path, 1, source, MARKUP)
    elif path.suffix in COMMENTS:
        for number, line in enumerate(source.splitlines(), 1):
            yield Prose(path, number, line.partition(COMMENTS[path.suffix])[2])
    else:
        tree = ast.parse(source)
        for found in docstrings(tree):
            yield Prose(path, found.lineno, str(found.value), is_doc=True)
        for found in messages(tree) if has_messages else ():
            yield Prose(path, found.lineno, str(found.value), CODE)
        if any(BANNED.search(after) for after in re.findall(r"#(.*)", source)):  # tokens take long
            for token in tokenize.generate_tokens(io.StringIO(source).readline):
                if token.type == tokenize.COMMENT:
                    yield Prose(path, token.start[0], token.string)


def banned_in(each: Prose) -> Iterator[str]:
    """Yield a line for each banned word."""
    prose = each.code.sub(lambda code: re.sub(r"[^\n]", " ", code[0]), each.text)
    right = RIGHT.get(each.path.suffix)
    for match in BANNED.finditer(prose):
        if right is None or not right.fullmatch(match[0]):
            yield f"{each.path}:{each.line + prose.count(chr(10), 0, match.start())}: banned word: {match[0]}"


def faults_of(found: list[Prose]) -> list[str]:
    """Return a line for each fault; none for good prose."""
    faults = [line for each in found for line in banned_in(each)]
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


def files_in(*folders: str) -> Iterator[Path]:
    """Yield the files with prose in these folders, but for documents."""
    for folder in folders:
        yield from (path for path in sorted(Path(folder).rglob("*")) if path.suffix in {".py", *COMMENTS})


def main() -> None:
    """Check the package, the other folders, and the documents."""
    faults = faults_of([each for path in files_in(*PACKAGE) for each in prose_of(path)])
    others = (*files_in(*OTHERS), *map(Path, DOCUMENTS), *sorted(Path("docs").rglob("*.md")))
    faults += [line for path in others for each in prose_of(path, has_messages=False) for line in banned_in(each)]
    print(*faults, sep="\n", end="\n" if faults else "")
    sys.exit(bool(faults))


if __name__ == "__main__":
    main()
