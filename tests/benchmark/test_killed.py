"""A benchmark that is killed goes on with the same bits, and a process that is killed is no failed edit."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import zoo
from benching import lines, run, timeless
from safetensors import safe_open

import ffedit
from ffedit.benchmark import editing
from ffedit.editor import value
from ffedit.errors import ProcessError
from ffedit.files import cache
from ffedit.model.editable import Editable

METHODS = ("alphaedit", "memit")
# `checksum` is of a manifest with its times, `crc32` of a line with its.
TIMES = ("seconds", "checksum", "crc32")


@pytest.fixture
def editable() -> Editable:
    return zoo.trained("gpt2", True)


@pytest.fixture
def saved_often(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each value is a group of its own, and is kept when it is chosen."""
    monkeypatch.setattr(value, "SAVED_EVERY", 0.0)
    monkeypatch.setattr(value, "ROOM", 1)


def killed(editable: Editable, out: Path, mode: str, stage: str, after: int) -> bool:
    """Run a benchmark in a copy of this process, which kills itself when `stage` is reported for the n-th time."""
    reports = iter(range(after))

    def kill(now: str, *_: Any) -> None:
        if now == stage and next(reports, None) is None:
            os.kill(os.getpid(), signal.SIGKILL)

    if not (copy := os.fork()):
        try:
            run(editable, out, mode, methods=METHODS, progress=kill)
        finally:
            os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(copy, 0)[1]) == -signal.SIGKILL


def bits(folder: Path) -> dict[str, Any]:
    """All tensors that a run has saved, as bytes, and what it says of them, without times."""
    content: dict[str, Any] = {}
    for path in sorted((folder / "edits").rglob("*")):
        name = str(path.relative_to(folder))
        if path.suffix == ".safetensors":
            with safe_open(path, framework="np") as file:
                content[name] = {tensor: file.get_tensor(tensor).tobytes() for tensor in sorted(file.keys())}
        elif path.suffix == ".json":
            content[name] = without(json.loads(path.read_text()), TIMES)
    return content


def without(tree: Any, names: Iterable[str]) -> Any:
    if isinstance(tree, dict):
        return {name: without(value, names) for name, value in tree.items() if name not in names}
    return [without(value, names) for value in tree] if isinstance(tree, list) else tree


@pytest.mark.skipif(not hasattr(os, "fork"), reason="kills a copy of this process")
@pytest.mark.usefixtures("saved_often")
@pytest.mark.parametrize(("mode", "second"), [("batch:3", 12), ("sequential:2", 20)])
def test_a_killed_run_goes_on_with_the_same_bits(editable: Editable, tmp_path: Path, mode: str, second: int) -> None:
    """`second` is the number of the report at which the second value of an edit is chosen."""
    whole = run(editable, tmp_path / "whole", mode, methods=METHODS)
    cache.clear()
    out = tmp_path / "out"
    assert killed(editable, out, mode, "choosing the value", second)
    assert len(list((cache.folder() / "values").iterdir())) == 1, "the first value was kept"
    for stage, after in (("choosing the value", 3), ("solving", 0), ("measuring", 2)):
        assert killed(editable, out, mode, stage, after), stage
    assert timeless(run(editable, out, mode, methods=METHODS)) == timeless(whole)
    assert without(lines(out), TIMES) == without(lines(tmp_path / "whole"), TIMES)
    assert bits(out) == bits(tmp_path / "whole")


def test_an_edit_during_which_another_process_ended_is_not_recorded_as_failed(
    editable: Editable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mode = "sequential:2"
    whole = run(editable, tmp_path / "whole", mode, methods=METHODS)
    edit, calls = ffedit.edit, iter(range(1))

    def ended(*given: Any, **more: Any) -> ffedit.Edit:
        if next(calls, None) is None:
            raise ProcessError("another process of this run has ended")
        return edit(*given, **more)

    with monkeypatch.context() as patch:
        patch.setattr(editing.ffedit, "edit", ended)
        with pytest.raises(ProcessError, match="has ended"):
            run(editable, tmp_path / "out", mode, methods=METHODS)
    measured = lines(tmp_path / "out")
    assert any(line["method"] == "alphaedit" for line in measured) and not any("error" in line for line in measured)
    assert timeless(run(editable, tmp_path / "out", mode, methods=METHODS)) == timeless(whole)
