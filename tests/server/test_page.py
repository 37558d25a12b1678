"""The web page: its files, and what a person sees and does in a browser."""

from __future__ import annotations

import re
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import llamakv.server
from llamakv.server.limits import ServeOptions
from tests.server.fake_service import FOREVER, say
from tests.server.keeping_service import KeepingService, line, serving

PAGE = Path(llamakv.server.__file__).parent / "page"
HTML = "<img src=x onerror=\"document.title='owned'\"> <b>bold</b> &amp;"
MESSAGES = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "What is on?"},
    {"role": "assistant", "content": "A play."},
    {"role": "user", "content": "And later?"},
    {"role": "assistant", "content": "Nothing."},
]
PATIENCE_S = 30.0

Browser = Any
"""Selenium's driver; it is imported where it is used, since the test may be skipped."""


# ---------------------------------------------------------------- the files


def test_the_page_is_small() -> None:
    assert sum(path.stat().st_size for path in PAGE.iterdir()) < 28_000
    assert sorted(path.name for path in PAGE.iterdir()) == ["app.js", "index.html", "style.css"]


def test_the_page_has_nothing_from_elsewhere_and_nothing_inline() -> None:
    html, script, style = ((PAGE / name).read_text() for name in ("index.html", "app.js", "style.css"))
    assert re.findall(r"https?:|//[a-z]", html + style) == []
    assert re.findall(r"https?:|\bimport\b", script) == []
    assert re.findall(r"(?:src|href)=\"([^\"]*)\"", html) == ["data:,", "style.css", "app.js"]
    assert re.findall(r"<style|\sstyle=|\son\w+=|<script>", html) == []


def test_the_script_never_makes_html_of_text() -> None:
    script = (PAGE / "app.js").read_text()
    assert re.findall(r"innerHTML|outerHTML|insertAdjacent|document\.write|eval\(|localStorage", script) == []


# ---------------------------------------------------------------- in a browser


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    chromium = shutil.which("chromium") or shutil.which("chromium-browser")
    chromedriver = shutil.which("chromedriver")
    if chromium is None or chromedriver is None:
        pytest.skip("chromium and chromedriver are not installed")
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service

    options = webdriver.ChromeOptions()
    options.binary_location = chromium
    for argument in (
        "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-dev-shm-usage",
        "--disable-background-networking", "--disable-component-update", "--disable-sync", "--window-size=1200,800",
        f"--user-data-dir={tmp_path_factory.mktemp('chromium')}",
    ):  # fmt: skip
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=Service(chromedriver))
    yield driver
    driver.quit()


@pytest.fixture
def service() -> KeepingService:
    return KeepingService()


@pytest.fixture
def page(browser: Browser, service: KeepingService) -> Iterator[Page]:
    with serving(service) as url:
        yield Page(browser, url)
        browser.get("about:blank")


class Page:
    """What a person can see and do."""

    def __init__(self, browser: Browser, url: str) -> None:
        self.browser = browser
        self.url = url
        browser.get_log("browser")
        browser.get(url)

    def all(self, selector: str) -> list[Any]:
        return self.browser.find_elements("css selector", selector)

    def one(self, selector: str) -> Any:
        return self.until(lambda: self.all(selector), lambda found: len(found) > 0)[0]

    def texts(self, selector: str) -> list[str]:
        return list(
            self.browser.execute_script(
                "return [...document.querySelectorAll(arguments[0])].map((one) => one.textContent)", selector
            )
        )

    def until(self, look: Callable[[], Any], is_so: Callable[[Any], bool]) -> Any:
        """What is there once it is as it should be; as it is at last otherwise."""
        until = time.monotonic() + PATIENCE_S
        while not is_so(found := look()) and time.monotonic() < until:
            time.sleep(0.02)
        return found

    def becomes(self, selector: str, *texts: str) -> None:
        assert self.until(lambda: self.texts(selector), lambda found: found == list(texts)) == list(texts)

    def shows(self, selector: str) -> bool:
        return bool(self.one(selector).is_displayed())

    def hides(self, selector: str) -> bool:
        return not self.until(lambda: self.one(selector).is_displayed(), lambda shown: not shown)

    def type(self, *keys: str) -> None:
        self.one("#text").send_keys(*keys)

    def act(self, name: str, act: str) -> None:
        """One of the buttons of a conversation in the list."""
        box = self.one_line(name)
        box.find_element("css selector", "summary").click()
        box.find_element("xpath", f".//button[text()='{act}']").click()

    def one_line(self, name: str) -> Any:
        def look() -> list[Any]:
            return [box for box in self.all("#sessions li") if box.find_element("tag name", "b").text == name]

        return self.until(look, lambda found: len(found) == 1)[0]

    def answer_dialog(self, text: str | None) -> None:
        """Give a name, or say yes."""
        from selenium.webdriver.common.keys import Keys

        assert self.until(lambda: self.one("#dialog").is_displayed(), bool)
        if text is not None:
            self.one("#dialog-name").send_keys(Keys.CONTROL, "a", Keys.NULL, text)
        self.one("#dialog-ok").click()

    def complaints(self) -> list[str]:
        """What the browser's console says, other than of refused requests."""
        told = [entry["message"] for entry in self.browser.get_log("browser") if entry["level"] == "SEVERE"]
        return [message for message in told if "the server responded with" not in message]


@pytest.mark.slow
def test_a_message_is_answered_as_it_is_written_and_what_it_took_is_told(page: Page, service: KeepingService) -> None:
    from selenium.webdriver.common.keys import Keys

    service.script = lambda ask: [*say("Good ")[:1], 0.3, *say("day.")]
    page.one("summary").click()
    page.one("#system").send_keys("Be brief.")
    page.type("two", Keys.SHIFT, Keys.ENTER, Keys.NULL, "lines")
    assert service.asks == []
    page.type(Keys.ENTER)
    page.becomes("#log article > div", "Be brief.", "two\nlines", "Good ")
    page.becomes("#log article > div", "Be brief.", "two\nlines", "Good day.")
    facts = page.until(lambda: page.texts(".facts"), lambda found: found != [""])[0]
    assert re.fullmatch(
        r"1,024 of 1,100 tokens were cached \(memory\) · waited 3\.2 s for its turn · "
        r"[\d.]+ s to first token · [\d,]+ tokens/s",
        facts,
    )
    ask = service.asks[0]
    assert [(message.role, message.content) for message in ask.prompt] == [  # type: ignore[union-attr]
        ("system", "Be brief."),
        ("user", "two\nlines"),
    ]
    assert (ask.sampling.temperature, ask.sampling.max_tokens) == (0.7, 512)
    assert re.fullmatch(r"chat-\d{8}-\d{6}", str(ask.session))
    page.type("again", Keys.ENTER)
    page.until(lambda: len(service.asks), lambda n: n == 2)
    assert [message.content for message in service.asks[1].prompt] == [  # type: ignore[union-attr]
        "Be brief.",
        "two\nlines",
        "Good day.",
        "again",
    ]
    assert service.asks[1].session == ask.session
    assert page.complaints() == []


@pytest.mark.slow
def test_nothing_that_is_said_becomes_html(page: Page, service: KeepingService) -> None:
    service.lines = {HTML: line(HTML, first_text=HTML)}
    service.model = service.model.__class__(**{**_fields(service.model), "name": HTML})
    service.script = lambda ask: say(HTML)
    page.becomes("#sessions b", HTML)
    page.becomes("#sessions .first", HTML)
    page.becomes("h1", HTML)
    page.type(HTML, "\n")
    page.becomes("#log article > div", HTML, HTML)
    assert page.all("img, #log b") == []
    assert page.browser.title == f"{HTML} · llamakv"
    assert page.complaints() == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("finish", "told"),
    [("stop", None), ("length", "the limit of tokens"), ("context", "the end of the context"),
     ("timeout", "the limit of time"), ("interrupted", "its reader, or with the server")],
)  # fmt: skip
def test_how_an_answer_ended_is_told_in_words(page: Page, service: KeepingService, finish: str, told: str) -> None:
    service.script = lambda ask: say("Good ", "day.", finish=finish)
    page.type("hello", "\n")
    facts = page.until(lambda: page.texts(".facts"), lambda found: found not in ([], [""]))[0]
    assert (facts.partition("ended by ")[2] or None) == told


@pytest.mark.slow
def test_of_many_conversations_the_last_ones_are_listed_and_the_others_counted(
    page: Page, service: KeepingService
) -> None:
    service.lines = {f"talk-{n}": line(f"talk-{n}") for n in range(1234)}
    page.becomes("#more", "and 1,034 more, used longer ago")
    assert page.texts("#sessions b") == [f"talk-{n}" for n in range(200)]
    service.lines = {f"talk-{n}": line(f"talk-{n}") for n in range(200)}
    assert page.hides("#more")


@pytest.mark.slow
def test_stop_ends_the_request_and_keeps_what_was_said(page: Page, service: KeepingService) -> None:
    service.script = lambda ask: [*say("Once ", "upon ")[:2], FOREVER]
    page.type("a story", "\n")
    page.becomes("#log article > div", "a story", "Once upon ")
    page.one("#stop").click()
    assert page.until(lambda: service.answers[0].was_left, bool) is True
    page.becomes(".facts", "stopped")
    assert page.hides("#stop")
    service.script = lambda ask: say("go on")
    page.type("and then?", "\n")
    page.becomes("#log article > div", "a story", "Once upon ", "and then?", "go on")
    assert [message.role for message in service.asks[1].prompt] == ["user", "assistant", "user"]  # type: ignore[union-attr]


@pytest.mark.slow
def test_an_answer_goes_on_while_another_conversation_is_open(page: Page, service: KeepingService) -> None:
    service.script = lambda ask: [*say("one ")[:1], 0.5, *say("two")]
    page.type("count", "\n")
    page.becomes("#log article > div", "count", "one ")
    page.one("#new").click()
    page.becomes("#log article > div")
    assert page.shows("#send")
    name = str(service.asks[0].session)
    page.until(lambda: service.n_active, lambda n: n == 0)
    page.one_line(name).find_element("class name", "open-it").click()
    page.becomes("#log article > div", "count", "one two")
    assert page.texts(".facts")[0].startswith("1,024 of 1,100 tokens were cached (memory)")
    assert page.texts("#error") == [""]


@pytest.mark.slow
def test_a_refused_message_can_be_sent_again(page: Page) -> None:
    page.type("busy", "\n")
    page.becomes("#error", "2 requests wait, which is all that may (try again in 7 s)")
    assert page.one("#text").get_attribute("value") == "busy"
    page.becomes("#log article > div")
    page.becomes("#name", "New conversation")


@pytest.mark.slow
def test_a_failure_inside_an_answer_is_told_and_what_came_before_stays(page: Page, service: KeepingService) -> None:
    from llamakv.errors import NoRoomError

    service.script = lambda ask: [*say("Half ")[:1], NoRoomError("the context is full: 512 of 512 tokens")]
    page.type("all of it", "\n")
    page.becomes("#error", "the context is full: 512 of 512 tokens")
    page.becomes("#log article > div", "all of it", "Half ")
    page.becomes(".facts", "broken off")


@pytest.mark.slow
def test_a_saved_conversation_is_resumed_forked_saved_pinned_and_deleted(page: Page, service: KeepingService) -> None:
    service.lines = {"plan": line("plan"), "rules": line("rules", n_cells_live=9, is_pinned=True)}
    service.messages = {"plan": MESSAGES, "plan-rain": MESSAGES[:3]}
    page.becomes("#sessions .where", "1,040 tokens · disk", "1,040 tokens · memory + disk · pinned")
    page.one_line("plan").find_element("class name", "open-it").click()
    page.becomes("#log article > div", *(message["content"] for message in MESSAGES))
    assert ("resume", "plan", "") in service.done
    page.becomes("#facts", "1,040 tokens · memory + disk")
    assert page.one("#system").get_attribute("value") == "Be brief."

    page.all("#log footer button")[0].click()
    page.answer_dialog("plan-rain")
    page.becomes("#log article > div", *(message["content"] for message in MESSAGES[:3]))
    assert ("fork", "plan", "plan-rain", "", "turn1") in service.done
    page.becomes("#name", "plan-rain")

    page.act("plan", "save as")
    page.answer_dialog("plan-copy")
    page.becomes("#sessions b", "plan", "rules", "plan-rain", "plan-copy")
    assert ("save", "plan", "plan-copy", "") in service.done
    page.act("plan", "fork")
    page.answer_dialog("rules")
    page.becomes("#error", "session 'rules' exists")

    page.act("rules", "unpin")
    page.until(lambda: service.lines["rules"].is_pinned, lambda pinned: not pinned)
    assert ("pin", "rules", "", False) in service.done
    page.act("plan", "delete")
    page.becomes("#dialog-text", "plan is forgotten, in memory and in the store.")
    assert "plan" in service.lines
    page.answer_dialog(None)
    page.becomes("#sessions b", "rules", "plan-rain", "plan-copy")
    assert list(service.lines) == ["rules", "plan-rain", "plan-copy"]
    assert page.complaints() == []


@pytest.mark.slow
def test_a_conversation_is_there_again_after_a_reload_and_behind_back(page: Page, service: KeepingService) -> None:
    page.type("hello", "\n")
    page.becomes("#log article > div", "hello", "Good day.")
    name = str(service.asks[0].session)
    assert page.browser.current_url.endswith(f"/#{name}")
    service.messages = {name: [MESSAGES[1], {**MESSAGES[2], "finish": "length"}], "plan: läuft #1": MESSAGES}
    page.browser.refresh()
    page.becomes("#log article > div", "What is on?", "A play.")
    page.becomes(".facts", "ended by the limit of tokens")
    page.becomes("#name", name)
    page.type("more", "\n")
    page.until(lambda: len(service.asks), lambda n: n == 2)
    assert service.asks[1].session == name
    assert [message.content for message in service.asks[1].prompt] == ["What is on?", "A play.", "more"]  # type: ignore[union-attr]

    service.lines["plan: läuft #1"] = line("plan: läuft #1")
    page.one_line("plan: läuft #1").find_element("class name", "open-it").click()
    page.becomes("#name", "plan: läuft #1")
    page.browser.refresh()
    page.becomes("#log article > div", *(message["content"] for message in MESSAGES))
    page.browser.back()
    page.becomes("#name", name)
    page.one("#new").click()
    page.becomes("#log article > div")
    assert page.browser.current_url.endswith("/")
    assert page.complaints() == []


@pytest.mark.slow
def test_an_address_of_no_conversation_is_told(page: Page, service: KeepingService) -> None:
    for name in ("gone", "%E0%A4%A", "plan"):
        page.browser.get("about:blank")
        page.browser.get(f"{page.url}#{name}")
        page.becomes("#name", "New conversation")
        if name != "%E0%A4%A":  # which is no name at all
            page.becomes("#error", f"session '{name}' does not exist")
            assert page.browser.current_url == f"{page.url}/"
    service.lines["plan"] = line("plan")
    service.messages["plan"] = MESSAGES
    page.browser.get(f"{page.url}#plan")
    page.becomes("#log article > div", *(message["content"] for message in MESSAGES))
    assert page.texts("#error") == [""]


@pytest.mark.slow
def test_what_is_still_being_answered_for_this_tab_is_waited_for(page: Page, service: KeepingService) -> None:
    service.lines["plan"] = line("plan", is_active=True)
    service.messages["plan"] = MESSAGES[:2]
    page.browser.get("about:blank")
    page.browser.get(f"{page.url}#plan")
    page.one_line("plan")
    time.sleep(1.0)
    assert page.texts("#log article > div") == []
    service.messages["plan"] = MESSAGES[:3]
    service.lines["plan"] = line("plan")
    page.becomes("#log article > div", *(message["content"] for message in MESSAGES[:3]))


@pytest.mark.slow
def test_a_dialog_that_is_left_does_nothing(page: Page, service: KeepingService) -> None:
    from selenium.webdriver.common.keys import Keys

    service.lines = {"plan": line("plan")}
    page.act("plan", "delete")
    page.browser.switch_to.active_element.send_keys(Keys.ESCAPE)
    assert page.hides("#dialog")
    assert list(service.lines) == ["plan"]


@pytest.mark.slow
def test_the_strip_shows_where_the_server_stands(page: Page, service: KeepingService) -> None:
    page.becomes("#cells", "100 of 400 cells · 10 pinned")
    page.becomes("#live dd", "3 of 8", "0", "2", "75 %", "0")
    widths = [page.one(f"#{name}").value_of_css_property("width") for name in ("bar", "pinned", "used")]
    bar, pinned, used = (float(width.removesuffix("px")) for width in widths)
    assert (pinned / bar, used / bar) == pytest.approx((0.025, 0.225), abs=0.005)  # pixels are rounded


@pytest.mark.slow
def test_a_hidden_tab_asks_for_nothing(page: Page, service: KeepingService) -> None:
    service.list_time_s = 1.0
    page.until(lambda: service.n_listing, lambda n: n > 0)  # hidden while it looks
    hide = "Object.defineProperty(document, 'hidden', {value: %s, configurable: true}); "
    page.browser.execute_script(hide % "true" + "document.dispatchEvent(new Event('visibilitychange'))")
    page.until(lambda: service.n_listing, lambda n: n == 0)
    n_before = len(service.done)
    time.sleep(2.5)
    assert len(service.done) == n_before
    page.browser.execute_script(hide % "false" + "document.dispatchEvent(new Event('visibilitychange'))")
    assert page.until(lambda: len(service.done), lambda n: n > n_before) > n_before


@pytest.mark.slow
def test_a_server_that_is_away_is_said_to_be_until_it_is_back(browser: Browser) -> None:
    with serving(KeepingService(line("plan"))) as url:
        page = Page(browser, url)
        page.becomes("#sessions b", "plan")
        assert page.hides("#away")
    told = page.until(lambda: page.texts("#away")[0], lambda text: "in 4 s" in text)
    assert told == "The server is away. The next look is in 4 s."
    page.type("hello", "\n")
    page.becomes("#error", "the server cannot be reached")
    with serving(KeepingService(line("plan-b")), port=int(url.rpartition(":")[2])):
        page.becomes("#sessions b", "plan-b")
        assert page.hides("#away")
    browser.get("about:blank")


@pytest.mark.slow
def test_a_key_is_asked_for_where_one_is_needed(browser: Browser, service: KeepingService) -> None:
    service.lines = {"plan": line("plan")}
    with serving(service, ServeOptions(keys={"ann": "right-key"})) as url:
        page = Page(browser, url)
        assert page.until(lambda: page.shows("#key"), bool)
        assert service.done == []
        page.one("#key-text").send_keys("wrong-key\n")
        page.becomes("#key-note", "the server does not know that key")
        page.one("#key-text").send_keys("right-key\n")
        page.becomes("#sessions b", "plan")
        assert page.hides("#key")
        page.type("hello", "\n")
        page.becomes("#log article > div", "hello", "Good day.")
        assert browser.execute_script("return localStorage.length") == 0
        service.messages["plan"] = MESSAGES
        browser.get(f"{url}#plan")
        page.becomes("#log article > div", *(message["content"] for message in MESSAGES))
        browser.execute_script("sessionStorage.clear()")
        browser.refresh()
        assert page.until(lambda: page.shows("#key"), bool)
        page.one("#key-text").send_keys("right-key\n")
        page.becomes("#log article > div", *(message["content"] for message in MESSAGES))
        page.becomes("#sessions b", "plan", str(service.asks[0].session))
        browser.get("about:blank")


@pytest.mark.slow
def test_a_server_without_keys_asks_for_none(page: Page) -> None:
    page.becomes("#cells", "100 of 400 cells · 10 pinned")
    assert not page.shows("#key")


@pytest.mark.slow
def test_everything_that_can_be_used_has_a_name(page: Page, service: KeepingService) -> None:
    service.lines = {"plan": line("plan")}
    page.one_line("plan")
    page.one("#options summary").click()
    page.one("#sessions summary").click()
    used = [one for one in page.all("button, input, textarea, summary, [role]") if one.is_displayed()]
    assert len(used) >= 12
    assert [one.get_attribute("outerHTML") for one in used if not one.accessible_name and one.text != ""] == []
    assert [one.get_attribute("id") for one in used if one.tag_name != "summary" and not one.accessible_name] == []


@pytest.mark.slow
def test_a_phone_shows_one_thing_at_a_time_and_never_scrolls_sideways(page: Page, service: KeepingService) -> None:
    service.lines = {"x" * 90: line("x" * 90, first_text="y" * 200)}
    service.messages = {"x" * 90: [{"role": "user", "content": "z" * 400}]}
    size = {"width": 360, "height": 740, "deviceScaleFactor": 1, "mobile": True}
    page.browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    try:
        page.becomes("#sessions b", "x" * 90)
        assert (page.shows("main"), page.all("aside")[0].is_displayed()) == (True, False)
        page.one("#menu").click()
        assert (page.one("main").is_displayed(), page.shows("aside")) == (False, True)
        assert page.one("#menu").get_attribute("aria-expanded") == "true"
        assert _overhang(page) == 0
        page.one("#sessions .open-it").click()
        page.becomes("#log article > div", "z" * 400)
        assert page.shows("main")
        assert _overhang(page) == 0
    finally:
        page.browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


def _overhang(page: Page) -> int:
    script = "return document.scrollingElement.scrollWidth - document.documentElement.clientWidth"
    return int(page.browser.execute_script(script))


def _fields(model: object) -> dict[str, object]:
    return {name: getattr(model, name) for name in model.__dataclass_fields__}  # type: ignore[attr-defined]
