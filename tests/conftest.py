"""Every test has one thread, its own cache or a `warm_cache`, and can be interrupted. What takes long comes first."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

# A shell starts a job in the background with SIGINT ignored; Python leaves it so, and what tests start inherits it.
signal.signal(signal.SIGINT, signal.default_int_handler)
# One thread in each process that a test starts, too: more than there are cores wait for each other.
os.environ["OMP_NUM_THREADS"] = "1"

HERE = Path(__file__).parent
# Files of half a minute and more, the longest first: the last worker to end would be waited for if it began one late.
LONGEST = (
    "loading/test_families.py",
    "journeys/test_tutorials.py",
    "journeys/test_documents.py",
    "journeys/test_smollm2.py",
    "benchmark/test_resume.py",
    "model/test_second_device.py",
    "journeys/test_added_packages.py",
    "journeys/test_atlas.py",
)


def pytest_configure(config: pytest.Config) -> None:
    """Let xdist keep that order: of itself it begins with the files of many tests."""
    config.option.loadscopereorder = False


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put the tests of `LONGEST` in front."""
    order = {HERE / name: i for i, name in enumerate(LONGEST)}
    items.sort(key=lambda item: order.get(item.path, len(order)))


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    """One thread, and no warnings. Imported here: xdist's first process runs no test and waits for no torch."""
    import torch
    import transformers

    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()


@pytest.fixture(scope="session", autouse=True)
def shared_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """One cache of all processes of a run, for fixtures wider than a test and for tests that use `warm_cache`."""
    base = tmp_path_factory.getbasetemp()
    common = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    (models := common / "trained").mkdir(exist_ok=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("zoo.SHARED", models)
        patch.setenv("FFEDIT_CACHE", str(folder := common / "ffedit-cache"))
        yield folder


@pytest.fixture(autouse=True)
def cache_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache of the test's own; no test reads or fills the user's."""
    folder = tmp_path / "ffedit-cache"
    monkeypatch.setenv("FFEDIT_CACHE", str(folder))
    return folder


@pytest.fixture(autouse=True)
def few_names(monkeypatch: pytest.MonkeyPatch) -> None:
    """Count a fortieth of the names that ship in C: each test has its own cache, and would read all anew."""
    from ffedit.editor import name_keys
    from ffedit.inference.names import names

    monkeypatch.setattr(name_keys, "names", lambda: names()[::40])


@pytest.fixture(scope="session", autouse=True)
def little_text() -> Iterator[None]:
    """Collect default statistics on an eighth of their tokens; sampling the others takes most of a test's time."""
    from ffedit.inference import corpus

    few = corpus.FEWEST // 8
    defaults = [few if value == corpus.FEWEST else value for value in corpus.Corpus.__init__.__defaults__ or ()]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(corpus, "FEWEST", few)
        patch.setattr(corpus.Corpus.__init__, "__defaults__", tuple(defaults))
        yield


@pytest.fixture(scope="session", autouse=True)
def one_precision() -> Iterator[None]:
    """Take bfloat16 to be no faster than float32, which would be measured for seconds: the same numbers everywhere."""
    from ffedit.inference import precision

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(precision, "least_seconds", lambda *_: 1.0)
        yield


@pytest.fixture
def warm_cache(shared_cache: Path, cache_folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Let a test find what others collected: half a minute for the default statistics of an embedded model.

    An entry is named by all that it was computed from, so a test reads from it what it would have computed.
    """
    monkeypatch.setenv("FFEDIT_CACHE", str(shared_cache))
    return shared_cache


@pytest.fixture
def verified_here(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Verify exports in this process, not in a fresh one that takes seconds to start; the tasks that were verified."""
    from making import check_here

    tasks: list[Any] = []
    monkeypatch.setattr("ffedit.exporter.exporting.check_fresh", lambda task: (tasks.append(task), check_here(task))[1])
    return tasks


@pytest.fixture
def tensors_only(verified_here: list[Any], monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Verify as `verified_here`, but load no model for its logits: for tests that compare all bytes themselves."""
    monkeypatch.setattr("ffedit.exporter.verification.has_room", lambda size: False)
    return verified_here


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tiny model that knows a few facts; read only."""
    from shell import trained_folder

    return trained_folder(tmp_path_factory.mktemp("base") / "model")


@pytest.fixture
def empty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with nothing in it."""
    (folder := tmp_path / "here").mkdir()
    monkeypatch.chdir(folder)
    monkeypatch.setenv("COLUMNS", "100")
    return folder
