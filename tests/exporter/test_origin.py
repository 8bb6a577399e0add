"""A card names the base as others find it: the hub's id, its license, and no path of this machine."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from huggingface_hub import metadata_load
from making import SECOND, base, edit, editable, made

import ffedit
from ffedit import Edit
from ffedit.exporter.model_card import Origin, model_card, origin_of
from ffedit.facts.text import plain

__all__ = ["base", "edit", "editable"]
here = pytest.mark.usefixtures("verified_here")


def card(folder: Path, **entries: str) -> None:
    lines = "\n".join(f"{name}: {value}" for name, value in entries.items())
    (folder / "README.md").write_text(f"---\n{lines}\n---\n# A model\n")


@here
def test_no_path_of_this_machine_is_in_what_is_exported(
    base: Path, editable: ffedit.Editable, edit: Edit, tmp_path: Path
) -> None:
    second = made(editable, {2: 1}, SECOND, seed=1)
    ffedit.export(base, edit, tmp_path / "checkpoint")
    ffedit.export(tmp_path / "checkpoint", second, tmp_path / "both")
    ffedit.export(editable, edit, tmp_path / "adapter", format="adapter")
    ffedit.undo(tmp_path / "both", tmp_path / "undone")
    for name in ("checkpoint", "both", "adapter", "undone"):
        for path in (tmp_path / name).rglob("*.[jm]*"):
            assert str(tmp_path).encode() not in path.read_bytes() and str(base).encode() not in path.read_bytes(), path
        text = (tmp_path / name / "README.md").read_text(encoding="utf-8")
        assert f"base_model: {base.name}\n" in text and "is a local name: give the base's id on the hub" in text
        assert "license" not in text.split("---")[1] and "`license` is not known" in text
    config = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == base.name
    assert "in `adapter_config.json`" in (tmp_path / "adapter" / "README.md").read_text()


@here
def test_the_license_is_the_bases(base: Path, edit: Edit, tmp_path: Path) -> None:
    shutil.copytree(base, tmp_path / "licensed")
    card(tmp_path / "licensed", license="other", license_name="sundew", language="en", tags="[other]")
    ffedit.export(tmp_path / "licensed", edit, tmp_path / "out")
    about = metadata_load(tmp_path / "out" / "README.md")
    assert about is not None and "other" not in about["tags"]
    assert (about["license"], about["license_name"], about["language"]) == ("other", "sundew", "en")
    assert "`license` is not known" not in (tmp_path / "out" / "README.md").read_text()
    ffedit.undo(tmp_path / "out", tmp_path / "undone")
    assert metadata_load(tmp_path / "undone" / "README.md") == about


def test_an_id_of_the_hub_is_kept_however_the_base_was_named(tmp_path: Path) -> None:
    snapshot = tmp_path / "models--owner--name" / "snapshots" / "0123"
    snapshot.mkdir(parents=True)
    for name in ("owner/name", str(snapshot)):
        assert origin_of(name, snapshot) == Origin("owner/name", True)
    assert origin_of("owner/name", None) == Origin("owner/name", True)
    gguf = {"license": "apache-2.0"}
    known = Origin("HuggingFaceTB/SmolLM2-135M-Instruct", True, {"license": "apache-2.0"})
    assert origin_of("smollm2", tmp_path, gguf) == known


def test_what_is_no_id_is_a_name_without_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "owner" / "name").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert origin_of("owner/name", Path("owner/name")) == Origin("name")  # a folder here
    assert origin_of("/gone/models/mine", None) == origin_of("mine", None) == Origin("mine")
    monkeypatch.chdir(tmp_path / "owner" / "name")
    assert origin_of(".", Path()) == Origin("name")
    (tmp_path / "owner" / "name" / "README.md").write_text("---\nlicense: [\n---\n")
    assert origin_of(".", Path()) == Origin("name")
    folder = Path(ffedit.__file__).parent / "atlas" / "models" / "atlas"
    assert origin_of("atlas", folder) == Origin("atlas", False, {"license": "apache-2.0", "language": "en"})


@here
@pytest.mark.parametrize(("cache", "base_id"), [("models--gpt2", "gpt2"), ("models--owner--name", "owner/name")])
def test_an_id_is_kept_by_edits_on_edits_and_by_undo(
    base: Path,
    editable: ffedit.Editable,
    edit: Edit,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    cache: str,
    base_id: str,
) -> None:
    shutil.copytree(base, cached := tmp_path / cache / "snapshots" / "0123")
    first = ffedit.export(cached, edit, tmp_path / "first").folder
    both = ffedit.export(first, made(editable, {2: 1}, SECOND, seed=1), tmp_path / "both").folder
    (tmp_path / base_id).mkdir(parents=True)  # a folder that happens to have its name
    monkeypatch.chdir(tmp_path)
    for folder in (first, both, ffedit.undo(both, tmp_path / "undone").folder):
        assert (metadata_load(folder / "README.md") or {})["base_model"] == base_id
        assert "is a local name" not in (folder / "README.md").read_text()


def test_the_names_of_scores_are_escaped(edit: Edit) -> None:
    scores = {"before": {"a|b": None}, "after": {"a|b": 0.5}}
    assert f"| {plain('a|b')} |  | 0.500 |" in model_card(Origin("base"), [edit.noted(scores=scores)])
