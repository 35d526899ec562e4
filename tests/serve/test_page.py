"""Proves that every control of the chat page does what it says, in a real browser against a real server.

Method: Debian's chromium, driven by playwright; a tiny random model, whose answers are noise of a known
length. Screenshots are kept in PAGE_SHOTS where that is set. Skipped where either is missing.
"""

import json
import os
import re
import shutil
from pathlib import Path

import pytest

from tests.serve.conftest import Server

pytestmark = pytest.mark.slow
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
PATIENCE_MS = 180_000  # on a machine that does much else
SOME = re.compile(".{20}", re.S)
LONG = "words of one conversation that come again in each of its turns, " * 3
FILL = """() => { for (let size = 1 << 23; size > 0; size >>= 1) try {
    for (let at = 0; ; ++at) sessionStorage.setItem(`${size} ${at}`, "x".repeat(size)); } catch {} }"""
CONTRAST = Path(__file__).with_name("contrast.js").read_text()  # of the placeholder
FOCUSED = """() => { const e = document.activeElement; // its name, its ring, what it is called
    return [e.id || e.textContent, getComputedStyle(e).outlineStyle,
            e.labels?.length || e.ariaLabel || e.textContent]; }"""


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
def long_home(home, tmp_path_factory):
    """The model, with answers long enough to be stopped."""
    model = tmp_path_factory.mktemp("roomy") / "model"
    shutil.copytree(home, model)
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 8192}))
    return model


@pytest.fixture(scope="module")
def roomy(long_home):
    server = Server(long_home, "--store", "64MiB")
    yield server
    server.end()


@pytest.fixture
def page(browser, roomy):
    yield from opened(browser, roomy.url)


def expect(locator):
    from playwright.sync_api import expect as told

    told.set_options(timeout=PATIENCE_MS)
    return told(locator)


def opened(browser, url, model="tiny", **how):
    context = browser.new_context(viewport={"width": 1280, "height": 860}, **how)
    context.set_default_timeout(PATIENCE_MS)
    page, errors = context.new_page(), []
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.goto(url)
    expect(page.locator("#model")).to_have_text(model)
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


def answers(page, *pieces, **last):
    """Has the page hear these deltas, and no server."""
    told = [{"choices": [{"index": 0, "delta": piece, "finish_reason": None}]} for piece in pieces]
    told.append({"choices": [{"index": 0, "delta": {}, "finish_reason": last.pop("finish", "stop")}]})
    told.append({"choices": [], **last})
    body = "".join(f"data: {json.dumps(piece)}\n\n" for piece in told) + "data: [DONE]\n\n"
    heard = {"content_type": "text/event-stream", "body": body}
    page.route("**/v1/chat/completions", lambda route: route.fulfill(**heard))


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
    wanted = {"temperature": 0.3, "top_p": 0.5, "max_tokens": 5, "seed": 7, "top_k": 9, "min_p": 0.02}
    wanted["repetition_penalty"] = 1.1
    for name, value in wanted.items():
        page.fill(f"#{name}", str(value))
    body = asked(page, lambda: say(page, "hi", ended=False))
    assert body["messages"][0] == {"role": "system", "content": "be brief"}
    assert body | wanted == body and body["stream"] and body["stream_options"] == {"include_usage": True}
    for name in ("seed", "top_k"):
        page.fill(f"#{name}", "")
    assert not {"seed", "top_k"} & asked(page, lambda: say(page, "again", ended=False)).keys()


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
    wait_until(lambda: (s := roomy.stats()).get("requests_cancelled_total") and not s["requests_running"])
    page.click("text=Edit and resend")
    assert page.input_value("#message") == "go on" and page.locator(".turn").count() == 0
    page.fill("#max_tokens", "5")
    (message,) = asked(page, lambda: say(page, "something else", ended=False))["messages"]
    assert message["content"] == "something else"


def test_of_several_models_one_can_be_chosen_and_stays_so(page):
    page.route("**/v1/models", lambda route: route.fulfill(json={"data": [{"id": "tiny"}, {"id": "other"}]}))
    page.reload()
    answers(page, {"content": "said"})
    for name in ("tiny", "other"):
        page.select_option("#models", name)
        assert asked(page, lambda: say(page, "one", ended=False))["model"] == name
    page.reload()
    expect(page.locator("#models")).to_have_value("other")


def test_a_reload_keeps_the_conversation_and_new_forgets_it(page):
    page.fill("#max_tokens", "7000")
    say(page, "go on", ended=False)
    expect(page.locator(".assistant .text")).to_have_text(SOME)  # which finds no end by itself
    page.reload()
    assert page.locator(".turn").count() == 2 and "stopped" in page.inner_text("#log")
    page.fill("#max_tokens", "5")
    say(page, "remember me")
    assert page.locator(".turn").count() == 4
    page.click("#clear")
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
    answers(page, *({"content": markup[at : at + 7]} for at in range(0, len(markup), 7)))
    say(page, "what does a model say")
    assert page.locator("#log img, #log script, #log a").count() == 0
    assert markup in page.inner_text(".assistant .text")
    assert re.search(r"waiting saved, about\s*–", page.inner_text("#talk")), "nothing is known of it"


def test_every_tier_is_told_and_drawn_and_what_is_approximate(page):
    reuse = {"prompt_tokens": 1000, "reused_tokens": 900, "memory_tokens": 500, "disk_tokens": 300}
    reuse |= {"peer_tokens": 100, "approximate_tokens": 40, "ttft_s": 0.05, "cold_ttft_estimate_s": 1.5}
    answers(page, {"content": "so"}, kv_reuse=reuse)
    say(page, "where from?")
    told = page.locator(".assistant .reuse").first.inner_text()
    assert "900 of 1000 tokens reused (500 memory, 300 disk, 100 other host)" in told
    assert "40 approximate" in told and "first token after 50 ms" in told
    assert "about 1.50 s without the store (an estimate)" in told
    kinds = ("", " .memory", " .disk", " .peer", " .computed")
    wide = [page.locator(f".assistant .bar{kind}").bounding_box()["width"] for kind in kinds]
    assert [part / wide[0] for part in wide] == pytest.approx([1, 0.5, 0.3, 0.1, 0.1], abs=0.01)
    assert re.search(r"approximately\s*40\s", page.inner_text("#talk"))
    assert re.search(r"waiting saved, about\s*1.45 s", page.inner_text("#talk"))
    assert page.get_attribute("#plot", "aria-label").endswith(": 50 ms reused from another host")
    style = "e => [getComputedStyle(e).backgroundColor, getComputedStyle(e).fill]"
    assert page.locator(".bar .peer").evaluate(style)[0] == page.locator("#plot .peer").evaluate(style)[1]


def test_thoughts_can_be_opened_and_an_answer_at_its_longest_says_so(page):
    thoughts = {"reasoning_content": "first "}, {"reasoning_content": "this"}
    answers(page, *thoughts, {"content": "x"}, finish="length")
    say(page, "think")
    assert page.locator(".assistant details span").text_content() == "first this"
    assert not page.locator(".assistant details span").is_visible()
    page.click(".assistant summary")
    assert page.locator(".assistant details span").is_visible()
    assert "ended at the longest answer" in page.inner_text("#log")


def test_a_message_of_100_kb_is_asked_whole_and_takes_no_more_room_than_a_page(page):
    answers(page, {"content": "long"})
    body = asked(page, lambda: say(page, "x y " * 25_000, ended=False))
    assert body["messages"] == [{"role": "user", "content": "x y " * 25_000}]
    assert page.locator(".user .text").bounding_box()["height"] < 400
    page.reload()
    assert len(page.locator(".user .text").text_content()) == 100_000


def test_a_full_storage_of_the_browser_stops_nothing(page):
    page.evaluate(FILL)
    say(page, "remember this")
    say(page, "and this")
    assert page.locator(".turn.assistant .reuse").count() == 2
    page.fill("#system", "be brief")
    page.reload()
    assert page.locator(".turn").count() == 0


def test_settings_and_figures_outlast_a_reload_and_the_key_does_not(page):
    say(page, "one")
    page.fill("#system", "be brief")
    page.fill("#top_p", "0.5")
    page.check("#window")
    page.fill("#recent", "48")
    page.fill("#key", "secret")
    page.reload()
    assert page.input_value("#system") == "be brief" and page.input_value("#top_p") == "0.5"
    expect(page.locator("#sizes")).to_be_visible()
    assert page.input_value("#key") == ""
    assert "secret" not in page.evaluate("JSON.stringify({...sessionStorage})")
    assert page.locator("#plot rect").count() == 1
    body = asked(page, lambda: say(page, "two", ended=False))
    assert body["window"]["recent"] == 48 and body["messages"][0]["content"] == "be brief"


def test_everything_can_be_done_by_keyboard(page):
    keys = page.keyboard
    page.fill("#max_tokens", "7000")
    page.focus("#message")
    keys.type("one")
    keys.press("Shift+Enter")
    keys.type("two")
    keys.press("Enter")
    assert page.get_attribute("#log", "aria-busy") == "true"  # an answer of any length ends some time
    expect(page.locator(".assistant .text")).to_have_text(SOME)
    assert page.inner_text(".user .text") == "one\ntwo"
    keys.press("Escape")
    page.wait_for_selector("#stop", state="hidden")
    assert "stopped" in page.inner_text("#log") and page.get_attribute("#log", "aria-busy") == "false"
    met = []
    for _ in range(40):
        keys.press("Tab")
        who = page.evaluate(FOCUSED)
        if who[0] == "message":
            break
        if who[0] != page.locator("body").text_content():
            met.append(who)
    wanted = ["send", "system", "temperature", "top_p", "max_tokens", "seed", "window", "key", "clear"]
    names = [name for name, *_ in met]
    assert [name for name in names if name in wanted] == wanted and "Edit and resend" in names
    assert all(outline != "none" and name for _, outline, name in met), met
    page.get_by_text("Edit and resend").press("Enter")  # a long answer, scrolled by keys, may stand before it
    assert page.input_value("#message") == "one\ntwo" and page.locator(".turn").count() == 0


def test_who_sets_something_while_an_answer_comes_stays_there(page):
    page.fill("#max_tokens", "200")
    say(page, "go on", ended=False)
    page.focus("#system")
    page.keyboard.type("be brief")
    page.wait_for_selector("#stop", state="hidden")
    assert page.evaluate("document.activeElement.id") == "system"
    assert page.input_value("#system") == "be brief"


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_no_rule_for_access_is_broken(browser, roomy, scheme):
    """axe's: names, roles, contrast, what scrolls; in each state of the page."""
    axe = pytest.importorskip("axe_playwright_python.sync_playwright", reason="make page installs it").Axe()
    for page in opened(browser, roomy.url, color_scheme=scheme, bypass_csp=True):

        def look(state, page=page):
            broken = axe.run(page).response["violations"]
            met = [(rule["id"], [node["html"] for node in rule["nodes"]]) for rule in broken]
            assert not met, (state, met)

        look("before anything was said")
        page.check("#window")
        say(page, "x y " * 600)
        look("an answer, and a message that scrolls")
        page.fill("#max_tokens", "7000")
        say(page, "go on", ended=False)
        expect(page.locator(".assistant .text").last).to_have_text(SOME)
        look("an answer under way")
        page.click("#stop")
        page.wait_for_selector("#stop", state="hidden")
        page.uncheck("#window")
        say(page, "x y " * 25_000)
        answers(page, {"reasoning_content": "a thought"}, {"content": "said"}, finish="length")
        say(page, "and now?")
        page.set_viewport_size({"width": 400, "height": 800})
        look("a stopped answer, a refusal, thoughts; narrow")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_light_and_dark_differ_and_can_be_read(browser, roomy, scheme):
    for page in opened(browser, roomy.url, color_scheme=scheme):
        say(page, LONG)
        assert page.evaluate("getComputedStyle(document.documentElement).colorScheme") == "light dark"
        black = page.evaluate("getComputedStyle(document.querySelector('.text')).color") == "rgb(0, 0, 0)"
        assert black == (scheme == "light")
        page.set_viewport_size({"width": 390, "height": 800})
        page.evaluate("scrollTo(0, 0)")
        box = page.locator("#message").bounding_box()
        assert box["y"] > 0 and box["y"] + box["height"] <= 800, "settings stand below, the message in view"
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
        plot, first = (page.locator(name).bounding_box()["x"] for name in ("#plot", "#plot rect"))
        assert 0 <= first - plot < 3, "its bars begin where the figures above them do"
        assert page.evaluate(CONTRAST) >= 4.5, "of what stands in a field before anything is written"


def test_a_server_that_is_gone_is_said(browser, server):
    running = server("--store", "64MiB")
    for page in opened(browser, running.url):
        running.end()
        say(page, "anybody?")
        assert "No answer: the connection" in page.inner_text(".error")
        expect(page.locator("#state")).to_contain_text("does not answer")


def test_a_server_that_dies_in_an_answer_leaves_what_it_said(browser, server, long_home):
    running = server("--store", "64MiB", model=long_home)
    for page in opened(browser, running.url):
        page.fill("#max_tokens", "7000")
        say(page, "go on", ended=False)
        expect(page.locator(".assistant .text")).to_have_text(SOME)
        running.process.kill()
        page.wait_for_selector("#stop", state="hidden")
        assert "It breaks off" in page.inner_text(".error")
        assert len(page.inner_text(".assistant .text")) >= 20
        expect(page.locator("#state")).to_contain_text("does not answer")


def test_a_server_with_keys_answers_once_one_is_typed(browser, server, tmp_path):
    (tmp_path / "keys").write_text("secret\n")
    running = server("--store", "64MiB", "--api-key-file", str(tmp_path / "keys"))
    for page in opened(browser, running.url, model=""):
        expect(page.locator("#state")).to_contain_text("key")
        say(page, "anybody?")
        assert "No answer" in page.inner_text(".error")
        page.fill("#key", "secret")
        page.press("#key", "Tab")
        expect(page.locator("#model")).to_have_text("tiny")
        expect(page.locator("#state")).to_have_text("")
        assert len(asked(page, lambda page=page: say(page, "and now?", ended=False))["messages"]) == 1
        assert page.locator(".assistant .reuse").count() == 1
