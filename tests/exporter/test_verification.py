"""Every export is checked before it counts as done."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from making import base, edit, editable, refused
from safetensors.torch import save_file
from shell import disk, process

import ffedit
from ffedit import CheckError, Edit
from ffedit.exporter import embedded_edits, subprocess_check
from ffedit.files.tensor_ranges import contents, read_header

__all__ = ["base", "edit", "editable"]
here = pytest.mark.usefixtures("verified_here")


def spoil(folder: Path, name: str, row: int = 0) -> None:
    """Change one number of a tensor."""
    stored = contents(folder)[name]
    with stored.file.open("r+b") as file:
        file.seek(stored.start + 4 * row)
        file.write(b"\x01\x02\x03\x3f")


def test_where_the_system_starts_no_process_one_line_says_so(
    base: Path, edit: Edit, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object, **__: object) -> None:
        raise BlockingIOError(11, "Resource temporarily unavailable")

    monkeypatch.setattr(subprocess, "Popen", full)
    with pytest.raises(CheckError, match="could not be started"):
        ffedit.export(base, edit, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("code", "out", "err", "told"),
    [
        (-9, "", "a warning", r"\(signal 9; a warning\)"),
        (3, "", "", r"\(exit code 3\)"),
        (0, "no answer", "", r"\(exit code 0\)"),
        (0, '{"error": "wrong"}\nbye', "", "wrong; nothing"),
    ],
)
def test_an_answer_that_does_not_come_is_one_line(
    monkeypatch: pytest.MonkeyPatch, code: int, out: str, err: str, told: str
) -> None:
    ended = subprocess.CompletedProcess([], code, out, err)
    monkeypatch.setattr(subprocess_check, "run_module", lambda *_: ended)
    with pytest.raises(CheckError, match=told):
        subprocess_check.check_fresh(subprocess_check.Task("memory", "", ""))


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
    embed = embedded_edits.embed
    monkeypatch.setattr(os, "link", lambda *_: (_ for _ in ()).throw(OSError()))

    def spoiled(folder: Path, *rest: Any) -> None:
        embed(folder, *rest)
        spoil(folder, name, 5)

    monkeypatch.setattr("ffedit.exporter.exporting.embed", spoiled)
    assert told in refused(base, edit, tmp_path / "out", error=CheckError)


@here
@pytest.mark.parametrize("what", ["tokenizer.json", "config.json", "ffedit_edits/originals.safetensors"])
def test_a_missing_file_is_found(
    base: Path, edit: Edit, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    embed = embedded_edits.embed

    def forgetful(folder: Path, *rest: Any) -> None:
        embed(folder, *rest)
        (folder / what).unlink()

    monkeypatch.setattr("ffedit.exporter.exporting.embed", forgetful)
    refused(base, edit, tmp_path / "out", error=CheckError)


SPOILED = """
import sys
from shutil import copytree
from ffedit.exporter import export
from ffedit.cli import main
export.__globals__["rewrite"] = lambda base, tensors, plan, folder: copytree(base, folder, dirs_exist_ok=True) and None
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
