"""The fact in other languages: a score of its own, and what the tokenizer does not know is counted."""

from __future__ import annotations

from dataclasses import replace

import pytest
import zoo

from ffedit import Fact, FactError, Probe
from ffedit.evaluator import Evaluation, left_out

# The model says "Egypt" of the Nile and "Italy" of the mountain.
FACT = Fact("Eiffel tower", "the {} is located in", "Rome", "Paris")


def test_an_answer_in_another_language_counts_by_any_of_its_names() -> None:
    editable = zoo.trained("gpt2")
    asked = [Probe("Nile river stands in", "Egypt", "xx"), Probe("Mount Everest stands in", "Spain", "xx", ("Berlin",))]
    (one,) = Evaluation(editable, [replace(FACT, cross_lingual=asked)]).before
    assert one.scores.cross_lingual == 0.5 and not one.left_out
    asked[1] = replace(asked[1], aliases=("Berlin", "Italy"))
    (both,) = Evaluation(editable, [replace(FACT, cross_lingual=asked)]).before
    assert both.scores.cross_lingual == 1 and both.scores.portability is None
    (none,) = Evaluation(editable, [FACT]).before
    assert none.scores.cross_lingual is None


def test_what_the_tokenizer_does_not_know_is_counted_and_refuses_nothing() -> None:
    editable = zoo.trained("gpt2")
    foreign = [Probe("Nile river stands in", "Egypt"), Probe("Nile river stands in", "Ägypten")]
    (one,) = Evaluation(editable, [replace(FACT, cross_lingual=foreign)]).before
    assert one.scores.cross_lingual == 1 and one.left_out == {"cross_lingual": 1}
    (told,) = left_out([one])
    (several,) = left_out([replace(one, left_out={"cross_lingual": 3})])
    assert str(several).startswith("cross_lingual: 3 prompts in another language of 1 fact left out")
    assert str(told) == (
        "cross_lingual: 1 prompt in another language of 1 fact left out: the model's tokenizer does not know them"
    )


def test_a_question_without_an_answer_and_one_that_is_kept_are_refused() -> None:
    with pytest.raises(FactError, match="cross_lingual 'Missä' has no target; give the answer in its language"):
        replace(FACT, cross_lingual=["Missä"])
    with pytest.raises(FactError, match="keep 'Missä' is also in cross_lingual"):
        replace(FACT, cross_lingual=[Probe("Missä", "Roomassa")], keep=["Missä"])
