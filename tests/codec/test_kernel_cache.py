"""Compiled kernels on disk: found again by whoever compiles the same, and never anything else served."""

import logging
import multiprocessing as mp
import os
from pathlib import Path

import kernel_folder
import numba
import pytest

from manthan.codec.cpu import numba_kernels
from manthan.codec.gpu.kernel_cache import KernelCache, cache_folder

NAMED = ("13.0", "--gpu-architecture=sm_90", "source")


def refuse() -> bytes:
    raise AssertionError("it is compiled again")


def test_another_process_finds_what_one_has_compiled(tmp_path: Path) -> None:
    assert KernelCache(tmp_path / "kernels").compiled(NAMED, lambda: b"made") == b"made"
    assert KernelCache(tmp_path / "kernels").compiled(NAMED, refuse) == b"made"


@pytest.mark.parametrize("changed", range(3), ids=["compiler", "options", "source"])
def test_what_it_depends_on_is_in_its_name(tmp_path: Path, changed: int) -> None:
    cache = KernelCache(tmp_path)
    cache.compiled(NAMED, lambda: b"made")
    other = tuple(name + " " * (i == changed) for i, name in enumerate(NAMED))
    assert cache.compiled(other, lambda: b"other") == b"other"
    assert cache.compiled(NAMED, refuse) == b"made"


@pytest.mark.parametrize("damage", ["empty", "short", "bit", "head"])
def test_damaged_files_are_compiled_again_and_mended(tmp_path: Path, damage: str) -> None:
    KernelCache(tmp_path).compiled(NAMED, lambda: b"made" * 100)
    [file] = tmp_path.iterdir()
    content = bytearray(file.read_bytes())
    if damage == "bit":
        content[-7] ^= 4
    elif damage == "head":
        content[3] ^= 4
    file.write_bytes(content[: {"empty": 0, "short": -1}.get(damage)])
    assert KernelCache(tmp_path).compiled(NAMED, lambda: b"made" * 100) == b"made" * 100
    assert KernelCache(tmp_path).compiled(NAMED, refuse) == b"made" * 100


def test_a_folder_that_cannot_be_written_to_is_one_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("in its place")
    cache = KernelCache(tmp_path / "file" / "kernels")
    with caplog.at_level(logging.WARNING, "vllm.manthan"):
        for name in "ab":
            assert cache.compiled((name,), name.encode) == name.encode()
            assert cache.compiled((name,), refuse) == name.encode()
    [record] = caplog.records
    assert str(tmp_path / "file") in record.getMessage()
    assert "Not a directory" in record.getMessage()


def test_what_cannot_be_compiled_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(AssertionError):
        KernelCache(tmp_path).compiled(NAMED, refuse)
    assert list(tmp_path.iterdir()) == []


def test_processes_may_compile_the_same_at_once(tmp_path: Path) -> None:
    spawn = mp.get_context("spawn")
    begin, answers = spawn.Barrier(2), spawn.Queue()
    both = [spawn.Process(target=kernel_folder.ask, args=(tmp_path, begin, answers)) for _ in range(2)]
    for process in both:
        process.start()
    assert [answers.get(timeout=60) for _ in both] == [True, True]
    for process in both:
        process.join()
    assert len(list(tmp_path.iterdir())) == 40
    assert not [name for name in os.listdir(tmp_path) if name.startswith(".")]


def test_it_lies_where_vllm_has_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/x")
    monkeypatch.delenv("VLLM_CACHE_ROOT", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert cache_folder() == Path("/home/x/.cache/vllm/manthan/kernels")
    monkeypatch.setenv("XDG_CACHE_HOME", "/var/cache")
    assert cache_folder() == Path("/var/cache/vllm/manthan/kernels")
    monkeypatch.setenv("VLLM_CACHE_ROOT", "~/models")
    assert cache_folder() == Path("/home/x/models/manthan/kernels")


def test_the_cpu_s_kernels_are_not_kept_in_the_package() -> None:
    """What numba writes there, `pip uninstall` would leave, and `import manthan` would find."""
    assert Path(numba_kernels.encode._cache.cache_path).parent == cache_folder().parent / "numba"
    assert not numba.config.CACHE_DIR, "other packages' kernels are kept as before"
