"""Every test has its own cache and one thread, and can be interrupted."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
import torch
import transformers
from shell import trained_folder

from ffedit.editor import name_keys
from ffedit.inference.names import names

torch.set_num_threads(1)
# A shell starts a job in the background with SIGINT ignored; Python leaves it so, and what tests start inherits it.
signal.signal(signal.SIGINT, signal.default_int_handler)
transformers.logging.set_verbosity_error()


@pytest.fixture(autouse=True)
def cache_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache of the test's own; no test reads or fills the user's."""
    folder = tmp_path / "ffedit-cache"
    monkeypatch.setenv("FFEDIT_CACHE", str(folder))
    return folder


@pytest.fixture(autouse=True)
def few_names(monkeypatch: pytest.MonkeyPatch) -> None:
    """Count a fortieth of the names that ship in C: each test has its own cache, and would read all anew."""
    monkeypatch.setattr(name_keys, "names", lambda: names()[::40])


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tiny model that knows a few facts; read only."""
    return trained_folder(tmp_path_factory.mktemp("base") / "model")


@pytest.fixture
def empty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with nothing in it."""
    (folder := tmp_path / "here").mkdir()
    monkeypatch.chdir(folder)
    monkeypatch.setenv("COLUMNS", "100")
    return folder
