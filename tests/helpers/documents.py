"""The command lines in the documents: where they stand, and what a reader would type.

A command is

- every line between ```sh fences;
- a line that begins with `$ ` between ```console fences, which show output too;
- a line of an indented block, and code within a paragraph, that begins with a program's name and has an argument.

It is marked as needing a GPU by a comment (`# needs a GPU`), by `<!-- needs a GPU -->` behind code within a paragraph,
or by standing under a heading that ends with "on a GPU".
"""

import re
import shlex
from collections.abc import Iterator
from itertools import dropwhile
from pathlib import Path
from typing import NamedTuple

REPO = Path(__file__).parents[2]
PROGRAMS = (
    *("aiperf", "apt", "cd", "curl", "docker", "for", "git", "head", "helm", "kubectl", "make", "manthan"),
    *("openssl", "pip", "printf", "promtool", "pytest", "python", "redis-cli", "redis-server", "systemctl", "ulimit"),
    *("vllm", "xz"),
)
ON_A_GPU = re.compile(r"\bon a gpu$", re.IGNORECASE)
NEEDS_A_GPU = "needs a GPU"
LISTINGS = ("sh", "console", "indented")


class Command(NamedTuple):
    """text: without prompt and comment, quoted lines joined. document: relative to the repository."""

    document: str
    line: int
    text: str
    needs_gpu: bool
    inline: bool = False

    @property
    def words(self) -> list[str]:
        return self.text.split()

    def __str__(self) -> str:
        return f"{self.document}:{self.line}: {self.text}"


class Paragraph(NamedTuple):
    """Lines of one kind that follow each other. kind: the fence's language, "indented", or "text"."""

    kind: str
    line: int
    lines: list[str]
    on_a_gpu: bool


def documents() -> list[Path]:
    """Every document that a reader may copy a command from."""
    ours = (path for path in REPO.glob("*.md") if path.name != "CHANGELOG.md")  # which names what is gone
    return [*sorted(ours), *sorted((REPO / "docs").rglob("*.md"))]


def rows(text: str, heading: str) -> list[list[str]]:
    """The cells of the table whose first column has this heading."""
    _, _, rest = text.partition(f"| {heading} |")
    lines = rest.partition("|\n|---")[2].partition("\n\n")[0].splitlines()[1:]
    assert lines, heading
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines]


def commands(path: Path) -> list[Command]:
    """The commands of one document, in order; those within a paragraph too."""
    found: list[Command] = []
    name = path.relative_to(REPO).as_posix()
    for paragraph in paragraphs(path.read_text(encoding="utf-8")):
        if paragraph.kind == "text":
            found.extend(_inline(name, paragraph))
        elif paragraph.kind in LISTINGS:
            found.extend(_listed(name, paragraph))
    return found


def paragraphs(text: str) -> Iterator[Paragraph]:
    """A document in pieces; headings are left out."""
    headings: dict[int, str] = {}
    piece: Paragraph | None = None
    fence = ""
    for number, line in enumerate(text.splitlines(), 1):
        opened = re.fullmatch(r" {0,3}```(\S*).*", line)
        if opened or (not fence and not line.strip()) or (not fence and re.match(r"#+ ", line)):
            if piece and piece.lines:
                yield piece
            piece = None
            if opened:
                fence = "" if fence else (opened[1] or "no language")
            elif line.startswith("#"):
                depth = len(line) - len(line.lstrip("#"))
                headings = {d: title for d, title in headings.items() if d < depth} | {depth: line}
            continue
        if piece is None:
            kind = fence or ("indented" if line.startswith("    ") else "text")
            piece = Paragraph(kind, number, [], any(map(ON_A_GPU.search, headings.values())))
        piece.lines.append(line)
    if piece and piece.lines:
        yield piece


def _listed(name: str, paragraph: Paragraph) -> Iterator[Command]:
    line, text = paragraph.line, ""
    for number, one in enumerate(paragraph.lines, paragraph.line):
        if not text:
            line = number
            if paragraph.kind != "sh" and not _is_command(one, paragraph.kind == "indented"):
                continue
        text = f"{text}\n{one}" if text else one.strip().removeprefix("$ ")
        if _is_whole(text):
            command, comment = _split_comment(text)
            if command:
                yield Command(name, line, command, paragraph.on_a_gpu or NEEDS_A_GPU in comment)
            text = ""
    if text:
        raise AssertionError(f"{name}:{line}: a quote or a backslash without its end")


def _inline(name: str, paragraph: Paragraph) -> Iterator[Command]:
    text = "\n".join(paragraph.lines)
    for code in re.finditer(r"`([^`]+)`(<!-- needs a GPU -->)?", text):
        command = " ".join(code[1].split())
        if "…" not in command and _is_command(command, True) and len(_words(command)) > 1:
            line = paragraph.line + text.count("\n", 0, code.start())
            yield Command(name, line, command, paragraph.on_a_gpu or bool(code[2]), inline=True)


def _is_command(line: str, bare: bool) -> bool:
    """True if a line begins with a prompt, or, if it may be `bare`, with a program."""
    return line.strip().startswith("$ ") or (bare and program(line) in PROGRAMS)


def _words(text: str) -> list[str]:
    """Return a command's words behind the variables that it sets."""
    return list(dropwhile(re.compile(r"[A-Z_]+=").match, text.split()))


def program(text: str) -> str:
    """Return a command's program, `manthan` for `.venv/bin/manthan`; empty if it only sets a variable."""
    return next(iter(_words(text)), "").removeprefix(".venv/bin/")


def _is_whole(text: str) -> bool:
    """True if no quote is open, and no backslash is the last character."""
    try:
        shlex.split(text, comments=True)
    except ValueError:
        return False
    return True


def _split_comment(text: str) -> tuple[str, str]:
    for found in re.finditer(r"(^|\s)#\s", text):
        if _is_whole(text[: found.start()]):
            return text[: found.start()].strip(), text[found.end() :]
    return text.strip(), ""
