"""An edit is undone in a checkpoint: from the originals, in any order, bit for bit; or not at all."""

from __future__ import annotations

from dataclasses import replace
from itertools import permutations
from pathlib import Path

import pytest
import torch
import zoo
from making import FACT, SECOND, made, on_disk, same, weights, written_by_hand
from shell import disk, shell

import ffedit
from ffedit import Address, CheckError, Edit, EditError, Fact, LowRank
from ffedit.editor.edit import applied_edits
from ffedit.exporter import history
from ffedit.exporter.embedded_edits import read_originals
from ffedit.files.tensor_ranges import contents

THIRD = Fact("Nile river", "{} stands in", "Rome")
pytestmark = pytest.mark.usefixtures("tensors_only")


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model in 16 bits, where W + Δ − Δ is seldom W; read only."""
    return on_disk("llama", tmp_path_factory.mktemp("undo") / "base", torch.bfloat16)


@pytest.fixture(scope="module")
def edits(base: Path) -> list[Edit]:
    """Three edits of the base that share a matrix."""
    editable = ffedit.load(base)
    ranks = ({1: 1}, {1: 2, 2: 1}, {0: 1, 1: 1})
    return [
        made(editable, r, fact, seed) for seed, (r, fact) in enumerate(zip(ranks, (FACT, SECOND, THIRD), strict=True))
    ]


def exported(base: Path, edits: list[Edit], place: Path) -> Path:
    """A checkpoint with edits, exported one after the other."""
    for i, edit in enumerate(edits):
        base = ffedit.export(base, edit, place / f"with{i}").folder
    return base


def refused(*arguments: object, **how: int | str) -> str:
    place = Path(str(arguments[1])).parent
    before = disk(place)
    with pytest.raises(EditError) as caught:
        ffedit.undo(*arguments, **how)  # type: ignore[arg-type]
    assert "\n" not in str(caught.value) and disk(place) == before
    return str(caught.value)


def test_undone_in_any_order_it_is_as_if_never_written(base: Path, edits: list[Edit], tmp_path: Path) -> None:
    everything = exported(base, edits, tmp_path)
    editable = ffedit.load(base)
    for order in permutations(range(3)):
        folder, left = everything, list(edits)
        for step in order:
            gone = edits[step]
            place = tmp_path / f"undo{order}{step}"
            folder = ffedit.undo(folder, place, edit=gone.fingerprint()).folder
            left.remove(gone)
            assert same(weights(folder), written_by_hand(weights(base), editable, *left))
            assert [e.fingerprint() for e in history(folder)] == [e.fingerprint() for e in left]
        assert same(weights(folder), weights(base)) and not (folder / "ffedit_edits").exists()
        assert contents(folder).keys() == contents(base).keys()


def test_the_last_is_undone_unless_another_is_named(
    base: Path, edits: list[Edit], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = exported(base, edits, tmp_path)
    monkeypatch.setattr("ffedit.exporter.verification.has_room", lambda size: True)  # logits are compared, too
    editable = ffedit.load(base)
    done = ffedit.undo(folder, tmp_path / "last")
    assert done.edit.fingerprint() == edits[2].fingerprint() and done.checked.logits
    assert same(weights(tmp_path / "last"), weights(tmp_path / "with1"))
    ffedit.undo(folder, tmp_path / "first", edit=0)
    assert same(weights(tmp_path / "first"), written_by_hand(weights(base), editable, *edits[1:]))
    card = (tmp_path / "first" / "README.md").read_text(encoding="utf-8")
    assert edits[1].fingerprint() in card and "was undone" in card


def test_only_what_the_undone_edit_changed_is_rewritten(base: Path, edits: list[Edit], tmp_path: Path) -> None:
    folder = exported(base, edits[:2], tmp_path)
    ffedit.undo(folder, tmp_path / "out", edit=0)
    shards = {path.name for path in folder.glob("*.safetensors")}
    copied = {name for name in shards if not (tmp_path / "out" / name).samefile(folder / name)}
    changed = contents(folder)["model.layers.1.mlp.down_proj.weight"].file.name
    assert copied == {changed}


def test_what_is_not_there_cannot_be_undone(base: Path, edits: list[Edit], tmp_path: Path) -> None:
    assert "no edits in it" in refused(base, tmp_path / "out")
    folder = exported(base, edits[:2], tmp_path)
    once = ffedit.undo(folder, tmp_path / "once", edit=edits[0].fingerprint()).folder
    line = refused(once, tmp_path / "out", edit=edits[0].fingerprint())
    assert "undone already?" in line and edits[1].fingerprint() in line
    assert "undone already?" in refused(folder, tmp_path / "out", edit=2)
    assert "exists already" in refused(folder, once)


def test_the_models_history_undoes_what_the_checkpoint_holds(base: Path, edits: list[Edit], tmp_path: Path) -> None:
    loaded = ffedit.load(exported(base, edits[:2], tmp_path))
    edits[0].undo_(loaded)
    one = ffedit.load(ffedit.undo(tmp_path / "with1", tmp_path / "one", edit=0).folder)
    assert zoo.unchanged(loaded, zoo.snapshot(one))
    edits[1].undo_(loaded)
    assert zoo.unchanged(loaded, zoo.snapshot(ffedit.load(base)))


def test_a_checkpoint_without_originals_knows_its_edits_and_undoes_none(
    base: Path, edits: list[Edit], tmp_path: Path
) -> None:
    first, upon = edits[:2]
    folder = exported(base, [first], tmp_path)
    (folder / "ffedit_edits" / "originals.safetensors").unlink()
    assert "its original is missing" in refused(folder, tmp_path / "out")
    loaded = ffedit.load(folder, dtype="float32")
    before, upon = zoo.snapshot(loaded), made(loaded, {1: 1, 2: 1}, SECOND, seed=1)
    assert [edit.fingerprint() for edit in applied_edits(loaded)] == [first.fingerprint()]
    with pytest.raises(EditError, match=r"cannot be undone .* original matrices are missing") as caught:
        first.undo_(loaded)
    assert "\n" not in str(caught.value)
    with pytest.raises(EditError, match="is applied already"):
        first.apply_(loaded)
    out = ffedit.export(loaded, upon, tmp_path / "out").folder  # from memory, in another dtype
    assert [edit.fingerprint() for edit in history(out)] == [first.fingerprint(), upon.fingerprint()]
    assert read_originals(out).keys() == {loaded.memories[2].parameter}, "what an edit changed before is no original"
    assert zoo.unchanged(loaded, before), "the later edit is undone bit for bit"


def test_an_undo_of_a_matrix_changed_by_others_is_refused(base: Path, edits: list[Edit], tmp_path: Path) -> None:
    folder = exported(base, edits[:1], tmp_path)
    stored = contents(folder)["model.layers.1.mlp.down_proj.weight"]
    with stored.file.open("r+b") as file:
        file.seek(stored.start)
        file.write(b"\x00\x3f")
    assert "changed by something else" in refused(folder, tmp_path / "out")


def test_an_undo_that_went_wrong_is_found(
    base: Path, edits: list[Edit], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = exported(base, edits[:1], tmp_path)
    before = disk(tmp_path)
    monkeypatch.setattr("ffedit.exporter.checkpoint.patch", lambda *_: None)
    with pytest.raises(CheckError, match="nothing was written"):
        ffedit.undo(folder, tmp_path / "out")
    assert disk(tmp_path) == before


def test_the_command_undoes_an_edit_by_number_or_fingerprint(
    base: Path, edits: list[Edit], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = exported(base, edits[:2], tmp_path)
    done = shell(capsys, "undo", folder, "--out", tmp_path / "a", "--edit", "0")
    assert done.code == 0 and "undone, bit for bit" in " ".join(done.out.split()) and "logits" in done.out
    done = shell(capsys, "undo", tmp_path / "a", "--out", tmp_path / "b", "--edit", edits[0].fingerprint())
    assert done.code == 1 and done.err.count("\n") == 1


def small(editable: ffedit.Editable) -> Edit:
    """An edit of one number, which is none of those that the sample of a matrix holds."""
    edit = made(editable, {1: 1}, THIRD)
    left, right = (torch.zeros_like(factor) for factor in vars(edit.updates[Address(1)]).values())
    left[0], right[0, 1] = 1.0, 1.0
    return replace(edit, updates={Address(1): LowRank(left, right)})


def test_an_export_holds_the_edits_of_the_model_not_those_of_its_folder(
    base: Path, edits: list[Edit], tmp_path: Path
) -> None:
    editable = ffedit.load(base)
    first = small(editable)
    first.apply_(editable)
    both = ffedit.export(editable, edits[0], tmp_path / "both").folder
    assert same(weights(both), written_by_hand(weights(base), editable, first, edits[0]))
    assert [e.fingerprint() for e in history(both)] == [first.fingerprint(), edits[0].fingerprint()]
    first.undo_(editable)
    reopened = ffedit.load(ffedit.export(editable, first, tmp_path / "first").folder)
    first.undo_(reopened)
    second = ffedit.export(reopened, edits[0], tmp_path / "second").folder
    assert same(weights(second), written_by_hand(weights(base), editable, edits[0]))
    assert [e.fingerprint() for e in history(second)] == [edits[0].fingerprint()]


def test_what_was_before_all_edits_is_known_when_the_first_is_undone(
    base: Path, edits: list[Edit], tmp_path: Path
) -> None:
    first = exported(base, edits[:1], tmp_path)
    loaded = ffedit.load(first)
    upon = made(loaded, {1: 1}, SECOND, seed=3)  # computed with the first edit, as is
    again = made(loaded, {2: 1}, THIRD, seed=4)  # this one
    both = ffedit.export(first, upon, tmp_path / "both").folder
    left = ffedit.load(ffedit.undo(both, tmp_path / "left", edit=0).folder)
    with pytest.raises(EditError, match="was computed on weights"):
        again.apply_(left)
    edits[2].apply_(left)  # computed on the base
    expected = written_by_hand(weights(base), left, upon, edits[2])
    assert all(torch.equal(left.model.state_dict()[name], tensor) for name, tensor in expected.items())
    edits[2].undo_(left)
    upon.undo_(left)
    assert zoo.unchanged(left, zoo.snapshot(ffedit.load(base)))


def test_in_another_precision_an_edit_of_the_base_is_one(base: Path, edits: list[Edit], tmp_path: Path) -> None:
    wide = ffedit.load(base, dtype="float32")
    edit = made(wide, {1: 1}, SECOND, seed=3)
    loaded = ffedit.load(exported(base, edits[:1], tmp_path), dtype="float32")
    edit.apply_(loaded)
    for applied in (edit, edits[0]):
        applied.undo_(loaded)
    assert zoo.unchanged(loaded, zoo.snapshot(wide))
