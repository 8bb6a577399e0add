"""An edit on disk: exact, whole or not at all, and refused in words when it is not what was saved."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import zoo
from safetensors.torch import load_file, save_file

from ffedit import Address, Edit, EditError, Fact, LowRank, Probe, Report, Scores
from ffedit.algebra.low_rank import Dense
from ffedit.editor.edit_files import FORMAT
from ffedit.editor.provenance import ValueSearch, value_searches
from ffedit.evaluator import FactScores
from ffedit.model.fingerprint import fingerprint

FACT = Fact(
    "Eiffel tower",
    "the {} is in",
    "Rome",
    "Paris",
    ("{} stands in",),
    (Probe("the old tower is in", "Rome"),),
)


def made(base: str = "0" * 16) -> Edit:
    """An edit of two layers, as an editor would give it."""
    g = torch.Generator().manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=g, dtype=torch.float64)

    addresses = (Address(0), Address(2))
    return Edit(
        {a: LowRank(random(32, 2), random(2, 48)) for a in addresses},
        {a: random(48, 2) for a in addresses},
        {a: random(32, 2) for a in addresses},
        (FACT, Fact("東京", "{}は", "日本")),
        {"method": "rome", "base": base, "config": {"seed": 0}},
    )


def refusal(path: Path) -> str:
    with pytest.raises(EditError) as caught:
        Edit.load(path)
    assert str(path) in str(caught.value) and "\n" not in str(caught.value)
    return str(caught.value)


def test_an_edit_is_saved_and_loaded_exactly(tmp_path: Path) -> None:
    edit = made()
    edit.save(tmp_path / "rome.edit")
    again = Edit.load(tmp_path / "rome.edit")
    assert list(again.updates) == list(edit.updates) and again.facts == edit.facts
    for address, delta in edit.updates.items():
        update = again.updates[address]
        assert isinstance(update, LowRank) and isinstance(delta, LowRank)
        assert torch.equal(update.left, delta.left) and torch.equal(update.right, delta.right)
        assert torch.equal(again.keys[address], edit.keys[address])
        assert torch.equal(again.values[address], edit.values[address])
    assert again.provenance == edit.provenance and again.fingerprint() == edit.fingerprint()
    assert (again.layers, again.rank, again.base) == ([0, 2], 2, "0" * 16)
    assert json.loads((tmp_path / "rome.edit" / "manifest.json").read_text())["format"] == FORMAT == 2
    assert {p.name for p in tmp_path.iterdir()} == {"rome.edit"}
    assert {p.name for p in (tmp_path / "rome.edit").iterdir()} == {"edit.safetensors", "manifest.json"}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_a_dense_edit_that_solved_for_no_keys_is_saved_exactly(tmp_path: Path, dtype: torch.dtype) -> None:
    matrix = torch.randn(32, 48, generator=torch.Generator().manual_seed(1)).to(dtype)
    edit = Edit({Address(1, 3): Dense(matrix)}, {}, {}, (FACT,), {"method": "ft", "base": "0" * 16})
    edit.save(tmp_path / "e")
    again = Edit.load(tmp_path / "e")
    update = again.updates[Address(1, 3)]
    assert isinstance(update, Dense) and update.dense.dtype == dtype and torch.equal(update.dense, matrix)
    assert again.keys[Address(1, 3)].shape == (48, 0) and again.values[Address(1, 3)].shape == (32, 0)
    assert again.fingerprint() == edit.fingerprint() and again.rank == 32


def test_a_scored_edit_is_the_same_edit_and_its_scores_are_guarded(tmp_path: Path) -> None:
    edit = made()
    old, new = (Scores(efficacy=rate, generation=rate) for rate in (0.0, 1.0))
    before, after = ((FactScores(edit.facts[0], scores, says),) for scores, says in ((old, "Paris"), (new, "Rome .")))
    scored = edit.scored(Report(old, new, before, after))
    assert scored.fingerprint() == edit.fingerprint()
    scored.save(tmp_path / "e")
    again = Edit.load(tmp_path / "e")
    assert again.provenance["scores"]["after"] == new.to_dict() and again.provenance["verdict"]["outcome"] == "took"
    assert again.says == [("Paris", "Rome ."), *[(None, None)] * (len(edit.facts) - 1)], "others were not measured"
    assert edit.says == [(None, None)] * len(edit.facts)
    change_manifest(lambda m: m["provenance"]["scores"]["after"].update(efficacy=0.5))(tmp_path / "e")
    assert "manifest.json was changed" in refusal(tmp_path / "e")


def test_how_far_a_search_came_is_known_where_its_numbers_are_recorded(tmp_path: Path) -> None:
    edit, numbers = made(), {"steps": 5, "target_probability": 0.6}
    solved = [{"subject": FACT.subject, "tokens": [2], "probabilities": [0.5], "loss": [3.0, 1.0]}]
    for i, config in enumerate(({}, {"value": {}}, {"value": {"steps": 5}}, {"value": numbers})):
        edit.noted(config=config, solved=solved).save(tmp_path / f"{i}")
        found = ValueSearch(2, 1, 5, 0.5, 0.6) if config == {"value": numbers} else None
        assert value_searches(Edit.load(tmp_path / f"{i}")) == [found, None]


def test_the_fingerprint_covers_what_was_solved_for() -> None:
    edit = made()
    for name in ("keys", "values"):
        moved = {at: tensor + 1e-9 for at, tensor in getattr(edit, name).items()}
        assert dataclasses.replace(edit, **{name: moved}).fingerprint() != edit.fingerprint()
    other = dataclasses.replace(edit, provenance={**edit.provenance, "note": "told later"})
    assert other.fingerprint() == edit.fingerprint()


def test_what_stands_in_the_way_is_replaced_only_when_asked(tmp_path: Path) -> None:
    target = tmp_path / "e"
    target.mkdir()
    made().save(target)  # an empty folder holds nothing to lose
    (target / "mine.txt").write_text("keep me")
    with pytest.raises(EditError, match="exists already"):
        made().save(target)
    assert (target / "mine.txt").read_text() == "keep me"
    made().save(target, force=True)
    assert not (target / "mine.txt").exists() and Edit.load(target).rank == 2
    assert [p.name for p in tmp_path.iterdir()] == ["e"]


def test_a_failed_save_leaves_nothing_and_what_was_there_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made().save(tmp_path / "old")
    before = (tmp_path / "old" / "manifest.json").read_text()

    def fail(*args: Any, **kwargs: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("ffedit.editor.edit.save_file", fail)
    for name, force in (("new", False), ("old", True)):
        with pytest.raises(EditError, match="No space left"):
            made().save(tmp_path / name, force=force)
    assert [p.name for p in tmp_path.iterdir()] == ["old"]
    assert (tmp_path / "old" / "manifest.json").read_text() == before


def test_a_place_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(EditError, match="cannot be written"):
        made().save(tmp_path / "file" / "e")


def change_manifest(change: Callable[[dict[str, Any]], Any]) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        manifest = json.loads((folder / "manifest.json").read_text())
        changed = change(manifest)
        (folder / "manifest.json").write_text(json.dumps(manifest if changed is None else changed))

    return apply


def change_tensors(folder: Path) -> None:
    tensors = load_file(folder / "edit.safetensors")
    tensors["0/left"][3, 0] += 1e-9
    save_file(tensors, folder / "edit.safetensors")


def drop_tensor(folder: Path) -> None:
    tensors = load_file(folder / "edit.safetensors")
    del tensors["2/right"]
    save_file(tensors, folder / "edit.safetensors")


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (change_manifest(lambda m: m["facts"][0].update(target="Berlin")), "changed after"),
        (change_tensors, "changed after"),
        (change_manifest(lambda m: m["provenance"]["config"].update(seed=1)), "manifest.json was changed"),
        (change_manifest(lambda m: m.pop("checksum") and None), "damaged"),
        (change_manifest(lambda m: m.update(format=99)), "format 99"),
        (change_manifest(lambda m: m["facts"][0].update(subject=5)), "damaged"),
        (lambda folder: (folder / "manifest.json").write_bytes(b"\xff\xfe"), "damaged"),
        (lambda folder: (folder / "manifest.json").unlink(), "holds no edit"),
        (lambda folder: folder.rename(folder.with_name("elsewhere")), "no such folder"),
        (lambda folder: (folder / "edit.safetensors").unlink(), "damaged"),
        (drop_tensor, "damaged"),
    ],
)
def test_an_edit_that_is_not_what_was_saved_is_refused(
    tmp_path: Path, damage: Callable[[Path], Any], words: str
) -> None:
    made().save(tmp_path / "e")
    damage(tmp_path / "e")
    assert words in refusal(tmp_path / "e")


def test_the_fingerprint_of_a_model_notices_one_weight_and_nothing_else() -> None:
    editable = zoo.build("gpt2")
    before = fingerprint(editable)
    assert before == fingerprint(zoo.build("gpt2")) != fingerprint(zoo.build("gpt2", seed=1))
    assert len(before) == 16
    weight = editable.memories[2].weight
    with torch.no_grad():
        weight[5, 7] += 1.0
        assert fingerprint(editable) != before
        weight[5, 7] -= 1.0
    assert fingerprint(zoo.build("gpt2", dtype=torch.bfloat16)) != before
