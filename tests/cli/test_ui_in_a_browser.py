"""The page of `ffedit ui` as a person uses it: in Chromium, with the mouse and the keyboard."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from pages import CHROMIUM
from playwright.sync_api import Page, expect, sync_playwright
from shell import FACT

import ffedit
from ffedit.cli.ui import HOST
from ffedit.cli.work.page import Session, page

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no chromium here (Debian: apt-get install chromium)")


@pytest.fixture
def tab(model: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Page]:
    """The page in a tab; at the end, no script has failed in it."""
    monkeypatch.setenv("GRADIO_ANALYTICS_ENABLED", "False")
    monkeypatch.setenv("GRADIO_TEMP_DIR", str(tmp_path / "gradio"))
    blocks = page(Session(ffedit.load(model), ffedit.load))
    _, url, _ = blocks.launch(server_name=HOST, prevent_thread_lock=True, quiet=True)
    failed: list[object] = []
    try:
        with sync_playwright() as started:
            browser = started.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
            tab = browser.new_page(viewport={"width": 1280, "height": 1000})
            tab.set_default_timeout(60_000)
            tab.on("pageerror", lambda error: failed.append(error))
            tab.goto(url)
            yield tab
            browser.close()
    finally:
        blocks.close()
    assert not failed


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
