"""`vllm serve` with its sessions in Redis: two servers at once, one of which is killed."""

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from redis import Redis
from redis_server import RedisServer, running
from warm_server import LOOKUP_WAIT, warm_server

from manthan.benchmarks.server import Reply, VllmServer

pytestmark = pytest.mark.slow
MODEL = str(Path(__file__).parents[1] / "data" / "tiny-llama")
FLAGS = [
    *("--block-size", "32", "--num-gpu-blocks-override", "131", "--max-model-len", "4096"),
    *("--enforce-eager", "--enable-prompt-tokens-details"),
]
YAML = "idle: {after_s: 0.3, min_tokens: 64}\n"
ANSWER = {"temperature": 0, "max_tokens": 4}
PASSWORD = "Do-not-print-me-9"


@pytest.fixture(scope="module")
def redis_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    yield from running(tmp_path_factory.mktemp("redis"), "--requirepass", PASSWORD)


def serve(redis_server: RedisServer, folder: Path, more: str = "") -> VllmServer:
    (folder / "manthan.yaml").write_text(YAML + more)
    flags = ["--manthan-config", str(folder / "manthan.yaml"), "--manthan-cold-store", "redis"]
    flags += ["--manthan-redis-url", redis_server.url, "--manthan-cold-bytes", "64MiB"]
    return warm_server(MODEL, [*FLAGS, *flags], folder / "log", {"MANTHAN_REDIS_PASSWORD": PASSWORD, LOOKUP_WAIT: "10"})


def ask(server: VllmServer, prompt: str, session: str) -> Reply:
    return server.chat([{"role": "user", "content": prompt}], session_id=session, **ANSWER)


def wait_until_cold(server: VllmServer) -> None:
    def is_so() -> bool:
        samples = [sample for sample in server.samples() if sample[0] == "vllm:manthan_sessions"]
        return bool(samples) and not any(value for _, labels, value in samples if labels["state"] != "cold")

    server.wait_for(is_so, 60, "have everybody go cold")


def restored(reply: Reply) -> bool:
    """At least 95% of the full blocks of a prompt were not computed."""
    return reply.cached_tokens >= 0.95 * ((reply.prompt_tokens - 1) // 32 * 32) > 0


@pytest.fixture(scope="module")
def pair(redis_server: RedisServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[VllmServer]]:
    """Two servers on one Redis, the second with RAM in front of it."""
    ram = "tiers: {host_bytes: 16MiB}\n"
    with (
        serve(redis_server, tmp_path_factory.mktemp("first")) as one,
        serve(redis_server, tmp_path_factory.mktemp("second"), ram) as two,
    ):
        one.wait_until_ready(600)
        two.wait_until_ready(600)
        yield [one, two]


@pytest.fixture(scope="module")
def killed(pair: list[VllmServer], table) -> list[str]:
    """The log of one of them, which had four sessions and is no more."""
    [server, _] = pair
    for seed in range(4):
        prompt, right = table(seed).question(1)
        assert ask(server, prompt, f"guest-{seed}").text == right
    wait_until_cold(server)
    command = Path(f"/proc/{server.pid}/cmdline").read_bytes() if Path("/proc").exists() else b""
    assert PASSWORD.encode() not in command
    server.kill()
    return server.new_log_lines()


def test_a_session_goes_on_at_another_server(pair: list[VllmServer], redis_server: RedisServer, table) -> None:
    """Each turn at the other one; what one has added the other restores."""
    raw = redis_server.admin(PASSWORD)
    t, shared = table(77), 0
    for turn in range(4):
        name = list(t.values)[turn]
        reply = ask(pair[turn % 2], t.text + "# and the next\n" * 16 * turn + f"assert {name} == ", "wanderer")
        assert reply.text == t.values[name]
        assert reply.cached_tokens >= 0.95 * shared
        shared = (reply.prompt_tokens - 12) // 32 * 32  # all but the question
        wait_until_cold(pair[turn % 2])
        pair[turn % 2].wait_for(lambda: blocks_of(raw, "wanderer") >= shared // 32, 60, "tell Redis")  # noqa: B023


def blocks_of(raw: Redis, session: str) -> int:
    """How many the books have of it."""
    return max(
        (int(raw.hget(name, "blocks") or 0) for name in raw.scan_iter(f"manthan:*:session:{session}")), default=0
    )


def test_no_secret_and_no_text_is_anywhere(
    pair: list[VllmServer], killed: list[str], redis_server: RedisServer, table
) -> None:
    assert restored(ask(pair[1], table(1).question(1)[0], "guest-1")), "it was the other server's"
    raw, raw_bytes = redis_server.admin(PASSWORD), redis_server.admin(PASSWORD, decode_responses=False)
    logs = "\n".join([*killed, *pair[1].new_log_lines()])
    metrics = httpx.get(f"{pair[1].url}/metrics").text
    keys = "\n".join(raw.scan_iter("*"))
    books = [raw.hgetall(key) for key in keys.split("\n") if raw.type(key) == "hash"]
    assert books
    assert not any("codec" in book for book in books), "each block names its own, which may be another"
    names = [name for seed in (0, 1, 2, 77) for name in table(seed).values]
    headers = str([raw_bytes.getrange(key, 0, 255) for key in raw_bytes.scan_iter("*:block:*")])
    for text in (logs, metrics, keys, str(books), headers):
        assert PASSWORD not in text
        assert not [name for name in names if f"{name} = " in text]
    assert "Manthan is on" in logs
    assert "session guest-1 restored" in logs
