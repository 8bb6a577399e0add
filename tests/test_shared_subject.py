"""Facts that share a subject are worded and solved jointly: one key, one value that says all of them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import zoo
from choosing import FOUR, FULL, choose, probability

import ffedit
from ffedit import EditConfig, Fact
from ffedit.editor import Wording, by_subject, word
from ffedit.editor.objective import Objective
from ffedit.readout import answer_log_probs
from ffedit.tokens import encode


@pytest.mark.parametrize("previous", ["playwright", "Dublin"], ids=["two old objects", "the same"])
def test_two_facts_of_one_subject_share_a_value_that_says_both(previous: str) -> None:
    editable = ffedit.load("atlas")
    both = (
        Fact("Oscar Wilde", "The mother of {} gave birth in the city of", "Venice", "Dublin"),
        Fact("Oscar Wilde", "{} followed the professional calling of", "architect", previous),
    )
    other = Fact("Arthur Miller", "The mother of {} gave birth in the city of", "Philadelphia", "New York")
    config = EditConfig(contexts=0, phrasings=4, steps=15)
    values = choose(editable, [both[0], other, both[1]], config, layer=0)
    assert len(values) == 2, "a column for each subject"
    assert len(values[0].probabilities) == 2 and min(values[0].probabilities) > 0.3
    for fact, expected in zip(both, values[0].probabilities, strict=True):
        text = encode(editable.tokenizer, fact.text, fact.new_object, fact.span)
        assert float(answer_log_probs(editable, [text])[0].sum().exp()) < 0.1
        assert probability(editable, text, values[0].delta, layer=0) == pytest.approx(expected, rel=1e-3)


def test_an_old_object_that_two_facts_share_gives_each_new_one_half() -> None:
    editable = zoo.trained("gpt2", True)
    both = [
        Fact("Eiffel tower", "the {} is located in", "Rome", "Paris"),
        Fact("Eiffel tower", "the city of {} is", "Berlin", "Paris"),
    ]
    (wording,) = word(editable, [both], FULL)
    one = Objective(editable, editable.feed_forward[0], [wording], FULL)
    rome, berlin, paris = editable.tokenizer.convert_tokens_to_ids(["Rome", "Berlin", "Paris"])
    for bucket in one._buckets:
        before = bucket.recording.logits.double().softmax(-1)
        if not len(before):
            continue
        torch.testing.assert_close(bucket.before.sum(-1).double(), torch.ones(len(before)).double(), rtol=1e-6, atol=0)
        for new in (rome, berlin):
            expected = before[:, new] + before[:, paris] / 2
            torch.testing.assert_close(bucket.before[:, new].double(), expected, rtol=1e-5, atol=1e-7)
    stated = [p for p in wording.phrasings if p.text.target_ids]
    assert not stated, "whose fact an own phrasing states cannot be told"


def test_texts_of_one_subject_do_not_depend_on_the_others() -> None:
    editable = zoo.trained("gpt2", True)

    def plainly(wording: Wording) -> Any:
        return wording.prompts, wording.essence, wording.swaps, wording.phrasings

    alone = [plainly(word(editable, [[fact]], FULL)[0]) for fact in FOUR]
    assert [plainly(wording) for wording in word(editable, by_subject(FOUR), FULL)] == alone
