"""Live page of a real `vllm serve`, in a real Chromium."""

import contextlib
import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import quote

import httpx
import pytest
from crowd import Crowd, serving

from manthan.benchmarks.server import VllmServer
from manthan.manager.listing import SessionInfo
from manthan.vllm_hooks.http import api
from manthan.vllm_hooks.http.page import FILES

expect: Any = pytest.importorskip("playwright.sync_api").expect
MODEL = str(Path(__file__).parents[1] / "data" / "tiny-llama")
KEY = "sesame"
AUTHORIZED = {"Authorization": f"Bearer {KEY}"}
WIDE, PHONE = {"width": 1280, "height": 900}, {"width": 360, "height": 740}
CHROMIUM_FLAGS = [
    *("--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking"),
    *("--disable-component-update", "--disable-sync"),
]
PATIENCE_MS = 60_000
"""A busy machine is slow."""
READABLE = 4.5
"""Least contrast of small text, by WCAG 2."""
CONTRAST = """
() => {
  const parse = (color) => color.match(/[0-9.]+/g).map((part) => part * (color.startsWith("color(") ? 255 : 1));
  const light = (color) => color.slice(0, 3).map((part) => part / 255)
    .map((part) => (part <= 0.04045 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4))
    .reduce((sum, part, n) => sum + part * [0.2126, 0.7152, 0.0722][n], 0);
  const ground = (element) => parse(getComputedStyle(element).backgroundColor);
  const behind = (element) => (ground(element).length === 3 || element === document.body)
    ? ground(element) : behind(element.parentElement);
  return [...document.querySelectorAll("body *")].filter((element) => element.checkVisibility()
    && [...element.childNodes].some((node) => node.nodeType === Node.TEXT_NODE && node.textContent.trim()))
    .map((element) => {
      const [a, b] = [light(parse(getComputedStyle(element).color)), light(behind(element))];
      return [element.textContent.trim().slice(0, 40), (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05)];
    });
}
"""


@pytest.fixture(scope="module")
def server(steered_server: VllmServer) -> Iterator[VllmServer]:
    """Server without sessions of other tests. None is left for others."""
    release_all(steered_server)
    yield steered_server
    release_all(steered_server)


def release_all(server: VllmServer) -> None:
    with httpx.Client(base_url=f"{server.url}/manthan", headers=AUTHORIZED) as client:
        for session in client.get("sessions", params={"limit": 500}).json()["sessions"]:
            client.post(f"sessions/{quote(session['id'], safe='')}/release").raise_for_status()


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """Chromium with a new, empty profile. The tests fail without one, because make installs it."""
    from playwright.sync_api import sync_playwright

    if (path := shutil.which("chromium")) is None:
        pytest.fail("chromium is not installed")
    expect.set_options(timeout=PATIENCE_MS)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=CHROMIUM_FLAGS)
        yield browser
        browser.close()


@pytest.fixture
def tabs(browser, server) -> Iterator[Callable[..., Any]]:
    """Open the page in tabs, with the key unless it is None.

    In all of them, nothing leaves the host, and no script fails or is refused.
    """
    contexts, asked, complaints = [], list[str](), list[str]()

    def hear(message: Any) -> None:
        if message.type == "error" and "Failed to load resource" not in message.text:  # that is an answer of 4xx
            complaints.append(message.text)

    def open_tab(key: str | None = KEY, viewport: dict[str, int] = WIDE, **options: Any) -> Any:
        context = browser.new_context(viewport=viewport, reduced_motion="reduce", **options)
        contexts.append(context)
        tab = context.new_page()
        tab.set_default_timeout(PATIENCE_MS)
        tab.on("request", lambda request: asked.append(request.url))
        tab.on("pageerror", lambda error: complaints.append(str(error)))
        tab.on("console", hear)
        if key is not None:
            tab.add_init_script(f"sessionStorage.setItem('manthan-key', '{key}')")
        tab.goto(f"{server.url}/manthan")
        return tab

    yield open_tab
    for context in contexts:
        context.close()
    assert complaints == []
    assert [url for url in asked if not url.startswith(f"{server.url}/manthan")] == []


def ask(server: VllmServer, prompt: str, session: str, tenant: str = "") -> None:
    """One turn."""
    body = {"model": MODEL, "messages": [{"role": "user", "content": prompt}], "session_id": session, "max_tokens": 4}
    headers = AUTHORIZED | ({"X-Tenant-ID": tenant.encode()} if tenant else {})
    httpx.post(f"{server.url}/v1/chat/completions", json=body, headers=headers, timeout=120).raise_for_status()


@contextlib.contextmanager
def running(server: VllmServer, prompt: str, session: str) -> Iterator[None]:
    """A request of the session runs meanwhile, until its client leaves."""
    body = {"model": MODEL, "messages": [{"role": "user", "content": prompt}], "session_id": session, "stream": True}
    body |= {"max_tokens": 3400, "ignore_eos": True}
    url = f"{server.url}/v1/chat/completions"
    with httpx.stream("POST", url, json=body, headers=AUTHORIZED, timeout=120) as answer:
        lines = answer.iter_lines()  # were it let go, so would the request be
        next(lines)
        yield


def shown(server: VllmServer, session: str) -> httpx.Response:
    """What the API says of a session."""
    return httpx.get(f"{server.url}/manthan/sessions/{session}", headers=AUTHORIZED)


def row_of(tab: Any, session: str) -> Any:
    return tab.get_by_role("row").filter(has=tab.get_by_role("button", name=session, exact=True))


def state_of(tab: Any, session: str) -> Any:
    return row_of(tab, session).locator("td.state")


def has_focus(locator: Any) -> bool:
    return bool(locator.evaluate("element => element === document.activeElement"))


def press_tab_until(tab: Any, locator: Any, most: int = 150) -> None:
    """As far as the key takes one, and what has the focus shows it."""
    for _ in range(most):
        tab.keyboard.press("Tab")
        outline = tab.evaluate("getComputedStyle(document.activeElement).outlineStyle")
        assert outline != "none" or tab.evaluate("document.activeElement === document.body")
        if has_focus(locator):
            return
    raise AssertionError(f"Tab does not lead to {locator}")


# -- what it shows ------------------------------------------------------------------------------------


def test_a_session_goes_cold_and_comes_back(server, table, tabs) -> None:
    prompt, _ = table(1).question(1)
    ask(server, prompt, "there-and-back")
    tab = tabs()
    expect(state_of(tab, "there-and-back")).to_contain_text("idle")
    row_of(tab, "there-and-back").get_by_role("button", name="Evict").click()
    expect(tab.locator("#said")).to_contain_text("there-and-back: evict is accepted")
    expect(state_of(tab, "there-and-back")).to_contain_text("cold")
    expect(tab.locator("[data-tile=used] .figure")).not_to_have_text("0%")
    assert httpx.post(f"{server.url}/reset_prefix_cache", headers=AUTHORIZED).json()["success"]
    with running(server, prompt, "there-and-back"):
        expect(state_of(tab, "there-and-back")).to_contain_text("active")
    expect(state_of(tab, "there-and-back")).to_contain_text("idle")
    expect(tab.locator("[data-tile=saved] .figure")).not_to_have_text("0")
    tab.get_by_role("button", name="there-and-back", exact=True).first.click()
    life = tab.get_by_role("dialog")
    expect(life.locator("#life-events .kind")).to_have_text(["turn", "restored", "evicted", "turn"])
    expect(life.locator("#life-sum")).to_contain_text(
        "2 turns, 1 eviction, 1 restore. 544 tokens were not computed again"
    )
    expect(life).to_contain_text("Qualitylossy, 544 tokens of the last prompt")
    expect(life).to_contain_text("Age")
    path = f"{server.url}/manthan/sessions/there-and-back/expect"
    httpx.post(path, json={"tool": "compile"}, headers=AUTHORIZED).raise_for_status()
    expect(life).to_contain_text("–, after compile")


def test_filters_sorting_and_pages(server, table, tabs) -> None:
    prompt = table(4).question(1)[0]
    for n in range(3):
        ask(server, prompt[: -100 * n - 1], f"sorted-{n}")
    tab = tabs()
    tab.get_by_label("Name begins with").fill("sorted-")
    names = tab.locator("tbody .open")
    expect(names).to_have_text(["sorted-2", "sorted-1", "sorted-0"])  # by last use
    expect(tab.locator("#range")).to_have_text("1–3 of 3 sessions")
    tab.get_by_role("button", name="Session", exact=True).click()
    expect(names).to_have_text(["sorted-0", "sorted-1", "sorted-2"])
    expect(tab.get_by_role("columnheader", name="Session")).to_have_attribute("aria-sort", "ascending")
    tab.get_by_label("active").check()
    expect(tab.locator("#empty")).to_have_text("No session is as the filter wants it.")
    tab.get_by_label("idle").check()
    tab.get_by_role("checkbox", name="cold").check()  # where memory is short one is saved already
    expect(names).to_have_count(3)
    tab.get_by_label("Tenant", exact=True).fill("acme")
    expect(tab.locator("#empty")).to_be_visible()


# -- what it does -------------------------------------------------------------------------------------


def test_a_session_is_pinned_and_unpinned_evicted_and_prefetched(server, table, tabs) -> None:
    ask(server, table(6).question(1)[0], "kept")
    tab = tabs()

    def press(button: str) -> None:
        row_of(tab, "kept").get_by_role("button", name=button).click()

    for button, mark in (("Pin", "pinned"), ("Unpin", "")):
        press(button)
        expect(row_of(tab, "kept").locator(".pinned-mark")).to_have_text(mark)
        assert shown(server, "kept").json()["pinned"] == bool(mark)


def test_one_that_is_prefetched_comes_back_without_a_request(server, table, tabs) -> None:
    release_all(server)  # a prefetch takes no room from what others have not saved
    ask(server, table(2).question(1)[0], "fetched")
    tab = tabs()
    row_of(tab, "fetched").get_by_role("button", name="Evict").click()
    expect(state_of(tab, "fetched")).to_contain_text("cold")
    assert httpx.post(f"{server.url}/reset_prefix_cache", headers=AUTHORIZED).json()["success"]
    ask(server, table(3).question(1)[0], "another")  # before that, the weights may be others
    in_pool = row_of(tab, "fetched").locator("td").nth(3)
    expect(in_pool).to_have_text("–")
    row_of(tab, "fetched").get_by_role("button", name="Prefetch").click()
    expect(in_pool).not_to_have_text("–")


def test_release_asks_first(server, table, tabs) -> None:
    ask(server, table(7).question(1)[0], "let-go")
    tab = tabs()
    row_of(tab, "let-go").get_by_role("button", name="Release").click()
    question = tab.get_by_role("alertdialog")
    expect(question).to_contain_text("Release let-go?")
    tab.keyboard.press("Enter")  # the focus is on Cancel
    expect(question).to_be_hidden()
    assert shown(server, "let-go").status_code == 200
    row_of(tab, "let-go").get_by_role("button", name="Release").click()
    question.get_by_role("button", name="Release").click()
    expect(row_of(tab, "let-go")).to_have_count(0)
    assert shown(server, "let-go").status_code == 404


@pytest.mark.slow
def test_an_error_is_the_sentence_of_the_api(server, table, tabs) -> None:
    """Pinned sessions may take the room of one of the two."""
    tab = tabs()
    for n, name in enumerate(("may", "may-not")):
        ask(server, table(8 + 100 * n).question(1)[0], name)
        row_of(tab, name).get_by_role("button", name="Pin").click()
    expect(tab.locator("#said.error")).to_contain_text("pinned sessions may take 671088 bytes of the cold store")
    release_all(server)


def test_the_keyboard_alone_does(server, table, tabs) -> None:
    ask(server, table(9).question(1)[0], "by-hand")
    tab = tabs()
    expect(row_of(tab, "by-hand")).to_be_visible()
    press_tab_until(tab, tab.get_by_role("link", name="To the sessions"))
    tab.keyboard.press("Enter")
    evict = row_of(tab, "by-hand").get_by_role("button", name="Evict")
    press_tab_until(tab, evict)
    tab.keyboard.press("Enter")
    expect(state_of(tab, "by-hand")).to_contain_text("cold")
    assert has_focus(evict)
    tab.keyboard.press("Shift+Tab")
    tab.keyboard.press("Enter")
    life = tab.get_by_role("dialog", name="by-hand")
    expect(life.locator(".kind").first).to_have_text("evicted")
    tab.keyboard.press("Escape")
    expect(life).to_be_hidden()
    assert has_focus(row_of(tab, "by-hand").get_by_role("button", name="by-hand", exact=True))


# -- where it is looked at ----------------------------------------------------------------------------


def test_it_says_that_the_server_does_not_answer(server, tabs) -> None:
    tab = tabs()
    expect(tab.locator("[data-tile=store] .figure")).to_have_text("up")
    tab.context.set_offline(True)
    expect(tab.get_by_role("alert").first).to_contain_text("The server does not answer. What is shown is of ")
    tab.context.set_offline(False)
    expect(tab.get_by_role("alert").first).to_have_text("")
    expect(tab.locator("#wrong")).to_contain_text("The server answers again.")


def test_a_phone_scrolls_in_one_direction_only(server, table, tabs) -> None:
    ask(server, table(10).question(1)[0], "a-rather-long-name-without-any-place-to-break-it-" * 3)
    tab = tabs(viewport=PHONE, has_touch=True, is_mobile=True)

    def fits() -> bool:
        return bool(tab.evaluate("document.documentElement.scrollWidth === 360 && innerWidth === 360"))

    row = tab.locator("tbody tr").first
    expect(row).to_contain_text("a-rather-long-name")
    assert fits()
    assert all(button.bounding_box()["height"] >= 24 for button in row.get_by_role("button").all())
    row.get_by_role("button").first.click()
    expect(tab.locator("#life-events .kind").first).to_be_visible()
    life = tab.get_by_role("dialog")
    assert fits()
    assert life.evaluate("dialog => dialog.scrollWidth <= dialog.clientWidth")
    life.get_by_role("button", name="Close").click()
    expect(life).to_be_hidden()
    assert fits()


@pytest.mark.parametrize("scheme", [pytest.param("light", marks=pytest.mark.slow), "dark"])
def test_texts_stand_out(server, table, tabs, scheme: str) -> None:
    for n, state in enumerate(["idle", "cold"]):
        ask(server, table(11 + n).question(1)[0], f"read-{state}")
    tab = tabs(color_scheme=scheme)
    row_of(tab, "read-cold").get_by_role("button", name="Evict").click()
    expect(state_of(tab, "read-cold")).to_contain_text("cold")
    ground = tab.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (int(re.findall(r"\d+", ground)[0]) < 60) == (scheme == "dark")
    texts = tab.evaluate(CONTRAST)
    row_of(tab, "read-cold").get_by_role("button", name="read-cold", exact=True).click()
    expect(tab.locator("#life-events .kind").first).to_be_visible()
    texts += tab.evaluate(CONTRAST)
    assert {"Cold store", "up", "Pool", "Evict", "read-idle", "evicted", "C"} <= {text for text, _ in texts}
    assert [(text, ratio) for text, ratio in texts if ratio < READABLE] == []


# -- ten thousand sessions ------------------------------------------------------------------------------


MANY, LOOK_S = 10_000, 0.3
"""Sessions, and seconds between two looks at what has changed."""


@pytest.fixture(scope="module")
def crowd() -> Iterator[tuple[Crowd, str]]:
    sessions = Crowd(MANY)
    with pytest.MonkeyPatch.context() as patch, serving(sessions) as url:
        patch.setattr(api, "EVERY_S", LOOK_S)
        yield sessions, url


@pytest.fixture
def crowded(browser, crowd) -> Iterator[Callable[..., Any]]:
    """Open the page of the server with many sessions."""
    contexts = []

    def open_tab(viewport: dict[str, int] = WIDE, **options: Any) -> Any:
        contexts.append(browser.new_context(viewport=viewport, reduced_motion="reduce", **options))
        tab = contexts[-1].new_page()
        tab.goto(f"{crowd[1]}/manthan/")
        expect(tab.locator("#range")).to_contain_text("of 10,000 sessions")
        return tab

    yield open_tab
    for context in contexts:
        context.close()


@pytest.mark.parametrize(("viewport", "rows"), [(WIDE, 25), pytest.param(PHONE, 10, marks=pytest.mark.slow)])
def test_of_many_sessions_only_those_of_the_page_are_drawn(crowded, viewport: dict[str, int], rows: int) -> None:
    tab = crowded(viewport)
    expect(tab.locator("#range")).to_have_text(f"1–{rows} of 10,000 sessions")
    assert tab.locator("tbody tr").count() == rows
    assert tab.evaluate("document.querySelectorAll('*').length") < 1200
    tab.get_by_role("button", name="Next").click()
    expect(tab.locator("#range")).to_have_text(f"{rows + 1}–{2 * rows} of 10,000 sessions")
    assert tab.evaluate("document.documentElement.scrollWidth <= innerWidth")


def test_changes_come_by_themselves_and_in_one_stream(crowded, crowd) -> None:
    sessions, _ = crowd
    asked: list[str] = []
    tab = crowded()
    tab.on("request", lambda request: asked.append(request.url))
    first = tab.locator("tbody .open").first
    for name in ("agent-07000", "agent-09990"):  # active ones, so that the states stay as many
        sessions.use(name)
        expect(first).to_have_text(name)
    assert asked == []
    tab.get_by_role("button", name="Pause").click()
    tab.wait_for_timeout(100)
    before = len(sessions.asked)
    tab.wait_for_timeout(4000 * LOOK_S)
    assert len(sessions.asked) == before, "a page that is paused asks for nothing"


def test_all_of_it_can_be_reached_by_keyboard(crowded) -> None:
    tab = crowded()
    press_tab_until(tab, tab.get_by_role("link", name="To the sessions"))
    tab.keyboard.press("Enter")
    press_tab_until(tab, tab.get_by_role("checkbox", name="cold"), most=5)
    tab.keyboard.press("Space")
    expect(tab.locator("#range")).to_have_text("1–25 of 6,000 sessions")
    press_tab_until(tab, tab.get_by_role("button", name="Next"), most=8)
    tab.keyboard.press("Enter")
    expect(tab.locator("#range")).to_have_text("26–50 of 6,000 sessions")


def test_nothing_is_told_by_colour_alone(crowded) -> None:
    tab = crowded(forced_colors="active")
    states = tab.locator("tbody td.state").all_inner_texts()
    assert {*states} == {"A active", "I idle", "C cold"}
    parts = tab.locator("figure svg path.part-1").first
    assert "#stripes" in parts.evaluate("path => getComputedStyle(path).fill")
    assert tab.locator("#stripes").count() == 1
    pause = tab.get_by_role("button", name="Pause")
    pause.click()
    expect(pause).to_have_attribute("aria-pressed", "true")


def test_one_look_says_what_it_gives_and_costs(crowded) -> None:
    tab = crowded()
    texts = {name: tab.locator(f"[data-tile={name}]").inner_text() for name in ("saved", "quality", "sessions", "pool")}
    assert "6,000,000" in texts["saved"]
    assert "in 40 s, 2,000 restores." in texts["saved"]
    assert "2,500 returns: 1,900,000 tokens resident, 5,000,000 restored, 300,000 computed again." in texts["saved"]
    assert "Without Manthan 5,300,000 computed again, about 2 min longer" in texts["saved"]
    assert "wht-5x" in texts["quality"]
    assert "guard: faithful. Of the tokens from the cache 63% were lossy, the others exact" in texts["quality"]
    assert "1,000 active, 3,000 idle, 6,000 cold" in texts["sessions"]
    assert "60%" in texts["pool"]
    figures = tab.locator("figcaption").all_inner_texts()
    assert [figure.split("\n")[0] for figure in figures] == ["Pool", "Cold store: host", "Cold store: redis"]
    assert "70%" in figures[1]


class Fresh(Crowd):
    """Engine without any request yet."""

    def _state(self, asked: dict[str, Any]) -> Any:
        state = super()._state(asked)
        state["pool"] |= {"free_blocks": 1000, "session_bytes": 0}
        return state


def test_a_pool_that_nothing_has_used_is_said_to_be_empty(browser) -> None:
    with serving(Fresh(0)) as url, browser.new_page() as tab:
        tab.goto(f"{url}/manthan/")
        pool = tab.locator("figure").first
        expect(pool.locator(".reading")).to_have_text("nothing in use: 0 B of 9.00 GiB, 0%")
        expect(pool.locator(".empty")).to_be_visible()
        expect(tab.locator("figure .empty").nth(1)).to_be_hidden()
        expect(tab.locator("#empty")).to_have_text("No sessions yet. One appears here with its first request.")


class Calibrated(Crowd):
    """Crowd of three sessions, with 1, 2 and no known refinements of the 2 that the codec has."""

    def _state(self, asked: dict[str, Any]) -> Any:
        state = super()._state(asked)
        state["store"]["codec"] = "klt-8x"
        return state

    def _make(self, n: int) -> SessionInfo:
        return replace(super()._make(n), exact=False, level=[1, 2, None][n])


def test_a_session_says_how_many_refinements_are_left(browser) -> None:
    with serving(Calibrated(3)) as url, browser.new_page() as tab:
        tab.goto(f"{url}/manthan/")
        for n, quality in enumerate(["lossy, cut to 1 of 2 refinements", "lossy", "lossy"]):
            tab.get_by_role("button", name=f"agent-0000{n}", exact=True).first.click()
            facts = tab.locator("#life-facts")
            expect(facts.get_by_text("Quality", exact=True).locator("xpath=following-sibling::dd")).to_have_text(
                quality
            )
            tab.keyboard.press("Escape")


class Unjudged(Crowd):
    def _state(self, asked: dict[str, Any]) -> Any:
        state = super()._state(asked)
        state["store"] |= {"verdict": "none", "measuring": {"codec": "klt-8x", "blocks": 12, "of": 64}}
        return state


def test_a_picture_taken_when_the_page_is_loaded_shows_the_state(browser) -> None:
    """As `chromium --headless --screenshot` takes it, without any wait."""
    with serving(Unjudged(3)) as url, browser.new_page() as tab:
        tab.goto(f"{url}/manthan/", wait_until="load")
        assert tab.locator("[data-tile=pool] .figure").inner_text() == "60%"
        assert tab.get_by_role("row").count() == 4
        quality = tab.locator("[data-tile=quality]").inner_text()
        assert "klt-8x measured on 12 of 64 blocks; wht-5x until then" in quality


# -- who may --------------------------------------------------------------------------------------------


def test_the_key_is_asked_for_and_kept_in_the_tab(server, tabs) -> None:
    tab = tabs(key=None)
    question = tab.get_by_role("dialog", name="This server wants an API key")
    question.get_by_label("API key").fill("another-key")
    tab.keyboard.press("Enter")
    expect(question.get_by_role("alert")).to_have_text("The server does not take this key.")
    question.get_by_label("API key").fill(KEY)
    question.get_by_role("button", name="Use it").click()
    expect(question).to_be_hidden()
    expect(tab.locator("[data-tile=store] .figure")).to_have_text("up")
    assert tab.evaluate("[sessionStorage.getItem('manthan-key'), localStorage.length, document.cookie]") == [KEY, 0, ""]
    tab.reload()
    expect(tab.locator("[data-tile=store] .figure")).to_have_text("up")
    tab.get_by_role("button", name="API key").click()
    question.get_by_role("button", name="Forget it").click()
    expect(tab.locator("#trouble")).to_have_text("The server wants an API key.")
    assert tab.evaluate("sessionStorage.length") == 0


def test_a_tenant_sees_its_own(server, table, tabs) -> None:
    for n, tenant in enumerate(["grün", "globex"]):
        ask(server, table(13 + n).question(1)[0], "theirs", tenant)
    tab = tabs()
    expect(row_of(tab, "grün/theirs")).to_be_visible()
    expect(row_of(tab, "globex/theirs")).to_be_visible()
    tab.get_by_label("As tenant").fill("grün")
    tab.keyboard.press("Enter")
    expect(tab.locator("tbody .open")).to_have_text(["theirs"])
    row_of(tab, "theirs").get_by_role("button", name="Evict").click()
    expect(state_of(tab, "theirs")).to_contain_text("cold")
    assert shown(server, "gr%C3%BCn%2Ftheirs").json()["state"] == "cold"
    row_of(tab, "theirs").get_by_role("button", name="Pin").click()
    expect(row_of(tab, "theirs").locator(".pinned-mark")).to_have_text("pinned")
    assert [shown(server, f"{tenant}%2Ftheirs").json()["pinned"] for tenant in ("gr%C3%BCn", "globex")] == [True, False]


# -- what others write ----------------------------------------------------------------------------------


EVIL = ["<img src=x onerror=document.title='hit'>", "\"><script>document.title='hit'</script>", "a/b?c#d%2F..&e=abc"]


@pytest.mark.slow
def test_a_name_is_text_and_nothing_else(server, table, tabs) -> None:
    release_all(server)  # the page shows the first 20 of the policy's order
    for n, name in enumerate(EVIL):
        ask(server, table(15 + n).question(1)[0], name)
    names = [f"/{name}" if "/" in name else name for name in EVIL]  # else it would read as a tenant's
    tab = tabs()
    for name in names:
        expect(tab.locator("#order")).to_contain_text(name)
        row_of(tab, name).get_by_role("button", name="Evict").click()
        expect(tab.locator("#said")).to_contain_text(f"{name}: evict is accepted")
        expect(state_of(tab, name)).to_contain_text("cold")
        tab.get_by_role("button", name=name, exact=True).first.click()
        expect(tab.locator("#life-title")).to_have_text(name)
        expect(tab.locator("#life-events .kind").first).to_have_text("evicted")
        tab.keyboard.press("Escape")
    assert tab.locator("img, body script").count() == 0
    assert "hit" not in tab.title()


def test_a_browser_is_told_to_run_and_load_only_what_is_of_the_page(server) -> None:
    for name in ["", *FILES]:
        answer = httpx.get(f"{server.url}/manthan/{name}")  # without a key: there is no data in it
        assert answer.status_code == 200
        assert "default-src 'self'" in answer.headers["Content-Security-Policy"]
    html = httpx.get(f"{server.url}/manthan/").text
    assert re.findall(r"<script(?! type=\"module\" src=\"page.js\"></script>)|<style|\son\w+=|style=", html) == []
    for name, content in FILES.items():
        text = content.decode().replace("http://www.w3.org/", "")
        assert re.findall(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(|https?:", text) == [], name
