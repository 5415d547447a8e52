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


@contextlib.contextmanager
def opened(browser, url: str, width: int = 1440, scheme: str = "light", **more) -> Iterator:
    """A page of its own session at `url`. Errors of scripts, and what the policy of the page forbids, fail the test."""
    height = 740 if width < 700 else 900
    context = browser.new_context(viewport={"width": width, "height": height}, color_scheme=scheme, **more)
    context.set_default_timeout(45_000)
    page, faults = context.new_page(), []
    page.on("pageerror", lambda error: faults.append(str(error)))
    page.on("console", lambda said: faults.append(said.text) if "Security Policy" in said.text else None)
    try:
        page.goto(url)
        yield page
    finally:
        context.close()
    assert not faults, faults
