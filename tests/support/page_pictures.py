"""Pictures of the page over a running server, for the documentation.

    python -m tests.support.page_pictures URL FOLDER

An answer is under way in each; temperature 0 makes them alike.
"""

import pathlib
import sys

from tests.support.browser import Tab, chromium

QUESTIONS = (
    "Give me a list of three tips for writing clear emails.",
    "Write a Python function that says whether a number is even.",
)
GROWN_MS = 3000  # until the second answer is shown in the middle
SIZES = (1440, 360)


def take(tab: Tab, url: str, folder: pathlib.Path, width: int, scheme: str) -> None:
    """Pictures of the chat, and on a narrow screen of the machine too."""
    with tab.at(url, width, scheme) as page:
        page.wait_for_selector("#model option[value]", state="attached")
        page.click("#open-settings")
        page.fill("[name=temperature]", "0")
        page.click("#settings .main")
        page.fill("#text", QUESTIONS[0])
        page.press("#text", "Enter")
        page.wait_for_selector("#send:text-is('Send')", timeout=120_000)
        page.fill("#text", QUESTIONS[1])
        page.press("#text", "Enter")
        page.wait_for_timeout(GROWN_MS)
        page.screenshot(path=folder / f"page-{width}-{scheme}.png")
        if width < 700:
            page.click("#open-machine")
            page.wait_for_timeout(1000)
            page.screenshot(path=folder / f"machine-{width}-{scheme}.png")


def main(url: str, folder: str) -> None:
    with chromium() as browser:
        tab = Tab(browser)
        for width in SIZES:
            for scheme in ("light", "dark"):
                take(tab, url, pathlib.Path(folder), width, scheme)


if __name__ == "__main__":
    main(*sys.argv[1:])
