"""The check of words in docstrings and comments: `.ci/words.py` passes here, and fails for bad prose."""

import runpy
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
SCRIPT = ROOT / ".ci" / "words.py"


def faults(tmp_path: Path, source: str) -> list[str]:
    file = tmp_path / "module.py"
    file.write_text(source)
    words = runpy.run_path(str(SCRIPT))
    return words["faults_of"](list(words["prose_of"](file)))


def test_prose_of_the_package_passes():
    run = subprocess.run([sys.executable, SCRIPT], cwd=ROOT, capture_output=True, text=True, check=False)
    assert (run.returncode, run.stdout) == (0, "")


def test_good_prose_has_no_faults(tmp_path):
    source = '"""Return the block at `place`.\n\nplace: number of the block.\n"""\n\nX = 1  # read in place\n'
    assert faults(tmp_path, source) == []


def test_banned_words_are_named_in_docstrings_attributes_and_comments(tmp_path):
    source = '"""Bytes of spilled blocks."""\n\nX = 1\n"""Lane of blocks."""\nY = "beside"  # bytes in place of X\n'
    found = [line.partition("banned word: ")[2] for line in faults(tmp_path, source)]
    assert found == ["spilled", "Lane", "in place of"]


def test_odd_beginnings_and_fillers_fail_above_their_bounds(tmp_path):
    odd = '"""Whether a block is saved."""\n'
    assert any("begin with a pronoun" in line for line in faults(tmp_path, odd))
    fillers = '"""Return those blocks that it has, or others."""\n'
    assert any("pronouns and fillers" in line for line in faults(tmp_path, fillers))
