"""Rechecks: while the server is idle, the prompt of some restored session is computed anew, and next tokens compared.

The engine core remembers the prompt of a request that used restored and lossy KV: changed by a lossy codec, or computed
behind such KV. An API server asks for the prompt, and generates one token twice: behind the KV that is still in the
prefix cache, and under a fresh cache salt, so that vLLM computes the whole prompt.
"""

import asyncio
import math
import random
import secrets
import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from pydantic_core import from_json
from vllm import SamplingParams
from vllm.config import VllmConfig
from vllm.logger import init_logger
from vllm.v1.request import Request

from manthan.manager.pool import Asker
from manthan.vllm_hooks.compat import ask_cores
from manthan.vllm_hooks.queries import METHOD

logger = init_logger("vllm.manthan")

EVERY = 1000  # mean number of ended requests with a lossy restore for each one that is remembered
QUIET_S = 5.0  # least seconds since the end of the last request before a recheck
ASK_S = 5.0  # seconds after which an API server asks the engine cores again
TOP = 20  # number of next tokens, the likeliest of each computation, whose probabilities are compared
TINY = 1e-9  # least probability, against division by 0
LOSSY, EXACT = "lossy", "exact"


class Restore(NamedTuple):
    """Restore to recheck."""

    prompt: Sequence[int]
    asker: Asker  # the restored request's, by which lossy blocks may serve the recheck
    hashes: Sequence[bytes]  # of the prompt's first blocks, which must still be in the prefix cache
    least: int  # number of these blocks' tokens


class Rechecks:
    """Rechecks of an engine core. At most one restore waits for a recheck; a newer restore replaces it.

    A recheck's requests belong to no session, are not stored, and do not count in Manthan's metrics of requests. Their
    ids begin with a random secret of the engine, so that no client can send a request with such an id.
    """

    def __init__(self, vllm_config: VllmConfig, is_on: bool) -> None:
        model = vllm_config.model_config
        self._top = TOP if model.max_logprobs < 0 else min(TOP, model.max_logprobs)
        self._is_on = is_on and self._top > 0 and model.logprobs_mode.endswith("logprobs")
        self._prefix = f"manthan-{secrets.token_hex(16)}-"
        self._waiting: Restore | None = None
        self._taken: Restore | None = None
        self._secret = ""  # of the recheck of `_taken`, until a result, a reset or a newer recheck comes; else empty
        self._quiet_from = 0.0

    def __contains__(self, request_id: str) -> bool:
        """True if a recheck made the request with this id."""
        return request_id.startswith(self._prefix)

    def asker(self, request_id: str) -> Asker | None:
        """Return the asker of the request that a recheck makes behind cached KV; None for any other request."""
        if self._taken is None or not request_id.startswith(f"{self._secret}-{LOSSY}"):
            return None
        return self._taken.asker

    def ended(self) -> None:
        """Note the end of a client's request."""
        self._quiet_from = time.monotonic() + QUIET_S

    def offer(self, request: Request, asker: Asker, hashes: Sequence[bytes], least: int) -> None:
        """Remember one in `EVERY` ended requests with a lossy restore, by chance, if its KV depends on tokens only."""
        prompt = request.prompt_token_ids
        is_plain = request.prompt_embeds is None and not (request.lora_request or request.mm_features)
        if self._is_on and prompt and is_plain and not request.cache_salt and random.random() * EVERY < 1:
            self._waiting = Restore(prompt, asker, hashes, least)

    @property
    def due(self) -> Restore | None:
        """Restore to recheck now; None if none waits, or in the `QUIET_S` after the end of a client's request."""
        return self._waiting if time.monotonic() >= self._quiet_from else None

    def take(self, found: Restore) -> dict[str, Any]:
        """Begin the recheck of a restore. Return the task for an API server."""
        self._waiting, self._taken, self._secret = None, found, self._prefix + secrets.token_hex(8)
        return {"secret": self._secret, "prompt": list(found.prompt), "least": found.least, "top": self._top}

    def accept(self, secret: str) -> bool:
        """End the recheck with this secret. Return True if there was one: only then the result may count."""
        if not self._secret or secret != self._secret:
            return False
        self.forget()
        return True

    def forget(self) -> None:
        self._waiting, self._taken, self._secret = None, None, ""


# -- the API server -----------------------------------------------------------------------------------


class Rechecker:
    """Task of an API server that rechecks restores. A client's request cancels a running recheck."""

    def __init__(self) -> None:
        self._task: asyncio.Task[None] | None = None
        self._run: asyncio.Task[None] | None = None

    def start(self, state: Any) -> None:
        self._task = asyncio.get_running_loop().create_task(self._watch(state))

    def make_way(self) -> None:
        """Cancel a running recheck. vLLM then aborts its request."""
        if self._run is not None:
            self._run.cancel()

    async def _watch(self, state: Any) -> None:
        """Ask the engine cores of `state.engine_client` for restores, and recheck them, until an error."""
        while (client := getattr(state, "engine_client", None)) is not None:
            await asyncio.sleep(ASK_S)
            try:
                answers = await ask_cores(client, METHOD, "recheck", {"bound": None}) or []
                for rank, asked in enumerate(map(from_json, answers)):
                    if asked is not None:
                        self._run = asyncio.ensure_future(_recheck(client, asked, rank, len(answers)))
                        await asyncio.wait({self._run})
                        if not self._run.cancelled():
                            self._run.result()
            except Exception as error:
                logger.warning("Manthan: restores are not rechecked any more: %s: %s", type(error).__name__, error)
                return
            finally:
                self.make_way()
                self._run = None


async def _recheck(client: Any, asked: Mapping[str, Any], rank: int, ranks: int) -> None:
    """Compare the next tokens behind cached and behind computed KV, and tell the cores, unless KV was overwritten."""
    where = {"data_parallel_rank": rank} if ranks > 1 else {}
    cached, lossy = await _first(client, asked, LOSSY, where)
    if cached < asked["least"] or not lossy:
        return
    _, exact = await _first(client, asked, EXACT, where)
    if not exact:
        return
    found = {"divergence": divergence(exact, lossy), "is_same": max(exact, key=exact.get) == max(lossy, key=lossy.get)}
    await ask_cores(client, METHOD, "rechecked", {"bound": None, "secret": asked["secret"], **found})


async def _first(client: Any, asked: Mapping[str, Any], name: str, where: dict[str, int]) -> tuple[int, Any]:
    """Return the prompt's number of cached tokens, and the log-probability of each of the likeliest next tokens."""
    salt = {"cache_salt": secrets.token_hex(16)} if name == EXACT else {}
    params = SamplingParams(temperature=0.0, max_tokens=1, logprobs=asked["top"], detokenize=False)
    prompt = {"prompt_token_ids": asked["prompt"], **salt}
    async for output in client.generate(prompt, params, f"{asked['secret']}-{name}", **where):
        last = output
    of_token: dict[int, Any] = next(iter(last.outputs[0].logprobs or ()), {})  # empty if the request was aborted
    return last.num_cached_tokens or 0, {token: each.logprob for token, each in of_token.items()}


def divergence(exact: Mapping[int, float], lossy: Mapping[int, float]) -> float:
    """Return a lower bound of the Kullback-Leibler divergence D(exact || lossy), in nats.

    exact, lossy: log-probabilities of equally many likeliest tokens. All tokens that are not in `exact` count as one
    token. A token that is not in `lossy` gets the least probability in `lossy`, an upper bound of its probability.
    """
    least = min(lossy.values())
    pairs = [(math.exp(p), math.exp(lossy.get(token, least))) for token, p in exact.items()]
    pairs.append((max(0.0, 1 - sum(p for p, _ in pairs)), 1 - sum(q for _, q in pairs)))
    return max(0.0, sum(p * math.log(p / max(q, TINY)) for p, q in pairs if p > 0))
