"""Commands that must fail: one line, an exit code, and nothing changed on disk or in a loaded model."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import zoo
from shell import FACT, Ran, disk, shell

import ffedit
from ffedit import api
from ffedit.model.editable import Editable

OUTPUTS = ["--out", "e", "--export", "x", "--json", "r.json", "--plot", "p.png"]
Refuses = Callable[..., str]


@pytest.fixture
def here(empty: Path) -> Path:
    (empty / "fact.json").write_text(json.dumps(FACT))
    return empty


@pytest.fixture
def refuses(here: Path, model: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Refuses:
    """Run a command that must fail; what it says after "error: ". Nothing on disk or in a loaded model changes."""
    loaded: list[tuple[Editable, dict[str, torch.Tensor]]] = []

    def load(*words: Any, **more: Any) -> Editable:
        editable = api.load(*words, **more)
        loaded.append((editable, zoo.snapshot(editable)))
        return editable

    def run(*words: str | Path, code: int = 1, loads: bool | None = None) -> str:
        before, base = disk(here), disk(model)
        done: Ran = shell(capsys, *words)
        assert done.code == code, done
        assert disk(here) == before and disk(model) == base
        assert all(zoo.unchanged(editable, weights) for editable, weights in loaded)
        assert loads in (None, bool(loaded)), "found before the model was loaded" if loaded else "found too early"
        said = done.err if code == 1 else done.err.removeprefix("\n")  # Ctrl-C stands on the line itself
        assert said.startswith("error: " if code == 1 else "interrupted: ") and said.count("\n") == 1
        return done.err.removeprefix("error: ")

    monkeypatch.setattr(ffedit, "load", load)
    return run


@pytest.fixture
def apply(refuses: Refuses, model: Path) -> Refuses:
    """`apply` with every output asked for."""
    corpus = model.parent / "corpus.txt"
    return lambda *words, **more: refuses("apply", *OUTPUTS, "-m", model, "--corpus", corpus, *words, **more)
