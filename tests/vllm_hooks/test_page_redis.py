"""The live page while sessions go cold by their clock, and while the store behind them is gone."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from browser import Watched, chromium
from redis_server import RedisServer
from warm_server import warm_server

from manthan.benchmarks.server import VllmServer

pytestmark = pytest.mark.slow
expect: Any = pytest.importorskip("playwright.sync_api").expect
MODEL = str(Path(__file__).parents[1] / "data" / "tiny-llama")
YAML = """
{{idle_after_s: 2, min_tokens: 64,
 cold_store: {{kind: redis, max_bytes: 64MiB}}, redis: {{url: "{url}?socket_timeout=0.5"}}}}
"""


@pytest.fixture(scope="module")
def redis_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    with RedisServer(tmp_path_factory.mktemp("redis")) as server:
        yield server


@pytest.fixture(scope="module")
def server(redis_server: RedisServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[VllmServer]:
    folder = tmp_path_factory.mktemp("watched")
    (folder / "manthan.yaml").write_text(YAML.format(url=redis_server.url))
    flags = ["--block-size", "32", "--num-gpu-blocks-override", "131", "--max-model-len", "4096", "--enforce-eager"]
    with warm_server(MODEL, [*flags, "--manthan-config", str(folder / "manthan.yaml")], folder / "log", {}) as server:
        server.wait_until_ready(600)
        yield server
        server.kill()


@pytest.fixture
def tab(server: VllmServer) -> Iterator[Any]:
    with chromium() as browser:
        tab = browser.new_page(viewport={"width": 1280, "height": 900}, reduced_motion="reduce")
        watched = Watched(tab)
        tab.goto(f"{server.url}/manthan")
        yield tab
        assert watched.complaints == []


def ask(server: VllmServer, table: Any, session: str) -> None:
    prompt, right = table.question(2)
    reply = server.chat([{"role": "user", "content": prompt}], session_id=session, temperature=0, max_tokens=4)
    assert reply.text == right


def state_of(tab: Any, session: str) -> Any:
    named = tab.get_by_role("row").filter(has=tab.get_by_role("button", name=session, exact=True))
    return named.locator("td.state")


def test_who_is_idle_for_long_enough_goes_cold_before_one_s_eyes(server: VllmServer, table: Any, tab: Any) -> None:
    ask(server, table(1), "by-the-clock")
    expect(state_of(tab, "by-the-clock")).to_contain_text("idle")
    expect(state_of(tab, "by-the-clock")).to_contain_text("cold")
    expect(tab.locator("#cold-holders")).to_contain_text("by-the-clock")


def test_a_store_that_is_gone_and_back(server: VllmServer, redis_server: RedisServer, table: Any, tab: Any) -> None:
    store, story = tab.locator("[data-tile=store] .figure"), tab.locator("body")
    expect(store).to_have_text("up")
    redis_server.kill()
    ask(server, table(2), "meanwhile")  # somebody has to ask the store to find that out
    expect(store).to_have_text("▲ DOWN")
    expect(tab).to_have_title(re.compile("store down"))
    expect(story).to_contain_text("The cold store is down.")
    redis_server.start()
    ask(server, table(3), "afterwards")
    expect(store).to_have_text("up")
    expect(story).to_contain_text("The cold store is up again.")
