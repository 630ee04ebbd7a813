"""The documents as a site: mkdocs.yml and its hook."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

REPO = Path(__file__).parents[1]
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As `make site` builds it. A link to nothing, or to no heading, is a warning, and a warning ends it."""
    folder = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", folder],
        cwd=REPO,
        env=os.environ | {"NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return folder


def test_every_document_is_a_page(site: Path) -> None:
    for path in [*REPO.glob("*.md"), *(REPO / "docs").glob("*.md")]:
        name = "" if path.name == "README.md" else f"{path.stem}/"
        folder = site / "repository" if path.parent == REPO else site
        assert (folder / name / "index.html").is_file(), path


def test_a_language_model_is_told_of_every_document(site: Path) -> None:
    """llms.txt by llmstxt.org: a title, a sentence, and sections of links, each with what is there."""
    text = (site / "llms.txt").read_text(encoding="utf-8")
    assert re.match(r"# Manthan\n\n> [^\n]+\.\n\n", text)
    sections = re.findall(r"^## .+\n\n((?:- .+\n)+)", text, re.MULTILINE)
    told = re.findall(r"^- \[[^]]+\]\(([^)]+)\): .+\.$", "".join(sections), re.MULTILINE)
    assert len(told) == text.count("\n- ")
    assert all((site / link / "index.html").is_file() for link in re.findall(r"\]\(([^)]+)\)", text))
    pages = {f"{path.stem}/" for path in (REPO / "docs").glob("*.md")} - {"README/"}
    assert pages <= set(told)


def test_nothing_is_loaded_from_elsewhere(site: Path) -> None:
    """But for links that a reader follows."""
    pages = {page: page.read_text(encoding="utf-8") for page in site.rglob("index.html")}
    assert len([text for text in pages.values() if re.search("<script[^>]* src=|<link[^>]* href=", text)]) > 20
    for page, text in pages.items():
        assert not re.findall(r'<(?:script|img|iframe)[^>]*src="https?:|<link[^>]*href="https?:', text), page
