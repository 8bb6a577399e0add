"""What a command does is logged where it was asked for, and nowhere else."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
from shell import ASKED, shell

EDIT = [*ASKED, "--layer", "1", "--set", "value.steps=2", "--force", "--out", "edit"]


def test_a_log_says_what_was_done_and_how_it_ended(
    capsys: pytest.CaptureFixture[str], model: Path, empty: Path
) -> None:
    words = ["apply", "--model", model, *EDIT, "--corpus", model.parent / "corpus.txt"]
    plain = shell(capsys, *words)
    logged = shell(capsys, *words, "--verbose", "--log", "log.txt")
    assert "Causal trace" in logged.out and "Causal trace" not in plain.out and not plain.err
    text = Path("log.txt").read_text(encoding="utf-8")
    assert text == logged.err[: len(text)]
    stages = [line for line in text.splitlines() if "ffedit.cli.work.stages: " in line]
    assert any(": measuring: " in line for line in stages)
    lines = [line for line in text.splitlines() if line not in stages]
    for line, words in zip(
        lines, (": apply --model ", "loaded ", "with ffedit ", "averages in ", "edit "), strict=False
    ):
        assert words in line
    assert shell(capsys, "apply", "--model", "./nowhere", *EDIT, "--log", "log.txt").code == 1
    assert "ModelError after " in Path("log.txt").read_text().splitlines()[-1]
    assert not logging.getLogger("ffedit").handlers


def test_a_log_that_cannot_be_written_is_refused_first(capsys: pytest.CaptureFixture[str], empty: Path) -> None:
    ran = shell(capsys, "methods", "--log", "nowhere/log.txt")
    assert ran.code == 1 and "nowhere" in ran.err and len(ran.err.splitlines()) == 1


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no device that is always full")
def test_a_log_on_a_full_disk_costs_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    done = shell(capsys, "cache", "list", "--log", "/dev/full")
    assert done.code == 0 and done.err == "" and "0 files" in done.out
