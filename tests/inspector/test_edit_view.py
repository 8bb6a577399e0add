"""The edit view: an edit is one more memory, and what it does to a text is what two plain passes find."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import zoo
from making import made
from shell import TEXT
from shown import shown
from writing import FACT, STRONG, write

from ffedit import Corpus, Edit, EditError, LowRank
from ffedit.algebra.low_rank import Dense
from ffedit.display.terminal.memories import edited_view
from ffedit.inspector import edit_view
from ffedit.inspector.edit_view import inspect_edit
from ffedit.inspector.prompt_view import inspect_prompt
from ffedit.model.editable import Editable
from ffedit.model.hooks import capture
from ffedit.model.memory import Address


@pytest.fixture(scope="module")
def written() -> tuple[Editable, Edit]:
    """A trained model, and an edit that writes `FACT` into its layer 1."""
    editable = zoo.trained("gpt2", True)
    return editable, write(editable, **STRONG)


def test_a_change_of_rank_one_is_one_more_memory(written: tuple[Editable, Edit]) -> None:
    editable, edit = written
    memory, at = editable.memories[1], Address(1)
    (added,) = edit_view.added_memories(at, edit.updates[at], edit.keys[at], 3)
    m = torch.randn(memory.d_ff, dtype=torch.float64)
    changed = memory.value.double() + edit.updates[at].dense
    assert torch.allclose(changed @ m, memory.value.double() @ m + (added.key @ m) * added.value, atol=1e-9)
    key = edit.keys[at][:, 0].double()
    assert added.written and added.share == pytest.approx(1) and float(added.key @ key) == pytest.approx(1)
    assert torch.allclose(added.value, edit.updates[at] @ key, atol=1e-9)


def test_a_change_of_higher_rank_is_several_memories_the_largest_first() -> None:
    left, right = torch.randn(6, 3, dtype=torch.float64), torch.randn(3, 9, dtype=torch.float64)
    thin, dense = LowRank(left, right), Dense(left @ right)
    for update in (thin, dense):
        found = edit_view.added_memories(Address(0), update, torch.zeros(9, 0), 9)
        assert torch.allclose(sum(torch.outer(one.value, one.key) for one in found), left @ right)
        assert [one.share for one in found] == sorted((one.share for one in found), reverse=True)
        assert sum(one.share for one in found) == pytest.approx(1) and not any(one.written for one in found)
        assert len(edit_view.added_memories(Address(0), update, torch.zeros(9, 0), 2)) == 2


@pytest.fixture
def corpus(tmp_path: Path) -> Corpus:
    (path := tmp_path / "text.txt").write_text(TEXT)
    return Corpus(path)


@pytest.mark.parametrize("dense", [False, True])
@pytest.mark.parametrize("family", ["gpt2", "opt", "llama"])
def test_what_a_text_reads_is_what_two_plain_passes_find(family: str, dense: bool, corpus: Corpus) -> None:
    editable = zoo.build(family)
    edit, before = made(editable, {0: 2, 2: 1}, size=0.3, dense=dense), zoo.snapshot(editable)
    view = inspect_edit(editable, edit, corpus=corpus, top=4)
    assert zoo.unchanged(editable, before) and not editable.history.edits
    ids = torch.tensor([editable.tokenizer(TEXT)["input_ids"]])
    assert ids.shape[1] <= 64 and view.tokens == ids.shape[1] - 1 and view.edit == edit.fingerprint()
    modules = {a: editable.memories[a].module for a in edit.updates}
    with capture(modules, inputs=True) as keys, torch.no_grad():
        p = editable.model(input_ids=ids[:, :-1]).logits[0].softmax(-1)
    with edit.applied(editable), torch.no_grad():
        q = editable.model(input_ids=ids[:, :-1]).logits[0].softmax(-1)
    old, new = p.argmax(-1), q.argmax(-1)
    assert view.changed == pytest.approx(float((old != new).double().mean()))
    keys = {a: x.reshape(len(old), -1).double() for a, x in keys.items()}
    lost = (p.max(-1).values - q.gather(1, old[:, None])[:, 0]).sort(descending=True)
    for one, at in zip(view.passages, lost.indices.tolist(), strict=False):
        assert (one.before.id, one.after.id) == (int(old[at]), int(new[at])) and one.coefficient is None
        assert one.before.probability - one.kept == pytest.approx(float(p[at].max() - q[at, old[at]]), abs=1e-5)
        assert one.after.probability == pytest.approx(float(q[at].max()), abs=1e-5)
        assert one.prefix.text.split() == editable.tokenizer.decode(ids[0, :at]).split()
    assert [layer.address for layer in view.layers] == [Address(0), Address(2)]
    for layer in view.layers:
        delta, value = edit.updates[layer.address].dense, editable.memories[layer.address].value.double()
        assert layer.norm == pytest.approx(float(delta.norm()))
        assert layer.relative == pytest.approx(float(delta.norm() / value.norm()), rel=1e-5)
        found = edit_view.added_memories(layer.address, edit.updates[layer.address], torch.zeros(delta.shape[1], 0), 3)
        for one, plain in zip(layer.added, found, strict=True):
            fired = keys[layer.address] @ plain.key
            best = fired[fired > 0].sort(descending=True).values[:4]
            shown_ = torch.tensor([trigger.coefficient for trigger in one.triggers], dtype=torch.float64)
            assert torch.allclose(shown_, best, rtol=1e-4, atol=1e-6)
    (pair,) = view.prompts
    with edit.applied(editable):
        assert pair[1] == inspect_prompt(editable, edit.facts[0].text, top=4)
    assert pair[0] == inspect_prompt(editable, edit.facts[0].text, top=4)


def test_the_view_of_a_written_fact_says_the_new_object(written: tuple[Editable, Edit]) -> None:
    editable, edit = written
    view = inspect_edit(editable, edit, corpus=Corpus(tokens=256), top=3)
    ((before, after),) = view.prompts
    said = [one.prediction.top[0].token.strip() for one in (before, after)]
    assert said == [FACT.previous, FACT.target]
    (layer,) = view.layers
    assert layer.added[0].written and view.to_dict()["layers"][0]["address"] == str(layer.address)
    headings = ("memory that layer 1 gets", "What fires it", "reads differently", "P(Rome)")
    for width in (80, 120):
        text = shown(edited_view(view), width)
        assert all(words in text for words in headings)


def test_an_edit_that_is_in_the_model_or_of_another_is_refused(corpus: Corpus) -> None:
    editable = zoo.build("gpt2")
    edit = made(editable, {1: 1})
    with edit.applied(editable), pytest.raises(EditError, match="applied already"):
        inspect_edit(editable, edit, corpus=corpus)
    with pytest.raises(EditError):
        inspect_edit(zoo.build("gpt2", seed=1), edit, corpus=corpus)
    with pytest.raises(EditError, match="a text was expected"):
        inspect_edit(editable, edit, corpus="file.txt")  # type: ignore[arg-type]
    for top in (0, -1, "5"):
        with pytest.raises(EditError, match="at least 1"):
            inspect_edit(editable, edit, corpus=corpus, top=top)  # type: ignore[arg-type]
    assert not editable.history.edits
