"""Every export is checked before it counts as done, and only what was checked is pushed to the hub."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from making import (
    base,
    edit,
    editable,
    refused,
    verified_here,
)
from safetensors.torch import save_file
from shell import disk, process, shell

from ffedit import CheckError, Edit, EditError
from ffedit.exporter import embedded_edits, push, ship
from ffedit.exporter.waiting import prepared
from ffedit.files.tensor_ranges import contents, read_header

__all__ = ["base", "edit", "editable", "verified_here"]
here = pytest.mark.usefixtures("verified_here")


def spoil(folder: Path, name: str, row: int = 0) -> None:
    """Change one number of a tensor."""
    stored = contents(folder)[name]
    with stored.file.open("r+b") as file:
        file.seek(stored.start + 4 * row)
        file.write(b"\x01\x02\x03\x3f")


class Started(subprocess.Popen[str]):
    """Keeps count of itself."""

    all: ClassVar[list[subprocess.Popen[str]]] = []

    def __init__(self, *how: Any, **other: Any) -> None:
        super().__init__(*how, **other)
        self.all.append(self)


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[subprocess.Popen[str]]:
    """The processes that were started so far."""
    monkeypatch.setattr(Started, "all", [])
    monkeypatch.setattr(subprocess, "Popen", Started)
    return Started.all


def test_a_process_that_was_made_ready_verifies_the_next_export(
    base: Path, edit: Edit, tmp_path: Path, started: list[subprocess.Popen[str]]
) -> None:
    with prepared():
        assert ship(base, edit, tmp_path / "one", verify="tensors").checked.tensors > 0 and len(started) == 1
        assert started[0].returncode == 0, "it did its one task, and ended"
        assert ship(base, edit, tmp_path / "two", verify="tensors").checked.tensors > 0 and len(started) == 2


def test_one_that_something_ended_is_replaced(
    base: Path, edit: Edit, tmp_path: Path, started: list[subprocess.Popen[str]]
) -> None:
    with prepared():
        started[0].kill()
        started[0].wait()
        assert ship(base, edit, tmp_path / "out", verify="tensors").checked.tensors > 0 and len(started) == 2


def test_one_that_is_not_needed_ends_with_its_block(
    base: Path, edit: Edit, tmp_path: Path, started: list[subprocess.Popen[str]]
) -> None:
    with pytest.raises(EditError), prepared():
        assert [one.poll() for one in started] == [None]
        raise EditError("the edit was refused")
    assert started[0].returncode
    assert ship(base, edit, tmp_path / "out", verify="tensors").checked.tensors > 0 and len(started) == 2


@here
@pytest.mark.parametrize(("options", "processes"), [((), 0), (("--export", "out"), 1)])
def test_apply_makes_one_ready_for_an_export(
    tmp_path: Path,
    base: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    started: list[subprocess.Popen[str]],
    options: tuple[str, ...],
    processes: int,
) -> None:
    monkeypatch.setattr("ffedit.cli.prepared", prepared)  # the real one
    monkeypatch.chdir(tmp_path)
    fact = {"subject": "Eiffel tower", "prompt": "the {} is located in", "target": "Rome"}
    (tmp_path / "fact.json").write_text(json.dumps(fact))
    done = shell(capsys, "apply", "fact.json", "-q", "--model", base, "--layer", "1", *options)
    assert (done.code, len(started)) == (0, processes)


@here
@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("transformer.h.1.mlp.c_proj.weight", "not the base's with the edit added"),
        ("transformer.h.1.mlp.c_proj.bias", "no edit changes it"),
    ],
)
def test_a_wrong_number_is_found(
    base: Path, edit: Edit, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, told: str
) -> None:
    keep = embedded_edits.keep
    monkeypatch.setattr(os, "link", lambda *_: (_ for _ in ()).throw(OSError()))

    def spoiled(folder: Path, *rest: Any) -> None:
        keep(folder, *rest)
        spoil(folder, name, 5)

    monkeypatch.setattr("ffedit.exporter.exporting.keep", spoiled)
    assert told in refused(base, edit, tmp_path / "out", error=CheckError, verify="tensors")


@here
@pytest.mark.parametrize("what", ["tokenizer.json", "config.json", "ffedit_edits/originals.safetensors"])
def test_a_missing_file_is_found(
    base: Path, edit: Edit, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    keep = embedded_edits.keep

    def forgetful(folder: Path, *rest: Any) -> None:
        keep(folder, *rest)
        (folder / what).unlink()

    monkeypatch.setattr("ffedit.exporter.exporting.keep", forgetful)
    refused(base, edit, tmp_path / "out", error=CheckError, verify="tensors")


SPOILED = """
import sys
from ffedit.shipping import ship
from ffedit.cli import main
ship.__globals__["WRITERS"]["checkpoint"] = lambda base, folder, _: __import__("shutil").copytree(
    base.folder, folder, dirs_exist_ok=True) and None
main()
"""


def test_the_command_exits_with_4_when_a_fresh_process_disagrees(base: Path, edit: Edit, tmp_path: Path) -> None:
    edit.save(tmp_path / "e")
    before = disk(tmp_path)
    done = process("-c", SPOILED, "export", tmp_path / "e", "--model", base, "--out", tmp_path / "out")
    assert done.code == 4 and done.err.startswith("error: ") and "nothing was written" in done.err
    assert done.err.count("\n") == 1 and disk(tmp_path) == before


def test_headers_are_read_as_safetensors_writes_them(tmp_path: Path) -> None:
    wanted = {"a": torch.randn(3, 5), "b": torch.arange(4), "c": torch.randn(2, 2).bfloat16(), "d": torch.tensor(1.0)}
    save_file(wanted, tmp_path / "x.safetensors")
    found = read_header(tmp_path / "x.safetensors")
    assert found.keys() == wanted.keys() and found["b"].kind == "I64" and found["d"].shape == ()
    assert torch.equal(found["a"].rows(1, 3), wanted["a"][1:]) and found["c"].dtype == torch.bfloat16
    assert found["a"].sample(4).tolist() == wanted["a"].reshape(-1)[::3][:4].double().tolist()


# The hub ------------------------------------------------------------------------------------------


@here
def test_the_hub_gets_the_folder(
    base: Path, edit: Edit, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    calls: list[Any] = []

    class Made(str):
        repo_id = "me/edited"

    monkeypatch.setattr("huggingface_hub.create_repo", lambda name, **_: calls.append(name) or Made("https://hub/x"))
    monkeypatch.setattr("huggingface_hub.upload_folder", lambda **how: calls.append(how))
    edit.save(tmp_path / "e")
    command = ["export", tmp_path / "e", "--model", base, "--out", tmp_path / "out", "--push-to-hub", "edited"]
    done = shell(capsys, *command)
    assert done.code == 0 and "https://hub/x" in done.out
    assert calls[0] == "edited" and calls[1]["repo_id"] == "me/edited" and calls[1]["folder_path"] == tmp_path / "out"

    def offline(*_: Any, **__: Any) -> None:
        raise ConnectionError("no route\nto host")

    monkeypatch.setattr("huggingface_hub.create_repo", offline)
    done = shell(capsys, *command, "--force")
    assert done.code == 1 and "not pushed (no route to host)" in done.err and done.err.count("\n") == 1
    assert (tmp_path / "out" / "README.md").is_file()
    with pytest.raises(EditError, match="not pushed"):
        push(tmp_path / "out", "edited")
