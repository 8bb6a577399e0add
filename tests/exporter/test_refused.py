"""Bases and edits that do not fit are refused, and what goes wrong in the middle leaves nothing."""

from __future__ import annotations

import json
import resource
from pathlib import Path
from typing import Any

import pytest
import torch
import zoo
from making import base, edit, editable, made, on_disk, refused
from safetensors.torch import load_file, save_file
from shell import disk, shell

import ffedit
from ffedit import Edit, EditError, ModelError
from ffedit.exporter import history
from ffedit.files import tensor_ranges
from ffedit.files.shards import INDEX
from ffedit.files.tensor_ranges import patch

__all__ = ["base", "edit", "editable"]
here = pytest.mark.usefixtures("verified_here")


@here
def test_bases_that_cannot_be_used_are_refused_in_one_line(edit: Edit, tmp_path: Path) -> None:
    base = on_disk("gpt2", tmp_path / "base", shards="1GB")
    good = load_file(base / "model.safetensors")
    name = "transformer.h.1.mlp.c_proj.weight"

    def told(error: type[Exception], *words: str) -> None:
        line = refused(base, edit, tmp_path / "out", error=error)
        assert all(word in line for word in words), line

    for change, words in (
        ({name: good[name] + 0.5}, ["another model, or edited already"]),
        ({name: good[name].T.contiguous()}, [name, "[32, 128]"]),
        ({name: None}, [name, "which the base does not have"]),
    ):
        save_file({k: v for k, v in {**good, **change}.items() if v is not None}, base / "model.safetensors")
        told(EditError, *words)
    save_file({**good, name: good[name].to(torch.int8)}, base / "model.safetensors")
    told(ModelError, "I8", "quantise the result")
    (base / "model.safetensors").write_bytes(b"\xff" * 20)
    told(ModelError, "model.safetensors", "fetch it anew")
    (base / "model.safetensors").rename(base / "pytorch_model.bin")
    told(ModelError, "pickled")
    (base / "pytorch_model.bin").unlink()
    told(ModelError, "no weights in it (model.safetensors")
    (base / INDEX).write_text(json.dumps({"weight_map": {name: "../elsewhere.safetensors"}}))
    told(ModelError, "outside the folder")


@here
def test_numbers_that_the_base_cannot_hold_are_refused_in_one_line(
    base: Path, editable: ffedit.Editable, tmp_path: Path
) -> None:
    half = on_disk("gpt2", tmp_path / "half", torch.float16)
    large = made(zoo.build("gpt2", True, torch.float16), {1: 1}, size=1e5)
    assert "too large" in refused(half, large, tmp_path / "out")


@here
def test_the_folder_that_is_read_is_not_replaced(edit: Edit, tmp_path: Path) -> None:
    base = on_disk("gpt2", tmp_path / "base")
    out = ffedit.export(base, edit, tmp_path / "out").folder
    (tmp_path / "link").symlink_to(base)
    for source in (base, ffedit.load(base)):
        for target in (base, tmp_path / "link"):
            assert "never changed" in refused(source, edit, target, force=True)
    before = disk(tmp_path)
    with pytest.raises(EditError, match="never changed"):
        ffedit.undo(out, out, force=True)
    assert disk(tmp_path) == before


@here
def test_a_format_that_is_not_known(base: Path, edit: Edit, tmp_path: Path) -> None:
    assert "adapter" in refused(base, edit, tmp_path / "out", format="onnx")


@here
def test_a_manifest_that_was_edited_by_hand(
    base: Path, edit: Edit, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    edit.save(tmp_path / "e")
    path = tmp_path / "e" / "manifest.json"
    path.write_text(path.read_text().replace("h.1.mlp", "h.2.mlp"))
    before = disk(tmp_path)
    done = shell(capsys, "export", tmp_path / "e", "--model", base, "--out", tmp_path / "out")
    assert done.code == 1 and "changed after" in done.err and done.err.count("\n") == 1 and disk(tmp_path) == before
    out = ffedit.export(base, edit, tmp_path / "out").folder
    (out / "ffedit_edits" / "000" / "manifest.json").unlink()
    with pytest.raises(EditError, match="holds no edit"):
        history(out)


# What goes wrong ----------------------------------------------------------------------------------


@here
def test_ctrl_c_in_the_middle_leaves_nothing(
    base: Path, edit: Edit, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(stored: tensor_ranges.Stored, blocks: Any) -> None:
        patch(stored, [next(blocks)])
        assert any(tmp_path.glob(".out.*/*/*.safetensors"))
        raise KeyboardInterrupt

    monkeypatch.setattr("ffedit.exporter.checkpoint.patch", interrupt)
    untouched = disk(base)
    with pytest.raises(KeyboardInterrupt):
        ffedit.export(base, edit, tmp_path / "out")
    assert not (tmp_path / "out").exists() and list(tmp_path.glob(".*")) == [] and disk(base) == untouched


@pytest.mark.parametrize("size", [100, 3_000, 10_000])
def test_a_full_disk_leaves_nothing(base: Path, edit: Edit, tmp_path: Path, size: int) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        assert "cannot be written" in refused(base, edit, tmp_path / "out")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_place_that_cannot_be_written(base: Path, edit: Edit, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for target in (tmp_path / "file" / "out", Path("/proc/out")):
        with pytest.raises(EditError, match="cannot be written"):
            ffedit.export(base, edit, target)
