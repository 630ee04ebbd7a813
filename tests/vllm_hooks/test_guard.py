"""The guard on real servers: no session decides for good, whatever comes first, and nobody waits for a verdict."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from api_client import ApiClient
from biased_model import with_biased_keys
from vllm_engine import MODEL, Table
from warm_server import warm_server

from manthan.benchmarks.server import codec_used

FLAGS = ["--served-model-name", "tiny", "--block-size", "32", "--max-model-len", "2048", "--enforce-eager"]
UNTIMED = ["--max-num-batched-tokens", "96", "--max-num-seqs", "8"]
"""In steps as short as these nobody learns how fast a model computes, and how fast a tiny one does decides nothing."""


class Client(ApiClient):
    def ask(self, prompt: str, name: str) -> str:
        return str(self.complete(name, prompt, model="tiny", temperature=0)["choices"][0]["text"])

    def ratio(self, name: str) -> float:
        """How many times smaller a cold session is than it was."""
        session = self.wait_for_state(name, "cold")
        pool = self.get("/state")["pool"]
        return float(session["cold_blocks"] * pool["bytes"] / pool["blocks"] / session["cold_bytes"])

    def judged(self, verdict: str) -> str:
        """The codec in use, once chats have come and gone for as long as that verdict takes."""
        for seed in range(40):
            prompt, _ = Table(seed).question(seed % 5)
            self.ask(prompt, f"chat {seed}")
            self.wait_for_state(f"chat {seed}", "cold")
            if self.get("/state")["store"]["verdict"] == verdict:
                break
        store = self.get("/state")["store"]
        assert store["verdict"] == verdict
        return str(store["codec"])


@contextmanager
def serving(folder: Path, model: str, codec: str, *more: str) -> Iterator[Client]:
    flags = [*FLAGS, *more, "--manthan-policy", "lru", "--manthan-idle-after", "0.3", "--manthan-codec", codec]
    with warm_server(model, flags, folder / "log") as server:
        server.wait_until_ready(300)
        yield Client(server)


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    with serving(tmp_path_factory.mktemp("guarded"), MODEL, "wht-5x", *UNTIMED) as found:
        yield found


@pytest.mark.slow
def test_a_first_prompt_of_one_word_does_not_make_everything_exact(client: Client) -> None:
    client.ask("word " * 300, "words")
    assert client.ratio("words") > 3
    assert client.get("/state")["store"]["codec"] == "wht-4x"
    assert codec_used(client.server.log) == "no verdict on codec wht-5x, wht-4x is used"
    prompt, right = Table(100).question(0)
    assert client.ask(prompt, "early") == right
    early = client.ratio("early")
    assert 3 < early < 4.5
    assert client.judged("faithful") == "wht-5x"
    assert codec_used(client.server.log) == "codec wht-5x is faithful, wht-5x is used"
    client.ask(Table(101).question(0)[0], "late")
    assert client.ratio("late") > early
    question, right = Table(100).question(1)
    assert client.ask(question, "early") == right  # in the codec of before
    assert client.get("/sessions/early")["life"][-2]["kind"] == "restored"


@pytest.mark.slow
def test_the_verdict_is_among_the_metrics(client: Client) -> None:
    noise = [value for name, _, value in client.server.samples() if name == "vllm:manthan_codec_noise"]
    assert len(noise) == 3
    assert client.server.metrics()["vllm:manthan_codec_fallback"] == 0


def test_with_biased_keys_a_finer_codec_is_used_and_what_returns_is_right(tmp_path: Path) -> None:
    with serving(tmp_path, with_biased_keys(tmp_path, bias=100.0), "k3v3", *UNTIMED) as client:
        assert client.judged("unfaithful") == "wht-4x"
        prompt, right = Table(1).question(3)
        assert client.ask(prompt, "chat 1") == right
        log = (tmp_path / "log").read_text()
        assert "codec k3v3 is not faithful on this model, and wht-4x is used instead" in log
        assert codec_used(tmp_path / "log") == "codec k3v3 is not faithful, wht-4x is used"
        assert client.server.metrics()["vllm:manthan_codec_fallback"] == 1


@pytest.mark.slow
def test_where_no_codec_is_faithful_all_tokens_are_kept_exact(tmp_path: Path) -> None:
    """Values with a bias, for which there is no remedy yet."""
    with serving(tmp_path, with_biased_keys(tmp_path, bias=0.0, of_values=200.0), "k3v3", *UNTIMED) as client:
        client.judged("unfaithful")
        client.ask(Table(200).question(0)[0], "late")
        assert client.ratio("late") < 1.1
        assert "and all tokens are kept exact; choose another" in (tmp_path / "log").read_text()
        assert codec_used(tmp_path / "log") == "codec k3v3 is not faithful, exact is used"
