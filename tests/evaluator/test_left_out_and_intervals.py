"""What reports tell beside means: intervals by kind, both gaps, what a score was not measured on, and its weights."""

from __future__ import annotations

import json
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest
import zoo
from benching import facts, lines, run
from changing import changed
from shown import shown
from writing import CORPUS, quick, write_facts

from ffedit import Edit, Fact, evaluate, explain
from ffedit.cli.work import result
from ffedit.display.terminal.scores import all_scores
from ffedit.evaluator import Evaluation, FactScores, LeftOut, Report, drift, left_out, mean_scores
from ffedit.evaluator.intervals import changes, intervals
from ffedit.model.editable import Editable

LONG = "the city of " * 18 + "red river is"  # 57 tokens, of 64 that the model takes
FAR = "the city of " * 12 + "red river is"


def probed() -> list[Fact]:
    """Facts with probes of two kinds; of the second kind the last one has none."""
    some, answers = facts(4)[1:], ["Paris", "Germany", "France"]
    asked = [{"prompt": "{} stands in", "target": answer, "kind": "Reasoning"} for answer in answers]
    other = {"prompt": "Nile river stands in", "target": "Egypt", "kind": "Alias"}
    return [
        replace(
            fact,
            portability=(own,) if i == 2 else (own, other),
            locality=({"prompt": "Mount Everest is", "kind": "K"},),
        )
        for i, (fact, own) in enumerate(zip(some, asked, strict=True))
    ]


def scored(editable: Editable) -> Report:
    """`probed` before and after a change of the model."""
    evaluation = Evaluation(editable, probed())
    with changed(editable):
        after = evaluation.scores()
    return Report(
        *(mean_scores(f.scores for f in side) for side in (evaluation.before, after)), evaluation.before, after
    )


def by_kind(some: tuple[FactScores, ...], name: str) -> list[float | None]:
    return [one.kinds.get(name) for one in some]


def test_kinds_have_the_intervals_of_any_score() -> None:
    report = scored(zoo.trained("gpt2"))
    assert report.facts_after is not None
    names = {"portability/Reasoning", "portability_token_accuracy/Reasoning", "portability/Alias", "locality/K"}
    assert names <= set(report.intervals_before) & set(report.intervals_after) & set(report.changes)
    for name in report.kinds[0]:
        before, after = (by_kind(side, name) for side in (report.facts_before, report.facts_after))
        assert report.intervals_before[name] == intervals({name: before})[name]
        assert report.intervals_after[name] == intervals({name: after})[name]
        assert report.changes[name] == changes({name: before}, {name: after})[name]
        assert report.intervals_after[name].mean == pytest.approx(report.kinds[1][name])
    assert any(one.low < one.high for name, one in report.changes.items() if name in names), "some facts moved"
    assert None in by_kind(report.facts_before, "portability/Alias")
    found = result.evaluated(zoo.trained("gpt2"), report)["intervals"]
    assert names <= set(found["before"]) & set(found["after"]) & set(found["change"])
    row = next(line for line in shown(all_scores(report), 120).splitlines() if line.strip().startswith("Reasoning"))
    assert row.count("[") == 3


def test_one_fact_alone_has_no_interval_of_its_kinds() -> None:
    report = evaluate(zoo.trained("gpt2"), probed()[:1])
    assert report.kinds[0]["portability/Reasoning"] == 1 and "portability/Reasoning" not in report.intervals_before
    row = next(line for line in shown(all_scores(report)).splitlines() if line.strip().startswith("Reasoning"))
    assert "[" not in row


def test_a_benchmark_has_the_intervals_by_kind(tmp_path: Path) -> None:
    report = run(zoo.trained("gpt2", True), tmp_path / "out", "single", probed(), ["memit", "ft"])
    found = lines(tmp_path / "out")
    values = {
        method: [x["kinds"].get("portability/Alias") for x in found if x["method"] == method and "kinds" in x]
        for method in (None, "memit", "ft")
    }
    name, own = "portability/Alias", report.methods["ft"]
    before, memit, ft = ({name: values[method]} for method in (None, "memit", "ft"))
    assert report.before.intervals[name] == intervals(before)[name]
    assert own.after.intervals[name] == intervals(ft)[name]
    assert own.change.differences[name] == changes(before, ft)[name]
    assert report.comparisons[0].differences[name] == changes(memit, ft)[name]
    told = json.loads((tmp_path / "out" / "report.json").read_text())["methods"]["ft"]
    assert name in told["after"]["intervals"] and name in told["change"]["differences"]
    text = (tmp_path / "out" / "report.md").read_text()
    tables = {part.partition("\n")[0]: part for part in text.split("## ")}
    for title in ("Change against before, paired", "Method against method, paired (second − first)"):
        assert name in tables[f"{title}, by kind"] and name not in tables[title]
    assert tables["Locality and portability by kind"].count("[") == 3 * len(report.before.kinds)


def test_free_and_teacher_forced_accuracy_are_both_reported(tmp_path: Path) -> None:
    """ "Paris Paris" is half right with teacher forcing, and never said."""
    editable = zoo.trained("gpt2")
    half = Fact("Eiffel tower", "the {} is located in", "Paris Egypt", "Rome")
    said = Fact("Nile river", "{} stands in", "Egypt", "Rome")
    report = evaluate(editable, [half, said])
    first, second = (one.scores for one in report.facts_before)
    assert (first.token_accuracy, first.teacher_forced, first.generation) == (0.5, 0, 0)
    assert (first.token_accuracy_gap, first.teacher_forced_gap) == (0.5, 0)
    assert second.token_accuracy_gap == 0 and report.before.token_accuracy_gap == 0.25
    gap = "token_accuracy_gap"
    assert report.intervals_before[gap] == intervals({gap: [0.5, 0.0]})[gap]
    table = shown(all_scores(report), 120)
    assert "token_accuracy_gap" in table and "are the differences to generation" in " ".join(table.split())
    run(zoo.trained("gpt2", True), tmp_path / "out", "single", facts(3), ["ft"])
    text = (tmp_path / "out" / "report.md").read_text()
    assert "token_accuracy_gap is token_accuracy − generation, as arXiv 2502.11177 publishes the gap" in text
    assert text.count("| teacher_forced_gap | token_accuracy_gap |") == 3  # scores, known facts, change


def crowded(first: Fact, second: Fact) -> list[Fact]:
    """Facts with neighbors that become too long behind the edit's sentence: one of one fact, two of the other."""
    near = {"target": "Madrid"}
    return [
        replace(first, neighbors=({**near, "prompt": LONG}, {**near, "prompt": FAR}), generation=("the {} is",)),
        replace(second, neighbors=({**near, "prompt": LONG}, {**near, "prompt": f"a {LONG}"}), references=("a b", "c")),
    ]


def test_what_was_left_out_is_counted_and_told(tmp_path: Path) -> None:
    editable, some = zoo.trained("gpt2"), crowded(*facts(3)[1:])
    (tmp_path / "text.txt").write_text("the Eiffel tower is located in Paris . " * 80)
    report = evaluate(editable, some, Nothing({}, {}, {}, (), {}), text=tmp_path / "text.txt", full=True)
    assert report.left_out == (
        LeftOut("neighbor_with_edit", 3, "neighbors of 2 facts", "too long for the model after the edit's sentence"),
    )
    assert report.facts_before[0].scores.neighbor_with_edit is not None, "the short one counts"
    assert report.facts_before[1].scores.neighbor_with_edit is None
    found = result.evaluated(editable, report)
    assert found["references"] == 2 and found["left_out"][0] == {
        "score": "neighbor_with_edit",
        "count": 3,
        "what": "neighbors of 2 facts",
        "reason": "too long for the model after the edit's sentence",
    }
    assert "neighbor_with_edit: 3 neighbors of 2 facts left out" in shown(all_scores(report), 120)
    whole = evaluate(editable, some, text=tmp_path / "text.txt")
    assert whole.left_out == (), "no drift, and no sentence in front, without an edit and not in full"


def test_neighbors_outside_the_sample_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drift, "NEIGHBOR_BYTES", 4 * 97 * 4)
    near = [{"prompt": f"the {word} red river is in", "target": "Madrid"} for word in zoo.WORDS[40:48]]
    one, two = (replace(fact, neighbors=some) for fact, some in zip(facts(3)[1:], (near[:5], near[5:]), strict=True))
    evaluation = Evaluation(zoo.trained("gpt2"), [one, two])
    kept = len(evaluation._reference.contexts)
    assert 0 < kept < 8
    counts = [scores.left_out.get("divergence", 0) for scores in evaluation.before]
    assert sum(counts) == 8 - kept and all(counts)
    (told,) = left_out(evaluation.before)
    assert (
        str(told)
        == f"divergence: {8 - kept} neighbors of 2 facts left out: outside the sample whose distributions are kept"
    )
    again = tuple(FactScores.from_dict(one.to_dict()) for one in evaluation.before)
    assert again == evaluation.before and left_out(again) == (told,)


@pytest.mark.parametrize("mode", ["single", "batch:2"])
def test_a_benchmark_tells_what_it_left_out_and_what_weights_are_of(tmp_path: Path, mode: str) -> None:
    (tmp_path / "text.txt").write_text("the Eiffel tower is located in Paris . " * 80)
    some = crowded(*facts(3)[1:])
    some[0] = replace(some[0], references=("the tower is in Rome",))
    out = tmp_path / "out"
    report = run(zoo.trained("gpt2", True), out, mode, some, ["memit", "ft"], full=True, text=tmp_path / "text.txt")
    told = json.loads((out / "report.json").read_text())
    assert [(one["score"], one["count"]) for one in told["left_out"]] == [("neighbor_with_edit", 3)]
    assert told["references"] == report.references == 3
    text = (out / "report.md").read_text()
    assert "## Not measured (1)" in text
    assert "- neighbor_with_edit: 3 neighbors of 2 facts left out: too long for the model" in text
    assert "The document frequencies of consistency come from the 3 reference texts of these facts" in text
    again = run(zoo.trained("gpt2", True), out, mode, some, ["memit", "ft"], full=True, text=tmp_path / "text.txt")
    assert again.left_out == report.left_out, "from the journal alone"


class Nothing(Edit):
    """An edit that changes nothing."""

    def applied(self, editable: Editable) -> nullcontext[Editable]:
        return nullcontext(editable)


def test_the_interval_of_a_score_does_not_vanish_by_a_rounding() -> None:
    """Draws of .9 on every fact differ in their last bit; those of .5 do not."""
    whole = {"efficacy": [1.0] * 30, "paraphrase": [1.0] * 30}
    for specificity in (0.9, 0.5):
        columns = {**whole, "specificity": [specificity] * 30}
        assert not intervals(columns)["score"].is_point
        assert not changes({**whole, "specificity": [1.0] * 30}, columns)["score"].is_point


def test_a_neighbor_that_another_fact_of_the_edit_changes_is_left_out_where_that_fact_is_not_measured() -> None:
    editable = zoo.trained("gpt2", True)
    first = Fact("Eiffel tower", zoo.TEMPLATES[0], "Rome", "Paris")
    neighbor = {"prompt": first.text, "target": "Paris"}
    second = Fact("Marie Curie", zoo.TEMPLATES[0], "Spain", "France", neighbors=[neighbor])
    edit = write_facts(editable, [first, second], "emmet", [1], quick(), CORPUS)
    for measured in ([first, second], [second]):
        found = evaluate(editable, measured, edit)
        assert found.facts_after is not None and found.facts_after[-1].scores.specificity is None
        assert any("edited as well" in str(one) for one in found.left_out)
    assert "neighbor_generation" not in explain(editable, [second], edit).counts


def test_a_narrow_terminal_cuts_no_number() -> None:
    """Intervals stand beside their scores or, in 80 columns, below them; where they do not fit, they are left out."""
    report = scored(zoo.trained("gpt2"))
    tables = {}
    for width in (40, 80, 160):
        lines = shown(all_scores(report), width).splitlines()
        end = next(i for i, line in enumerate(lines) if line.startswith(("in brackets", "teacher_forced…")))
        tables[width] = lines[:end]
        assert not any("…" in line for line in lines[:end])
    row = next(i for i, line in enumerate(tables[80]) if line.startswith("generation"))
    assert "[" not in tables[80][row] and tables[80][row + 1].lstrip().startswith("[")
    assert any(line.startswith("generation") and "[" in line for line in tables[160])
    assert not any("[" in line for line in tables[40])
