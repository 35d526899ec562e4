"""Proves that every control of the chat page does what it says, in a real browser against a real server.

Method: Debian's chromium, driven by playwright; a tiny random model, whose answers are noise of a known
length. Screenshots are kept in PAGE_SHOTS where that is set. Skipped where either is missing.
"""

import json
import os
import re
import shutil

import pytest

from tests.serve.conftest import Server

pytestmark = pytest.mark.slow
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
SOME = re.compile(".{20}", re.S)
LONG = "words of one conversation that come again in each of its turns, " * 3


@pytest.fixture(scope="module")
def browser():
    driver = pytest.importorskip("playwright.sync_api", reason="the page: pip install playwright")
    if CHROMIUM is None:
        pytest.skip("the page: no chromium on this machine (Debian: apt install chromium)")
    with driver.sync_playwright() as play:
        chromium = play.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield chromium
        chromium.close()


@pytest.fixture(scope="module")
def roomy(home, tmp_path_factory):
    """A server whose answers may be long enough to be stopped."""
    model = tmp_path_factory.mktemp("roomy") / "model"
    shutil.copytree(home, model)
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 8192}))
    server = Server(model, "--store", "64MiB")
    yield server
    server.end()


@pytest.fixture
def page(browser, roomy):
    yield from opened(browser, roomy.url)


def expect(locator):
    from playwright.sync_api import expect as told

    return told(locator)


def opened(browser, url, **how):
    context = browser.new_context(viewport={"width": 1280, "height": 860}, **how)
    page, errors = context.new_page(), []
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.goto(url)
    expect(page.locator("#model")).to_have_text("tiny")
    page.fill("#max_tokens", "24")
    page.fill("#temperature", "0")
    yield page
    if "PAGE_SHOTS" in os.environ:
        name = os.environ["PYTEST_CURRENT_TEST"].split("::")[-1].split(" ")[0]
        page.screenshot(path=f"{os.environ['PAGE_SHOTS']}/{name}.png")
    context.close()
    assert not errors, errors


def say(page, text, ended=True):
    page.fill("#message", text)
    page.press("#message", "Enter")
    if ended:
        page.wait_for_selector("#stop", state="hidden")


def asked(page, act):
    """The JSON of the request that `act` makes."""
    with page.expect_request("**/v1/chat/completions") as caught:
        act()
    page.wait_for_selector("#stop", state="hidden")
    return caught.value.post_data_json


def test_a_conversation_is_streamed_and_its_figures_stand_beside_it(page):
    page.fill("#system", LONG)
    say(page, "one")
    say(page, "two")
    assert page.locator(".turn.assistant .text").count() == 2
    told = page.locator(".turn.assistant .reuse").last.inner_text()
    assert "first token after" in told and "tokens reused" in told and not told.startswith("0 of")
    assert page.locator(".turn.assistant .bar .memory").last.bounding_box()["width"] > 0
    assert page.locator("#plot rect").count() == 2
    expect(page.locator("#store")).to_contain_text("hits")
    assert "tokens reused, exactly" in page.inner_text("#talk")


def test_every_setting_is_in_the_next_request(page):
    page.fill("#system", "be brief")
    for name, value in {"temperature": "0.3", "top_p": "0.5", "max_tokens": "5", "seed": "7"}.items():
        page.fill(f"#{name}", value)
    body = asked(page, lambda: say(page, "hi", ended=False))
    assert body["messages"][0] == {"role": "system", "content": "be brief"}
    assert (body["temperature"], body["top_p"], body["max_tokens"], body["seed"]) == (0.3, 0.5, 5, 7)
    assert body["stream"] and body["stream_options"] == {"include_usage": True}
    page.fill("#seed", "")
    assert "seed" not in asked(page, lambda: say(page, "again", ended=False))


def test_the_windows_settings_take_effect_at_once_and_its_classes_are_told(page):
    assert "window" not in asked(page, lambda: say(page, LONG, ended=False))
    page.check("#window")
    page.fill("#recent", "64")
    page.fill("#older", "64")
    page.select_option("#codec", "int4")
    body = asked(page, lambda: say(page, LONG, ended=False))
    assert body["window"] == {"recent": 64, "older": 64, "codec": "int4"}
    assert re.search(r"older tokens, quantised\s*64", page.inner_text("#talk"))
    assert re.search(r"dropped tokens\s*[1-9]", page.inner_text("#talk"))
    expect(page.locator("#sizes")).to_be_visible()
    page.uncheck("#window")
    expect(page.locator("#sizes")).to_be_hidden()
    assert "window" not in asked(page, lambda: say(page, "small again", ended=False))


def test_stop_ends_the_computing_and_edit_asks_again(page, roomy, wait_until):
    page.fill("#max_tokens", "7000")
    say(page, "go on", ended=False)
    expect(page.locator(".assistant .text")).to_have_text(SOME)
    page.click("#stop")
    page.wait_for_selector("#stop", state="hidden")
    assert "stopped" in page.inner_text("#log")
    wait_until(lambda: roomy.stats().get("requests_cancelled_total"))
    assert roomy.stats()["requests_running"] == 0
    page.click("text=Edit and resend")
    assert page.input_value("#message") == "go on" and page.locator(".turn").count() == 0
    page.fill("#max_tokens", "5")
    body = asked(page, lambda: say(page, "something else", ended=False))
    assert [m["content"] for m in body["messages"]] == ["something else"]


def test_a_reload_keeps_the_conversation_and_new_forgets_it(page):
    say(page, "remember me")
    page.fill("#max_tokens", "7000")
    say(page, "and me", ended=False)
    expect(page.locator(".assistant .text").last).to_have_text(SOME)
    page.reload()
    assert page.locator(".turn").count() == 4 and "stopped" in page.inner_text("#log")
    page.click("#clear")
    assert page.locator(".turn").count() == 0
    page.reload()
    assert page.locator(".turn").count() == 0


def test_markup_is_text_and_a_large_message_is_taken_or_refused_with_its_reason(page):
    say(page, "<img src=x onerror=alert(1)><b>bold</b>")
    assert page.locator("#log img, #log b").count() == 0
    assert "<b>bold</b>" in page.inner_text(".user .text")
    say(page, "x y " * 25_000)
    assert "longest prompt that fits" in page.inner_text(".error")
    body = asked(page, lambda: say(page, "small again", ended=False))
    assert len(body["messages"]) == 3, "what had no answer is not asked again"


def test_markup_in_an_answer_is_text(page):
    markup = "<img src=x onerror=alert(1)><script>alert(2)</script> <a href=javascript:alert(3)>x</a> **b**"
    pieces = [{"choices": [{"index": 0, "delta": {"content": markup[at : at + 7]}, "finish_reason": None}]}
              for at in range(0, len(markup), 7)]  # fmt: skip
    pieces.append({"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]})
    body = "".join(f"data: {json.dumps(piece)}\n\n" for piece in pieces) + "data: [DONE]\n\n"
    told = {"content_type": "text/event-stream", "body": body}
    page.route("**/v1/chat/completions", lambda route: route.fulfill(**told))
    say(page, "what does a model say")
    assert page.locator("#log img, #log script, #log a").count() == 0
    assert markup in page.inner_text(".assistant .text")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_light_and_dark_differ_and_can_be_read(browser, roomy, scheme):
    for page in opened(browser, roomy.url, color_scheme=scheme):
        say(page, LONG)
        back = page.evaluate("getComputedStyle(document.documentElement).colorScheme")
        assert back == "light dark"
        text = page.evaluate("getComputedStyle(document.querySelector('.text')).color")
        assert (text == "rgb(0, 0, 0)") == (scheme == "light")
        page.set_viewport_size({"width": 400, "height": 800})
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")


def test_a_server_that_is_gone_is_said(browser, home):
    server = Server(home, "--store", "64MiB")
    for page in opened(browser, server.url):
        server.end()
        say(page, "anybody?")
        assert "No answer" in page.inner_text(".error")
        expect(page.locator("#state")).to_contain_text("does not answer")
