"""Checkpoints whose model sees pictures, too: the text decoder is edited, and all else is kept."""

from __future__ import annotations

from pathlib import Path

import pictures
import pytest
import torch
import zoo
from making import made, same, weights
from safetensors.torch import load_file, save_file
from transformers import Gemma3ForConditionalGeneration

import ffedit
from ffedit import ModelError
from ffedit.files.shards import INDEX

pytest.importorskip("peft")
DOCUMENT = Path(__file__).parents[2] / "docs" / "families.md"
READ = [kind for kind in pictures.SHAPES if kind != "paligemma"]
every_class = pytest.mark.parametrize("kind", READ)


@every_class
def test_an_export_is_the_whole_checkpoint_with_one_matrix_changed(kind: str) -> None:
    found = pictures.case(kind)
    assert found.missed < 1e-4, "what ROME asked for is there in the real forward pass"
    assert found.name and found.others and found.reopened


@every_class
def test_an_undo_of_an_export_is_the_base_to_the_bit(kind: str) -> None:
    assert pictures.case(kind).undone


@every_class
def test_peft_finds_the_names_of_an_adapter_in_the_class_itself(kind: str) -> None:
    assert pictures.case(kind).adapter == ""


def test_the_document_says_what_was_measured() -> None:
    document = DOCUMENT.read_text(encoding="utf-8")
    assert document.endswith(pictures.section()), "run python tests/helpers/families.py"


def test_a_prompt_that_is_read_as_a_whole_is_refused_in_a_line() -> None:
    refused = pictures.case("paligemma").refused
    assert "looks ahead" in refused and "a causal decoder is needed" in refused and "\n" not in refused


def test_a_class_that_needs_pictures_is_refused_in_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def forward(self: object, **inputs: object) -> None:
        raise ValueError("pixel_values\nare missing")

    model = pictures.model("gemma3")
    monkeypatch.setattr(type(model), "forward", forward)
    with pytest.raises(ModelError, match="cannot run Gemma3ForConditionalGeneration on text alone") as caught:
        ffedit.load((model, zoo.bytes_bpe()))
    assert "\n" not in str(caught.value)


@pytest.mark.usefixtures("verified_here")
def test_an_edit_of_one_layout_of_names_is_exported_to_another(tmp_path: Path) -> None:
    """transformers 4.52 wrote the names in memory; the same numbers may lie elsewhere under older ones."""
    older, newer = pictures.saved("gemma3", tmp_path / "older"), pictures.saved("gemma3", tmp_path / "newer")
    prefixes = "language_model.model.", "model.language_model."
    for path in sorted(newer.glob("*.safetensors")):
        tensors = {name.replace(*prefixes): tensor for name, tensor in load_file(path).items()}
        save_file(tensors, path, metadata={"format": "pt"})
    index = newer / INDEX
    index.write_text(index.read_text().replace(*prefixes))
    edit = made(ffedit.load(newer), {1: 2})
    for base, prefix in ((older, prefixes[0]), (newer, prefixes[1])):
        ffedit.export(base, edit, tmp_path / f"{base.name}-edited")
        before, after = weights(base), weights(tmp_path / f"{base.name}-edited")
        changed = [name for name in before if not torch.equal(before[name], after[name])]
        assert before.keys() == after.keys() and changed == [f"{prefix}layers.1.mlp.down_proj.weight"]
        ffedit.undo(tmp_path / f"{base.name}-edited", tmp_path / f"{base.name}-undone")
        assert same(weights(tmp_path / f"{base.name}-undone"), before)


@pytest.mark.usefixtures("verified_here")
def test_a_model_edited_in_memory_is_written_with_its_tower(tmp_path: Path) -> None:
    base = pictures.saved("gemma3", tmp_path / "base")
    editable = ffedit.load(base)
    made(editable, {0: 2}).apply_(editable)
    ffedit.export(editable, made(editable, {1: 2}), tmp_path / "edited")
    before, after = weights(base), weights(tmp_path / "edited")
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert before.keys() == after.keys()
    assert changed == {f"language_model.model.layers.{layer}.mlp.down_proj.weight" for layer in (0, 1)}
    assert isinstance(Gemma3ForConditionalGeneration.from_pretrained(tmp_path / "edited"), torch.nn.Module)
