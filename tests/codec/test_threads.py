"""Threads: ours within a call, and the callers'."""

import multiprocessing
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from manthan.codec import get_codec


def test_the_number_of_threads_changes_nothing(make):
    codec = make("lloyd3", 64)
    x = np.random.default_rng(0).standard_normal((10_001, 64)).astype(np.float32)
    results = []
    for codec.threads in (1, 2, 3, 7):
        codes = codec.encode(x)
        results.append((codes, codec.decode(codes, len(x))))
    for codes, decoded in results[1:]:
        assert np.array_equal(codes, results[0][0])
        assert np.array_equal(decoded, results[0][1])


def test_small_calls_and_one_thread_stay_with_the_caller(make, monkeypatch):
    def no_pool():
        raise AssertionError("a thread was asked for")

    monkeypatch.setattr("manthan.codec.cpu.numpy_codec._pool", no_pool)
    codec = make("lloyd3", 64)
    codec.threads = 8
    codec.encode(np.ones((256, 64), np.float32))
    with pytest.raises(AssertionError, match="a thread was asked for"):
        codec.encode(np.ones((20_000, 64), np.float32))
    codec.threads = 1
    codec.encode(np.ones((20_000, 64), np.float32))


def test_several_callers_at_once(make):
    codec = make("lloyd3", 64)
    codec.threads = 2
    xs = [np.random.default_rng(i).standard_normal((5000, 64)).astype(np.float32) for i in range(4)]
    expected = [codec.encode(x) for x in xs]
    together = threading.Barrier(4)

    def work(i):
        together.wait()
        return all(
            np.array_equal(codec.encode(xs[i]), expected[i]) and codec.decode(expected[i], 5000).shape == (5000, 64)
            for _ in range(10)
        )

    with ThreadPoolExecutor(4) as callers:
        assert list(callers.map(work, range(4))) == [True] * 4


def _encode_in_child(codec, x, queue):
    queue.put(codec.encode(x).sum())


@pytest.mark.skipif("fork" not in multiprocessing.get_all_start_methods(), reason="needs fork")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_has_threads_again(make):
    codec = make("lloyd3", 64)
    codec.threads = 2
    x = np.ones((5000, 64), np.float32)
    expected = codec.encode(x).sum()
    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    child = context.Process(target=_encode_in_child, args=(codec, x, queue), daemon=True)
    child.start()
    assert queue.get(timeout=60) == expected
    child.join()


def test_warm_up_leaves_nothing_to_compile():
    numba_backend = pytest.importorskip("manthan.codec.cpu.numba_kernels")
    codec = get_codec("lloyd3", 64)
    codec.warm_up()
    kernels = (numba_backend.encode, numba_backend.decode)
    before = [len(kernel.signatures) for kernel in kernels]
    for x in (np.ones((9, 64), np.float32), np.zeros((9, 64), np.uint16)):
        codec.decode(codec.encode(x), 9, dtype=x.dtype)
    assert [len(kernel.signatures) for kernel in kernels] == before


def test_importing_the_codec_imports_nothing_heavy():
    code = (
        "import sys, manthan.codec, manthan.codec.wire; manthan.codec.get_codec('lloyd3', 64);"
        "print({'torch', 'vllm', 'numba', 'manthan.manager', 'manthan.policies'} & sys.modules.keys())"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert out.strip() == "set()"


def test_without_numba_the_codec_is_plain(monkeypatch):
    monkeypatch.setattr("manthan.codec.cpu.numpy_codec._numba_kernels", lambda: None)
    codec = get_codec("lloyd3", 64)
    codec.warm_up()
    assert not codec.fused
    assert codec.decode(codec.encode(np.ones((3, 64), np.float32)), 3).shape == (3, 64)
