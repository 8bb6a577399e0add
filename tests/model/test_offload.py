"""A model that does not fit: its weights wait in CPU memory or on the disk, and nothing else is different."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import zoo
from accelerate import cpu_offload
from making import made, on_disk, weights
from shell import ASKED, disk, save_model, shell
from writing import CORPUS, FACT, quick

import ffedit
from ffedit import EditError, ModelError
from ffedit.editor.write import write as write_facts
from ffedit.loading.verify import find_and_verify
from ffedit.model import storage
from ffedit.model.editable import Editable
from ffedit.model.fingerprint import fingerprint
from ffedit.model.memory import identity

LAYERS = {"gpt2": "transformer.h", "llama": "model.layers"}
families = pytest.mark.parametrize("family", LAYERS)


def spread(family: str, folder: Path, **how: Any) -> Editable:
    """The model in `folder`, a layer in memory, all else on the disk, read where it is used."""
    layers, modules = LAYERS[family], ffedit.load(folder).model.named_modules()
    outside = [path for path, module in modules if not list(module.children()) and not path.startswith(f"{layers}.")]
    places = {**dict.fromkeys(outside, "disk"), f"{layers}.0": "cpu", f"{layers}.1": "disk", f"{layers}.2": "disk"}
    return ffedit.load(folder, device_map=places, offload_folder=folder.parent / "offload", **how)


def trained(family: str, folder: Path) -> Path:
    editable = zoo.trained(family, True)
    editable.model.save_pretrained(folder, max_shard_size="20KB")
    editable.tokenizer.save_pretrained(folder)
    return folder


@families
def test_an_offloaded_model_is_the_same_model(tmp_path: Path, family: str) -> None:
    folder = on_disk(family, tmp_path / "model")
    assert len(list(folder.glob("*.safetensors"))) > 2
    whole, other = ffedit.load(folder), spread(family, folder)
    assert other.memories[1].weight.is_meta and not other.memories[0].weight.is_meta
    assert storage.is_offloaded(other.model) and not storage.is_offloaded(whole.model)
    assert torch.equal(zoo.logits(other.model), zoo.logits(whole.model))
    assert (other.device, other.norm, other.resumable, other.ragged) == (whole.device, whole.norm, True, True)
    for below in (None, 0, 1, 2):
        assert fingerprint(other, below) == fingerprint(whole, below)
    for layer in range(3):
        assert identity(other.memories[layer]) == identity(whole.memories[layer])
        assert torch.equal(other.memories[layer].value, whole.memories[layer].value)
        assert other.memories[layer].shape == whole.memories[layer].value.shape


@families
def test_an_edit_lands_in_offloaded_weights_and_leaves_them_bit_for_bit(tmp_path: Path, family: str) -> None:
    folder = on_disk(family, tmp_path / "model", torch.bfloat16)
    whole, other = ffedit.load(folder), spread(family, folder)
    before, files = zoo.logits(other.model), disk(folder)
    first, second = made(whole, {0: 1, 1: 2}), made(whole, {1: 1, 2: 1}, ffedit.Fact("a", "{} is", "b"), seed=1)
    for edit in (first, second):
        edit.apply_(whole)
        edit.apply_(other)
        assert torch.equal(zoo.logits(other.model), zoo.logits(whole.model)) and not torch.equal(
            zoo.logits(other.model), before
        )
        assert fingerprint(other) == fingerprint(whole)
    assert other.memories[1].weight.is_meta, "the weight stays offloaded"
    for edit in (first, second):
        edit.undo_(whole)
        edit.undo_(other)
        assert torch.equal(zoo.logits(other.model), zoo.logits(whole.model))
    assert torch.equal(zoo.logits(other.model), before) and fingerprint(other) == first.base
    assert disk(folder) == files, "no file of the checkpoint is written"


@pytest.mark.parametrize(
    ("family", "method"), [("gpt2", "memit"), ("llama", "memit"), ("llama", "rome"), ("gpt2", "ft-l")]
)
def test_facts_are_located_written_and_measured_as_without_offloading(tmp_path: Path, family: str, method: str) -> None:
    folder = trained(family, tmp_path / "model")
    fact = ffedit.Fact(FACT.subject, FACT.prompt, FACT.target, FACT.previous, paraphrases=("{} stands in",))
    found = []
    for editable in (ffedit.load(folder), spread(family, folder)):
        trace = ffedit.locate(editable, fact, samples=2) if method == "memit" else None
        layers = [0, 1] if method == "memit" else [1]
        edit = write_facts(editable, [fact], method, layers, quick(ft_steps=3), CORPUS)
        assert edit.base == fingerprint(editable), "the model is as it was"
        report = ffedit.evaluate(editable, [fact], edit)
        assert edit.base == fingerprint(editable)
        assert not any(p.requires_grad for p in editable.model.parameters())
        found.append((edit, report.before.to_dict(), report.after.to_dict(), trace))
    (edit, *scores, trace), (other, *others, seen) = found
    assert others == scores and scores[0] != scores[1]
    assert edit.provenance["base"] == other.provenance["base"] and edit.updates.keys() == other.updates.keys()
    for at, delta in edit.updates.items():
        assert delta.norm() > 0 and torch.equal(delta.dense, other.updates[at].dense)
    assert trace is None or (trace.effects == seen.effects).all()


@families
def test_vectors_are_read_without_a_copy_of_an_offloaded_head(
    tmp_path: Path, family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = on_disk(family, tmp_path / "model", torch.bfloat16)
    whole, other = ffedit.load(folder), spread(family, folder)
    vectors = torch.randn(3, whole.d_model)
    monkeypatch.setattr(storage, "fetched", lambda *of: pytest.fail("copied"))
    assert torch.equal(other.read(vectors), whole.read(vectors))


def test_half_precision_is_computed_wider_and_written_as_it_was_saved(tmp_path: Path) -> None:
    folder = on_disk("llama", tmp_path / "model", torch.float16)
    whole, other = ffedit.load(folder), spread("llama", folder)
    assert other.memories[2].weight.dtype == torch.float32 and other.memories[2].saved_dtype == torch.float16
    with (edit := made(whole, {2: 1})).applied(whole), edit.applied(other):
        assert torch.equal(zoo.logits(other.model), zoo.logits(whole.model))
        written = other.memories[2].value
        assert torch.equal(written, written.half().float())


@pytest.mark.usefixtures("verified_here")
def test_an_edit_is_exported_as_from_a_model_that_is_loaded_whole(tmp_path: Path) -> None:
    folder = on_disk("llama", tmp_path / "model")
    whole, other = ffedit.load(folder), spread("llama", folder)
    edit = made(whole, {1: 1, 2: 1})
    edit.apply_(other)
    edit.undo_(other)
    for name, editable in (("a", whole), ("b", other)):
        ffedit.export(editable, edit, tmp_path / name)
    stored, expected = weights(tmp_path / "b"), weights(tmp_path / "a")
    assert stored.keys() == expected.keys() and all(torch.equal(stored[n], expected[n]) for n in stored)
    again = spread("llama", tmp_path / "b")
    with edit.applied(whole):
        assert torch.equal(zoo.logits(again.model), zoo.logits(whole.model))
    edit.undo_(again)
    assert torch.equal(zoo.logits(again.model), zoo.logits(whole.model))
    made(whole, {0: 1}, ffedit.Fact("a", "{} is", "b")).apply_(other)
    with pytest.raises(EditError, match="some of its weights are offloaded"):
        ffedit.export(other, edit, tmp_path / "c")
    assert not (tmp_path / "c").exists()


def test_a_model_that_others_offloaded_to_memory_can_be_edited() -> None:
    model = zoo.model("llama")
    expected = find_and_verify(zoo.model("llama"), zoo.words(), "llama")
    editable = find_and_verify(cpu_offload(model, torch.device("cpu")), zoo.words(), "llama")
    assert editable.memories[0].weight.is_meta and fingerprint(editable) == fingerprint(expected)
    with (edit := made(expected, {0: 1})).applied(expected), edit.applied(editable):
        assert torch.equal(zoo.logits(editable.model), zoo.logits(expected.model))
    assert torch.equal(zoo.logits(editable.model), zoo.logits(expected.model))


def test_the_command_line_spreads_a_model_over_memory_and_disk(
    tmp_path: Path, empty: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = save_model(zoo.trained("gpt2", True), tmp_path / "model")
    small = ["--device-map", "auto", "--offload", tmp_path / "offload", "--max-memory", "cpu=100KB"]
    assert storage.is_offloaded(ffedit.load(folder, device_map="auto", max_memory={"cpu": "100KB"}).model)
    said = [shell(capsys, "evaluate", *ASKED, "--model", folder, "--json", "-", *how) for how in ([], small)]
    assert [ran.code for ran in said] == [0, 0]
    plain, spread = ({**json.loads(ran.out), "command": ""} for ran in said)
    assert spread == plain


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ({"device_map": "everywhere"}, "device map 'everywhere' is not known; give auto, balanced"),
        ({"device_map": "auto", "device": "cpu"}, "device 'cpu' and a device map were given"),
        ({"device_map": 0}, "found 0 \\(int\\) where a device map was expected"),
        ({"offload_folder": "x"}, "needs a device map"),
        ({"device_map": "auto", "max_memory": {"cpu": "much"}}, "'much' is not an amount of memory"),
        ({"device_map": "auto", "max_memory": {0: 20e9}}, "is not an amount of memory"),
    ],
)
def test_options_that_cannot_spread_a_model_are_refused_in_one_line(how: dict[str, Any], said: str) -> None:
    with pytest.raises(ModelError, match=said):
        ffedit.load("atlas", **how)


def test_a_folder_or_a_map_that_cannot_hold_weights_is_refused_in_one_line(
    tmp_path: Path, model: Path, empty: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (taken := tmp_path / "taken").write_text("")
    with pytest.raises(ModelError, match="is a file; a folder to offload weights to was expected"):
        ffedit.load(model, device_map="auto", offload_folder=taken)
    with pytest.raises(ModelError, match="the model cannot be read: "):
        ffedit.load(model, device_map={"transformer.wte": "disk"})
    ran = shell(capsys, "evaluate", *ASKED, "--model", model, "--device-map", "auto", "--max-memory", "20GB")
    assert (ran.code, ran.err.count("\n")) == (1, 1) and "--max-memory '20GB' is not known" in ran.err
