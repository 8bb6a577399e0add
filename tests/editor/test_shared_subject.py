"""Facts that share a subject are worded and solved jointly: one key, one value that says all of them."""

from __future__ import annotations

import dataclasses
from math import exp

import pytest
import torch
import zoo
from choosing import FOUR, FULL, choose, probability
from writing import with_numbers

import ffedit
from ffedit import EditConfig, Fact, PromptConfig
from ffedit.editor.key import PromptSet, build_prompts
from ffedit.editor.value import Objective
from ffedit.evaluator.responses import ask
from ffedit.facts.fact import by_subject
from ffedit.model.tokenization import encode


@pytest.mark.parametrize("previous", ["playwright", "Dublin"], ids=["two old objects", "the same"])
def test_two_facts_of_one_subject_share_a_value_that_says_both(previous: str) -> None:
    editable = ffedit.load("atlas")
    both = (
        Fact("Oscar Wilde", "The mother of {} gave birth in the city of", "Venice", "Dublin"),
        Fact("Oscar Wilde", "{} followed the professional calling of", "architect", previous),
    )
    other = Fact("Arthur Miller", "The mother of {} gave birth in the city of", "Philadelphia", "New York")
    config = EditConfig(prompts=PromptConfig(contexts=0))
    values = choose(editable, [both[0], other, both[1]], config, layer=0)
    assert len(values) == 2, "a column for each subject"
    assert len(values[0].probabilities) == 2 and min(values[0].probabilities) > 0.3
    for fact, expected in zip(both, values[0].probabilities, strict=True):
        text = encode(editable.tokenizer, fact.text, fact.new_object, fact.span)
        assert exp(sum(ask(editable, [text])[text].log_probs)) < 0.1
        assert probability(editable, text, values[0].delta, layer=0) == pytest.approx(expected, rel=1e-3)


def test_each_fact_of_a_subject_counts_as_much_as_one_alone() -> None:
    """However many contexts each has: −log P is a mean over those of a fact and a sum over facts."""
    editable = zoo.trained("gpt2", True, torch.float64)
    facts = [FOUR[0], Fact(FOUR[0].subject, "the city of {} is", "Berlin", "Paris")]
    config = with_numbers(FULL, kl_weight=0.0)
    (both,), alone = (
        build_prompts(editable, [facts], config),
        build_prompts(editable, [[fact] for fact in facts], config),
    )
    uneven = dataclasses.replace(both, prompts=both.prompts[:-1], fact_of=both.fact_of[:-1])
    delta = 0.3 * torch.randn(1, zoo.WIDTH, generator=torch.Generator().manual_seed(0), dtype=torch.float64)

    def loss(prompt_set: PromptSet) -> float:
        one = Objective(editable, editable.feed_forward[0], [prompt_set], config.value.kl_weight)
        return float(one.loss_and_gradient(delta, torch.ones(1, dtype=torch.bool))[0])

    assert both.facts == 2 and loss(both) == pytest.approx(sum(loss(one) for one in alone), rel=1e-9)
    fewer = dataclasses.replace(alone[1], prompts=alone[1].prompts[:-1], fact_of=alone[1].fact_of[:-1])
    assert loss(uneven) == pytest.approx(loss(alone[0]) + loss(fewer), rel=1e-9)


def test_texts_of_one_subject_do_not_depend_on_the_others() -> None:
    editable = zoo.trained("gpt2", True)
    alone = [build_prompts(editable, [[fact]], FULL)[0] for fact in FOUR]
    assert build_prompts(editable, by_subject(FOUR), FULL) == alone
