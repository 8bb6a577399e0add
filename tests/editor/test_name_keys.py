"""Keys of other names in the metric of an edit: which they are, what they do to an update, where they are kept."""

from __future__ import annotations

import unicodedata
from dataclasses import replace

import pytest
import torch
import zoo
from writing import FACT, quick, write, write_facts

from ffedit import Editable, EditError, Fact
from ffedit.algebra.linalg import double
from ffedit.editor import name_keys as module
from ffedit.editor.config import KeyConfig
from ffedit.editor.key import read_at, read_layers
from ffedit.editor.name_keys import NameKeys, name_moments, read_names
from ffedit.files import cache
from ffedit.inference.corpus import Corpus
from ffedit.inference.names import MENTIONS, alike, mention, names
from ffedit.model.feed_forward import FeedForward

FEW = ("Rome", "Paris", "Marie Curie", "Marie", "France", "Spain", "Madrid")


def name_keys(editable: Editable, ff: FeedForward) -> NameKeys:
    return read_names(editable, [ff])[ff.layer]


@pytest.fixture
def editable(monkeypatch: pytest.MonkeyPatch) -> Editable:
    monkeypatch.setattr(module, "names", lambda: FEW)
    monkeypatch.setattr(module, "THIRD", 1)
    return zoo.trained("gpt2", True)


def test_the_names_that_ship_are_many_of_many_kinds_and_each_once() -> None:
    found = names()
    assert len(found) > 3000 and len({name.casefold() for name in found}) == len(found)
    assert all(name == unicodedata.normalize("NFC", name.strip()) and "{" not in name for name in found)
    scripts = {unicodedata.name(name[0]).split()[0] for name in found}
    assert {"LATIN", "CYRILLIC", "GREEK", "ARABIC", "HEBREW", "CJK", "HANGUL", "DEVANAGARI", "THAI"} <= scripts


@pytest.mark.parametrize(
    ("name", "other", "expected"),
    [("Oman", "Romania", False), ("Rome", "ROME", True), ("Marie", "Marie Curie", True), ("Nile", "Blue Nile", True)],
)
def test_names_are_alike_where_one_is_words_of_the_other(name: str, other: str, expected: bool) -> None:
    assert alike(name, other) is alike(other, name) is expected


def test_the_moment_is_that_of_the_names_that_are_not_the_subjects(editable: Editable) -> None:
    ff = editable.feed_forward[1]
    config = KeyConfig(names_weight=2.0, without_names=("Madrid",))
    found = name_moments(editable, [ff], ["Marie Curie"], config)[1]
    assert found.count == 4 and found.left_out == ("Marie Curie", "Marie", "Madrid")
    others = [mention(editable, name, MENTIONS[FEW.index(name)]) for name in ("Rome", "Paris", "France", "Spain")]
    keys = double(read_at(editable, ff, others)[0].bfloat16())
    torch.testing.assert_close(found.moment, 2.0 * keys.T @ keys / len(FEW), rtol=1e-5, atol=1e-7)
    assert name_moments(editable, [ff], [], replace(config, names_weight=0.0)) == {}
    with pytest.raises(EditError, match="without_names is 'Madrid'; a list was expected"):
        KeyConfig(without_names="Madrid")  # type: ignore[arg-type]


@pytest.mark.parametrize("method", ["rome", "emmet", "memit"])
def test_other_names_receive_less_and_the_subject_as_much(editable: Editable, method: str) -> None:
    """uᵀ(C + w E)u is least: more weight on E cannot make uᵀEu larger, nor uᵀCu smaller; uᵀk* stays 1."""
    ff = editable.feed_forward[1]
    keys = name_keys(editable, ff).keys
    received, subject = [], []
    for weight in (0.0, 1.0, 100.0):
        edit = write(editable, method=method, names_weight=weight)
        ((at, delta),) = edit.updates.items()
        received.append(float((double(keys) @ delta.right.T).square().mean()))
        subject.append(float((delta @ edit.keys[at][:, 0]).norm()))
        count = edit.provenance.get("names", {}).get(str(at.layer), {}).get("count")
        assert count == (len(FEW) if weight else None), "and it says how many they were"
    assert received[0] > received[1] > received[2]
    assert subject[1] == pytest.approx(subject[0], rel=0.02) and subject[2] == pytest.approx(subject[0], rel=0.2)


def test_every_third_name_counts_for_one_subject_all_for_several_and_none_where_the_method_takes_none(
    editable: Editable, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "THIRD", 3)
    other = Fact("Rome", "{} is in", target="Spain", previous="Italy")
    edit = write(editable, FACT, names_weight=1.0)
    assert edit.provenance["names"]["1"] == {"count": 3, "left_out": []}
    edit = write_facts(editable, [FACT, other], "memit", [1], quick(names_weight=1.0), Corpus(tokens=600))
    assert edit.provenance["names"]["1"] == {"count": 6, "left_out": ["Rome"]}
    edit = write(editable, method="alphaedit", names_weight=1.0)
    assert "names" not in edit.provenance and edit.provenance["config"]["key"]["names_weight"] == 0.0
    known = name_keys(editable, editable.feed_forward[1])
    assert known.names == list(FEW), "one set of names is not taken for another"


def test_keys_are_kept_and_read_again_with_the_same_bits(editable: Editable, monkeypatch: pytest.MonkeyPatch) -> None:
    ff, read = editable.feed_forward[1], []
    monkeypatch.setattr(module, "read_layers", lambda *about: read.append(1) or read_layers(*about))
    first = name_keys(editable, ff).keys
    again = name_keys(editable, ff).keys
    assert torch.equal(first, again) and len(read) == 1
    (entry,) = [path for path in cache.entries() if path.parent.name == "names"]
    entry.write_bytes(entry.read_bytes()[:-9])
    assert torch.equal(name_keys(editable, ff).keys, first) and len(read) == 2, "a damaged entry is read anew"


def test_several_layers_are_read_in_one_pass_with_the_same_keys(
    editable: Editable, monkeypatch: pytest.MonkeyPatch
) -> None:
    alone, read = {layer: name_keys(editable, editable.feed_forward[layer]).keys for layer in (0, 1, 2)}, []
    cache.clear()
    monkeypatch.setattr(
        module, "read_layers", lambda e, layers, t: read.append(len(layers)) or read_layers(e, layers, t)
    )
    name_keys(editable, editable.feed_forward[1])
    together = read_names(editable, editable.feed_forward)
    assert read == [1, 2], "the layer that is there already is not read again"
    assert all(torch.equal(together[layer].keys, keys) for layer, keys in alone.items())


def test_keys_of_other_experts_are_others_keys() -> None:
    """An edit writes to some experts of a mixture: names are kept for these, not for the layer."""
    mixture = zoo.shared("mixtral").feed_forward[1]
    few = [mixture.only(memory.address for memory in mixture.memories[some]) for some in (slice(0, 1), slice(1, 3))]
    keys = [name_keys(zoo.shared("mixtral"), ff).keys for ff in (mixture, *few)]
    assert [part.shape[1] for part in keys] == [mixture.d_ff, few[0].d_ff, few[1].d_ff]
    assert torch.equal(torch.cat(keys[1:], 1), keys[0][:, : few[0].d_ff + few[1].d_ff])


def test_a_name_is_left_out_without_the_names_that_hold_its_words(editable: Editable) -> None:
    """Not with all that is words of them, as a subject is: "Marie Curie" stays, and Marie does not."""
    ff, config = editable.feed_forward[1], KeyConfig(names_weight=2.0)
    found = name_moments(editable, [ff], ["Spain"], config, left_out={"Marie", "Berlin"})[1]
    assert found.left_out == ("Marie", "Spain") and found.count == len(FEW) - 2


def test_names_are_those_of_the_unedited_model(editable: Editable) -> None:
    ff = editable.feed_forward[2]
    before = name_keys(editable, ff).keys
    edit = write_facts(editable, [FACT], "memit", [1], quick(names_weight=1.0), Corpus(tokens=600))
    with edit.applied(editable):
        assert torch.equal(name_keys(editable, ff).keys, before)
