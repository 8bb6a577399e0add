"""What an edit got wrong, and which part of it failed, in the terminal."""

from __future__ import annotations

from dataclasses import replace

from shown import words

from ffedit.display.terminal.explanation import MOST_WRONG, explanation_view
from ffedit.evaluator import Explanation, WrongAnswer

OWN = WrongAnswer(
    "paraphrase_generation", "Tower", "Tower [bold]is in", "Rome", "Paris", "key", "Rome", 0.31, "Tower", " Tower", 1
)
MOVED = WrongAnswer(
    "neighbor_generation", "Tower", "Column is in", "Berlin", "", "key", None, -0.2, "Marie Curie", " Column", 0
)
TOLD = replace(OWN, failed=None, forced=None, reach=None, reason="it does not occur")


def test_each_wrong_answer_is_shown_with_its_reach_and_the_subject_that_leaked() -> None:
    shown = words(explanation_view(Explanation((OWN, MOVED), {"paraphrase_generation": 4, "neighbor_generation": 3})))
    assert "The edit got 2 of 7 answers wrong." in shown
    assert "paraphrase_generation 4 1 1 0" in shown and "neighbor_generation 3 1 1 0" in shown
    assert "key Tower [bold]is in Rome Paris Rome 0.31 at “Tower”" in shown
    assert "key Column is in Berlin (nothing) −0.20 of “Marie Curie” at “Column”" in shown
    assert "not explained" not in shown


def test_the_first_explanations_are_shown_and_the_others_counted() -> None:
    many = (OWN,) * (MOST_WRONG + 3) + (TOLD,) * (MOST_WRONG + 1)
    shown = words(explanation_view(Explanation(many, {"paraphrase_generation": 50})))
    assert shown.count("0.31 at") == MOST_WRONG and "… and 3 more" in shown
    assert shown.count("not explained: “Tower [bold]is in”: it does not occur") == MOST_WRONG and "and 1 more" in shown


def test_nothing_wrong_and_nothing_explained_are_a_line() -> None:
    assert words(explanation_view(Explanation((), {"generation": 1}))) == (
        "Nothing to explain: of 1 answer, the edit got none wrong."
    )
    assert words(explanation_view(Explanation((), {}, "the edit changes 2 layers"))) == (
        "Not explained, key or value: the edit changes 2 layers."
    )
