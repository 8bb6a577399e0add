"""`accelerate launch` as a person types it: two processes write what one writes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from benching import facts
from shell import process, shell

from ffedit import Edit
from ffedit.cli.surface import is_first_process
from ffedit.inference.distributed import ProcessGroup

LAUNCH = ["-m", "accelerate.commands.accelerate_cli", "launch", "--num_processes", "2", "--main_process_port", "0"]


@pytest.fixture(autouse=True)
def few_names() -> None:
    """Count all names here, as the processes that are launched do."""


def test_two_processes_write_the_edit_of_one(model: Path, empty: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (empty / "facts.json").write_text(json.dumps([fact.to_dict() for fact in facts(4)]))
    words = ["apply", "facts.json", "--model", model, "--corpus", model.parent / "corpus.txt", "--layers", "1"]
    words += ["--set", "prompts.contexts=1", "--set", "value.steps=5", "--dtype", "float32", "--force"]
    ran = process(*LAUNCH, "--multi_gpu", "-m", "ffedit", *words, "--out", "two", "--json", "two.json")
    assert ran.code == 0, ran.err
    assert ran.out.count("layer 1 of") == 1, "the first process tells it"
    assert shell(capsys, *words, "--out", "one", "--json", "one.json").code == 0
    two, one = Edit.load("two"), Edit.load("one")
    assert two.facts == one.facts and two.updates.keys() == one.updates.keys()
    for at, delta in one.updates.items():
        assert torch.allclose(two.updates[at].dense, delta.dense, rtol=1e-3, atol=1e-4 * float(delta.dense.abs().max()))
        assert torch.allclose(two.keys[at], one.keys[at], rtol=1e-4, atol=1e-6)
    both = [json.loads(Path(f"{name}.json").read_text()) for name in ("two", "one")]
    for side in ("before", "after"):
        assert both[0][side] == pytest.approx(both[1][side], abs=1e-3)
    assert [row["prompt"] for row in both[0]["facts"]] == [row["prompt"] for row in both[1]["facts"]]


def test_statistics_are_collected_by_one_process(
    model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    ran = shell(capsys, "stats", "--model", model)
    assert ran.code == 1 and "stats runs in one process; start it without `accelerate launch`" in ran.err


@pytest.mark.parametrize(
    ("environment", "first"),
    [
        ({}, True),
        ({"RANK": "0", "WORLD_SIZE": "2"}, True),
        ({"RANK": "1", "WORLD_SIZE": "2"}, False),
        ({"RANK": "3"}, True),
    ],
)
def test_one_process_shows_and_writes(
    environment: dict[str, str],
    first: bool,
    empty: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert is_first_process() is first
    ran = shell(capsys, "methods", "--json", "methods.json")
    assert ran.code == 0 and bool(ran.out) is Path("methods.json").exists() is first


def test_the_processes_part_when_the_work_is_done(
    model: Path, empty: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (empty / "facts.json").write_text(json.dumps([fact.to_dict() for fact in facts(2)]))
    parted: list[bool] = []
    monkeypatch.setattr(ProcessGroup, "disband", lambda _: parted.append(Path("one/report.md").exists()))
    words = ["bench", "facts.json", "--model", model, "--methods", "ft", "--layers", "1", "--set", "ft.steps=1"]
    assert shell(capsys, *words, "--mode", "single", "--no-full", "--out", "one").code == 0
    assert parted == [True], "once, after the last that they tell each other"
