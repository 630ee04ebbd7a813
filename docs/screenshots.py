"""Makes page.png and page-phone.png: the live page of a real server, whose chats come, fall idle, go cold and return.

Takes two minutes, and needs Debian's chromium. The model is the demo's.

    python docs/screenshots.py
"""

import itertools
import os
import random
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from PIL import Image
from playwright.sync_api import Browser, Page, sync_playwright

DOCS = Path(__file__).resolve().parent
sys.path[:0] = [str(DOCS.parent / "benchmarks")]

from demo import ANSWER, MODEL, make_chats  # noqa: E402

from manthan.benchmarks.server import CHAT_TEMPLATE, VllmServer  # noqa: E402

FLAGS = [
    *("--block-size", "32", "--num-gpu-blocks-override", "420", "--max-model-len", "4096", "--enforce-eager"),
    *("--chat-template", CHAT_TEMPLATE, "--enable-prompt-tokens-details"),
    *("--manthan-policy", "lru", "--manthan-idle-after", "45", "--manthan-cold-bytes", "32MiB"),
]
BROWSER_FLAGS = [
    *("--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking"),
    *("--disable-component-update", "--disable-sync"),
]
OTHERS = ["agent-7", "agent-12", "agent-31", "batch/nightly-4", "batch/nightly-9", "support-118", "support-204"]
ACTIVE_S = 80.0
WIDE, PHONE = {"width": 1280, "height": 1000}, {"width": 360, "height": 780}
GAP = 24  # pixels between two pictures of a phone


class Visitors:
    """Chats of different lengths that take turns, with pauses between."""

    def __init__(self, server: VllmServer) -> None:
        self.server, self.chance = server, random.Random(0)
        self.texts = {chat.name: chat.messages[0]["content"] for chat in make_chats()}
        for name, text in zip(OTHERS, list(self.texts.values()), strict=False):
            self.texts[name] = f"{name}\n" + text[: self.chance.randrange(900, 4500)]

    def ask(self, name: str, **options: Any) -> None:
        messages = [{"role": "user", "content": self.texts[name]}]
        self.texts[name] += self.server.chat(messages, session_id=name, **{**ANSWER, **options}).text

    def come_and_go(self, seconds: float) -> None:
        end, names = time.monotonic() + seconds, list(self.texts)
        for name in itertools.cycle(names):
            if time.monotonic() > end:
                return
            pause = {"kv_transfer_params": {"manthan": {"expect_return_s": 90}}} if name.startswith("agent") else {}
            self.ask(name, **pause)
            if self.chance.random() < 0.4:
                self.ask(self.chance.choice(names))
            time.sleep(self.chance.uniform(1, 8))


@contextmanager
def page(browser: Browser, url: str, **options: Any) -> Iterator[Page]:
    context = browser.new_context(reduced_motion="reduce", **options)
    tab = context.new_page()
    tab.goto(f"{url}/manthan/")
    tab.wait_for_selector("tbody tr")
    yield tab
    context.close()


def phone_pictures(browser: Browser, url: str) -> Iterator[bytes]:
    """The head of the page, its sessions, and a session's life."""
    with page(browser, url, viewport=PHONE, device_scale_factor=2, color_scheme="dark") as tab:
        yield tab.screenshot()
        tab.locator("#sessions").evaluate("section => section.scrollIntoView()")
        yield tab.screenshot()
        tab.locator("tr:has(.mark.cold) .open").first.click()
        tab.wait_for_selector("#life-events li")
        yield tab.screenshot()


def side_by_side(pictures: list[Path], to: Path) -> None:
    images = [Image.open(picture).convert("RGB") for picture in pictures]
    width = sum(image.width for image in images) + GAP * (len(images) - 1)
    whole = Image.new("RGB", (width, images[0].height), "white")
    for n, image in enumerate(images):
        whole.paste(image, (n * (image.width + GAP), 0))
    small(whole, to)


def small(image: Image.Image, to: Path) -> None:
    """With 256 colours: texts and bars need no more."""
    image.convert("RGB").quantize(256, method=Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE).save(
        to, optimize=True
    )


def main() -> None:
    with (
        tempfile.TemporaryDirectory() as folder,
        VllmServer(os.path.relpath(MODEL), FLAGS, Path(folder, "log")) as server,
        sync_playwright() as playwright,
    ):
        server.wait_until_ready(300)
        browser = playwright.chromium.launch(executable_path="/usr/bin/chromium", args=BROWSER_FLAGS)
        visitors = Visitors(server)
        visitors.ask("alice", kv_transfer_params={"manthan": {"pin": True}})
        with page(browser, server.url, viewport=WIDE, color_scheme="light") as tab:
            busy = threading.Thread(target=visitors.come_and_go, args=(ACTIVE_S,))
            busy.start()
            while busy.is_alive():
                tab.wait_for_timeout(500)  # its scripts run meanwhile
            long = threading.Thread(
                target=visitors.ask, args=("grace",), kwargs={"max_tokens": 1000, "ignore_eos": True}
            )
            long.start()
            tab.wait_for_selector(".mark.active >> nth=1")
            tab.screenshot(path=Path(folder, "page.png"))
            pictures = []
            for n, picture in enumerate(phone_pictures(browser, server.url)):
                pictures.append(Path(folder, f"{n}.png"))
                pictures[-1].write_bytes(picture)
        long.join()
        small(Image.open(Path(folder, "page.png")), DOCS / "page.png")
        side_by_side(pictures, DOCS / "page-phone.png")
        browser.close()


if __name__ == "__main__":
    main()
