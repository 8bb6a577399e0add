"""What a person sees says the same at 80 columns, without colour and through a pipe."""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import zoo
from rich.console import Console
from rich.text import Text
from shown import shown, words

from ffedit import Fact, Report, Scores
from ffedit.display.terminal.console import error_line, next_commands
from ffedit.display.terminal.explanation import MOST_WRONG, explanation_view
from ffedit.display.terminal.model_table import memory_table, model_line
from ffedit.display.terminal.outcome import outcome, worse
from ffedit.display.terminal.progress_bar import progress_bars
from ffedit.display.terminal.scores import before_after, sayings, verdict_view, what_it_says
from ffedit.display.terminal.tables import duration, ranges
from ffedit.evaluator import METRICS, Explanation, WrongAnswer
from ffedit.evaluator.scores import Continuation, FactScores
from ffedit.facts.text import number, token
from ffedit.progress import silent

FACT = Fact("Eiffel Tower", "The {} is in", "Rome", "Paris")


def scored(*first: float | None, **more: float) -> Scores:
    """Scores by their order among the metrics, and by name."""
    return Scores(**dict(zip(METRICS, first, strict=False)), **more)


BEFORE = scored(0.0, 0.0, 1.0, 1.0, 0.0, 0.0, None, -0.86, -0.7, 0.8, 0.9)
AFTER = scored(1.0, 0.9972, 0.98, 1.0, 0.99, 1.0, 0.0003, 0.97, 0.9, 0.7, 0.8)


def report(
    after: Scores | None = AFTER, says: str = "Rome, the capital", before: Scores = BEFORE, count: int = 1
) -> Report:
    """A report of one fact `count` times."""
    old = (FactScores(FACT, before, "Paris, the capital"),) * count
    return Report(before, after, old, None if after is None else (FactScores(FACT, after, says),) * count)


# Scores and sayings --------------------------------------------------------------------------------


def test_scores_before_and_after() -> None:
    lines = shown(before_after(report())).splitlines()
    rows = {line.split()[0]: line.split() for line in lines[2:]}
    assert rows["efficacy"][:6] == ["efficacy", "up", "0.00", "1.00", "+1.00", "1"]
    assert rows["paraphrase"][3] == "0.997", "never rounded to 1"
    assert rows["specificity"][:2] == ["specificity", "keep"] and "−0.02" in rows["specificity"]
    assert rows["drift"][2:] == ["0.0003", "nats", "per", "token"]
    assert len(lines) == 2 + 7, "one line each at 80 columns"


@pytest.mark.parametrize(
    ("width", "heads"),
    [
        (80, "score should before after change prompts"),
        (50, "score before after change prompts"),
        (40, "score before after change"),
    ],
)
def test_a_narrow_terminal_shows_fewer_columns_and_whole_numbers(width: int, heads: str) -> None:
    lines = shown(before_after(report()), width).splitlines()
    assert lines[0].split() == heads.split() and len(lines) == 2 + 7
    assert "0.997" in lines[3] and ("new beats old" in lines[2]) == (width == 80)


def test_a_fall_is_marked_without_colour() -> None:
    text = shown(before_after(report(scored(1.0, None, 0.94, 0.5, drift=0.2))))
    assert "−0.06 !" in text and "−0.50 !" in text
    assert "!" in next(line for line in text.splitlines() if line.startswith("drift"))
    assert "!" not in shown(before_after(report(scored(1.0, 1.0, 0.95, 1.0)))), "0.05 itself is no fall"


def test_what_was_not_measured_is_a_footnote() -> None:
    scores = Scores(efficacy=1.0, generation=1.0)
    text = words(before_after(report(scores, before=scores)))
    assert "specificity (give neighbors)" in text and "paraphrase (give paraphrases)" in text
    assert "not measured: paraphrase" in words(before_after(Report(Scores(), Scores(), (), ())))


def test_scores_without_an_edit() -> None:
    text = shown(before_after(report(None)))
    assert "now" in text and "after" not in text and "change" not in text


def test_sayings_before_and_after_an_edit() -> None:
    text = shown(what_it_says(report()))
    assert "The Eiffel Tower is in" in text and "Paris, the capital" in text and "Rome, the capital" in text
    assert "after" not in shown(what_it_says(report(None)))
    assert "… and 4 more" in shown(what_it_says(report(count=12)))
    odd = shown(sayings(["[red]x " + "東" * 100], [""]))
    assert "[red]x" in odd and "(nothing)" in odd and odd.count("東") == 100


# The outcome ---------------------------------------------------------------------------------------


def asked(*kinds: str, right: Sequence[bool]) -> tuple[Continuation, ...]:
    """Continuations of one prompt for each score in `kinds`, which say its answer or not."""
    return tuple(Continuation(kind, f"{kind}?", "yes", f"so {ok}", ok) for kind, ok in zip(kinds, right, strict=True))


def asked_report(before: Sequence[bool], after: Sequence[bool], scores: Scores = AFTER) -> Report:
    """A report of a fact with two paraphrases, two neighbors and two other facts."""
    kinds = ("paraphrase", "specificity", "same_subject")
    sides = [asked(*(kind for kind in kinds for _ in range(2)), right=right) for right in (before, after)]
    old = FactScores(FACT, BEFORE, "Paris, the capital", asked=sides[0])
    return Report(BEFORE, scores, (old,), (FactScores(FACT, scores, "Rome, the capital", asked=sides[1]),))


def test_the_outcome_counts_what_took_and_what_moved() -> None:
    measured = asked_report([False, False, True, False, True, True], [True, False, True, False, True, False])
    lines = shown(outcome(measured, ["layer 4", "9 s"]), 120).splitlines()
    assert lines[0] == "The Eiffel Tower is in   Paris → Rome   took; one other fact moved"
    counts = "says it in 2 of 3 wordings · 1 of 1 known neighbor as before · 1 of 2 other facts as before"
    assert lines[1:] == [f"{counts} · text as fluent as before", "layer 4 · 9 s"]
    table = shown(worse(measured)).splitlines()
    assert table[0].split() == ["changed", "for", "the", "worse", "before", "after"] and len(table) == 3
    assert table[2].split() == ["same_subject?", "so", "True", "so", "False", "other", "fact"]
    assert worse(asked_report([True] * 6, [True] * 6)) is None
    shared = shown(worse(asked_report([True] * 6, [True, True, False, False, True, True]))).splitlines()
    assert len(shared) == 3, "a prompt that stands twice is shown once"


def test_lines_of_the_outcome_break_between_parts_only() -> None:
    command = "undo: ffedit undo rome-tower --out as-before"
    narrow = shown(outcome(asked_report([True] * 6, [True] * 6), ["saved rome-tower/", command]), 50).splitlines()
    assert narrow[-2:] == ["saved rome-tower/", f"  {command}"]


def test_facts_that_did_not_take_lead_the_outcome() -> None:
    whole, failed = report(count=9), report(Scores(efficacy=0.0, generation=0.0), "Paris")
    assert whole.facts_after is not None and failed.facts_after is not None
    mixed = Report(BEFORE, AFTER, whole.facts_before + failed.facts_before, whole.facts_after + failed.facts_after)
    lines = shown(outcome(mixed, []), 120).splitlines()
    assert lines[0].endswith("DID NOT TAKE: it says “Paris”") and lines[1].endswith("took")
    assert lines[8] == "… and 2 more facts"
    assert lines[9] == "9 of 10 facts took · says them in 9 of 10 wordings · text as fluent as before"
    unlikely = shown(outcome(report(Scores(efficacy=0.0, generation=1.0), "Rome"), []), 120).splitlines()
    assert unlikely[0].endswith("DID NOT TAKE: it says “Rome”, but “Paris” is still likelier")


def test_broken_text_is_named_in_the_outcome() -> None:
    broken = asked_report([True] * 6, [True] * 6, Scores(efficacy=1.0, generation=1.0, special_tokens=0.9))
    broken = replace(broken, before=Scores(efficacy=0.0, special_tokens=0.0))
    text = shown(outcome(broken, []), 120)
    assert "took, but text breaks" in text and "TEXT BREAKS" in text and "fluent" not in text


def test_a_rise_of_repetition_is_shown_in_figures_where_it_is_no_break() -> None:
    both = [Scores(efficacy=float(after), degenerate=0.22 + 0.14 * after) for after in (False, True)]
    repeats = replace(asked_report([True] * 6, [True] * 6, both[1]), before=both[0])
    assert "36% of its text repeats, 22% before" in shown(outcome(repeats, []), 200)
    said = Scores(efficacy=1.0, degenerate=0.36, special_tokens=0.1)
    special = replace(asked_report([True] * 6, [True] * 6, said), before=both[0])
    assert "36% of its text is special tokens or repeats, 22% before" in shown(outcome(special, []), 200)
    calmer = replace(asked_report([True] * 6, [True] * 6, both[0]), before=both[1])
    assert "text as fluent as before" in shown(outcome(calmer, []), 200)


# The verdict ---------------------------------------------------------------------------------------


def edited(layers: list[int], tokens: int, probability: float, steps: int = 25) -> Any:
    """As much of an edit of one fact as the verdict looks at; fine-tuning may write to every layer."""
    solved = {"subject": FACT.subject, "tokens": [tokens], "probabilities": [probability], "loss": [9.0] * (steps + 1)}
    config = {"value": {"steps": 25, "target_probability": 0.6}}
    return SimpleNamespace(
        layers=layers, facts=(FACT,), provenance={"method": "ft", "config": config, "solved": [solved]}
    )


def verdict(measured: Report, edit: Any = None, layers: int = 6) -> str:
    """What is said of an edit of a model of `layers` layers, on one line."""
    return words(verdict_view(measured, edit, SimpleNamespace(layers=range(layers))) or Text(""))


def test_the_verdict_of_an_edit_that_took() -> None:
    text = verdict(report())
    assert text.startswith("Done: the model now says “Rome” instead of “Paris”")
    assert "specificity 1.00 → 0.98" in text and "drift 0.0003" in text and "Try" not in text
    assert verdict_view(report(), whole=False) is None, "the outcome says it"
    unmeasured = verdict(report(Scores(efficacy=1.0, generation=1.0), before=Scores(efficacy=0.0)))
    assert "not measured, since no prompt was given or left: specificity and same_subject" in unmeasured
    assert "held" not in unmeasured


def test_the_verdict_of_an_edit_with_damage() -> None:
    broken = report(scored(1.0, 1.0, 0.9, 0.5, 1.0, 1.0, 0.2))
    text = verdict(broken, edited([1], 1, 0.7))
    assert text.startswith("Done, but something else broke")
    assert broken.verdict.outcome == "took with damage"
    assert broken.verdict.to_dict()["damage"] == ["specificity", "same_subject", "drift"]
    assert "specificity fell from 1.00 to 0.90" in text and "same_subject fell from 1.00 to 0.50" in text
    assert "drift on generic text is 0.20 nats per token" in text and "steps" not in text
    assert text.endswith("Try another layer (--layers N, one of 0, 2-5).")
    narrow = verdict(report(scored(1.0, 0.2, 1.0, 1.0, 1.0, 1.0, 0.0)))
    assert narrow.startswith("Done, but narrowly") and "paraphrase 0.20" in narrow


def test_an_edit_that_did_not_take_is_loud() -> None:
    failed = report(Scores(efficacy=0.0, generation=0.0), "Paris [b]")
    text = verdict(failed, edited([2], 3, 0.01))
    assert text.startswith("THE EDIT DID NOT TAKE: “Rome” is not more likely than the old object")
    assert "“Paris [b]”" in text and "another layer (--layers N, one of 0-1, 3-5)" in text
    assert "“Rome” (3 tokens) reached the probability 0.01 after 25 of 25 steps; 0.60 was aimed at." in text
    assert text.endswith("or more than 25 steps (--set value.steps=50).")
    unsaid = verdict(report(Scores(efficacy=1.0, generation=0.0), "Paris"))
    assert unsaid.startswith("THE EDIT DID NOT TAKE") and "the model generates “Paris”" in unsaid


def test_advice_names_only_what_is_possible() -> None:
    failed = report(Scores(efficacy=0.0, generation=0.0), "Paris")
    everywhere = verdict(failed, edited([0, 1, 2], 1, 0.7), 3)
    assert "another layer" not in everywhere and everywhere.endswith("Try a single layer (--spread 1).")
    assert "Try" not in verdict(failed, edited([0], 1, 0.7), 1), "one layer, and its value was found"
    stopped = verdict(failed, edited([0], 1, 0.01, steps=4), 1)
    assert "after 4 of 25 steps" in stopped and "more than" not in stopped, "it did not end because steps ran out"
    assert "Try" not in verdict(failed), "how it was edited is not known"


def test_a_long_object_that_is_not_said_is_told_the_length_that_works() -> None:
    failed = report(Scores(efficacy=0.0, generation=0.0), "Paris")
    for probability in (0.01, 0.7):
        text = verdict(failed, edited([2], 50, probability))
        assert "new object of more than 20 tokens, and this one has 50: give the first words, 20 tokens at most" in text
        assert text.endswith("Try another layer (--layers N, one of 0-1, 3-5)."), "more steps would not help"
    assert "more than 20 tokens" not in verdict(failed, edited([2], 20, 0.01))


def test_a_batch_that_took_in_part() -> None:
    whole, failed = report(count=9), report(Scores(efficacy=0.0, generation=0.0))
    assert failed.facts_after is not None and whole.facts_after is not None
    mixed = Report(BEFORE, AFTER, whole.facts_before + failed.facts_before, whole.facts_after + failed.facts_after)
    text = verdict(mixed)
    assert text.startswith("The edit took in part, for 9 of 10 facts: for 1 of 10 facts the new object")
    assert "all 9 new objects" in verdict(whole)
    none = verdict(report(Scores(efficacy=0.0, generation=0.0), count=4))
    assert none.startswith("THE EDIT DID NOT TAKE: for 4 of 4 facts")
    assert (mixed.verdict.outcome, mixed.verdict.facts, mixed.verdict.took) == ("took in part", 10, 9)


@pytest.mark.parametrize(("failures", "outcome"), [(0, "took"), (2, "took in part"), (3, "did not take")])
def test_a_batch_takes_in_part_from_half_of_its_facts_on(failures: int, outcome: str) -> None:
    whole = report(count=4)
    (bad,) = report(Scores(efficacy=1.0, generation=0.0), "Paris").facts_after or ()
    after = (bad,) * failures + (whole.facts_after or ())[failures:]
    assert Report(BEFORE, AFTER, whole.facts_before, after).verdict.outcome == outcome


def test_success_that_was_there_before_is_named() -> None:
    before = Scores(efficacy=1.0, generation=0.0, knew=0.0)
    (new,) = report().facts_after or ()
    text = verdict(Report(before, AFTER, (FactScores(FACT, before, "London"),), (new,)))
    assert "Even before the edit the model found “Rome” more likely" in text
    assert "did not know the old object “Paris”: before the edit it said “London”" in text
    assert "instead of" not in text
    assert "already gives 0 of 1 new objects" in verdict(report(None))


def test_where_the_model_said_the_new_object_before_there_was_nothing_to_change() -> None:
    before = Scores(efficacy=1.0, generation=1.0, paraphrase=0.5)
    old = (FactScores(FACT, before, "Rome"),)
    idle = Report(before, before, old, old)
    assert verdict(idle) == "Nothing to change: the model said “Rome” before the edit, too."
    assert idle.verdict.outcome == "nothing to change"
    spread = Report(before, AFTER, old, report().facts_after)
    assert spread.verdict.outcome == "took", "it says so in more wordings now"


# Explanations --------------------------------------------------------------------------------------

OWN = WrongAnswer(
    "paraphrase_generation", "Tower", "Tower [bold]is in", "Rome", "Paris", "key", "Rome", 0.31, "Tower", " Tower", 1
)
MOVED = WrongAnswer(
    "neighbor_generation", "Tower", "Column is in", "Berlin", "", "key", None, -0.2, "Marie Curie", " Column", 0
)
TOLD = replace(OWN, failed=None, forced=None, reach=None, reason="it does not occur")


def test_each_wrong_answer_is_shown_with_its_reach_and_the_subject_that_leaked() -> None:
    text = words(explanation_view(Explanation((OWN, MOVED), {"paraphrase_generation": 4, "neighbor_generation": 3})))
    assert "The edit got 2 of 7 answers wrong." in text
    assert "paraphrase_generation 4 1 1 0" in text and "neighbor_generation 3 1 1 0" in text
    assert "key Tower [bold]is in Rome Paris Rome 0.31 at “Tower”" in text
    assert "key Column is in Berlin (nothing) −0.20 of “Marie Curie” at “Column”" in text
    assert "not explained" not in text


def test_the_first_explanations_are_shown_and_the_others_counted() -> None:
    many = (OWN,) * (MOST_WRONG + 3) + (TOLD,) * (MOST_WRONG + 1)
    text = words(explanation_view(Explanation(many, {"paraphrase_generation": 50})))
    assert text.count("0.31 at") == MOST_WRONG and "… and 3 more" in text
    assert text.count("not explained: “Tower [bold]is in”: it does not occur") == MOST_WRONG and "and 1 more" in text


def test_nothing_wrong_and_nothing_explained_are_a_line() -> None:
    assert words(explanation_view(Explanation((), {"generation": 1}))) == (
        "Nothing to explain: of 1 answer, the edit got none wrong."
    )
    assert words(explanation_view(Explanation((), {}, "the edit changes 2 layers"))) == (
        "Not explained, key or value: the edit changes 2 layers."
    )


# The model, errors and commands --------------------------------------------------------------------


def test_the_model_in_one_line() -> None:
    editable = zoo.build("llama", True)
    editable.name = "/a/very/long/path/to/a/folder/of/models/mine"
    text = shown(model_line(editable), 120)
    assert text == "mine  29.5K parameters · 3 layers · d_model 32 · d_ff 48 · cpu · float32"


@pytest.mark.parametrize(
    ("family", "row", "more"),
    [
        ("llama", "0-2 model.layers.*.mlp.down_proj [32, 48] as is float32 no yes", "55.3 kB"),
        ("gpt2", "0-2 transformer.h.*.mlp.c_proj [32, 128] transposed float32 yes yes", "393.2 kB"),
    ],
)
def test_anatomy_collapses_equal_layers(family: str, row: str, more: str) -> None:
    text = words(memory_table(zoo.shared(family)))
    assert row in text and f"{more} more to edit" in text and "norm" in text
    assert "resumable" in text and "to the last bit" in text
    assert ranges([0, 1, 2, 5, 7, 8]) == "0-2, 5, 7-8"


def test_a_duration_is_off_by_less_than_a_quarter_of_itself() -> None:
    unit = {"s": 1, "min": 60, "h": 3600}
    for seconds in range(1, 20_000):
        told, of = duration(seconds).split()
        assert abs(float(told) * unit[of] - seconds) < seconds / 4
    assert [duration(s) for s in (4.25, 95, 150, 9000)] == ["4.2 s", "95 s", "2 min", "2.5 h"]


def test_errors_are_one_line_and_commands_do_not_wrap() -> None:
    assert shown(error_line("no such [file]\n  here")) == "error: no such [file] here"
    command = f"ffedit ask '{'The Eiffel Tower ' * 9}' --edit rome.edit"
    assert next_commands(command).plain == f"Next:\n  {command}" and next_commands(command).no_wrap


def test_numbers_are_rounded_and_tokens_made_visible() -> None:
    found = [number(x) for x in (0.0, -0.0, 1e-5, 0.004, 0.005, -0.25, -0.003)]
    assert found == ["0.00", "0.00", "1e-05", "0.004", "0.01", "−0.25", "−0.003"]
    assert [token(t) for t in (" Tower", "\n", " ", "\x1b[31m")] == ["Tower", "⏎", "␣", "⟨U+001B⟩[31m"]
    assert token("👩\u200d👧") == "👩\u200d👧"


# Progress ------------------------------------------------------------------------------------------


def test_progress_is_a_bar_on_a_terminal_and_elsewhere_a_line_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    for quiet, terminal in ((False, True), (True, True), (False, False)):
        file = io.StringIO()
        console = Console(file=file, force_terminal=terminal, width=80)
        with progress_bars(quiet, console) as progress:
            assert (progress is silent) == quiet
            for stage in ("tracing", "measuring"):
                for done in range(3):
                    progress(stage, done, 2)
        assert ("tracing" in file.getvalue()) == (not quiet and terminal)
    # A stage has no line before 10 s, the next one when as much time has passed again, and none at its end.
    # Where less is done than before it begins anew; the time of the first step it reports is not known then.
    clock = iter([0, 0, 9, 12, 22, 24, 48, 100, 112])
    monkeypatch.setattr("ffedit.display.terminal.progress_bar.time.monotonic", clock.__next__)
    with progress_bars(console=Console(file=(file := io.StringIO()))) as progress:
        for done in (*range(6), 1, 2):
            progress("tracing", done, 5)
    anew = "tracing 1/5\ntracing 2/5, 36 s left\n"
    assert file.getvalue() == f"tracing 2/5, 18 s left\ntracing 4/5, 6.0 s left\n{anew}"


def test_the_line_of_a_benchmark_says_how_long_all_its_facts_take(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([0, 0, 5, 15, 20, 25, 30, 60])
    monkeypatch.setattr("ffedit.display.terminal.progress_bar.time.monotonic", clock.__next__)
    calls = [("measuring", 1, 4), ("measuring", 4, 4), ("rome", 1, 3), ("generating", 1, 40)]
    calls += [("generating", 40, 40), ("rome", 2, 3), ("generating", 8, 40)]
    with progress_bars(console=Console(file=(file := io.StringIO()))) as progress:
        for call in calls:
            progress(*call)
    # "rome" began at 15 s, and is the outer stage until all its facts are done.
    assert file.getvalue() == "rome 1/3\nrome 2/3, 15 s left\nrome 2/3, 45 s left: generating 8/40\n"
