"""The check of words: `.ci/words.py` passes here, and fails for bad prose."""

import importlib
import inspect
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

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


def test_banned_words_are_named_in_messages_but_not_in_names_and_code(tmp_path):
    source = """
logger.warning("%d blocks are spilled", n)
raise ValueError(f"an orphan of {n}: `lanes`")
parts = {"beside": n}
"""
    found = [line.partition("banned word: ")[2] for line in faults(tmp_path, source)]
    assert found == ["spilled", "orphan"]


BAD = {
    "README.md": "Blocks are\nspilled.\n",
    "CHANGELOG.md": "No `lane`, [link](lanes.md) or\n```text\nlanes\n```\nlanes\n",
    "CONTRIBUTING.md": "A block in place. `` `lane` `` and an anchor.\n",
    "SECURITY.md": "Good.\n",
    "docs/page.md": "Elsewhere: a block.\n",
    "docs/page.py": "X = 1  # orphans\n",
    "codec/kernel.cu": "int lane;  // a lane of the ring\n",
    "vllm_hooks/page.js": 'const a = "beside";  // beside\n',
    "manager/script.lua": "local lane = 1 -- lane\n",
    "policies/module.py": 'raise ValueError("no landing")\n',
    "tests/test_module.py": '"""A chain."""\nX = "not a chain"\n',
    "configs/default.yaml": "lane: 1  # a stranger\n",
}


def test_all_kinds_of_files_are_checked(tmp_path):
    for name, text in BAD.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    run = subprocess.run([sys.executable, SCRIPT], cwd=tmp_path, capture_output=True, text=True, check=False)
    found = {line.replace(" banned word: ", " ") for line in run.stdout.splitlines()}
    assert (run.returncode, found) == (
        1,
        {
            "README.md:2: spilled",
            "CHANGELOG.md:5: lanes",
            "CONTRIBUTING.md:1: anchor",
            "docs/page.md:1: Elsewhere",
            "docs/page.py:1: orphans",
            "codec/kernel.cu:1: ring",
            "vllm_hooks/page.js:1: beside",
            "manager/script.lua:1: lane",
            "policies/module.py:1: landing",
            "tests/test_module.py:1: chain",
            "configs/default.yaml:1: stranger",
        },
    )


def test_odd_beginnings_and_fillers_fail_above_their_bounds(tmp_path):
    odd = '"""Whether a block is saved."""\n'
    assert any("begin with a pronoun" in line for line in faults(tmp_path, odd))
    fillers = '"""Return those blocks that it has, or others."""\n'
    assert any("pronouns and fillers" in line for line in faults(tmp_path, fillers))


EXTENSIONS = [
    "manthan.codec.base:Codec",
    "manthan.codec.registry:Preset",
    "manthan.codec.registry:get_codec",
    "manthan.policies.base:EvictionPolicy",
    "manthan.policies.base:RankedPolicy",
    "manthan.manager.tiers.tier:Tier",
    "manthan.manager.tiers.tier:part_ends",
    "manthan.vllm_hooks.transfer_config:kv_transfer_config",
]


@pytest.mark.parametrize("extension", EXTENSIONS)
def test_what_other_packages_call_or_define_says_all_its_arguments(extension: str):
    """A method without a docstring has that of the class which it extends."""
    module, _, name = extension.partition(":")
    found = getattr(importlib.import_module(module), name)
    public = {name: found}
    if inspect.isclass(found):
        public = {name: of for name, of in vars(found).items() if name[0] != "_" and hasattr(of, "__doc__")}
    for name, of in public.items():
        function = inspect.unwrap(getattr(of, "__func__", of))
        if not inspect.isfunction(function) or not (said := inspect.getdoc(function)):
            continue
        told = said.partition("Args:")[2]
        wanted = set(inspect.signature(function).parameters) - {"self", "cls"}
        assert not (missing := {each for each in wanted if not re.search(rf"\b{each}\b", told)}), (name, missing)
        is_plain = inspect.signature(function).return_annotation in (None, "None", inspect.Signature.empty)
        assert is_plain or re.match(r"(Return|Yield|Encode|Decode|Store|True if|Make)", said), name
