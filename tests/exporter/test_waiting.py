"""The process that verifies what is written is started before the command that writes it is imported."""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Iterator

import click
import pytest

from ffedit import CheckError, cli
from ffedit.exporter import waiting


@pytest.mark.parametrize(
    ("words", "started"),
    [
        ("apply fact.json --export out", True),
        ("apply fact.json --export=out", True),
        ("apply fact.json --out e", False),
        ("export e --out out", True),
        ("undo checkpoint --out out", True),
        ("undo --help", False),
        ("export e --out out --trust-remote-code", False),
        ("evaluate fact.json", False),
    ],
)
def test_a_command_that_writes_what_is_verified_has_it_started_first(
    monkeypatch: pytest.MonkeyPatch, words: str, started: bool
) -> None:
    seen: list[str] = []

    @contextlib.contextmanager
    def prepared() -> Iterator[None]:
        seen.append("started")
        yield
        seen.append("ended")

    def imported(group: cli.Lazy, ctx: click.Context, name: str) -> click.Command:
        seen.append("imported")
        loose = {"allow_extra_args": True, "ignore_unknown_options": True}
        return click.Command(name, callback=lambda: seen.append("ran"), context_settings=loose)

    monkeypatch.setattr(cli, "prepared", prepared)
    monkeypatch.setattr(cli.Main, "get_command", imported)
    assert cli.run(words.split()) == 0
    work = ["imported"] if "--help" in words else ["imported", "ran"]
    assert seen == (["started", *work, "ended"] if started else work)


def test_completing_a_line_starts_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli, "prepared", lambda: pytest.fail("a process was started"))
    words = ["export", "e", "--out", "out"]
    with cli.cli.make_context("ffedit", list(words), resilient_parsing=True) as context:
        cli.cli.resolve_command(context, words)


def test_where_the_system_starts_no_process_the_work_goes_on_until_one_is_needed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def full(*_: object, **__: object) -> None:
        raise BlockingIOError(11, "Resource temporarily unavailable")

    monkeypatch.setattr(subprocess, "Popen", full)
    with waiting.prepared(), pytest.raises(CheckError, match="could not be started"):
        waiting.waiting(offline=True)
