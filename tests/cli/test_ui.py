"""The page of `ffedit ui`: trace, edit, ask, undo and report, on this machine only."""

from __future__ import annotations

import re
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from gradio_client import Client
from pages import CHROMIUM, needs_nothing_else, said
from playwright.sync_api import Page, expect, sync_playwright
from shell import FACT, shell

import ffedit
from ffedit.cli.ui import HOST, ui
from ffedit.cli.work.page import Session, fact_of, page
from ffedit.errors import FactError

pytestmark = pytest.mark.usefixtures("warm_cache")

FIELDS = (FACT["subject"], FACT["prompt"], FACT["target"], FACT["previous"], "{} stands in\n\n", "the Nile = Egypt\n")


@pytest.fixture
def session(model: Path) -> Session:
    return Session(ffedit.load(model), ffedit.load)


def test_the_fields_are_a_fact() -> None:
    fact = fact_of(*FIELDS)
    assert fact.paraphrases == ("{} stands in",)
    assert [(probe.prompt, probe.target) for probe in fact.neighbors] == [("the Nile", "Egypt")]
    with pytest.raises(FactError):
        fact_of("", *FIELDS[1:])
    with pytest.raises(FactError, match=r"'the Nile' cannot be read; write a line like: .* = Berlin"):
        fact_of(*FIELDS[:-1], "the Nile\n")
    with pytest.raises(FactError, match="' = Berlin' cannot be read"):
        fact_of(*FIELDS[:-1], " = Berlin")


def test_another_model_has_none_of_the_edits(session: Session) -> None:
    session.edits.append(object())  # type: ignore[arg-type]
    assert "`Editable atlas" in session.load("atlas") and session.edits == []


@pytest.fixture
def url(session: Session, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[str]:
    """Where the page is served."""
    monkeypatch.setenv("GRADIO_ANALYTICS_ENABLED", "False")
    monkeypatch.setenv("GRADIO_TEMP_DIR", str(tmp_path / "gradio"))
    blocks = page(session)
    _, url, _ = blocks.launch(server_name=HOST, prevent_thread_lock=True, quiet=True)
    try:
        yield url
    finally:
        blocks.close()


@pytest.fixture
def caller(url: str, tmp_path: Path) -> Any:
    """A client of the page, over HTTP."""
    return Client(url, verbose=False, download_files=str(tmp_path))


def test_a_fact_is_traced_written_asked_for_and_undone_over_http(session: Session, caller: Any) -> None:
    pytest.importorskip("matplotlib")
    prompt, ids = "the Eiffel tower is located in", session.editable.probe_ids(8)
    before = session.editable.model(ids).logits
    was, same = caller.predict(prompt, api_name="/ask")
    assert was == same == session.ask(prompt)[0]
    assert caller.predict(*FIELDS, api_name="/trace")["plot"].startswith("data:image/")
    drawn, scores, report, state = caller.predict(*FIELDS, api_name="/edit")
    assert drawn["plot"].startswith("data:image/") and "efficacy" in scores and "**Rome**" in state
    assert not session.editable.model(ids).logits.equal(before)
    text = Path(report).read_text(encoding="utf-8")
    needs_nothing_else(text)
    assert "ffedit ui --model" in text
    assert "the model now says “Rome” instead of “Paris”" in said(text)
    asked = caller.predict(prompt, api_name="/ask")
    assert asked == session.ask(prompt) and asked[0] == was and asked[1].strip().startswith("Rome")
    assert "No edits in it" in caller.predict(api_name="/undo")
    assert session.editable.model(ids).logits.equal(before)
    assert caller.predict(prompt, api_name="/ask") == (was, was)


def test_mistakes_are_one_line_on_the_page(caller: Any) -> None:
    with pytest.raises(Exception, match="no edit to undo"):
        caller.predict(api_name="/undo")
    with pytest.raises(Exception, match="subject"):
        caller.predict("", *FIELDS[1:], api_name="/trace")


def test_no_result_is_promised() -> None:
    options = {form for option in ui.params for form in option.opts}
    assert "--quiet" in options and "--json" not in options, "the page has no result"


def test_a_port_in_use_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as other:
        other.bind((HOST, 0))
        other.listen()
        port = other.getsockname()[1]
        done = shell(capsys, "ui", "--port", str(port))
    assert (done.code, done.out, done.err.count("\n")) == (1, "", 1)
    assert f"port {port}: Address already in use; name another with --port" in done.err


# As a person uses it: in Chromium, with the mouse and the keyboard --------------------------------------


@pytest.fixture
def tab(url: str) -> Iterator[Page]:
    """The page in a tab; at the end, no script has failed in it."""
    failed: list[object] = []
    with sync_playwright() as started:
        browser = started.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        tab = browser.new_page(viewport={"width": 1280, "height": 1000})
        tab.set_default_timeout(60_000)
        tab.on("pageerror", lambda error: failed.append(error))
        tab.goto(url)
        yield tab
        browser.close()
    assert not failed


@pytest.mark.skipif(CHROMIUM is None, reason="no chromium here (Debian: apt-get install chromium)")
def test_a_person_traces_edits_asks_and_undoes(tab: Page, tmp_path: Path) -> None:
    expect.set_options(timeout=60_000)
    fields = {
        "Subject": FACT["subject"],
        "Prompt, {} for the subject": FACT["prompt"],
        "New object": FACT["target"],
        "Old object": FACT["previous"],
        "Other wordings, one a line": "{} stands in",
        "Answers that must stay: prompt = answer": "the Nile = Egypt",
    }
    for label, text in fields.items():
        tab.get_by_label(label, exact=True).fill(text)

    tab.get_by_role("button", name="Trace", exact=True).click()
    picture = tab.locator("img[src*=';base64,']")
    expect(picture).to_be_visible()
    assert picture.evaluate("image => image.naturalWidth") > 300

    tab.get_by_role("button", name="Edit", exact=True).click()
    expect(tab.get_by_text("efficacy").first).to_be_visible()
    expect(tab.get_by_text("No edits in it")).to_have_count(0)
    asked, before, now = (tab.get_by_label(label, exact=True) for label in ("Ask", "Before the edits", "Now"))
    asked.fill("the Eiffel tower is located in")
    asked.press("Enter")
    expect(now).to_have_value(re.compile(r"^\s*Rome"))
    as_before = before.input_value()
    assert as_before and not as_before.strip().startswith("Rome")

    with tab.expect_download() as report:
        tab.get_by_role("button", name="Report of the last edit").click()
    report.value.save_as(tmp_path / "report.html")
    assert "Rome" in (tmp_path / "report.html").read_text(encoding="utf-8")

    tab.get_by_role("button", name="Undo", exact=True).click()
    expect(tab.get_by_text("No edits in it")).to_be_visible()
    asked.press("Enter")
    expect(now).to_have_value(as_before)

    tab.get_by_role("button", name="Undo", exact=True).click()
    expect(tab.get_by_text("no edit to undo")).to_be_visible()
    tab.screenshot(path=tmp_path / "page.png")
