"""The guard on a real server: a codec that is not faithful on its model is replaced, while sessions come and go."""

from pathlib import Path

import pytest
from api_client import ApiClient
from biased_model import with_biased_keys
from vllm_engine import Table
from warm_server import warm_server

from manthan.benchmarks.server import codec_used

FLAGS = ["--served-model-name", "tiny", "--block-size", "32", "--max-model-len", "2048", "--enforce-eager"]
FLAGS += ["--manthan-policy", "lru", "--manthan-idle-after", "0.3", "--manthan-codec", "k3v3"]
UNTIMED = ["--max-num-batched-tokens", "96", "--max-num-seqs", "8"]
"""In steps as short as these nobody learns how fast a model computes, and how fast a tiny one does decides nothing."""


def ask(client: ApiClient, prompt: str, name: str) -> str:
    return str(client.complete(name, prompt, model="tiny", temperature=0)["choices"][0]["text"])


@pytest.mark.slow
def test_with_biased_keys_a_finer_codec_is_used_and_what_returns_is_right(tmp_path: Path) -> None:
    log = tmp_path / "log"
    with warm_server(with_biased_keys(tmp_path, bias=100.0), [*FLAGS, *UNTIMED], log) as server:
        server.wait_until_ready(300)
        client = ApiClient(server)
        for seed in range(40):  # as long as the verdict takes
            ask(client, Table(seed).question(seed % 5)[0], f"chat {seed}")
            client.wait_for_state(f"chat {seed}", "cold")
            store = client.get("/state")["store"]
            if store["verdict"] == "unfaithful":
                break
        assert (store["verdict"], store["codec"]) == ("unfaithful", "wht-4x")
        prompt, right = Table(1).question(3)
        assert ask(client, prompt, "chat 1") == right
        assert "codec k3v3 is not faithful on this model, and wht-4x is used instead" in log.read_text()
        assert codec_used(log) == "codec k3v3 is not faithful, wht-4x is used"
        assert server.metrics()["vllm:manthan_codec_fallback"] == 1
        assert len([name for name, _, _ in server.samples() if name == "vllm:manthan_codec_noise"]) == 3
