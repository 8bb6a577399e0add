"""A fact's `keep` costs the value, lasts from step to step, and is held; what it also says is written, too."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import zoo
from choosing import FULL, choose, probability
from writing import CORPUS, FACT, SECOND, quick, write, write_facts

import ffedit
from ffedit import Corpus, EditConfig, Fact
from ffedit.editor.combine import combine
from ffedit.editor.key import build_prompts, kept
from ffedit.editor.value import Objective
from ffedit.evaluator.scores import NAMES
from ffedit.model.memory import Address

KEEP = "the city of {} is"
KEEPING = replace(FACT, keep=[{"prompt": KEEP, "target": "Paris"}])
SAYING = replace(FACT, also=["{} stands in"])
# A value that says the fact at any price, unless it is asked to keep something.
PLAIN = {"steps": 80, "target_probability": 0.8, "kl_weight": 0.0, "contexts": 0, "context_weight": 3.0}


def divergence(editable: ffedit.Editable, fact: Fact, edit: ffedit.Edit) -> float:
    """KL of the unedited from the edited model at each token of the answer to keep, by plain passes, nats."""
    ((text,),) = kept(editable, [fact], "subject_last")
    reads = slice(text.answer - 1, len(text.ids) - 1)
    before = logits(editable, text.ids)[reads]
    with edit.applied(editable):
        after = logits(editable, text.ids)[reads]
    return float((before.exp() * (before - after)).sum())


def logits(editable: ffedit.Editable, ids: tuple[int, ...]) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = editable.model(input_ids=torch.tensor([ids])).logits[0].double().log_softmax(-1)
    return found


def test_what_is_kept_moves_less_and_the_fact_is_said() -> None:
    editable, text = zoo.trained("llama", True), Corpus(tokens=2000)  # much of it: how far is a matter of C, too
    moved = {}
    for fact in (FACT, KEEPING):
        edit = write_facts(editable, [fact], "memit", [0], quick(**PLAIN), text)
        report = ffedit.evaluate(editable, [KEEPING], edit)
        assert report.after is not None and report.after.generation == 1.0
        assert report.before.keep == 1.0 and report.after.same_subject is None
        moved[fact] = divergence(editable, KEEPING, edit), report.after.keep
    assert moved[KEEPING][0] < 0.2 * moved[FACT][0] and moved[KEEPING][1] == 1.0 and moved[FACT][1] == 0.0


def test_the_loss_of_what_is_kept_is_that_of_plain_passes_and_does_not_decay() -> None:
    editable = zoo.trained("gpt2", True, torch.float64)
    fact = replace(FACT, keep=[{"prompt": KEEP, "target": "Paris France"}, "{} stands in"])
    (prompt_set,), going = build_prompts(editable, [[fact]], FULL), torch.ones(1, dtype=torch.bool)
    with_keep, without = (Objective(editable, editable.feed_forward[0], [prompt_set], 1.0, w) for w in (3.0, 0.0))
    delta = 3 * torch.randn(1, zoo.WIDTH, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    costs = [
        float(with_keep.loss_and_gradient(delta, going, p)[0] - without.loss_and_gradient(delta, going, p)[0])
        for p in (1.0, 0.01)
    ]
    expected = 0.0
    first, second = prompt_set.keep
    assert (len(first.target_ids), len(second.target_ids)) == (2, 1), "and the model's own answer where none is given"
    for text in prompt_set.keep:
        for end in range(text.answer, len(text.ids)):
            before = logits(editable, text.ids[:end])[-1].exp()
            for token, p in enumerate(before):
                ids = (*text.ids[:end], token)
                now = probability(editable, replace(text, ids=ids, answer=end), delta[0])
                expected += float(p * (p / now).log()) * 3.0 / 2
    assert costs == pytest.approx([expected, expected], rel=1e-6) and expected > 1e-3


def test_a_value_is_not_done_while_what_is_kept_is_lost() -> None:
    """Even where it weighs so little that the new object is reached first."""
    editable, config = zoo.trained("llama", True), quick(**PLAIN, keep_weight=0.5)
    (prompt_set,) = build_prompts(editable, [[KEEPING]], config)
    one, going = Objective(editable, editable.feed_forward[0], [prompt_set], 0.0, 0.5), torch.ones(1, dtype=torch.bool)
    plain, keeping = (choose(editable, [fact], config)[0] for fact in (FACT, KEEPING))
    lost = [float(one.loss_and_gradient(value.delta[None].float(), going)[3]) for value in (plain, keeping)]
    assert lost[0] > 0 == lost[1] and len(plain.losses) < len(keeping.losses) <= 80
    assert min(plain.probabilities[0], keeping.probabilities[0]) >= 0.8


def test_a_fact_without_keep_and_also_is_written_with_the_same_bits() -> None:
    editable, at = zoo.trained("gpt2", True), Address(1)
    plain = write(editable)
    same = write(editable, keep_weight=0.0)
    assert torch.equal(plain.updates[at].dense, same.updates[at].dense) and "protected" not in plain.provenance
    other = write(editable, KEEPING)
    assert not torch.equal(plain.updates[at].dense, other.updates[at].dense)


def test_what_is_also_said_is_said_and_its_key_counts() -> None:
    editable = zoo.trained("llama", True)
    said = []
    for fact in (FACT, SAYING):
        edit = write(editable, fact, layer=0, method="memit", **PLAIN)
        report = ffedit.evaluate(editable, [SAYING], edit)
        assert report.after is not None and report.after.paraphrase is None
        said.append((report.after.generation, report.after.also))
    assert said == [(1.0, 0.0), (1.0, 1.0)]
    (prompt_set,) = build_prompts(editable, [[SAYING]], quick(contexts=0))
    assert [text.text for text in prompt_set.prompts] == [
        "the Eiffel tower is located in Rome",
        "Eiffel tower stands in Rome",
    ]
    assert prompt_set.fact_of == (0, 0) and prompt_set.shares.tolist() == [0.5, 0.5]


def test_keep_and_also_have_scores_of_their_own_that_are_not_measured_without_them() -> None:
    editable = zoo.trained("gpt2", True)
    scores = ffedit.evaluate(editable, [FACT]).before
    assert {"keep", "also"} <= set(NAMES) and scores.keep is scores.also is None
    fact = replace(KEEPING, also=["{} stands in"], keep=[*KEEPING.keep, "the city of old tower is"])
    report = ffedit.evaluate(editable, [fact])
    assert (report.before.keep, report.before.also) == (1.0, 0.0)
    asked = [(each.score, each.answer) for each in report.facts_before[0].asked]
    assert asked == [("keep", "Paris"), ("keep", "Rome"), ("also", "Rome")]
    wrong = replace(FACT, keep=[{"prompt": KEEP, "target": "Egypt"}])
    assert ffedit.evaluate(editable, [wrong]).before.keep == 0.0, "the answer that is given counts"


def test_keep_and_also_are_kept_with_the_edit_and_in_a_combination(tmp_path: object) -> None:
    editable = zoo.trained("gpt2", True)
    fact = replace(KEEPING, also=["{} stands in"])
    edit = write(editable, fact)
    edit.save(f"{tmp_path}/e")
    loaded = ffedit.Edit.load(f"{tmp_path}/e")
    assert loaded.facts == (fact,) and loaded.fingerprint() == edit.fingerprint()
    both = combine(editable, [edit, write(editable, SECOND)], "emmet", stats=CORPUS, config=quick())
    assert both.facts == (fact, SECOND)
    torch.testing.assert_close(both.keys[Address(1)][:, :1], edit.keys[Address(1)])


def test_a_prompt_too_long_for_the_model_is_told() -> None:
    long = "the city of " * 30
    for fact in (replace(FACT, keep=[long + "{} is"]), replace(FACT, also=[long + "{} is"])):
        with pytest.raises(ffedit.FactError, match="the model reads at most 64"):
            write_facts(zoo.trained("gpt2", True), [fact], "memit", [1], EditConfig(), CORPUS)
