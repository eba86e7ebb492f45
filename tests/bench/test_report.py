"""The report, read as text and in a real browser."""

from __future__ import annotations

import base64
import html
import importlib.util
import itertools
import re
import shutil
import sys
import time
from datetime import UTC, datetime
from html.parser import HTMLParser
from pathlib import Path

import pytest

from assay.bench._report import Extra, render, write_report

ROOT = Path(__file__).resolve().parents[2]
NOW = datetime(2026, 5, 1, 12, 30, tzinfo=UTC)


def load(path: Path):
    spec = importlib.util.spec_from_file_location(f"loaded_{path.stem}", path)
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


checks = load(Path(__file__).with_name("checks.py"))


@pytest.fixture(scope="module")
def picture(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("pictures") / "heads.png"
    path.write_bytes(
        base64.b64decode(
            "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNkYPhfDwAChwGA60e6kgAAAABJRU5ErkJggg=="
        )
    )
    return path


@pytest.fixture(scope="module")
def page(tmp_path_factory, picture) -> Path:
    extra = {
        "racs-alice": Extra(
            prepared=[
                {
                    "name": "tuned",
                    "at": {"arm": "alice"},
                    "result": {"best": 0.01, "grid": [{"rate": 0.01, "loss": 3.3}]},
                }
            ],
            artifacts=[("heads of layer 3", picture)],
        )
    }
    return write_report(tmp_path_factory.mktemp("report") / "report.html", checks.sample(), extra=extra, now=NOW)


def words(text: str) -> str:
    """What a reader sees, without the tags."""
    return " ".join(
        html.unescape(re.sub(r"<[^>]+>", " ", re.sub(r"<(style|script)>.*?</\1>", "", text, flags=re.S))).split()
    )


# As text


def test_every_claim_shows_the_papers_figure_beside_ours_and_the_command_that_repeats_it(page):
    text = words(page.read_text(encoding="utf-8"))
    assert "5 of 9 claims hold." in text
    for part in (
        "Alice ends at least 2 % below GaLore.",
        "perplexity 21.95 against 27.18 (LLaMA-130M, C4)",
        "0.938 , 95 % interval 0.921 to 0.955; the bar is at most 0.98",
        "Smaller than in the paper, in the full study: a 0.2M-parameter LLaMA on 21 MB of English",
        "assay check racs-alice --scale full --only pretrain",
        "assay check uncertain-imputation --scale quick --only coverage",
        "The share of heads is above one half, but the whole interval lies below the bar.",
        "missed[vattention] <= delta eps=0.05, delta=0.1",
        'muon: skipped, pip install "assay[peers]"',
        "licence public domain",
        "tuned arm=alice",
        "heads of layer 3",
        "seed 3 0.930",
        "1 min 03 s",
    ):
        assert part in text, part


def test_the_page_needs_nothing_outside_itself(page):
    text = page.read_text(encoding="utf-8")
    assert not re.search(r"""(?:src|href)=["'](?!#|data:|https://arxiv\.org/abs/)""", text)
    assert not re.search(r"@import|url\((?!#)", text)
    assert "default-src 'none'" in text


def test_a_run_on_its_own_terms_says_so_and_repeats_them():
    one = checks.sample()[1]
    one.partial = ("--seeds", "3", "--only", "pretrain", "--set", "text=a b")
    text = words(render([one, checks.sample()[1]], now=NOW))
    assert "on terms of its own: --seeds 3 --only pretrain --set 'text=a b'" in text
    assert "assay check racs-alice --scale full --only pretrain --seeds 3 --set 'text=a b'" in text


def test_what_quick_leaves_out_is_repeated_at_the_full_scale_and_a_reason_is_said_once():
    one = checks.sample()[2]
    one.verdicts[0].left_out = True
    claim, verdict = one.card.claims[1], one.verdicts[1]
    claim.testable, claim.because, verdict.note = "no", "it needs a telescope", "it needs a telescope"
    text = render([one], now=NOW)
    assert "assay check uncertain-imputation --scale full --only coverage" in words(text)
    assert words(text).count("it needs a telescope") == 1


def test_one_method_twice_has_two_addresses():
    twins = [checks.sample()[1] for _ in range(3)]
    twins[0].scale = "quick"
    text = render(twins, now=NOW)
    assert re.findall(r'<article class="method" id="([^"]+)"', text) == [
        "racs-alice-full",
        "racs-alice-full-2",
        "racs-alice-quick",
    ]


HOSTILE = "</script><script>alert(1)</script><img src=x onerror=alert(2)>\"'&{{ 7 * 7 }}\u202e"


def test_hostile_text_is_shown_and_never_read_as_markup(tmp_path):
    word = HOSTILE
    one = checks.sample()[1]
    claim = one.card.claims[0]
    claim.says = claim.reported = claim.because = claim.experiment = word
    one.card.title = one.card.summary = one.card.paper.title = one.card.paper.venue = one.card.paper.id = word
    one.card.fields = [word]
    verdict = one.verdicts[0]
    verdict.note = verdict.reported = word
    verdict.conditions[0].test = word
    verdict.conditions[0].cell = {word: word}
    one.machine = one.versions = {word: word}
    one.data = {word: {word: word}}
    for observation in one.evidence["pretrain"].observations:
        observation.arm = observation.why = word
        observation.curves = {word: [(0, 1.0), (1, 2.0)]}
        observation.at = {word: word}
    one.evidence = {word: one.evidence["pretrain"]}
    (tmp_path / "notes.txt").write_text(word)
    extra = Extra(
        prepared=[{"name": word, "at": {word: word}, "result": {word: word, "t": [{word: word}]}}],
        artifacts=[(word, tmp_path / "notes.txt")],
    )
    text = render([one], extra={one.method: extra}, now=NOW)
    tags: list[tuple[str, dict]] = []
    parser = HTMLParser()
    parser.handle_starttag = lambda tag, attributes: tags.append((tag, dict(attributes)))  # type: ignore[method-assign]
    parser.feed(text)
    assert [tag for tag, _ in tags].count("script") == 1
    assert "img" not in [tag for tag, _ in tags]
    assert not [name for _, attributes in tags for name in attributes if name.startswith("on")]
    assert "{{ 7 * 7 }}" in html.unescape(text)


def test_an_empty_page_says_what_to_do():
    text = words(render([], now=NOW))
    assert "Nothing was measured yet." in text
    assert "assay check NAME" in text


def test_figures_that_are_not_finite_or_missing_do_not_break_the_page():
    one = checks.sample()[0]
    bad = one.verdicts[0]
    bad.effect, bad.interval, bad.per_seed = "nan", ["-inf", "inf"], [None, "nan", 1.0]
    one.verdicts[1].interval = None
    one.verdicts[2].effect = one.verdicts[2].interval = None
    one.verdicts[2].per_seed = [None, None]
    assert "not a number" in render([one], now=NOW)


def test_the_largest_report_is_light_and_quick(tmp_path):
    synthetic = load(ROOT / "benchmarks" / "report.py").synthetic()
    start = time.process_time()
    path = write_report(tmp_path / "report.html", synthetic)
    assert time.process_time() - start < 10
    assert path.stat().st_size < 5e6
    assert path.read_text(encoding="utf-8").count('class="claim"') == 190


def test_pictures_over_the_limit_are_left_out_and_counted(tmp_path, monkeypatch, picture):
    monkeypatch.setattr("assay.bench._report.PICTURE_BYTES", 200)
    one = checks.sample()[1]
    text = render([one], extra={one.method: Extra(artifacts=[("a", picture), ("b", picture)])}, now=NOW)
    assert text.count("data:image/png") == 1
    assert "1 more file beside the store" in words(text)


def test_a_large_picture_is_made_smaller(tmp_path):
    image = pytest.importorskip("PIL.Image")
    path = tmp_path / "noise.png"
    image.effect_noise((1600, 1200), 90).save(path)
    one = checks.sample()[1]
    text = render([one], extra={one.method: Extra(artifacts=[("noise", path)])}, now=NOW)
    assert "data:image/webp;base64," in text
    assert len(text) < path.stat().st_size


# In a browser

CHROMIUM, DRIVER = "/usr/bin/chromium", "/usr/bin/chromedriver"


class Browser:
    """Headless Chromium on one page."""

    def __init__(self, folder: Path, width: int, height: int, phone: bool = False) -> None:
        from selenium import webdriver
        from selenium.webdriver.chrome.service import Service

        options = webdriver.ChromeOptions()
        options.binary_location = CHROMIUM
        for flag in (
            "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update",
            "--disable-sync", "--no-first-run", f"--user-data-dir={folder}", f"--window-size={width},{height}",
        ):  # fmt: skip
            options.add_argument(flag)
        options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
        if phone:
            options.add_experimental_option(
                "mobileEmulation", {"deviceMetrics": {"width": width, "height": height, "pixelRatio": 2.0}}
            )
        self.driver = webdriver.Chrome(options=options, service=Service(DRIVER))

    def js(self, code: str):
        return self.driver.execute_script("return " + code)

    def dark(self, on: bool) -> None:
        feature = {"name": "prefers-color-scheme", "value": "dark" if on else "light"}
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [feature]})

    def one(self, selector: str):
        return self.driver.find_element("css selector", selector)

    def shown(self, selector: str) -> list[str]:
        return self.js(f"[...document.querySelectorAll('{selector}')].filter(e => e.checkVisibility()).map(e => e.id)")

    def errors(self) -> list:
        return [entry for entry in self.driver.get_log("browser") if entry["level"] in ("SEVERE", "WARNING")]


def browser(tmp_path_factory, *size, **more) -> Browser:
    pytest.importorskip("selenium")
    for program in (CHROMIUM, DRIVER):
        if not shutil.which(program):
            pytest.skip(f"{program} is not installed (Debian: apt-get install chromium chromium-driver)")
    return Browser(tmp_path_factory.mktemp("profile"), *size, **more)


@pytest.fixture(scope="module")
def desktop(tmp_path_factory):
    it = browser(tmp_path_factory, 1360, 950)
    yield it
    it.driver.quit()


@pytest.fixture(scope="module")
def phone(tmp_path_factory):
    it = browser(tmp_path_factory, 390, 844, phone=True)
    yield it
    it.driver.quit()


@pytest.fixture
def opened(desktop, page) -> Browser:
    desktop.dark(False)
    desktop.driver.get(page.as_uri())
    desktop.js("localStorage.clear()")
    desktop.driver.get(page.as_uri())
    return desktop


def test_the_console_stays_empty_with_everything_open(opened):
    opened.one("#openall").click()
    opened.js("document.querySelectorAll('details').forEach(d => { d.open = true })")
    assert opened.errors() == []
    assert opened.js("document.querySelectorAll('.claim[open]').length") == 9


def test_search_narrows_to_the_claims_that_have_every_word(opened):
    from selenium.webdriver.common.keys import Keys

    box = opened.one("#q")
    box.send_keys("galore alice")
    assert opened.shown(".claim") == ["racs-alice--beats-galore"]
    assert opened.shown(".method") == ["racs-alice"]
    assert opened.one("#count").text == "1 of 9"
    box.send_keys(" nothing has this")
    assert opened.shown(".claim") == []
    assert opened.one("#nothing").is_displayed()
    box.send_keys(Keys.ESCAPE)
    assert len(opened.shown(".claim")) == 9
    assert opened.one("#count").text == "9 claims"


def test_verdicts_and_fields_filter_together(opened):
    opened.one(".tile.v-fails").click()
    assert opened.shown(".claim") == ["vattention--beats-top-k"]
    opened.one(".tile.v-open").click()
    assert opened.shown(".claim") == ["racs-alice--twice-as-fast", "vattention--beats-top-k"]
    assert opened.js("document.querySelector('.tile.v-open').getAttribute('aria-pressed')") == "true"
    opened.js(
        "(f => { f.value = 'inference'; f.dispatchEvent(new Event('change')) })(document.querySelector('#field'))"
    )
    assert opened.shown(".claim") == ["vattention--beats-top-k"]
    assert opened.js("[...document.querySelectorAll('.contents li')].filter(e => e.checkVisibility()).length") == 1


def test_the_keyboard_reaches_search_claims_and_filters(opened):
    from selenium.webdriver.common.keys import Keys

    body = opened.one("body")
    body.send_keys("/")
    assert opened.js("document.activeElement.id") == "q"
    opened.js("document.querySelector('#racs-alice--memory > summary').focus()")
    opened.driver.switch_to.active_element.send_keys(Keys.ENTER)
    assert opened.js("document.querySelector('#racs-alice--memory').open") is True
    opened.js("document.querySelector('.tile.v-holds').focus()")
    opened.driver.switch_to.active_element.send_keys(Keys.SPACE)
    assert len(opened.shown(".claim")) == 5
    assert opened.js("getComputedStyle(document.activeElement).outlineStyle") != "none"


def test_every_control_has_a_name_and_headings_do_not_skip_a_level(opened):
    nameless = "[...document.querySelectorAll('button, input, select, a, [role=img], [role=region]')].filter(e => e.checkVisibility() && !(e.textContent.trim() || e.getAttribute('aria-label') || (e.labels && e.labels.length))).length"
    assert opened.js(nameless) == 0
    levels = opened.js("[...document.querySelectorAll('h1,h2,h3,h4')].map(h => +h.tagName[1])")
    assert levels[0] == 1
    assert all(after - before <= 1 for before, after in itertools.pairwise(levels))


def test_a_link_to_a_claim_opens_it(opened, page):
    opened.driver.get("about:blank")
    opened.driver.get(page.as_uri() + "#vattention--guarantee")
    assert opened.js("document.querySelector('#vattention--guarantee').open") is True


LUMINANCE = """(() => {
  const bad = [];
  const parse = c => { const m = c.match(/[\\d.]+/g).map(Number); return c.startsWith('color(') ? m.slice(0, 3).map(v => v * 255) : m; };
  const lum = c => { const [r, g, b] = c.slice(0, 3).map(v => { v /= 255; return v <= .03928 ? v / 12.92 : ((v + .055) / 1.055) ** 2.4; }); return .2126 * r + .7152 * g + .0722 * b; };
  const under = e => { for (; e; e = e.parentElement) { const c = getComputedStyle(e).backgroundColor; if (!/, 0\\)|transparent/.test(c)) return parse(c); } return [255, 255, 255]; };
  for (const e of document.querySelectorAll('p, .says, .theirs, .verdict, .ours b, .ours small, h1, h2, h3, td, th, dt, dd, figcaption, summary, .tile .w, .command code, .legend li')) {
    if (!e.checkVisibility() || !e.textContent.trim()) continue;
    const a = lum(parse(getComputedStyle(e).color)), b = lum(under(e));
    const ratio = (Math.max(a, b) + .05) / (Math.min(a, b) + .05);
    if (ratio < 4.5) bad.push(e.className + ' ' + e.tagName + ' ' + ratio.toFixed(2));
  }
  return [...new Set(bad)];
})()"""


@pytest.mark.parametrize("dark", [False, True])
def test_text_has_contrast_in_light_and_dark(opened, dark):
    opened.dark(dark)
    opened.one("#openall").click()
    background = opened.js("getComputedStyle(document.body).backgroundColor")
    assert (sum(map(int, re.findall(r"\d+", background)[:3])) < 200) is dark
    assert opened.js(LUMINANCE) == []


def test_the_theme_button_changes_the_colours_and_is_remembered(opened):
    light = opened.js("getComputedStyle(document.body).backgroundColor")
    opened.one("#theme").click()
    dark = opened.js("getComputedStyle(document.body).backgroundColor")
    assert dark != light
    assert opened.one("#theme").text == "Light"
    opened.driver.refresh()
    assert opened.js("getComputedStyle(document.body).backgroundColor") == dark


def test_nothing_scrolls_sideways_on_a_phone_and_fingers_find_the_controls(phone, page):
    phone.driver.get(page.as_uri())
    for code in ("null", "document.querySelectorAll('details').forEach(d => { d.open = true })"):
        phone.js(code)
        assert phone.js("document.documentElement.scrollWidth <= innerWidth")
    small = phone.js(
        "[...document.querySelectorAll('button, input, select')].filter(e => e.checkVisibility() && e.getBoundingClientRect().height < 38).length"
    )
    assert small == 0
    assert phone.errors() == []


def test_paper_shows_every_claim_open(opened):
    pdf = opened.driver.execute_cdp_cmd("Page.printToPDF", {"printBackground": True})
    assert base64.b64decode(pdf["data"]).startswith(b"%PDF")
    opened.js("window.dispatchEvent(new Event('beforeprint'))")
    assert opened.js("document.querySelectorAll('.claim:not([open])').length") == 0
    opened.js("window.dispatchEvent(new Event('afterprint'))")
    assert opened.js("document.querySelectorAll('.claim[open]').length") == 0


def test_hostile_text_runs_nothing(opened, tmp_path):
    one = checks.sample()[1]
    one.card.title = one.card.claims[0].says = one.verdicts[0].note = HOSTILE
    opened.driver.get(write_report(tmp_path / "hostile.html", [one], now=NOW).as_uri())
    from selenium.common.exceptions import NoAlertPresentException

    with pytest.raises(NoAlertPresentException):
        _ = opened.driver.switch_to.alert.text
    assert opened.one(".method h2").text.startswith("</script><script>alert(1)</script>")
    assert opened.errors() == []
