"""An edit in a GGUF file: the file that the model was loaded from, with nothing changed but what the edit changes."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import gguf
import gguf_making
import jsonschema
import numpy as np
import pytest
import torch
from making import SECOND, made
from shell import disk, shell
from writing import quick

import ffedit
from ffedit import CheckError, EditError
from ffedit.exporter.gguf import ENTRY, MOST_LOST, edits_in, pack
from ffedit.loading.gguf_reader import open_gguf
from ffedit.model.memory import Address

here = pytest.mark.usefixtures("verified_here")
Kind = gguf.GGMLQuantizationType
IDS = torch.arange(3, 20)[None]


def write(path: Path, kind: Kind | None, family: str = "llama") -> Path:
    """A tiny model in a file, whose first value matrix is of a type."""
    path.parent.mkdir(exist_ok=True)
    sizes = {"intermediate_size": 256} if family == "llama" else {"n_positions": 1024}
    model, tokenizer = gguf_making.parts(family, **sizes)
    if kind is Kind.Q6_K:  # which gguf cannot pack: blocks of 210 bytes, the last two of them the scale
        data = np.random.default_rng(0).integers(0, 64, (32, 210), dtype=np.uint8)
        data[:, 208:] = np.frombuffer(np.float16(1e-4).tobytes(), np.uint8)
        weight = torch.nn.Parameter(torch.from_numpy(data), requires_grad=False)
        model.model.layers[0].mlp.down_proj.weight = weight
    return gguf_making.write_gguf(path, model, tokenizer, family, kind=kind)


def tensors(file: Path) -> dict[str, Any]:
    return {tensor.name: tensor for tensor in open_gguf(file).tensors}


def unpacked(tensor: Any) -> torch.Tensor:
    return torch.from_numpy(gguf.dequantize(tensor.data, tensor.tensor_type).copy())


@here
@pytest.mark.parametrize(
    ("kind", "size", "now"),
    [
        (None, 0.1, "F32"),
        (Kind.F16, 0.1, "F16"),
        (Kind.Q8_0, 0.1, "Q8_0"),
        (Kind.Q4_1, 1.0, "Q4_1"),  # Δ much larger than a step of W's grid
        (Kind.Q4_1, 0.05, "Q8_0"),  # Δ smaller than a step
        (Kind.Q4_1, 0.01, "F16"),
        (Kind.Q6_K, 0.1, "Q8_0"),
    ],
)
def test_only_the_changed_matrix_is_packed_anew(tmp_path: Path, kind: Kind | None, size: float, now: str) -> None:
    file = write(tmp_path / "in" / "base.gguf", kind)
    before, untouched = tensors(file), disk(file.parent)
    editable = ffedit.load(file)
    edit = made(editable, {0: 1}, size=size)
    done = ffedit.export(editable, edit, tmp_path / "out" / "edited.gguf")
    (packed,) = done.packed
    after = tensors(done.folder)
    assert (packed.name, packed.kind, packed.was) == ("blk.0.ffn_down.weight", now, kind.name if kind else "F32")
    assert list(after) == list(before)
    for name, old in before.items():
        if name != packed.name:
            assert old.tensor_type == after[name].tensor_type and (old.data == after[name].data).all()
    delta = edit.updates[Address(0)].dense
    W, written = unpacked(before[packed.name]).double(), unpacked(after[packed.name]).double()
    assert packed.lost == pytest.approx(float((written - W - delta).norm() / delta.norm()), abs=1e-12)
    assert packed.lost <= MOST_LOST and after[packed.name].tensor_type.name == now
    if now == "F32":
        assert torch.equal(written, (W + delta).float().double())
    fields = {name: field.contents() for name, field in open_gguf(file).fields.items()}
    entries = {name: field.contents() for name, field in open_gguf(done.folder).fields.items()}
    (note,) = json.loads(entries.pop(ENTRY))
    assert note["edit"] == edit.fingerprint() and note["facts"][0]["target"] == "Rome"
    assert note["tensors"] == [packed.to_dict()]
    assert entries == {**fields, "GGUF.kv_count": fields["GGUF.kv_count"] + 1}
    assert disk(file.parent) == untouched and [path.name for path in done.folder.parent.iterdir()] == ["edited.gguf"]


def test_a_fresh_process_reads_the_file_and_it_says_what_the_edited_model_says(tmp_path: Path) -> None:
    file = write(tmp_path / "base.gguf", Kind.Q8_0)
    editable = ffedit.load(file)
    edit = made(editable, {0: 1, 2: 2})
    done = ffedit.export(editable, edit, tmp_path / "edited.gguf")
    assert done.checked.logits and done.checked.tensors == len(tensors(file))
    again = ffedit.load(done.folder).model(IDS).logits
    with edit.applied(editable):
        expected = editable.model(IDS).logits
    assert torch.allclose(again, expected, atol=0.02 * float(expected.abs().max()))
    assert not torch.allclose(again, editable.model(IDS).logits, atol=0.02 * float(expected.abs().max()))


@here
def test_a_matrix_that_transformers_transposes_stands_the_right_way(tmp_path: Path) -> None:
    editable = ffedit.load(write(tmp_path / "base.gguf", None, "gpt2"))
    assert editable.memories[0].stored_transposed
    edit = made(editable, {0: 1})
    again = ffedit.load(ffedit.export(editable, edit, tmp_path / "edited.gguf").folder)
    with edit.applied(editable):
        assert torch.equal(again.model(IDS).logits, editable.model(IDS).logits)


@here
def test_an_edit_on_top_of_another_is_noted_after_it(tmp_path: Path) -> None:
    file = write(tmp_path / "base.gguf", None)
    for number in range(2):
        editable = ffedit.load(file)
        edit = made(editable, {0: 1}, seed=number)
        file = ffedit.export(editable, edit, tmp_path / f"{number}.gguf").folder
    notes = edits_in(open_gguf(file))
    assert len(notes) == 2 and notes[1]["edit"] == edit.fingerprint()


@here
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_a_lora_adapter_adds_the_change_to_its_matrices(tmp_path: Path, family: str) -> None:
    file = write(tmp_path / "in" / "base.gguf", None, family)
    untouched, editable = disk(file.parent), ffedit.load(file)
    edit = made(editable, {0: 1, 2: 3})
    done = ffedit.export(editable, edit, tmp_path / "out" / "lora.gguf", format="adapter")
    assert (done.checked.tensors, done.checked.logits, done.moved) == (2, False, None)
    sides, entries = tensors(done.folder), open_gguf(done.folder).fields
    assert entries["general.type"].contents() == "adapter" and entries["adapter.type"].contents() == "lora"
    assert entries["general.architecture"].contents() == open_gguf(file).fields["general.architecture"].contents()
    alpha = entries["adapter.lora.alpha"].contents()
    assert set(sides) == {f"blk.{layer}.ffn_down.weight.lora_{side}" for layer in (0, 2) for side in "ab"}
    for layer, rank in ((0, 1), (2, 3)):
        a, b = (unpacked(sides[f"blk.{layer}.ffn_down.weight.lora_{side}"]).double() for side in "ab")
        assert len(a) == b.shape[1] == rank
        assert torch.allclose(alpha / rank * b @ a, edit.updates[Address(layer)].dense, atol=1e-6)  # as llama.cpp adds
    assert disk(file.parent) == untouched and [path.name for path in done.folder.parent.iterdir()] == ["lora.gguf"]


@here
def test_an_adapter_that_is_not_the_edit_is_not_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    editable = ffedit.load(write(tmp_path / "base.gguf", None))
    edit = made(editable, {0: 1})
    balanced = ffedit.exporter.gguf.balanced
    monkeypatch.setattr("ffedit.exporter.gguf.balanced", lambda update: tuple(2 * side for side in balanced(update)))
    with pytest.raises(CheckError, match=r"blk.0.ffn_down.weight differs"):
        ffedit.export(editable, edit, tmp_path / "lora.gguf", format="adapter")
    assert not (tmp_path / "lora.gguf").exists()


@here
def test_what_quantisation_loses_is_measured_at_the_keys_of_the_edit(tmp_path: Path) -> None:
    file = write(tmp_path / "base.gguf", Kind.Q8_0)
    editable = ffedit.load(file)
    edit = ffedit.edit(editable, ffedit.Fact("Eiffel tower", "the {} is", " Rome"), "rome", layers=[0], config=quick())
    (packed,) = ffedit.export(editable, edit, tmp_path / "edited.gguf").packed
    delta, K = edit.updates[Address(0)].dense, edit.keys[Address(0)].double()
    error = unpacked(tensors(tmp_path / "edited.gguf")[packed.name]).double() - editable.memories[0].value.double()
    assert packed.lost == pytest.approx(float(((error - delta) @ K).norm() / (delta @ K).norm()), rel=1e-6)


@pytest.mark.parametrize("damage", ["tensor", "entry"])
def test_a_file_that_is_not_what_was_meant_is_not_left(
    tmp_path: Path, damage: str, monkeypatch: pytest.MonkeyPatch, verified_here: list[Any]
) -> None:
    from ffedit.exporter import exporting

    file = write(tmp_path / "base.gguf", Kind.Q8_0)
    editable, write_gguf = ffedit.load(file), exporting.write_gguf

    def damaged(source: Path, target: Path, *rest: Any) -> Any:
        moved = write_gguf(source, target, *rest)
        content = bytearray(target.read_bytes())
        at = tensors(target)["blk.1.attn_norm.weight"].data_offset if damage == "tensor" else content.find(b"tiny")
        content[at] ^= 1
        target.write_bytes(content)
        return moved

    monkeypatch.setattr(exporting, "write_gguf", damaged)
    before = disk(tmp_path)
    with pytest.raises(CheckError, match="nothing was written"):
        ffedit.export(editable, made(editable, {0: 1}), tmp_path / "edited.gguf")
    assert disk(tmp_path) == before and verified_here


def test_what_cannot_be_written_is_told(tmp_path: Path, model: Path) -> None:
    file = write(tmp_path / "base.gguf", None)
    editable, other = ffedit.load(file), ffedit.load(model)
    edit = made(editable, {0: 1})
    before = disk(tmp_path)

    def refused(words: str, *arguments: Any, **options: Any) -> None:
        with pytest.raises(EditError, match=words) as caught:
            ffedit.export(*arguments, **options)
        assert "\n" not in str(caught.value) and disk(tmp_path) == before

    refused("was not loaded from a GGUF file", other, made(other, {0: 1}), tmp_path / "out.gguf")
    refused("give it a name that ends in .gguf", editable, edit, tmp_path / "out", format="gguf")
    refused("exists already", editable, edit, file)
    refused("the model was loaded from this file", editable, edit, file, force=True)
    with made(editable, {1: 1}, SECOND).applied(editable):
        refused("weights in memory are not those of", editable, edit, tmp_path / "out.gguf")
    other_file = write(tmp_path / "other" / "base.gguf", Kind.Q8_0)
    with pytest.raises(EditError, match="is not its tensor"):
        pack(other_file, edit)


@here
def test_the_command_exports_and_says_what_was_lost(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = write(tmp_path / "base.gguf", Kind.Q4_1)
    editable = ffedit.load(file)
    made(editable, {0: 1}, size=0.05).save(tmp_path / "edit")
    done = shell(capsys, "export", tmp_path / "edit", "--out", tmp_path / "out.gguf", "--json", tmp_path / "done.json")
    said = " ".join(done.out.split())
    assert (done.code, done.err) == (0, "")
    assert "blk.0.ffn_down.weight is stored as Q8_0 (was Q4_1), which loses" in said and "Next:" in said
    assert json.loads((tmp_path / "done.json").read_text())["gguf"][0]["was"] == "Q4_1"
    assert shell(capsys, "ask", "the tower", "--model", tmp_path / "out.gguf").code == 0


@here
def test_apply_measures_what_the_file_holds(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = write(tmp_path / "base.gguf", Kind.Q4_1)
    fact = ["--subject", "Eiffel tower", "--prompt", "the {} is", "--target", " Rome", "--previous", " Paris"]
    how = ["--layer", "0", "--method", "ft", "--quiet", "--force"]
    how += ["--out", tmp_path / "edit", "--json", tmp_path / "result.json"]
    out = tmp_path / "out.gguf"
    assert shell(capsys, "apply", *fact, *how, "--model", file, "--export", out).code == 0
    result = json.loads((tmp_path / "result.json").read_text())
    schema = Path(ffedit.__file__).parent / "cli" / "result.schema.json"
    jsonschema.validate(result, json.loads(schema.read_text()))
    report = ffedit.evaluate(ffedit.load(out), [ffedit.Edit.load(tmp_path / "edit").facts[0]])
    assert result["after"]["efficacy_magnitude"] == pytest.approx(report.before.efficacy_magnitude, abs=1e-6)
    assert result["edit"]["gguf"][0]["name"] == "blk.0.ffn_down.weight"
    told = shell(capsys, "apply", *fact, "--model", "atlas", "--export", tmp_path / "no.gguf")
    assert told.code == 1 and "was not loaded from a GGUF file" in told.err and not (tmp_path / "no.gguf").exists()


@pytest.mark.skipif(shutil.which("llama-cli") is None, reason="llama.cpp is not installed (llama-cli)")
def test_llama_cpp_reads_the_file(tmp_path: Path) -> None:
    editable = ffedit.load(write(tmp_path / "base.gguf", Kind.Q8_0))
    file = ffedit.export(editable, made(editable, {0: 1}), tmp_path / "edited.gguf").folder
    command = ["llama-cli", "-m", file, "-p", "the tower", "-n", "4", "-no-cnv", "--no-warmup"]
    assert subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, timeout=120).returncode == 0
