"""Uses the web page of `march serve` as a person would, in a headless Chromium.

    python drive.py --march target/release/march --configs configs [--screenshots DIR [--model DIR]]

The models have random weights: the test is about the page and the server, not about what is answered. Every wait is
for a condition. --screenshots writes pictures for a phone and a desktop, light and dark, with the answers of --model.
"""

import argparse
import contextlib
import json
import re
import shutil
import subprocess
import tempfile
import threading
import time
import urllib.request
from pathlib import Path

from selenium import webdriver
from selenium.common.exceptions import NoSuchElementException, StaleElementReferenceException
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.support.ui import Select

PATIENCE = 30  # seconds for one condition
LONG = 100_000  # tokens of an answer that does not end by itself in time
TEXT = "Alice was beginning to get very tired of sitting by her sister on the bank."

# Every text on the screen with its contrast to what is behind it, if that is less than 4.5.
CONTRAST = """
const pixel = document.createElement("canvas").getContext("2d", {willReadFrequently: true});
const over = (colors) => {
  pixel.clearRect(0, 0, 1, 1);
  for (const color of colors) { pixel.fillStyle = color; pixel.fillRect(0, 0, 1, 1); }
  return [...pixel.getImageData(0, 0, 1, 1).data].slice(0, 3);
};
const light = (rgb) => {
  const [r, g, b] = rgb.map((v) => v / 255).map((v) => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
  return 0.2126 * r + 0.7152 * g + 0.0722 * b;
};
const found = [];
let seen = 0;
for (const element of document.querySelectorAll("body, body *")) {
  const own = [...element.childNodes].some((node) => node.nodeType === 3 && node.data.trim());
  if (!own && !("value" in element && element.value) || !element.checkVisibility({visibilityProperty: true})) continue;
  if (element.matches("option, :disabled, .hidden, svg *")) continue;
  const behind = [];
  for (let e = element; e; e = e.parentElement) behind.unshift(getComputedStyle(e).backgroundColor);
  const pair = [over(behind), over([...behind, getComputedStyle(element).color])].map(light).sort((a, b) => b - a);
  const contrast = (pair[0] + 0.05) / (pair[1] + 0.05);
  seen++;
  if (contrast < 4.5) found.push(`${element.tagName}.${element.className}: ${contrast.toFixed(2)}`);
}
return [seen, found];
"""

# The lengths that the newest answer had while it was written.
WATCH = """
window.lengths = [];
new MutationObserver(() => {
  const answer = document.querySelector(".turn.running .answer .text");
  if (answer) window.lengths.push(answer.textContent.length);
}).observe(document.getElementById("turns"), {subtree: true, childList: true, characterData: true});
"""


class Server:
    """A running `march serve`."""

    def __init__(self, march, model, *flags):
        command = [march, "serve", "--json", "--addr", "127.0.0.1:0", "--model", model, *flags]
        command = [str(part) for part in command]
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, encoding="utf-8")
        # Keep reading, so that the server never waits for its log.
        said = []
        reader = threading.Thread(target=lambda: said.extend(self.process.stderr), daemon=True)
        reader.start()
        ready = self.process.stdout.readline()
        if not ready:
            reader.join()
            raise AssertionError(f"the server did not start: {''.join(said)}")
        self.url = json.loads(ready)["url"]

    def get(self, path):
        with urllib.request.urlopen(self.url + path, timeout=PATIENCE) as answer:
            return answer.headers, answer.read().decode()

    def session(self, name):
        return json.loads(self.get(f"/v1/sessions/{name}")[1])

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.process.terminate()
        try:
            self.process.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            self.process.kill()


def until(condition, what):
    """Waits until the condition gives something true, and returns it."""
    end = time.monotonic() + PATIENCE
    while True:
        with contextlib.suppress(NoSuchElementException, StaleElementReferenceException):
            if found := condition():
                return found
        if time.monotonic() > end:
            raise AssertionError(f"waited {PATIENCE} s in vain: {what}")
        time.sleep(0.02)


class Page:
    """The page in the browser."""

    def __init__(self, driver):
        self.driver = driver

    def run(self, script, *arguments):
        return self.driver.execute_script(script, *arguments)

    def one(self, selector):
        return self.driver.find_element(By.CSS_SELECTOR, selector)

    def all(self, selector):
        return self.driver.find_elements(By.CSS_SELECTOR, selector)

    def text(self, selector):
        """The text in the document, whether it is on the screen or not."""
        return self.one(selector).get_property("textContent")

    def texts(self, selector):
        return self.run("return [...document.querySelectorAll(arguments[0])].map((e) => e.textContent)", selector)

    def value(self, selector):
        return self.one(selector).get_property("value")

    def open(self, url):
        """Opens the page anew; addresses that differ only after # would not load it again."""
        self.driver.get("about:blank")
        self.driver.get(url)
        self.ready()

    def ready(self):
        until(lambda: self.one("#send").is_enabled() and self.text("#model"), "the page is loaded")

    def fill(self, selector, value):
        field = self.one(selector)
        field.clear()
        field.send_keys(str(value))

    def idle(self):
        until(lambda: self.one("#send").is_displayed() and self.one("#send").is_enabled(), "the page is idle")

    def write(self, text):
        self.fill("#input", text)
        self.one("#input").send_keys(Keys.ENTER)

    def turns(self):
        return len(self.all(".turn:not(.running)"))

    def ask(self, text):
        """Sends a text and waits for the answer, which is returned."""
        before = self.turns()
        self.write(text)
        until(lambda: self.turns() == before + 1 or self.text("#alert"), "the answer is whole")
        assert not self.text("#alert"), self.text("#alert")
        self.idle()
        return self.texts(".turn .answer .text")[-1]

    def name(self):
        return self.run("return location.hash.slice(1)")

    def size(self, width, height, mobile=False):
        metrics = {"width": width, "height": height, "deviceScaleFactor": 2 if mobile else 1, "mobile": mobile}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)

    def colors(self, scheme):
        media = {"prefers-color-scheme": scheme, "prefers-reduced-motion": "reduce"}
        features = [{"name": name, "value": value} for name, value in media.items()]
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})

    def log(self):
        """What the browser complained about since the last call."""
        return [entry["message"] for entry in self.driver.get_log("browser") if entry["level"] in ("SEVERE", "WARNING")]

    def quiet(self):
        log = self.log()
        assert not log, f"the browser complains: {log}"

    def no_wider(self):
        wider = self.run(
            """return [document.documentElement, ...document.querySelectorAll("#main, #scroll, #foot, .panel")]
            .filter((e) => e.scrollWidth > e.clientWidth).map((e) => `${e.tagName} ${e.id}`)"""
        )
        assert not wider, f"wider than the window: {wider}"

    def readable(self):
        seen, low = self.run(CONTRAST)
        assert seen > 20 and not low, f"of {seen} texts: {low}"


def checkpoint(options, folder, preset):
    """A checkpoint with random weights, and without an end-of-text token, so that answers end where requests say."""
    output = Path(folder, preset.replace("/", "-"))
    config = output.with_suffix(".toml")
    text = Path(options.configs, preset).with_suffix(".toml").read_text(encoding="utf-8")
    config.write_text(text.replace("vocab_size = 257", "vocab_size = 256"), encoding="utf-8")
    subprocess.run([options.march, "init", "--config", config, "--output", output], check=True, capture_output=True)
    return output


def answers_arrive_in_steps(page, server):
    page.open(server.url)
    assert page.one("#empty").is_displayed()
    assert page.driver.switch_to.active_element == page.one("#input")
    page.run(WATCH)
    page.fill("#max-tokens", 120)
    # Shift+Enter begins a new line and sends nothing.
    page.fill("#input", "Hello")
    page.one("#input").send_keys(Keys.SHIFT, Keys.ENTER)
    assert page.value("#input") == "Hello\n" and not page.all(".turn")
    answer = page.ask(TEXT)
    lengths = page.run("return window.lengths")
    steps = sorted(set(lengths))
    assert len(steps) > 5 and lengths == sorted(lengths), lengths
    assert steps[-1] == len(answer), (steps[-1], len(answer))
    assert page.name() and page.value("#input") == ""
    line = page.text(".turn .numbers")
    assert re.match(r"120 tokens · [0-9.]+ tokens/s · ended at max tokens · conversation", line), line
    kept = server.session(page.name())
    assert kept["turns"] == 1 and kept["history"][0]["answer"] == answer, kept
    assert kept["history"][0]["messages"] == [{"role": "user", "content": TEXT}], kept
    assert page.text("#title") == kept["id"] and kept["saved"] is True and page.one("#unsaved").is_displayed() is False
    # The same request has the same answer: the seed counts, and is sent.
    first = page.name()
    page.one("#new").click()
    until(lambda: page.turns() == 0, "a new conversation")
    page.fill("#seed", 1)
    assert page.ask(TEXT) != answer
    page.one("#new").click()
    until(lambda: page.turns() == 0, "a new conversation")
    page.fill("#seed", 0)
    assert page.ask(TEXT) == answer and page.name() != first
    page.quiet()


def policies_apply(page, server):
    assert page.value("#interval") == "64" and page.value("#top-k") == ""
    page.fill("#interval", 16)
    Select(page.one("#storage")).select_by_visible_text("int8")
    assert "read again" in page.text("#policy-hint")
    page.ask("And then?")
    assert page.texts(".turn .policy")[-1] == "interval=16 top-k=dense storage=int8"
    kept = server.session(page.name())
    assert kept["policy"] == "interval=16 top-k=dense storage=int8", kept
    assert "next message on" in page.text("#policy-hint")
    # The chart has a point for each turn, and says the same in words.
    assert len(page.all("#chart circle")) == 2
    assert "in 2 turns" in page.one("#chart svg").get_attribute("aria-label")
    assert len(page.all("#chart tbody tr")) == 2 and "anchors" in page.text("#memory-now")
    # One that the server refuses leaves everything as it was.
    page.fill("#retention", "some")
    page.write("More")
    until(lambda: "retention" in page.text("#alert"), "the server's message")
    page.idle()
    assert page.value("#input") == "More" and page.turns() == 2
    assert all("400" in entry for entry in page.log())
    page.one("#own-policy").click()
    assert page.value("#retention") == "all" and page.value("#interval") == "64"
    page.fill("#interval", 16)
    page.quiet()


def what_was_read_is_shown(page):
    page.ask("Who was tired?")
    page.all(".recall summary")[-1].click()
    view = ".turn:last-child "
    segments = until(lambda: page.all(view + ".segment"), "segments")
    recalled = "".join(page.texts(view + ".segment"))
    assert TEXT in recalled, recalled
    assert "later text is in the current state" in page.text(view + ".read")

    def labels():
        return [segment.get_attribute("aria-label") for segment in segments]

    def shares():
        return page.run("return arguments[0].map((e) => getComputedStyle(e).backgroundColor)", segments)

    mean = labels()
    for number, label in enumerate(mean, 1):
        assert label.startswith(f"Anchor {number}, tokens {16 * number - 15} to {16 * number}, weight "), label
    percents = [float(re.search(r"weight <?([0-9.]+) %", label).group(1)) for label in mean]
    none = float(re.search(r"([0-9.]+) %", page.text(view + ".none")).group(1))
    assert abs(sum(percents) + none - 100) < 1, (percents, none)
    assert len(set(shares())) > 1, shares()

    # Arrow keys move between segments, and the detail follows.
    page.run("arguments[0].focus()", segments[0])
    steps = {Keys.ARROW_RIGHT: 2, Keys.ARROW_DOWN: 3, Keys.ARROW_LEFT: 2, Keys.END: len(segments), Keys.HOME: 1}
    for keys, number in steps.items():
        page.driver.switch_to.active_element.send_keys(keys)
        assert page.driver.switch_to.active_element == segments[number - 1], (keys, number)
        assert page.text(view + ".detail caption") == f"Anchor {number} · tokens {16 * number - 15} to {16 * number}"
    assert [segment.get_attribute("tabindex") for segment in segments].count("0") == 1
    assert page.texts(view + ".detail thead th") == ["Layer", "mean", "1", "2", "3", "4"]
    cells = page.texts(view + ".detail td")
    assert len(cells) == 10 and all(cell.endswith(" %") for cell in cells), cells
    # So does the pointer.
    webdriver.ActionChains(page.driver).move_to_element(segments[1]).perform()
    until(lambda: page.text(view + ".detail caption").startswith("Anchor 2 "), "the segment under the pointer")
    # A layer has its own shading and its own weights.
    shaded = shares()
    Select(page.one(view + "select")).select_by_value("2")
    assert shares() != shaded and labels() != mean
    assert page.text(view + ".detail th.chosen") == "3"
    page.quiet()


def forks_and_undoes(page, server):
    first = page.name()
    before = server.session(first)
    listed = len(page.all("#list li"))
    page.one("[aria-label='Fork after turn 2']").click()
    until(lambda: page.name() != first and page.turns() == 2, "the fork")
    page.idle()
    copy = server.session(page.name())
    assert copy["history"] == before["history"][:2] and server.session(first) == before
    assert len(page.all("#list li")) == listed + 1 and page.text("#list .open .pick span") == copy["id"]
    assert copy["policy"] == before["policy"] and page.value("#interval") == "16"
    # What a forked turn read is still known.
    page.all(".recall summary")[1].click()
    until(lambda: page.all(".turn:nth-child(2) .segment"), "segments in the fork")
    page.ask("In the fork")
    page.ask("Again")
    assert server.session(first) == before

    page.one(".turn:last-child .undo").click()
    until(lambda: page.turns() == 3, "the last turn is gone")
    page.idle()
    assert page.value("#input") == "Again" and server.session(page.name())["turns"] == 3
    page.one("#input").clear()
    page.one("[aria-label='Undo all turns after turn 1']").click()
    page.one("#confirm-no").click()
    assert page.turns() == 3
    page.one("[aria-label='Undo all turns after turn 1']").click()
    page.one("#confirm-yes").click()
    until(lambda: page.turns() == 1, "the later turns are gone")
    page.idle()
    assert server.session(page.name())["history"] == before["history"][:1]

    page.one(f"[aria-label='Delete {page.name()}']").click()
    page.one("#confirm-yes").click()
    until(lambda: page.name() == "" and len(page.all("#list li")) == listed, "the conversation is deleted")
    page.idle()
    page.one(f"#list [data-id='{first}'] .pick").click()
    until(lambda: page.turns() == len(before["history"]), "the first conversation")
    page.idle()
    page.quiet()


def failures_are_said(page, server):
    turns = page.turns()
    page.fill("#max-tokens", 10_000_000)
    page.write("Too much")
    until(lambda: "--context" in page.text("#alert"), "the server's message")
    page.idle()
    assert page.one("#alert").get_attribute("role") == "alert" and page.one("#alert").is_displayed()
    assert page.value("#input") == "Too much" and page.turns() == turns
    assert server.session(page.name())["turns"] == turns
    log = page.log()
    assert len(log) == 1 and "400" in log[0], log
    page.fill("#max-tokens", 40)
    page.ask("Enough")
    assert page.text("#alert") == ""
    # A conversation that does not exist.
    here = page.name()
    page.open(f"{server.url}/#nowhere")
    until(lambda: "nowhere" in page.text("#alert"), "the server's message")
    assert page.name() == "" and page.turns() == 0
    page.one(f"#list [data-id='{here}'] .pick").click()
    until(lambda: page.turns() == turns + 1, "the conversation")
    page.idle()
    assert all("404" in entry for entry in page.log())


def answers_can_be_stopped(page, server):
    turns = page.turns()
    page.fill("#max-tokens", LONG)
    for how in ("Escape", "button"):
        page.write(f"Stopped by {how}")
        until(lambda: "tokens/s" in "".join(page.texts(".turn.running .numbers")), "some tokens")
        assert page.one("#stop").is_displayed() and not page.one("#send").is_displayed()
        # Nothing that would change the conversation can be pressed meanwhile.
        assert not page.one("#new").is_enabled() and not page.one("#list .pick").is_enabled()
        if how == "Escape":
            page.one("#input").send_keys(Keys.ESCAPE)
        else:
            page.one("#stop").click()
        until(lambda: page.text("#status").startswith("Stopped"), "the page says that it stopped")
        page.idle()
        assert page.value("#input") == f"Stopped by {how}" and page.turns() == turns and not page.all(".running")
        assert page.driver.switch_to.active_element == page.one("#input")
        assert server.session(page.name())["turns"] == turns
        page.one("#input").clear()
    page.fill("#max-tokens", 40)
    page.ask("On we go")
    assert server.session(page.name())["turns"] == turns + 1
    page.quiet()


def a_reload_keeps_the_conversation(page):
    name, texts, policy = page.name(), page.texts(".text"), page.value("#interval")
    page.driver.refresh()
    page.ready()
    until(lambda: page.turns(), "the conversation")
    assert page.name() == name and page.texts(".text") == texts
    assert page.value("#interval") == policy and page.value("#max-tokens") == "40"
    page.all(".recall summary")[-1].click()
    until(lambda: "since the page was loaded" in page.text(".turn:last-child .read"), "why nothing is shown")
    page.quiet()


def it_fits_and_can_be_read(page):
    page.ask("And on a phone?")
    page.all(".recall summary")[-1].click()
    until(lambda: page.all(".segment"), "segments")
    for control in page.all("button, input, select, textarea"):
        if control.is_displayed():
            assert control.accessible_name, control.get_attribute("outerHTML")
    for scheme in ("light", "dark"):
        page.colors(scheme)
        page.readable()
    page.size(360, 740, mobile=True)
    page.no_wider()
    assert not page.one("#settings").is_displayed() and not page.one("#conversations").is_displayed()
    for drawer in ("settings", "conversations"):
        page.one(f"[data-open={drawer}]").click()
        until(lambda: page.one(f"#{drawer}").is_displayed(), f"the drawer {drawer}")
        page.no_wider()
        page.readable()
        page.driver.switch_to.active_element.send_keys(Keys.ESCAPE)
        until(lambda: not page.one(f"#{drawer}").is_displayed(), f"the drawer {drawer} is closed")
        assert page.driver.switch_to.active_element == page.one(f"[data-open={drawer}]")
    page.one("[data-open=conversations]").click()
    page.one("#list li:last-child .pick").click()
    until(lambda: page.turns() == 1 and not page.one("#conversations").is_displayed(), "the oldest conversation")
    page.no_wider()
    page.colors("light")
    page.size(1280, 800)
    page.quiet()


def nothing_comes_from_elsewhere(page, server):
    for path in ("/", "/page.css", "/page.js"):
        headers = server.get(path)[0]
        assert "default-src 'none'" in headers.get("content-security-policy", ""), (path, headers.items())
    loaded = page.run("return performance.getEntriesByType('resource').map((entry) => entry.name)")
    assert loaded and all(name.startswith(server.url) for name in loaded), loaded
    # The policy is in force: a script in the document does not run.
    page.run("const script = document.createElement('script'); script.textContent = 'window.inlined = true';"
             "document.body.append(script)")
    assert page.run("return window.inlined") is None
    log = page.log()
    assert log and all("Content Security Policy" in entry for entry in log), log
    # Texts stay texts.
    page.one("#new").click()
    until(lambda: page.turns() == 0, "a new conversation")
    page.ask("<img src=x onerror='window.inlined = true'><b>bold</b>")
    assert page.text(".turn .user .text").startswith("<img") and not page.all(".turn img, .turn .text b")
    page.quiet()


def keys_are_asked_for(page, server):
    page.driver.get("about:blank")
    page.driver.get(server.url)
    until(lambda: page.one("#key-dialog").is_displayed(), "the page asks for the key")
    assert page.text("#key-message") == ""
    page.fill("#key", "wrong")
    page.one("#key").send_keys(Keys.ENTER)
    until(lambda: "API key" in page.text("#key-message"), "the server's message")
    until(lambda: page.one("#key-dialog").is_displayed(), "the page asks again")
    page.fill("#key", "right")
    page.one("#key").send_keys(Keys.ENTER)
    page.ready()
    assert not page.one("#key-dialog").is_displayed()
    page.fill("#max-tokens", 20)
    page.ask("With the key")
    assert page.one("#unsaved").is_displayed()
    page.one(".recall summary").click()
    until(lambda: "no anchor to read yet" in page.text(".turn .read"), "why nothing is shown")
    page.driver.refresh()
    page.ready()
    until(lambda: page.turns() == 1, "the conversation, with the key of this tab")
    assert all("401" in entry for entry in page.log())


def models_without_routing_say_so(page, server):
    page.open(server.url)
    assert page.one("#no-routes").is_displayed() and not page.one("#policy").is_displayed()
    page.fill("#max-tokens", 20)
    page.ask(TEXT)
    page.one(".recall summary").click()
    until(lambda: "does not route" in page.text(".turn .read"), "why nothing is shown")
    assert len(page.all("#chart circle")) == 1 and "anchor" not in page.text(".turn .numbers")
    page.quiet()


def reasoning_is_folded(page, server):
    """With random weights, what the model thinks does not come to an end; what was known is under the second answer."""
    page.open(server.url)
    page.fill("#max-tokens", 30)
    for turn in range(2):
        assert page.ask(TEXT) == ""
        thoughts = page.all(".turn .thoughts")[turn]
        assert thoughts.is_displayed() and not page.all(".turn .thought")[turn].is_displayed()
    line = page.texts(".turn .numbers")[1]
    assert re.search(r"30 tokens · [0-9.]+ tokens/s · [0-9,]+ tokens of the prompt read, [0-9,]+ known", line), line
    kept = server.session(page.name())["history"]
    for reload in range(2):
        page.all(".turn .thoughts summary")[1].click()
        until(lambda: page.all(".turn .thought")[1].is_displayed(), "what the model thought")
        shown = page.run("return [...document.querySelectorAll('.thought')].map((it) => it.textContent)")
        assert shown == [turn["said"]["reasoning_content"] for turn in kept], (shown, kept)
        if reload == 0:
            page.driver.refresh()
            page.ready()
            until(lambda: page.turns() == 2, "the turns")
    page.quiet()


def the_model_inside_the_program_is_tried(page, server):
    """Its example and a question are filled in; the answer lights up the day that it came from."""
    page.open(server.url)
    ask_about_the_diary(page)
    answers = page.texts(".turn .answer .text")
    lines = page.texts(".turn .user .text")[0].split("\n")
    for question, answer, quote in zip(page.questions, answers, page.texts(".turn .source button"), strict=True):
        thing, date = re.search(r"the (\S+) on (.*)\?", question).groups()
        line = next(line for line in lines if line.startswith(f"{date}: "))
        assert f"the {thing} {'is ' if f': the {thing}' in line else ''}in the {answer}" in line, (question, answer, line)
        assert set(quote.split()) & set(line.split()), (quote, line)
    assert page.run("return CSS.highlights.get('source').size") > 1
    page.one(".turn .source button").click()
    page.no_wider()
    page.readable()
    page.quiet()


def ask_about_the_diary(page):
    page.one("#try").click()
    until(lambda: page.value("#input"), "the diary is filled in")
    page.questions = [page.value("#input").split("\n")[-1]]
    page.one("#input").send_keys(Keys.ENTER)
    until(lambda: page.turns() == 1, "the first answer")
    page.idle()
    other = page.texts(".turn .user .text")[0].split("\n")[50]
    date, thing = re.match(r"(.*?): the (\S+)", other).groups()
    page.questions.append(f"Where was the {thing} on {date}?")
    page.ask(page.questions[-1])


def screenshots(page, server, folder, own):
    folder.mkdir(parents=True, exist_ok=True)
    page.open(server.url)
    if own:
        page.fill("#max-tokens", 160)
        page.fill("#temperature", 0.8)
        page.fill("#interval", 16)
        page.ask(TEXT)
        page.ask("What did she see when the Rabbit ran by?")
    else:
        # One of the last days, so that the part that lights up is near the answer.
        page.one("#try").click()
        until(lambda: page.value("#input"), "the diary is filled in")
        lines = page.value("#input").split("\n")
        date, thing = re.search(r"^(.*?): .*the (\S+) in the \S+\. That", lines[57]).groups()
        page.run("arguments[0].value = arguments[1]", page.one("#input"),
                 "\n".join([*lines[:-1], f"Where was the {thing} on {date}?"]))
        page.one("#input").send_keys(Keys.ENTER)
        until(lambda: page.turns() == 1, "the answer")
        page.idle()
    for name, (width, height) in {"desktop": (1280, 800), "phone": (390, 844)}.items():
        page.size(width, height, mobile=name == "phone")
        if own and not page.all(".segment"):
            page.all(".recall summary")[-1].click()
            until(lambda: page.all(".segment"), "segments")
        page.run("arguments[0].scrollIntoView({block: 'end'})", page.one(".turn:last-child"))
        for scheme in ("light", "dark"):
            page.colors(scheme)
            page.driver.save_screenshot(str(folder / f"{name}-{scheme}.png"))
    page.colors("light")
    page.size(1280, 800)


def browser():
    options = webdriver.ChromeOptions()
    options.binary_location = shutil.which("chromium")
    # Containers have no user namespaces for the sandbox, and often a small /dev/shm.
    for flag in ("headless=new", "no-sandbox", "disable-dev-shm-usage", "disable-gpu", "no-first-run", "lang=en-US",
                 "disable-background-networking", "disable-component-update", "hide-scrollbars"):
        options.add_argument(f"--{flag}")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    return webdriver.Chrome(options=options, service=webdriver.ChromeService(shutil.which("chromedriver")))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--march", required=True)
    parser.add_argument("--configs", required=True, help="the folder of the presets")
    parser.add_argument("--screenshots", type=Path, help="write screenshots to this folder instead of testing")
    parser.add_argument("--model", help="the model of the screenshots; the one inside the program unless given")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        driver = browser()
        stack.callback(driver.quit)
        page = Page(driver)
        page.size(1280, 800)
        page.colors("light")
        march = checkpoint(options, folder, "tiny/march")
        if options.screenshots:
            with Server(options.march, options.model or "diary") as server:
                screenshots(page, server, options.screenshots, options.model)
            return

        def step(test, *arguments):
            began = time.monotonic()
            try:
                test(page, *arguments)
            except BaseException:
                picture = str(Path(tempfile.gettempdir(), "march-page-failed.png"))
                driver.save_screenshot(picture)
                print(f"{test.__name__} failed; the page: {picture}; the browser: {page.log()}", flush=True)
                raise
            print(f"{test.__name__.replace('_', ' ')}: {time.monotonic() - began:.1f} s", flush=True)

        with Server(options.march, march, "--sessions", Path(folder, "sessions")) as server:
            step(answers_arrive_in_steps, server)
            step(policies_apply, server)
            step(what_was_read_is_shown)
            step(forks_and_undoes, server)
            step(failures_are_said, server)
            step(answers_can_be_stopped, server)
            step(a_reload_keeps_the_conversation)
            step(it_fits_and_can_be_read)
            step(nothing_comes_from_elsewhere, server)
        key = Path(folder, "key")
        key.write_text("right\n", encoding="utf-8")
        with Server(options.march, march, "--api-key-file", key) as server:
            step(keys_are_asked_for, server)
        with Server(options.march, "diary") as server:
            step(the_model_inside_the_program_is_tried, server)
        with Server(options.march, checkpoint(options, folder, "tiny/gdn")) as server:
            step(models_without_routing_say_so, server)
        hybrid = checkpoint(options, folder, "tiny/hybrid")
        template = Path(options.configs).parent / "crates/server/src/tests/chat_template.jinja"
        shutil.copy(template, hybrid / "chat_template.jinja")
        with Server(options.march, hybrid) as server:
            step(reasoning_is_folded, server)


if __name__ == "__main__":
    main()
