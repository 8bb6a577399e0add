"""What an edit leaves as it is: what earlier edits stored, and what it would write a second time."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import zoo
from storing import AGAIN, BARE, EXACT, SOLVING, THIRD, outputs, write
from writing import CORPUS, FACT, SECOND, quick

import ffedit
from ffedit import EditError, Fact
from ffedit.algebra.linalg import double
from ffedit.editor.checks import check_preserved
from ffedit.editor.key import build_prompts, read_at
from ffedit.editor.statistics import collect
from ffedit.editor.value import Value
from ffedit.editor.write import write as write_facts
from ffedit.facts.fact import by_subject
from ffedit.model.editable import Editable
from ffedit.model.memory import Address

pytestmark = pytest.mark.usefixtures("warm_cache")

Written = tuple[Editable, tuple[Fact, ...], int]


@pytest.fixture(scope="module")
def atlas() -> Written:
    """Two facts that the embedded model does not know, where it recalls such."""
    facts = (
        Fact("Oscar Wilde", "The mother of {} gave birth in the city of", "Venice", "Dublin"),
        Fact("Eiffel Tower", "The {} is located in the city of", "Rome", "Paris"),
    )
    return ffedit.load("atlas"), facts, 0


@pytest.fixture(scope="module")
def tiny() -> Written:
    """One that a tiny model does not know, where the default settings suffice to write it."""
    return zoo.trained("gemma", True), (FACT,), 0


@pytest.mark.parametrize(("name", "method"), [("atlas", "memit"), ("tiny", "rome"), ("tiny", "alphaedit")])
def test_what_is_written_already_is_not_written_again(name: str, method: str, request: pytest.FixtureRequest) -> None:
    """End to end, with default settings."""
    editable, facts, layer = request.getfixturevalue(name)
    stats, at = collect(editable, [editable.memories[layer]], CORPUS), Address(layer)
    assert ffedit.evaluate(editable, facts).before.generation == 0.0
    first = ffedit.edit(editable, facts, method, layers=[layer], stats=stats)
    assert min(len(one["loss"]) for one in first.provenance["solved"]) > 1
    with first.applied(editable):
        again = ffedit.edit(editable, facts, method, layers=[layer], stats=stats)
        assert again.norms()[at] <= 0.1 * first.norms()[at]
        assert ffedit.evaluate(editable, facts).before.generation == 1.0


@pytest.mark.parametrize("method", SOLVING)
@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_what_earlier_edits_stored_is_kept(family: str, method: str) -> None:
    editable, at = zoo.trained(family, True), Address(1)
    first = write(editable, [FACT, SECOND], method, **BARE)
    first.apply_(editable)
    prompt_sets = build_prompts(editable, by_subject(first.facts), quick(**BARE))
    usual = outputs(editable, 1, prompt_sets)
    moved = []
    # A share of the directions that leaves something in both edits' keys.
    for after in ((), (first,)):
        edit = write(editable, [THIRD], method, preserve=after, **BARE, alphaedit_null_share=0.3)
        assert edit.provenance["after"] == [one.fingerprint() for one in after]
        with edit.applied(editable):
            now = outputs(editable, 1, prompt_sets)
        moved.append(float((now - usual).norm() / (edit.updates[at] @ edit.keys[at]).norm()))
    assert moved[0] > 1e-3
    if method in EXACT:
        assert moved[1] < 1e-4
    else:
        assert moved[1] < 0.5 * moved[0]


@pytest.mark.parametrize("method", SOLVING)
def test_the_earlier_value_of_a_subject_that_is_edited_again_is_free(method: str) -> None:
    editable, at = zoo.trained("gpt2", True), Address(1)
    first = write(editable, [FACT, SECOND], method, **BARE)
    first.apply_(editable)
    other = replace(FACT, target="Madrid", previous="Rome")
    edit = write(editable, [other], method, preserve=[first], **BARE, context_weight=0.0, alphaedit_null_share=0.3)
    own, kept = ((edit.updates[at] @ first.keys[at][:, i]).norm() for i in range(2))
    asked = (edit.values[at] - editable.memories[at].value.double() @ edit.keys[at]).norm()
    assert float(own) > 0.5 * float(asked), "the first edit's key of this subject is free to give another value"
    assert float(kept) < 0.3 * float(own)


@pytest.mark.parametrize(("method", "layer"), [("emmet", 0), ("ft", 1)])
def test_facts_that_are_stored_in_another_layer_or_without_keys_are_kept(method: str, layer: int) -> None:
    editable = zoo.trained("gpt2", True)
    first = write(editable, [FACT, SECOND], method, [layer], **BARE, ft_steps=2)
    first.apply_(editable)
    texts = [replace(editable.encode(fact.text, span=fact.span), fact_token="subject_last") for fact in (FACT, SECOND)]
    K = double(read_at(editable, editable.feed_forward[1], texts)[0]).T
    moved = []
    for preserve in ((), (first,)):
        edit = write(editable, [THIRD], "emmet", preserve=preserve, **BARE)
        delta = edit.updates[Address(1)]
        moved.append(float((delta @ K).norm() / (delta @ edit.keys[Address(1)]).norm()))
    assert moved[0] > 1e-3 and moved[1] < 1e-5
    again = write(editable, [replace(FACT, target="Madrid")], "emmet", preserve=[first], **BARE)
    assert (again.updates[Address(1)] @ K).norm(dim=0)[0] > 1e-3, "a subject that is edited again is free"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_edit_that_is_not_in_the_history_is_not_kept(dtype: torch.dtype) -> None:
    editable = zoo.trained("gpt2", True, dtype)
    absent, *chain = (write(editable, [fact], "memit", **BARE) for fact in (THIRD, FACT))
    for edit in chain:
        edit.apply_(editable)
    chain.append(write(editable, [SECOND], "memit", **BARE))
    chain[1].apply_(editable)
    check_preserved(editable, chain)
    before = zoo.snapshot(editable)
    for after in ([absent], [*chain, absent], [absent, *chain]):
        with pytest.raises(
            EditError, match=f"{absent.fingerprint()} was computed on other .* apply it first"
        ) as caught:
            write(editable, [AGAIN], "memit", preserve=after, **BARE)
        assert "\n" not in str(caught.value) and zoo.unchanged(editable, before)
    chain[0].undo_(editable)
    with pytest.raises(EditError, match=f"{chain[0].fingerprint()} was computed on other weights"):
        check_preserved(editable, chain)


def test_edits_of_another_model_are_not_kept() -> None:
    editable, alike = zoo.trained("gpt2", True), zoo.build("gpt2", seed=1, bos=True)
    shapes = r"\[32, 48\] in layer 1, where gpt2 has \[32, 128\]"
    for other, words in ((zoo.trained("llama", True), shapes), (alike, "is not in its history")):
        with pytest.raises(EditError, match=words) as caught:
            write(editable, [SECOND], "alphaedit", preserve=[write(other, [FACT], "memit", **BARE)], **BARE)
        assert "\n" not in str(caught.value)


def test_a_sequence_that_keeps_its_keys_is_one_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Δ_1 + Δ_2 of two edits, one behind the other, is Δ of both for the same values: of smallest C-norm."""
    editable, at = zoo.trained("gpt2", True, torch.float64), Address(1)
    stats, config = collect(editable, [editable.memories[1]], CORPUS), quick(**BARE, context_weight=0.0)
    batch = write_facts(editable, [FACT, SECOND], "emmet", [1], config, stats)
    first = write_facts(editable, [FACT], "emmet", [1], config, stats)
    torch.testing.assert_close(first.values[at][:, 0], batch.values[at][:, 0])
    first.apply_(editable)
    value = Value(batch.values[at][:, 1], batch.values[at][:, 1], (), (1.0,))
    monkeypatch.setattr("ffedit.editor.solve.choose_values", lambda *_: [value])
    off = []
    for after in ((first,), ()):
        later = write_facts(editable, [SECOND], "emmet", [1], config, stats, after)
        gap = first.updates[at].dense + later.updates[at].dense - batch.updates[at].dense
        off.append(float(gap.norm()) / batch.norms()[at])
    assert off[0] < 1e-6 < 1e-3 < off[1]
