"""The example of docs/codec.md, built and installed as its reader would, down to a server that uses it."""

import re
from pathlib import Path

import pytest
from documents import REPO
from example_package import EXAMPLES, install, path_with, run

from manthan.benchmarks.server import VllmServer

EXAMPLE = EXAMPLES / "manthan-codec-int8"
TEXT = (REPO / "docs" / "codec.md").read_text(encoding="utf-8")
MODEL = REPO / "tests" / "data" / "tiny-llama"
THERE_AND_BACK = """
import numpy as np
from manthan.codec import BlockFormat, BlockShape, Dtype, NonFiniteError

x = np.random.default_rng(0).standard_normal((96, 64)).astype(np.float32)
x[5] = 0
shape = BlockShape(layers=3, heads=2, tokens=16, head_dim=64, dtype=Dtype.FLOAT32)
form, keys = BlockFormat("int8", shape, bytes(16)), x.reshape(shape.numbers)
for exact in (0, 4):
    block = form.encode(keys, 2 * keys, key=b"key", first_token=32, exact=exact)
    assert len(block) == form.max_nbytes(exact)
    for found, right in zip(form.decode(block, key=b"key"), (keys, 2 * keys), strict=True):
        error = np.abs(found - right)
        assert (error <= 0.51 / 127 * np.abs(right).max(axis=3, keepdims=True) * 1.02).all(), error.max()
        assert (error[:, :, :exact] == 0).all()
x[7, 3] = np.inf
try:
    form.encode(keys, keys, key=b"key", first_token=0, exact=0)
except NonFiniteError as error:
    print(error)
"""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return install(EXAMPLE, tmp_path_factory.mktemp("example"))


def test_the_document_shows_its_entry_point() -> None:
    (entry_point,) = re.findall(r"^```toml\n(.*?)^```", TEXT, re.MULTILINE | re.DOTALL)
    assert entry_point in (EXAMPLE / "pyproject.toml").read_text(encoding="utf-8")


def test_blocks_go_there_and_back(site: Path, tmp_path: Path) -> None:
    done = run(site, tmp_path, THERE_AND_BACK)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "vector 7 holds a NaN or an infinity.\n"


@pytest.mark.slow
def test_a_server_uses_it(site: Path, tmp_path: Path) -> None:
    flags = ["--manthan-codec", "int8", "--manthan-idle-after", "0.5", "--block-size", "32", "--max-model-len", "2048"]
    more = ["--num-gpu-blocks-override", "131", "--enforce-eager", "--enable-prompt-tokens-details"]
    env = {"PYTHONPATH": path_with(site)}
    with VllmServer(str(MODEL), [*flags, *more], tmp_path / "log", env) as server:
        server.wait_until_ready(600)
        messages = [{"role": "user", "content": "def f(x):\n    return x\n" * 40}]
        first = server.chat(messages, max_tokens=8, temperature=0, session_id="alice")
        server.wait_for(lambda: "session alice went cold" in server.log.read_text(), 120, "say that alice went cold")
        again = server.chat(messages, max_tokens=8, temperature=0, session_id="alice")
        assert (first.cached_tokens, again.text) == (0, first.text)
        assert again.cached_tokens == (again.prompt_tokens - 1) // 32 * 32
        assert "codec int8 (1.9" in server.log.read_text()
