"""A server that runs: what it says of itself, and how it renders chats."""

import json
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from typing import Any

from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from manthan.manager.config.model import ConfigError, ManthanConfig
from manthan.manager.doctor.finding import Finding, Mark
from manthan.manager.doctor.template import Message
from manthan.vllm_hooks.doctor.hashing import check_hashing
from manthan.vllm_hooks.doctor.versions import check_vllm

SERVER, STORE = "server", "cold store"
UP = "vllm:manthan_cold_store_up"
TIMEOUT_S = 20.0


class Server:
    """A vLLM server at a URL. api_key: empty for none. Raises ConfigError for what it does not answer."""

    def __init__(self, url: str, api_key: str = "") -> None:
        self.url = url.rstrip("/").removesuffix("/v1")
        self._headers = {"Content-Type": "application/json"} | (
            {"Authorization": f"Bearer {api_key}"} if api_key else {}
        )
        self._open = urllib.request.build_opener(urllib.request.ProxyHandler({})).open
        self._model = ""

    def version(self) -> str:
        return str(self._json("/version")["version"])

    def metrics(self) -> dict[str, list[Sample]]:
        """What is on /metrics, by name; those that nobody has counted yet are there without samples."""
        return {family.name: family.samples for family in text_string_to_metric_families(self._ask("/metrics"))}

    def render(self, messages: Sequence[Message], *, asks: bool, minutes: int = 0) -> list[int]:
        """A server's clock is its own: `minutes` are of no effect."""
        return self._tokenize(messages=list(messages), add_generation_prompt=asks)

    def encode(self, text: str) -> list[int]:
        return self._tokenize(prompt=text, add_special_tokens=False)

    def decode(self, tokens: Sequence[int]) -> str:
        return str(self._json("/detokenize", model=self._name(), tokens=list(tokens))["prompt"])

    def _tokenize(self, **asked: Any) -> list[int]:
        return list(map(int, self._json("/tokenize", model=self._name(), **asked)["tokens"]))

    def _name(self) -> str:
        """What it calls its model."""
        self._model = self._model or str(self._json("/v1/models")["data"][0]["id"])
        return self._model

    def _json(self, path: str, **body: Any) -> Any:
        text = self._ask(path, body)
        try:
            return json.loads(text)
        except ValueError:
            raise ConfigError(f"what answers at {self.url} is no vLLM server: correct --url.") from None

    def _ask(self, path: str, body: dict[str, Any] | None = None) -> str:
        data = json.dumps(body).encode() if body else None
        try:
            request = urllib.request.Request(self.url + path, data, self._headers)
            with self._open(request, timeout=TIMEOUT_S) as answer:
                return str(answer.read().decode("utf-8", "replace"))
        except urllib.error.HTTPError as error:
            if error.code in (401, 403):
                raise ConfigError(f"the server at {self.url} asks for another key: set --api-key.") from None
            raise ConfigError(f"the server at {self.url} answers {path} with {error.code} {error.reason}.") from None
        except (OSError, ValueError) as error:
            why = getattr(error, "reason", error)
            raise ConfigError(f"no server answers at {self.url} ({why}): correct --url, or start it.") from None


def check_server(server: Server, config: ManthanConfig) -> Iterator[Finding]:
    """Whether Manthan is on there, and how it goes."""
    try:
        yield check_vllm(server.version())._replace(check="server's vLLM")
        metrics = server.metrics()
    except ConfigError as error:
        yield Finding(SERVER, Mark.WRONG, str(error))
        return
    if UP not in metrics:
        yield Finding(
            SERVER,
            Mark.WRONG,
            f"{server.url} runs without Manthan: start it with a --manthan-… flag, such as --manthan-policy lru.",
        )
        return
    sessions = sum(sample.value for sample in metrics.get("vllm:manthan_sessions", ()))
    yield Finding(SERVER, Mark.OK, f"{server.url} runs with Manthan, and has {sessions:.0f} sessions.")
    yield _store(server, metrics)
    for sample in metrics.get("vllm:cache_config", metrics.get("vllm:cache_config_info", ())):
        yield check_hashing(config.cold_store, sample.labels["prefix_caching_hash_algo"])


def _store(server: Server, metrics: dict[str, list[Sample]]) -> Finding:
    """How its cold store does."""
    if any(sample.value == 0 for sample in metrics[UP]):
        return Finding(STORE, Mark.WRONG, f"that of {server.url} does not answer: see the server's log for why.")
    failures = [sample for sample in metrics.get("vllm:manthan_failures", ()) if _counts(sample)]
    if failures:
        count, causes = sum(one.value for one in failures), ", ".join(sorted({one.labels["cause"] for one in failures}))
        return Finding(
            STORE,
            Mark.WARNING,
            f"{count:.0f} blocks could not be stored or read ({causes}): see docs/troubleshooting.md.",
        )
    return Finding(STORE, Mark.OK, "no block failed since the server was started.")


def _counts(sample: Sample) -> bool:
    """Whether it is a counter, not the time since when it counts, and above 0."""
    return sample.name.endswith("_total") and sample.value > 0
