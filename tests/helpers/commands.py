"""The commands as a person types them, in a folder with two files of facts."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from shell import FACT, PROBES, Ran, shell
from writing import quick

Command = Callable[..., Ran]
SHORT = quick(steps=20, step_size=0.2, penalty_decay=0.7)


@pytest.fixture
def here(empty: Path) -> Path:
    """The current folder, with two files of facts and nothing else in it."""
    (empty / "fact.json").write_text(json.dumps({**FACT, **PROBES}))
    (empty / "bare.json").write_text(json.dumps(FACT))
    return empty


@pytest.fixture
def run(here: Path, capsys: pytest.CaptureFixture[str]) -> Command:
    return lambda *words: shell(capsys, *words)


@pytest.fixture
def thorough_apply(run: Command, model: Path) -> Command:
    """With the default settings."""
    return lambda *words: run("apply", *words, "--model", model, "--corpus", model.parent / "corpus.txt")


@pytest.fixture
def apply(thorough_apply: Command, monkeypatch: pytest.MonkeyPatch) -> Command:
    """With a short optimisation, after which the edit of FACT took."""
    monkeypatch.setattr("ffedit.cli.work.solving.preset", lambda *_: SHORT)
    return thorough_apply


def loads(text: str) -> Any:
    """JSON, and nothing that JSON does not have."""

    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is no JSON")

    return json.loads(text, parse_constant=refuse)
