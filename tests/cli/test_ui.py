"""The page of `ffedit ui`: trace, edit, ask, undo and report, on this machine only."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

import pytest
from shell import FACT, shell

import ffedit
from ffedit.cli.ui import HOST, Session, fact_of, page
from ffedit.errors import EditError, FactError

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


def test_the_page_calls_the_session_and_tells_mistakes(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    gradio, client = pytest.importorskip("gradio"), pytest.importorskip("gradio_client")
    monkeypatch.setenv("GRADIO_ANALYTICS_ENABLED", "False")
    assert gradio
    blocks = page(session)
    _, url, _ = blocks.launch(server_name=HOST, prevent_thread_lock=True, quiet=True)
    try:
        caller: Any = client.Client(url, verbose=False)
        assert caller.predict("the tower", api_name="/ask") == session.ask("the tower")
        with pytest.raises(Exception, match="no edit to undo"):
            caller.predict(api_name="/undo")
    finally:
        blocks.close()


def test_a_port_in_use_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as other:
        other.bind((HOST, 0))
        other.listen()
        port = other.getsockname()[1]
        done = shell(capsys, "ui", "--port", str(port))
    assert (done.code, done.out, done.err.count("\n")) == (1, "", 1)
    assert f"port {port}: Address already in use; name another with --port" in done.err
