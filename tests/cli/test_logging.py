"""What a command does, and what each stage took, is logged where it was asked for, and nowhere else."""

from __future__ import annotations

import logging
from itertools import chain, repeat
from pathlib import Path

import pytest
import torch
from shell import ASKED, shell

from ffedit.cli.surface import Surface
from ffedit.cli.work import stages

EDIT = [*ASKED, "--layer", "1", "--set", "value.steps=2", "--force", "--out", "edit"]


def test_a_log_says_what_was_done_and_how_it_ended(
    capsys: pytest.CaptureFixture[str], model: Path, empty: Path
) -> None:
    words = ["apply", "--model", model, *EDIT, "--corpus", model.parent / "corpus.txt"]
    logged = shell(capsys, *words, "--verbose", "--log", "log.txt")
    text = Path("log.txt").read_text(encoding="utf-8")
    assert text == logged.err[: len(text)]
    took = [line for line in text.splitlines() if "ffedit.cli.work.stages: " in line]
    assert any(": measuring: " in line for line in took)
    lines = [line for line in text.splitlines() if line not in took]
    said = (": apply --model ", "loaded ", "with ffedit ", "averages in ", "keys of ", "edit ")
    assert all(part in line for line, part in zip(lines, said, strict=False))
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


# What each stage took ---------------------------------------------------------------------------------


def test_products_are_counted_in_both_directions() -> None:
    a, b = torch.randn(3, 5, requires_grad=True), torch.randn(5, 7)
    with stages.Products() as products:
        product = a @ b
        assert products.operations == 2 * 3 * 5 * 7
        product.sum().backward()  # of a alone
    assert products.operations == 2 * 2 * 3 * 5 * 7 and a.grad is not None


def test_time_and_products_belong_to_the_stage_that_is_reported(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    clock = chain([0.0, 1.0, 3.0, 7.0, 8.0], repeat(9.0))
    monkeypatch.setattr(stages.time, "perf_counter", lambda: next(clock))
    monkeypatch.setattr(stages, "fastest_products", lambda: 1e3)
    calls: list[tuple[str, int, int]] = []
    a = torch.ones(10, 10)
    with caplog.at_level(logging.INFO, "ffedit"), stages.timed_stages(lambda *call: calls.append(call)) as progress:
        a @ a
        progress("reading", 0, 2)  # opens a stage: 1 second before it
        progress("reading", 1, 2)  # 2 seconds
        a @ a
        progress("measuring", 1, 1)  # 4 seconds
        progress("reading", 2, 2)  # 1 second
    assert calls == [("reading", 0, 2), ("reading", 1, 2), ("measuring", 1, 1), ("reading", 2, 2)]
    lines = [record.message for record in caplog.records]
    assert lines[1] == "reading: 3.0 s" and lines[0].startswith("between: 2.0 s, 0.00 TFLOP at 100 % of")
    assert lines[2] == "measuring: 4.0 s, 0.00 TFLOP at 50 % of 0.00/s"


def test_stages_are_timed_only_where_somebody_reads_them(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(stages, "timed_stages", None)
    with Surface(quiet=True).progress() as progress:
        progress("reading", 1, 1)
    with caplog.at_level(logging.INFO, "ffedit"), pytest.raises(TypeError), Surface(quiet=True).progress():
        pass


def test_the_ceiling_is_a_speed() -> None:
    assert stages.fastest_products() > 1e8
