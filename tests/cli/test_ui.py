"""The page of `ffedit ui`: trace, edit, ask, undo and report, on this machine only."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pages import needs_nothing_else, said
from shell import FACT, shell

import ffedit
from ffedit.cli.ui import HOST, ui
from ffedit.cli.work.page import Session, fact_of, page
from ffedit.errors import EditError, FactError

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


def test_an_edit_is_written_asked_for_reported_and_undone(session: Session, model: Path) -> None:
    pytest.importorskip("matplotlib")
    ids = ffedit.load(model).probe_ids(8)
    before = session.editable.model(ids).logits
    assert session.trace(*FIELDS).axes
    drawn, scores, path, state = session.write(*FIELDS)
    assert drawn.axes and "efficacy" in scores and "**Rome**" in state
    assert not session.editable.model(ids).logits.equal(before)
    report = Path(path).read_text(encoding="utf-8")
    assert "Rome" in report and "ffedit ui --model" in report and "<script" not in report
    was, now = session.ask("the Eiffel tower is located in")
    assert was != now and now.strip().startswith("Rome")
    assert "No edits in it" in session.undo()
    assert session.editable.model(ids).logits.equal(before)
    with pytest.raises(EditError, match="no edit to undo"):
        session.undo()


def test_another_model_has_none_of_the_edits(session: Session) -> None:
    session.edits.append(object())  # type: ignore[arg-type]
    assert "`Editable atlas" in session.load("atlas") and session.edits == []


@pytest.fixture
def caller(session: Session, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Any]:
    """A client of the page, over HTTP."""
    gradio, client = pytest.importorskip("gradio"), pytest.importorskip("gradio_client")
    assert gradio
    monkeypatch.setenv("GRADIO_ANALYTICS_ENABLED", "False")
    monkeypatch.setenv("GRADIO_TEMP_DIR", str(tmp_path / "gradio"))
    blocks = page(session)
    _, url, _ = blocks.launch(server_name=HOST, prevent_thread_lock=True, quiet=True)
    try:
        yield client.Client(url, verbose=False, download_files=str(tmp_path))
    finally:
        blocks.close()


def test_a_fact_is_traced_written_asked_for_and_undone_over_http(session: Session, caller: Any) -> None:
    pytest.importorskip("matplotlib")
    prompt = "the Eiffel tower is located in"
    was, same = caller.predict(prompt, api_name="/ask")
    assert was == same == session.ask(prompt)[0]
    assert caller.predict(*FIELDS, api_name="/trace")["plot"].startswith("data:image/")
    drawn, scores, report, state = caller.predict(*FIELDS, api_name="/edit")
    assert drawn["plot"].startswith("data:image/") and "efficacy" in scores and "**Rome**" in state
    text = Path(report).read_text(encoding="utf-8")
    needs_nothing_else(text)
    assert "the model now says “Rome” instead of “Paris”" in said(text)
    assert caller.predict(prompt, api_name="/ask") == (was, session.ask(prompt)[1]) != (was, was)
    assert "No edits in it" in caller.predict(api_name="/undo")
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
