"""A checkpoint is made from the base's files: what changes is W + Δ rounded once, and nothing else moves."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
import zoo
from making import FACT, SECOND, base, edit, editable, made, on_disk, refused, same, weights, written_by_hand
from safetensors.torch import load_file, save_file
from shell import disk

import ffedit
from ffedit import Edit, Fact
from ffedit.editor.edit import base_of
from ffedit.exporter import history
from ffedit.files import tensor_ranges
from ffedit.files.shards import INDEX
from ffedit.files.tensor_ranges import contents, row_blocks

__all__ = ["base", "edit", "editable"]
FAMILIES = [("gpt2", torch.float32), ("llama", torch.bfloat16), ("gpt_neo", torch.float16)]
families = pytest.mark.parametrize(("family", "dtype"), FAMILIES)
here = pytest.mark.usefixtures("tensors_only")


# What is written ----------------------------------------------------------------------------------


@here
@families
def test_only_what_changes_is_rewritten(family: str, dtype: torch.dtype, tmp_path: Path) -> None:
    base = on_disk(family, tmp_path / "base", dtype)
    editable = ffedit.load(base)
    edit = made(editable, {0: 2, 2: 1})
    untouched = disk(base)
    out = ffedit.export(base, edit, tmp_path / "out").folder
    assert disk(base) == untouched
    before, after = weights(base), weights(out)
    assert same(after, written_by_hand(before, editable, edit)) and not same(after, before)
    index = json.loads((out / INDEX).read_text())
    assert index == json.loads((base / INDEX).read_text())
    changed = {index["weight_map"][editable.memories[layer].parameter] for layer in (0, 2)}
    shards = set(index["weight_map"].values())
    assert len(shards) > 3
    linked = {name for name in shards if (out / name).samefile(base / name)}
    assert linked == shards - changed
    assert not (out / "config.json").samefile(base / "config.json")


@here
def test_a_loaded_model_goes_the_same_way(
    base: Path, editable: ffedit.Editable, edit: Edit, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = ffedit.export(base, edit, tmp_path / "a").folder
    monkeypatch.setattr(type(editable.model), "save_pretrained", None)
    assert disk(out) == disk(ffedit.export(editable, edit, tmp_path / "b").folder)


@pytest.mark.usefixtures("verified_here")
def test_no_model_is_loaded_where_it_takes_half_of_the_free_memory(
    base: Path, edit: Edit, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    size = sum(stored.size for stored in contents(base).values())
    monkeypatch.setattr("psutil.virtual_memory", lambda: SimpleNamespace(available=2 * size + 1))
    assert ffedit.export(base, edit, tmp_path / "fits").checked.logits
    monkeypatch.setattr("psutil.virtual_memory", lambda: SimpleNamespace(available=2 * size))
    monkeypatch.setattr(transformers.AutoModelForCausalLM, "from_pretrained", None)
    done = ffedit.export(base, edit, tmp_path / "out")
    assert not done.checked.logits and done.checked.tensors == len(contents(base))
    assert done.moved is not None and done.moved.linked > 0 < done.moved.copied


@here
@pytest.mark.parametrize("entries", [1, 100])
def test_blocks_of_rows_make_no_difference(
    base: Path, editable: ffedit.Editable, edit: Edit, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, entries: int
) -> None:
    monkeypatch.setattr(tensor_ranges, "BLOCK", entries)
    assert len(list(row_blocks(128, 32))) > 1
    out = ffedit.export(base, edit, tmp_path / "out").folder
    assert same(weights(out), written_by_hand(weights(base), editable, edit))


@here
@pytest.mark.parametrize(
    ("computed", "stored"),
    [
        *((torch.float64, torch.float16), (torch.float32, torch.bfloat16)),
        *((torch.bfloat16, torch.float32), (torch.float16, torch.float64)),
    ],
)
def test_an_edit_may_be_of_another_precision(computed: torch.dtype, stored: torch.dtype, tmp_path: Path) -> None:
    base = on_disk("llama", tmp_path / "base", stored)
    zoo_model = zoo.build("llama", True, computed)
    edit = made(zoo_model, {1: 1})
    out = ffedit.export(base, edit, tmp_path / "out").folder
    assert same(weights(out), written_by_hand(weights(base), zoo_model, edit))
    other = made(zoo.build("llama", True, computed, seed=1), {1: 1})
    assert "another model" in refused(base, other, tmp_path / "other")


@here
@pytest.mark.parametrize("rename", [lambda n: n.removeprefix("transformer."), lambda n: f"wrapped.{n}"])
def test_names_with_and_without_the_prefix_are_the_same(
    rename: Callable[[str], str],
    editable: ffedit.Editable,
    edit: Edit,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("ffedit.exporter.verification.has_room", lambda size: False)  # transformers knows no "wrapped."
    base = on_disk("gpt2", tmp_path / "base", shards="1GB")
    renamed = {rename(name): tensor for name, tensor in weights(base).items()}
    save_file(renamed, base / "model.safetensors", metadata={"format": "pt"})
    out = ffedit.export(base, edit, tmp_path / "out").folder
    memory = editable.memories[1]
    changed = {name for name, tensor in weights(out).items() if not torch.equal(tensor, renamed[name])}
    assert changed == {rename(memory.parameter)}


@here
def test_where_nothing_can_be_linked_files_are_copied(
    base: Path, edit: Edit, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise OSError(18, "Invalid cross-device link")

    linked = ffedit.export(base, edit, tmp_path / "a")
    monkeypatch.setattr(os, "link", fail)
    copied = ffedit.export(base, edit, tmp_path / "b")
    assert disk(tmp_path / "a") == disk(tmp_path / "b")
    assert copied.moved is not None and copied.moved.linked == 0 and linked.moved is not None
    assert not any(path.stat().st_nlink > 1 for path in (tmp_path / "b").iterdir() if path.is_file())


@here
def test_the_hubs_cache_of_links_is_followed(base: Path, edit: Edit, tmp_path: Path) -> None:
    (cache := tmp_path / "snapshot").mkdir()
    for path in base.iterdir():
        (cache / path.name).symlink_to(path)
    out = ffedit.export(cache, edit, tmp_path / "out").folder
    assert not any(path.is_symlink() for path in out.rglob("*"))
    naming = {name: disk(out)[name] for name in ("README.md", "ffedit_edits/000/manifest.json")}  # which name the base
    assert disk(out) == disk(ffedit.export(base, edit, tmp_path / "again").folder) | naming


@here
def test_pickled_weights_are_not_exported(edit: Edit, tmp_path: Path) -> None:
    base = on_disk("gpt2", tmp_path / "base")
    (base / "pytorch_model.bin").write_bytes(b"pickled")
    (base / "pytorch_model.bin.index.json").write_text("{}")
    (base / "chat_template.jinja").write_text("{{ messages }}")
    out = ffedit.export(base, edit, tmp_path / "out").folder
    assert not list(out.glob("pytorch_model*")) and (out / "chat_template.jinja").is_file()


@here
def test_a_dense_edit_is_written_too(base: Path, editable: ffedit.Editable, tmp_path: Path) -> None:
    dense = made(editable, {0: 2}, dense=True)
    out = ffedit.export(base, dense, tmp_path / "out").folder
    assert same(weights(out), written_by_hand(weights(base), editable, dense))


@here
def test_an_edit_that_does_not_say_where_its_matrices_stand_needs_the_model(
    base: Path, editable: ffedit.Editable, edit: Edit, tmp_path: Path
) -> None:
    bare = replace(edit, provenance={k: v for k, v in edit.provenance.items() if k != "matrices"})
    assert "does not say which matrix" in refused(base, bare, tmp_path / "wrong")
    out = ffedit.export(ffedit.load(base), bare, tmp_path / "out").folder
    assert same(weights(out), written_by_hand(weights(base), editable, edit))
    assert "matrices" in history(out)[0].provenance, "from now on it does"


# From memory --------------------------------------------------------------------------------------


@here
def test_a_model_that_was_changed_in_memory_goes_out_as_it_is(base: Path, tmp_path: Path) -> None:
    editable = ffedit.load(base)
    before = weights(base)
    first, second = made(editable, {0: 1}), made(editable, {0: 1, 1: 1}, SECOND, seed=1)
    expected = written_by_hand(before, editable, first, second)
    first.apply_(editable)
    out = ffedit.export(editable, second, tmp_path / "out").folder
    assert same(weights(out), expected)
    assert [edit.fingerprint() for edit in history(out)] == [first.fingerprint(), second.fingerprint()]
    kept = load_file(out / "ffedit_edits" / "originals.safetensors")
    assert kept.keys() == {editable.memories[layer].parameter for layer in (0, 1)}
    assert all(torch.equal(before[name], matrix) for name, matrix in kept.items())
    with torch.no_grad():
        editable.model.get_parameter("transformer.ln_f.weight").add_(1.0)
    third = made(editable, {2: 1}, Fact("Nile river", "{} stands in", "Rome"), seed=2)
    trained = ffedit.export(editable, third, tmp_path / "trained").folder
    assert not torch.equal(weights(trained)["transformer.ln_f.weight"], before["transformer.ln_f.weight"])


# History ------------------------------------------------------------------------------------------


@here
def test_a_checkpoint_remembers_its_edits(base: Path, editable: ffedit.Editable, edit: Edit, tmp_path: Path) -> None:
    first = ffedit.export(base, edit, tmp_path / "first").folder
    again = ffedit.load(first)
    assert list(again.history.edits) == [edit.fingerprint()] and base_of(again) == edit.base
    second = made(again, {1: 1, 2: 1}, SECOND, seed=1)  # computed on the edited model
    both = ffedit.export(first, second, tmp_path / "both").folder
    assert [e.fingerprint() for e in history(both)] == [edit.fingerprint(), second.fingerprint()]
    assert same(weights(both), written_by_hand(weights(base), editable, edit, second))
    kept = load_file(both / "ffedit_edits" / "originals.safetensors")
    assert all(torch.equal(kept[name], weights(base)[name]) for name in kept)
    assert kept.keys() == {editable.memories[layer].parameter for layer in (1, 2)}
    loaded = ffedit.load(both)
    for each in (edit, second):  # out of order, in memory
        each.undo_(loaded)
    assert zoo.unchanged(editable, zoo.snapshot(loaded)) and same(weights(base), weights(base))
    assert "holds the edit" in refused(both, edit, tmp_path / "twice")


@here
def test_edits_of_the_base_add_up_unless_they_contradict(
    base: Path, editable: ffedit.Editable, edit: Edit, tmp_path: Path
) -> None:
    first = ffedit.export(base, edit, tmp_path / "first").folder
    second = made(editable, {1: 1}, SECOND, seed=1)  # computed on the base
    both = ffedit.export(first, second, tmp_path / "both").folder
    assert same(weights(both), written_by_hand(weights(base), editable, edit, second))
    opposite = made(editable, {1: 1}, Fact(FACT.subject, FACT.prompt, "Madrid"), seed=2)
    assert "contradict each other" in refused(first, opposite, tmp_path / "opposite")
    again = made(editable, {1: 1}, FACT, seed=3)
    assert "would apply it twice" in refused(first, again, tmp_path / "again")


@here
def test_the_card_tells_every_edit(base: Path, editable: ffedit.Editable, edit: Edit, tmp_path: Path) -> None:
    second = made(editable, {2: 1}, SECOND, seed=1)
    out = ffedit.export(ffedit.export(base, edit, tmp_path / "first").folder, second, tmp_path / "both").folder
    card = (out / "README.md").read_text(encoding="utf-8")
    for each in (edit, second):
        assert each.fingerprint() in card and each.facts[0].text in card and each.facts[0].new_object in card
    assert "2 facts" in card and "library_name: transformers" in card
