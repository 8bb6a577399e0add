"""What is measured, and what is not: drift, neighbors, other facts of the subject, ties, prompts that are not there."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from statistics import fmean, harmonic_mean

import pytest
import torch
import zoo
from changing import changed

from ffedit import Edit, Fact, FactError, Probe, evaluate
from ffedit.evaluator import NAMES, mean_scores
from ffedit.evaluator.drift import DRIFT_ROWS, DRIFT_SEED, DRIFT_TOKENS
from ffedit.evaluator.prompts import Edited
from ffedit.inference.own_text import own_text
from ffedit.model.editable import Editable

FACTS = [
    Fact(
        "Eiffel tower",
        "the {} is located in",
        target="the old Rome",
        previous="Paris",
        paraphrases=["{} stands in", "the city of {} is"],
        neighbors=[
            {"prompt": "Marie Curie stands in", "target": "France"},
            {"prompt": "old tower stands in", "target": "Rome"},
        ],
        same_subject=["{} is a", {"prompt": "the city of {} is", "target": "Paris ."}],
    ),
    Fact(
        "Leo Tolstoy",
        "{} stands in",
        target="Italy",
        previous="Germany",
        neighbors=["Marie Curie stands in", {"prompt": "the Eiffel tower is located in", "target": "Paris"}],
    ),
    Fact("Nile river", "{} stands in", target="Madrid", paraphrases=["the {} is located in"]),
    Fact("Mount Everest", "{} stands in", target="Italy", previous="Rome", same_subject=["{} and"]),
]


class Shaken(Edit):
    """A change of one value matrix, as an edit is applied and taken back."""

    def __init__(self, size: float) -> None:
        super().__init__({}, {}, {}, (), {"size": size})

    @contextmanager
    def applied(self, editable: Editable) -> Iterator[Editable]:
        with changed(editable, self.provenance["size"]):
            yield editable


def test_drift_is_the_mean_divergence_of_next_token_distributions() -> None:
    editable, change = zoo.trained("llama"), Shaken(0.3)
    rows = own_text(editable, DRIFT_ROWS, DRIFT_TOKENS, DRIFT_SEED)

    def distributions() -> list[torch.Tensor]:
        with torch.no_grad():
            return [editable.model(input_ids=torch.tensor([row])).logits[0].double().log_softmax(-1) for row in rows]

    usual = distributions()
    with change.applied(editable):
        after = distributions()
    kl = [float((a.exp() * (a - b)).sum(-1).mean()) for a, b in zip(usual, after, strict=True)]
    report = evaluate(editable, FACTS[:1], change)
    assert report.after is not None and report.before.drift is None
    assert report.after.drift == pytest.approx(fmean(kl), rel=1e-4) and fmean(kl) > 1e-3


def test_an_edit_that_changes_nothing_has_no_drift_and_the_same_scores() -> None:
    editable = zoo.trained("gpt2")
    report = evaluate(editable, FACTS, Shaken(0.0))
    assert report.after is not None and report.after.drift == 0.0
    scores = mean_scores([f.scores for f in report.facts_after or ()], perplexity=report.after.perplexity)
    assert scores == report.before and report.before.perplexity is not None
    three = scores.efficacy, scores.paraphrase, scores.specificity
    assert scores.score == pytest.approx(harmonic_mean(three)), "of the means, not a mean of the facts'"


def test_without_an_edit_there_is_no_after() -> None:
    report = evaluate(zoo.trained("gpt2"), FACTS)
    assert report.after is None and report.facts_after is None
    assert report.before.efficacy == 0.25, "of four facts the model knows one already"


def test_what_was_not_there_to_measure_is_none() -> None:
    bare = Fact("Eiffel tower", "the {} is located in", "Rome", "Paris")
    scores = evaluate(zoo.trained("gpt2"), [bare]).before
    nothing = {name for name, value in scores.to_dict().items() if value is None}
    assert nothing == {
        "paraphrase", "specificity", "same_subject", "score", "drift", "perplexity",
        "paraphrase_magnitude", "specificity_magnitude", "same_subject_magnitude",
        "paraphrase_token_accuracy", "paraphrase_generation", "portability", "portability_token_accuracy", "locality",
        "locality_token_accuracy", "locality_argmax", "neighbor_with_edit", "neighbor_with_edit_magnitude",
        "divergence", "entropy", "consistency", "neighbor_generation", "keep", "also",
        "cross_lingual",
    }  # fmt: skip
    assert set(NAMES) <= set(scores.to_dict())


def test_a_tie_is_no_success() -> None:
    editable = zoo.trained("gpt2")
    with torch.no_grad():
        editable.unembedding.weight.zero_()  # all words are equally likely
    fact = Fact(
        "Eiffel tower",
        "the {} is in",
        "Rome",
        "Paris",
        ["{} stands in"],
        [{"prompt": "a tower is in", "target": "Paris"}],
    )
    scores = evaluate(editable, [fact]).before
    assert (scores.efficacy, scores.paraphrase, scores.specificity, scores.score) == (0.0, 0.0, 0.0, 0.0)
    assert (scores.efficacy_magnitude, scores.specificity_magnitude) == (0.0, 0.0)


def test_neighbors_whose_own_fact_is_edited_in_the_batch_do_not_count() -> None:
    editable = zoo.trained("gpt2")
    near = {"prompt": "the old tower is located in", "target": "Rome"}
    one = Fact("Eiffel tower", "the {} is located in", "Berlin", "Paris", neighbors=[near])
    other = Fact("old tower", "the {} is located in", "Berlin", "Rome")
    rephrased = Fact("old tower", "{} stands in", "Berlin", "Rome", paraphrases=["the {} is located in"])
    assert evaluate(editable, [one]).before.specificity == 1.0
    for second in (other, rephrased):
        assert evaluate(editable, [one, second]).before.specificity is None


def test_a_neighbor_is_known_in_other_words_by_its_relation_or_its_object() -> None:
    near = Probe("a man stands by the old tower of", "Rome")
    other = Fact("old tower", "the {} is located in", "Berlin", "Rome", relation="city")
    assert Edited([other]).asks_neighbor(near, "city") and Edited([other]).asks_neighbor(near, None)
    assert not Edited([other]).asks_neighbor(near, "builder"), "another fact of that subject"
    assert not Edited([other]).asks_neighbor(Probe("the old towers stand in", "Rome"), "city"), "another word"
    unnamed = replace(other, relation=None)
    assert Edited([unnamed]).asks_neighbor(near, "city")
    assert not Edited([unnamed]).asks_neighbor(replace(near, target="Paris"), "city"), "another fact, it seems"
    assert Edited([unnamed]).asks_neighbor(replace(near, target="Roma", aliases=("Rome",)), "city"), "another name"
    assert not Edited([replace(unnamed, previous=None)]).asks_neighbor(replace(near, target=None), None)


def test_same_subject_prompts_whose_own_fact_is_edited_in_the_batch_do_not_count() -> None:
    editable = zoo.trained("gpt2")
    probe = {"prompt": "a man in the {} speaks", "target": "Rome"}
    one = Fact("old tower", "the {} is located in", "Berlin", "Paris", same_subject=[probe])
    other = Fact("old tower", "the language of {} is", "Berlin", "Rome")
    assert evaluate(editable, [one]).before.same_subject is not None
    assert evaluate(editable, [one, other]).before.same_subject is None
    assert evaluate(editable, [one, replace(other, previous="Paris")]).before.same_subject is not None
    alone = replace(one, previous="Rome")
    assert evaluate(editable, [alone]).before.same_subject is not None, "the same object in another relation"


def test_same_subject_is_what_is_generated_and_not_what_is_likelier() -> None:
    editable = zoo.trained("gpt_neo")
    probe = {"prompt": "{} stands in", "target": "Rome"}  # likelier than the new object, but not what is said
    fact = Fact("Eiffel tower", "the {} is located in", "piano", "Paris", same_subject=[probe])
    scores = evaluate(editable, [fact]).before
    assert scores.same_subject == 0.0
    own = Fact("Eiffel tower", "the {} is located in", "piano", "Paris", same_subject=["{} stands in"])
    assert evaluate(editable, [own]).before.same_subject == 1.0


def test_a_prompt_that_fills_the_context_is_measured() -> None:
    editable = zoo.trained("gpt2")
    fact = Fact("Eiffel tower", "the " * 59 + "{} is in", "Rome", "Paris")
    assert editable.max_tokens == 64 and evaluate(editable, [fact]).before.efficacy is not None
    unsaid = Fact("Eiffel tower", "the " * 59 + "{} is in", "Rome")
    assert evaluate(editable, [unsaid]).before.efficacy is not None


@pytest.mark.parametrize(
    "bad",
    [
        [],
        [Fact("Eiffel tower", "the {} is in", None)],
        [Fact("Eiffel tower", "the {} is in", "東京", "Paris")],
        [Fact("Eiffel tower", "the " * 70 + "{} is in", "Rome", "Paris")],
        [Fact("Eiffel tower", "the {} is in", "Rome", "Paris", paraphrases=["the " * 70])],
    ],
)
def test_what_cannot_be_asked_is_refused_in_one_line(bad: list[Fact]) -> None:
    with pytest.raises(FactError) as caught:
        evaluate(zoo.trained("gpt2"), bad)
    assert "\n" not in str(caught.value)
