"""Pages: whole without a network, and deaf to whatever a corpus, a tokenizer or a prompt holds."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import dataclass, field, fields, is_dataclass, replace
from html import escape, unescape
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path
from typing import Any

import halves
import pytest
import zoo
from making import made
from shell import TEXT, shell

from ffedit import Corpus, Slot, inspect_edit, inspect_memory, inspect_model, inspect_prompt, load, load_stacks
from ffedit.display.html import page
from ffedit.display.html.charts import Line, lines, stacked
from ffedit.inspector.corpus_pass.memory_pass import Settings
from ffedit.inspector.slots import View
from ffedit.inspector.views.model_view import Removing

EVIL = "<script>alert(1)</script>\"'&\x00\x1b\n\u202eright\ud800 שלום "
PROMPT = "the Eiffel tower is located in"
VOID = {"meta", "link", "line", "path", "circle", "rect", "input"}
# What stands in a view by its own right: names of memories, measures, cases.
OURS = {"slot", "address", "name", "memory", "case", "stack", "settings"}
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


@pytest.fixture(scope="module")
def views(tmp_path_factory: pytest.TempPathFactory) -> dict[str, View]:
    """One view of each kind, and both of an encoder."""
    folder = tmp_path_factory.mktemp("pages")
    (folder / "text.txt").write_text(TEXT * 3)
    corpus, editable = Corpus(folder / "text.txt"), zoo.shared("gpt2")
    memory = inspect_memory(editable, "1.7", corpus, top=4)
    prompt = inspect_prompt(editable, PROMPT, {"1.7": 0.0}, "Rome", top=2)
    edit = inspect_edit(editable, made(editable, {1: 1}, size=0.3), corpus, top=3)
    report = inspect_model(editable, corpus, folder / "pass", Settings(5, 20, 0), Removing(2, 2))
    encoder = load_stacks((halves.model("bert"), zoo.words()))[0]
    (folder / "texts.jsonl").write_text(f'{{"text": "{PROMPT} Paris"}}\n' * 3)
    texts = Corpus(folder / "texts.jsonl")
    around = inspect_model(encoder, texts, folder / "around", Settings(5, 20, 0), Removing(2, 2))
    return {
        "encoder": around,
        "encoder_memory": inspect_memory(encoder, "1.7", texts, top=3),
        "memory": memory,
        "prompt": prompt,
        "edit": edit,
        "model": report,
    }


@dataclass
class Read(HTMLParser):
    """What a page is made of; fails where a tag is left open."""

    links: list[str] = field(default_factory=list)
    fetched: list[str] = field(default_factory=list)
    tags: list[str] = field(default_factory=list)
    open: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = dict(attrs)
        self.tags.append(tag)
        if tag == "a":
            self.links.append(found["href"] or "")
        self.fetched += [v or "" for k, v in attrs if k in ("src", "href", "srcset", "action", "data") and tag != "a"]
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert tag in VOID or self.open.pop() == tag


def read(text: str) -> Read:
    (found := Read()).feed(text)
    assert not found.open
    return found


def poisoned(value: Any) -> Any:
    """A view that has `EVIL` in all of its texts."""
    if isinstance(value, str):
        return EVIL + value
    if isinstance(value, tuple):
        return tuple(map(poisoned, value))
    if isinstance(value, dict):
        return {key: inner if key in OURS else poisoned(inner) for key, inner in value.items()}
    if is_dataclass(value) and not isinstance(value, Slot | type):
        mine = {one.name: getattr(value, one.name) for one in fields(value) if one.name not in OURS}
        return replace(value, **{name: poisoned(inner) for name, inner in mine.items()})
    return value


KINDS = pytest.mark.parametrize("kind", ["memory", "prompt", "edit", "model", "encoder", "encoder_memory"])


@KINDS
def test_a_page_needs_nothing_else(kind: str, views: dict[str, View]) -> None:
    text = page(views[kind])
    found = read(text)
    assert not found.links
    assert found.fetched == ["data:,"] and not re.search(r"@import|url\(|https?:", text)
    assert "script" not in found.tags and found.tags.count("h1") == 1 and found.tags.count("main") == 1
    assert 'name="viewport"' in text and "prefers-color-scheme: dark" in text
    levels = [int(tag[1]) for tag in found.tags if re.fullmatch(r"h\d", tag)]
    assert all(after <= before + 1 for before, after in pairwise(levels))
    if kind == "model":
        assert found.tags.count("svg") >= len(views[kind].groups())  # type: ignore[attr-defined]


@KINDS
def test_what_a_text_holds_is_shown_and_does_nothing(kind: str, views: dict[str, View]) -> None:
    text = page(poisoned(views[kind]))
    found = read(text)
    assert "script" not in found.tags and "<script" not in text and "alert(1)" in text
    assert not [c for c in text if not c.isprintable() and c not in "\n"]
    plain = read(page(views[kind]))
    assert found.tags == plain.tags
    text.encode()


def test_a_page_says_what_its_view_says(views: dict[str, View]) -> None:
    def said(kind: str) -> str:
        text = page(views[kind])
        return " ".join(unescape(re.sub(r"<style>.*</style>|<[^>]*>", " ", text, flags=re.DOTALL)).split())

    assert said("encoder").count("Not measured.") == 3
    memory, prompt, report = (views[kind] for kind in ("memory", "prompt", "model"))
    shown = said("memory")
    assert "Memory 1.7 of" in shown
    for one in memory.triggers:  # type: ignore[attr-defined]
        assert f"{one.coefficient:.2f}" in shown and one.next.token.strip() in shown
    shown = said("prompt")
    for layer in prompt.layers:  # type: ignore[attr-defined]
        assert all(f"{one.slot} {one.promotes.token.strip()}" in shown for one in layer.firing)
    shown = said("model")
    for measure in report.measures:  # type: ignore[attr-defined]
        assert measure.definition.title in shown and measure.definition.text in shown


def test_charts_leave_gaps_out_and_put_the_best_rank_on_top() -> None:
    ranks = lines("rank", [Line("a", [1.0, None, 1000.0])], list("012"), "rank")
    (_, best, *_), (_, worst, *_) = ranks.dots
    assert (best, worst) == (ranks.top, ranks.bottom)
    assert [label for _, label in ranks.y_ticks] == ["1", "10", "100", "1,000"]
    changes = lines("change", [Line("a", [-1.0, 0.02])], list("01"), "change")
    assert changes.y_ticks[0][1] == "−100%" and changes.dots[0][1] == changes.bottom
    cases = stacked("cases", [Line("a", [0.25, None]), Line("b", [0.75, 1.0])], list("01"))
    assert [round(box.height / (cases.bottom - cases.top), 3) for box in cases.boxes] == [0.25, 0.75, 0, 1]
    for nothing in ([None], [float("nan")]):
        assert lines("nothing", [Line("a", nothing)], ["0"], "share").dots == []
    assert lines("zero", [Line("a", [0.0, 0.0])], list("01"), "share").dots[0][1] == cases.bottom


@pytest.mark.parametrize(
    "words", [("memory", "1.7", "--corpus", "text.txt"), ("prompt", PROMPT), ("edit", "edit", "--corpus", "text.txt")]
)
def test_a_command_writes_a_page(
    words: tuple[str, ...], empty: Path, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (empty / "text.txt").write_text(TEXT)
    if words[0] == "edit":
        made(load(model), {1: 1}, size=0.3).save("edit")
    ran = shell(capsys, "inspect", *words, "--model", model, "--quiet", "--html", "page.html")
    assert (ran.code, ran.out, ran.err) == (0, "", "")
    assert f"ffedit inspect {words[0]}" in Path("page.html").read_text(encoding="utf-8")
    ran = shell(capsys, "inspect", *words, "--model", model, "--html", "nowhere/page.html")
    assert ran.code != 0 and ran.err.count("\n") == 1 and "cannot be written" in ran.err
    assert sorted(path.name for path in empty.iterdir() if "page" in path.name) == ["page.html"]


def test_a_report_and_a_prompt_before_and_after_an_edit(
    empty: Path, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (empty / "text.txt").write_text(TEXT)
    small = ("--top", "4", "--positions", "10", "--removing", "2", "2", "--corpus", "text.txt", "--out", "out")
    ran = shell(capsys, "inspect", "model", "--model", model, *small, "--quiet", "--html", "model.html")
    assert (ran.code, ran.err) == (0, "")
    assert "ffedit inspect model" in Path("model.html").read_text()
    made(load(model), {1: 1}, size=0.3).save("edit")
    ran = shell(capsys, "inspect", "prompt", PROMPT, "--edit", "edit", "--quiet", "--html", "both.html")
    assert (ran.code, ran.err) == (0, "") and "Before the edit" in Path("both.html").read_text()


@pytest.fixture
def browser(tmp_path: Path) -> Callable[[str, str], str]:
    """Opens a page, runs a script in it, and gives what it returns; fails on any console message."""
    if CHROMIUM is None:
        pytest.skip("no chromium here (Debian: apt-get install chromium)")

    def run(text: str, script: str) -> str:
        run_it = f"onload = () => {{ document.documentElement.dataset.found = (() => {{ {script} }})() }}"
        (path := tmp_path / "opened.html").write_text(f"{text}<script>{run_it}</script>")
        command = [CHROMIUM, "--headless=new", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr"]
        profile = f"--user-data-dir={tmp_path / 'profile'}"
        done = subprocess.run(
            [*command, profile, "--dump-dom", path.as_uri()],
            capture_output=True, text=True, timeout=120, check=True,
        )  # fmt: skip
        assert "CONSOLE" not in done.stderr, done.stderr
        found = re.search(r'data-found="([^"]*)"', done.stdout)
        assert found is not None, done.stdout[:500]
        return unescape(found[1])

    return run


# Chromium has no window as narrow as a phone, but a frame can be. Wide is what stands out to the right, unless it
# scrolls in a box of its own.
WIDE = """
const frame = document.querySelector('iframe'), { document: page, innerWidth: width } = frame.contentWindow
const edge = page.documentElement.clientWidth + 1
const wide = [...page.querySelectorAll('body *')].filter(one => !one.closest('.box table') &&
  one.getBoundingClientRect().right > edge).map(one => one.tagName + '.' + one.className)
return [width, page.documentElement.scrollWidth <= width, ...wide].join(' ')
"""


def test_a_page_fits_a_phone(browser: Callable[[str, str], str], views: dict[str, View]) -> None:
    for text in (page(shown) for view in views.values() for shown in (view, poisoned(view))):
        frame = f'<!doctype html><iframe width="390" height="800" style="border:0" srcdoc="{escape(text)}"></iframe>'
        assert browser(frame, WIDE) == "390 true"
