"""The page in a browser, over the real HTTP process and a fake rank 0 that answers with the user's last message."""

import os
import re
import signal
import time

import pytest

from tests.support.browser import Tab, chromium
from tests.support.served import serving, wait_for

TEMPLATE = "{{ messages[-1].content }}<|end|>{% if false %}<think>{% endif %}"
OPTIONS = {"context_length": 100_000}
RANK = {
    "host": "alpha",
    "nodes": "0",
    "cpus": "0-7",
    "threads": 8,
    "weights_bytes": 2_100_000_000,
    "cache_bytes": 500_000_000,
    "packing_bytes": 2_100_000_000,
    "bandwidth": 40e9,
    "packed_bytes": None,
}
MARKDOWN = """# Title

Some **bold**, *slanted* and ~~old~~ text with `code` and [a link](https://example.org/a_b?c=d).
A second line. https://example.org/(x).

1. one
   - inner
2. two

- [x] done

> quoted

| a | b |
|---|--:|
| 1 | `2` |

```python
def f(x):  # why
    return "text" + 1
```"""
HOSTILE = (
    """<script>window.hacked = 1</script> <img src=x onerror="window.hacked = 2">
<iframe srcdoc="<script>parent.hacked = 3</script>"></iframe> <svg onload="hacked=4">

[a](javascript:window.hacked=5) [b](data:text/html,<script>1</script>) [c](JaVaScRiPt:alert(1))
![d](https://e.org/p.png) [e](vbscript:x) <https://user:pass@example.org/> **unclosed *emphasis `code

\u202egnp.exe\u202c and \u2066isolated

"""
    + "> " * 300
    + "deep\n\n"
    + "- " * 300
    + "deep\n\n"
    + "[" * 3000
    + "]("
    + "*_`" * 2000
    + "\n\n"
)
FENCE = "```js\nconst path = '\u202egnp.exe'; // <script>window.hacked = 6</script>\nnot closed"


@pytest.fixture(scope="module")
def tab():
    with chromium() as browser:
        yield Tab(browser)


@pytest.fixture(scope="module")
def served(tab):
    with serving(OPTIONS, TEMPLATE) as pair:
        yield pair


@pytest.fixture
def engine(served):
    yield served[0]
    served[0].delay, served[0].at_once, served[0].ranks, served[0].more_stats = 0.0, 1, [], {}


@pytest.fixture
def page(tab, served, engine):
    with tab.at(served[1].url) as shown:
        yield shown


def say(page, text):
    page.fill("#text", text)
    page.press("#text", "Enter")


def answers(page):
    return page.locator(".theirs .markdown:not(.reasoning *)")


def wait_complete(page):
    page.wait_for_selector("#send:text-is('Send')")


def test_an_answer_streams_and_can_be_stopped(page, engine):
    engine.delay = 0.02
    text = "word " * 400
    say(page, text)
    answer = answers(page)
    wait_for(lambda: len(answer.inner_text()) > 20)
    assert len(answer.inner_text()) < len(text.strip())  # it is still coming
    before = len(engine.aborted)
    page.press("#text", "Escape")
    page.wait_for_selector("text=Stopped")
    wait_for(lambda: len(engine.aborted) == before + 1)
    assert 20 < len(answer.inner_text()) < len(text) and page.inner_text("#send") == "Send"
    engine.delay = 0
    say(page, "whole")
    wait_complete(page)
    assert answer.nth(1).inner_text() == "whole" and page.locator(".figures").count() == 1
    assert page.inner_text("#announcer") == "The answer is complete"


def test_conversations_stay_and_can_be_removed(page):
    say(page, "the first question")
    wait_complete(page)
    page.click("#new-chat")
    say(page, "another one")
    wait_complete(page)
    page.reload()
    page.wait_for_selector("#conversations .open >> nth=1")
    assert page.locator("#conversations .open").all_inner_texts() == ["another one", "the first question"]
    assert answers(page).inner_text() == "another one"
    page.click("#conversations .open >> nth=1")
    assert answers(page).inner_text() == "the first question"
    page.hover("#conversations li >> nth=1")
    page.click("#conversations .quiet >> nth=1")
    page.click("#removal button.danger")
    wait_for(lambda: page.locator("#conversations .open").count() == 1)
    page.reload()
    page.wait_for_selector("#conversations .open")
    assert page.locator("#conversations .open").all_inner_texts() == ["another one"]
    assert "IndexedDB" not in page.content() and page.evaluate("Object.keys(localStorage).length") == 0


def test_edit_and_ask_again_keep_what_was_there(page, engine):
    say(page, "befor")
    wait_complete(page)
    page.click(".mine button[aria-label=Edit]")
    page.fill(".edit textarea", "after")
    page.press(".edit textarea", "Enter")
    wait_complete(page)
    assert answers(page).all_inner_texts() == ["after"] and "2 of 2" in page.inner_text(".mine .pager")
    page.click(".theirs button[aria-label='Ask again']")
    wait_complete(page)
    assert "2 of 2" in page.inner_text(".theirs .pager") and answers(page).all_inner_texts() == ["after"]
    page.click(".mine button[aria-label='Earlier version']")
    assert answers(page).all_inner_texts() == ["befor"] and page.inner_text(".mine .said") == "befor"
    page.reload()
    page.wait_for_selector(".mine")
    assert page.inner_text(".mine .said") == "befor"


def test_markdown_and_reasoning(page, engine):
    say(page, f"<think>\nLet me *see*.\n</think>\n{MARKDOWN}")
    wait_complete(page)
    body = answers(page)
    for selector, text in {
        "h2": "Title", "strong": "bold", "em": "slanted", "del": "old", "p code": "code", "ol > li ul li": "inner",
        "blockquote p": "quoted", "th >> nth=1": "b", "td.end code": "2", "pre .code-comment": "# why",
        "pre .code-text": '"text"', "pre .code-word >> nth=0": "def", ".has-task": "☑ done",
    }.items():  # fmt: skip
        assert body.locator(selector).inner_text() == text, selector
    links = [link.get_attribute("href") for link in body.locator("a").all()]
    assert links == ["https://example.org/a_b?c=d", "https://example.org/(x)"]
    assert not page.locator(".reasoning").get_attribute("open") and "Let me see." not in page.inner_text("#messages")
    page.click(".reasoning summary")
    assert page.inner_text(".reasoning em") == "see"


def test_hostile_answers_stay_text(page, engine):
    """In 1,400 events, which end within words, marks and characters."""
    engine.at_once = 97
    rows = "|".join("abcdefghijklmnopqrst")
    table = f"{rows}\n{'|'.join(['---'] * 20)}\n" + f"{rows}\n" * 300
    begun = time.monotonic()
    say(page, HOSTILE + table + "\n" + FENCE)
    wait_complete(page)
    assert time.monotonic() - begun < 60
    assert page.evaluate("window.hacked") is None
    inside = page.locator("#messages")
    assert inside.locator("script, img, iframe, object, embed, style, svg[onload]").count() == 0
    for link in inside.locator("a").all():
        assert re.match(r"https?://", link.get_attribute("href")) and "noopener" in link.get_attribute("rel")
    assert "<script>window.hacked = 1</script>" in answers(page).inner_text()
    assert inside.locator(".theirs .hidden-character").all_inner_texts() == ["U+202E"]
    assert "not closed" in inside.locator(".theirs pre").last.inner_text()
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    assert page.evaluate("Math.max(...Array.from(document.querySelectorAll('#messages *'), n => {"
                         "let d = 0; for (; n; n = n.parentElement) d++; return d; }))") < 60  # fmt: skip


def test_files_and_settings_go_with_a_message(page, engine, tmp_path):
    text, picture = tmp_path / "notes.txt", tmp_path / "picture.png"
    text.write_text("three ``` ticks\n")
    picture.write_bytes(b"\x89PNG\0\xff")
    page.set_input_files("#chooser", [text, picture])
    page.wait_for_selector("text=picture.png is not UTF-8 text.")
    page.click("#open-settings")
    page.fill("[name=temperature]", "0.25")
    page.fill("[name=max_tokens]", "20")
    page.click("#settings .main")
    say(page, "read it")
    wait_complete(page)
    asked = engine.submitted[-1]
    prompt = bytes(page_bytes(asked["prompt"])).decode()
    assert prompt == "notes.txt:\n````\nthree ``` ticks\n\n````\n\nread it"
    assert (asked["sampling"]["temperature"], asked["sampling"]["max_tokens"]) == (0.25, 20)
    assert "notes.txt" in page.inner_text(".mine .chip") and "Ended at the maximum" in page.inner_text(".theirs")


def page_bytes(tokens):
    """The bytes of the byte tokenizer's ids, without the specials."""
    from tokenizers import pre_tokenizers

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    known = {letter: byte for byte, letter in byte_letters().items()}
    return [known[letters[token - 2]] for token in tokens if token > 1]


def byte_letters():
    """Which letter stands for which byte in byte-level BPE."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = (byte for byte in range(256) if byte not in plain)
    return {**{byte: chr(byte) for byte in plain}, **{byte: chr(256 + i) for i, byte in enumerate(others)}}


def test_a_lost_server_is_told_and_found_again(page, served, engine):
    engine.delay = 0.02
    say(page, "word " * 200)
    wait_for(lambda: len(answers(page).inner_text()) > 10)
    os.kill(served[1].pid, signal.SIGKILL)  # it is started again on the same socket
    page.wait_for_selector("#banner:has-text('does not answer')")
    page.wait_for_selector(".theirs .problem:has-text('was lost in the middle')")
    assert answers(page).inner_text().startswith("word")
    page.wait_for_selector("#banner", state="hidden", timeout=60_000)
    engine.delay = 0
    page.click("button[aria-label='Ask again']")
    wait_complete(page)
    assert answers(page).inner_text() == ("word " * 200).strip()


def test_a_key_is_asked_for_and_kept_in_the_tab(tab):
    with serving(OPTIONS, TEMPLATE, api_key="secret") as (_, process), tab.at(process.url) as page:
        page.fill("#key-field", "wrong")
        page.press("#key-field", "Enter")
        page.wait_for_selector("#key-problem:visible")
        page.fill("#key-field", "secret")
        page.press("#key-field", "Enter")
        page.wait_for_selector("#key", state="hidden")
        say(page, "hello")
        wait_complete(page)
        assert answers(page).inner_text() == "hello"
        page.reload()
        page.wait_for_selector("#model option[value=bytes]", state="attached")
        assert not page.is_visible("#key") and page.evaluate("sessionStorage['ckdist.key']") == "secret"
        assert "secret" not in page.evaluate("JSON.stringify(localStorage) + document.cookie + location.href")


def test_the_machine_beside_the_chat(page, engine):
    def ranks(step):
        own = [(0.004, 0.001), (0.006, 0.001)]  # seconds by itself, and waiting, of a step of 8 ms
        return [
            {
                **RANK, "rank": i, "steps_total": step, "step_seconds_total": step * 0.008,
                "wait_seconds_total": step * wait, "exchange_seconds_total": step * (0.008 - alone - wait),
                "decode_steps_total": step, "decode_seconds_total": step * 0.008,
                "decode_read_bytes_total": step * 200_000_000,
            }
            for i, (alone, wait) in enumerate(own)
        ]  # fmt: skip

    loads = {0: (5, 1.5), 1: (7, 3.0)}
    engine.more_stats = {f"expert_busiest.layer.{layer}": expert for layer, (expert, _) in loads.items()} | {
        f"expert_imbalance.layer.{layer}": times for layer, (_, times) in loads.items()
    }
    for step in range(100, 1000, 100):
        engine.ranks = ranks(step)
        page.wait_for_timeout(300)
    first, second = page.locator(".ranks > li").all()
    assert "node 0" in first.inner_text() and "8 threads on CPUs 0-7 · 2.1 GB weights" in first.inner_text()
    assert "25.0 of 40.0 GB/s" in first.inner_text() and "8.00 ms" in first.inner_text()
    assert "compute 4.00 · wait 1.00 · exchange 3.00" in first.inner_text()
    assert second.locator(".slowest").is_visible() and not first.locator(".slowest").is_visible()
    assert "of 8 running, 3 waiting" in page.inner_text("#machine") and "2 used" in page.inner_text("#machine")
    assert "3.0 times the mean, in layer 1" in page.inner_text("#machine")
    page.click("#open-machine")
    assert not page.is_visible("#machine")
    page.reload()
    page.wait_for_selector("#open-machine[aria-expanded=false]")


def test_keys_alone_are_enough(page, engine):
    page.focus("#open-chats")
    page.keyboard.press("Shift+Tab")
    assert page.evaluate("document.activeElement.className") == "skip"  # the first of all
    page.keyboard.press("Enter")
    page.keyboard.type("one")
    page.keyboard.press("Shift+Enter")
    page.keyboard.type("two")
    page.keyboard.press("Enter")
    wait_complete(page)
    assert page.inner_text(".mine .said") == "one\ntwo"
    page.focus("#theme")
    page.keyboard.press("Enter")
    assert page.evaluate("document.documentElement.dataset.theme") == "dark"
    page.reload()
    assert page.get_attribute("#theme", "aria-pressed") == "true"


@pytest.mark.parametrize("width, scheme", [(360, "light"), (1440, "dark")])  # of places, and of colours
def test_axe_has_no_findings(tab, served, engine, width, scheme):
    axe = pytest.importorskip("axe_playwright_python.base", reason="axe-playwright-python is not installed")
    engine.ranks = [{**RANK, "rank": i} for i in range(2)]
    with tab.at(served[1].url, width, scheme, any_script=True) as page:
        say(page, f"<think>Hm.</think>\n{MARKDOWN}")
        wait_complete(page)
        page.evaluate(axe.AXE_SCRIPT)
        for name in ("chat", "settings", "machine"):
            if name == "settings":
                page.click("#open-settings")
            elif name == "machine":
                page.click("#close-settings")
                page.click("#open-machine") if width == 360 else None
                page.wait_for_selector(".ranks > li")
            page.wait_for_timeout(500)  # until colours stand still
            found = axe.AxeResults(page.evaluate("axe.run({resultTypes: ['violations']})"))
            assert not found.response["violations"], f"{name}: {found.generate_report()}"
            assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), name
