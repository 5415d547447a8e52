"""A headless Chromium for tests of the page: the system's own, driven by Playwright."""

import contextlib
import shutil
from collections.abc import Iterator

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome")
FLAGS = (
    "--no-sandbox",  # tests run as root in containers
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)


@contextlib.contextmanager
def chromium() -> Iterator:
    """A running browser, with a new profile; skips where there is none, or no Playwright."""
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    program = next(filter(None, map(shutil.which, NAMES)), None)
    if program is None:
        pytest.skip("no Chromium (Debian and Ubuntu: apt-get install chromium)")
    with playwright.sync_playwright() as started:
        browser = started.chromium.launch(executable_path=program, headless=True, args=list(FLAGS))
        try:
            yield browser
        finally:
            browser.close()


class Tab:
    """A page for several visits. Each begins as in a new browser, whose start would cost a second of CPU."""

    def __init__(self, browser):
        self.context = browser.new_context()
        self.context.set_default_timeout(45_000)
        self.page, self.faults = self.context.new_page(), []
        self.page.on("pageerror", lambda error: self.faults.append(str(error)))
        self.page.on("console", self.hear)
        self.protocol = self.context.new_cdp_session(self.page)

    def hear(self, message) -> None:
        if "Security Policy" in message.text:
            self.faults.append(message.text)

    @contextlib.contextmanager
    def at(self, url: str, width: int = 1440, scheme: str = "light", any_script: bool = False) -> Iterator:
        """The page at `url`. Errors of scripts, and what the policy of the page forbids, fail the test.

        any_script: The policy does not hold, so that a test can add a script.
        """
        self.page.set_viewport_size({"width": width, "height": 740 if width < 700 else 900})
        self.page.emulate_media(color_scheme=scheme)
        self.protocol.send("Page.setBypassCSP", {"enabled": any_script})
        self.faults.clear()
        self.page.goto(url)
        try:
            yield self.page
        finally:
            self.forget(url)
        assert not self.faults, self.faults

    def forget(self, url: str) -> None:
        """Leaves the page at `url`, and removes all that it has stored."""
        self.page.goto(url + "/page/icon.svg")
        self.page.evaluate("sessionStorage.clear()")
        self.protocol.send("Storage.clearDataForOrigin", {"origin": url, "storageTypes": "all"})
