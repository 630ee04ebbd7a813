"""A hook of mkdocs: what the documents link to outside of docs/ becomes a part of the site, below repository/.

So a link works in a checkout and on the site. Code is shown on a page of its own. The navigation is the list in
docs/README.md, and so is llms.txt, which says to language models what there is to read (llmstxt.org).
"""

import posixpath
import re
from pathlib import Path
from urllib.parse import urljoin

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

REPO = Path(__file__).parents[1]
LIST = "docs/README.md"
LINK = re.compile(r"(\]\()([^)#:\s]+)(#[^)]*)?(\))")
OUTSIDE = "repository/"
ROOT = ("README.md", "CONTRIBUTING.md", "CODE_OF_CONDUCT.md", "CHANGELOG.md", "SECURITY.md")
LANGUAGES = {".py": "python", ".yaml": "yaml", ".json": "json", ".service": "ini"}
SHOWN = """---
title: {path}
search: {{exclude: true}}
---

```{language}
{text}
```
"""


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """A section for each list of docs/README.md, by the line above it."""
    config.nav = ["README.md"]
    sections = re.findall(r"^(.+):\n\n((?:[- ] .*\n)+)", (REPO / LIST).read_text(encoding="utf-8"), re.M)
    for heading, listed in sections:
        links = re.findall(r"^- \[[^]]*\]\(([^)]+)\)", listed, re.M)
        config.nav.append({heading: [place(_target(LIST, link)) for link in links]})
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add what is linked to, and what that links to, and llms.txt."""
    todo = [*ROOT, *(f"docs/{file.src_uri}" for file in files.documentation_pages())]
    seen = set(todo)
    while todo:
        path = todo.pop()
        if place(path).startswith(OUTSIDE):
            files.append(_file(path, config))
        if path.endswith(".md"):
            found = {_target(path, link[2]) for link in LINK.finditer((REPO / path).read_text(encoding="utf-8"))}
            todo += [target for target in sorted(found - seen) if (REPO / target).is_file()]
            seen |= found
    files.append(File.generated(config, "llms.txt", content=_llms(files, config)))
    return files


def on_page_markdown(markdown: str, page: Page, **_: object) -> str:
    """Links between files of the repository as links between files of the site."""
    here = page.file.src_uri
    path = here.removeprefix(OUTSIDE) if here.startswith(OUTSIDE) else f"docs/{here}"
    if Path(path).suffixes[:1] != [".md"]:
        return markdown

    def moved(link: re.Match[str]) -> str:
        there = posixpath.relpath(place(_target(path, link[2])), posixpath.dirname(here) or ".")
        return f"{link[1]}{there}{link[3] or ''}{link[4]}"

    return LINK.sub(moved, markdown)


def place(path: str) -> str:
    """Where a file of the repository is on the site: documents in docs/ and their pictures where they are."""
    is_code = not path.endswith((".md", ".png"))
    if path.startswith("docs/") and not is_code:
        return path.removeprefix("docs/")
    return OUTSIDE + path + (".md" if is_code else "")


def _llms(files: Files, config: MkDocsConfig) -> str:
    """Return the list of documents with the site's name and description, and links to the site's pages."""
    _, _, listed = (REPO / LIST).read_text(encoding="utf-8").partition("\n\n")

    def moved(link: re.Match[str]) -> str:
        file = files.get_file_from_path(place(_target(LIST, link[2])))
        assert file, link[0]
        return f"{link[1]}{urljoin(config.site_url or '', file.url)}{link[4]}"

    sections = re.sub(r"^(.+):(?=\n\n- )", r"## \1", LINK.sub(moved, listed), flags=re.M)
    return f"# {config.site_name}\n\n> {config.site_description}\n\n{sections}"


def _file(path: str, config: MkDocsConfig) -> File:
    language = LANGUAGES.get(Path(path).suffix, "text")
    if path.endswith((".md", ".png")):
        return File.generated(config, place(path), abs_src_path=str(REPO / path))
    text = (REPO / path).read_text(encoding="utf-8")
    return File.generated(config, place(path), content=SHOWN.format(path=path, language=language, text=text))


def _target(path: str, link: str) -> str:
    return posixpath.normpath(posixpath.join(posixpath.dirname(path), link))
