"""A benchmark gives what editing and evaluating by hand gives, for every mode; what cannot be done is counted."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import zoo
from benching import CONFIG, facts, lines, run
from writing import CORPUS, with_numbers

import ffedit
from ffedit import Edit, EditError, Fact, FactError
from ffedit.algebra.low_rank import LowRank
from ffedit.benchmark import Mode, bench
from ffedit.benchmark.settings import checkpoints, held_out
from ffedit.benchmark.tables import markdown, number
from ffedit.editor.config import EditConfig, KeyConfig
from ffedit.evaluator import Evaluation
from ffedit.inference.names import names
from ffedit.layer_choice.published import Published
from ffedit.model.editable import Editable

pytestmark = pytest.mark.usefixtures("warm_cache")


@pytest.fixture
def editable() -> Editable:
    return zoo.trained("gpt2", True)


def by_hand(
    editable: Editable, some: Sequence[Fact], method: str, after: Sequence[Edit] = (), config: EditConfig = CONFIG
) -> Edit:
    stats = ffedit.collect_stats(zoo.trained("gpt2", True), [1], corpus=CORPUS)
    return ffedit.edit(editable, some, method, layers=[1], config=config, stats=stats, preserve=after)


def scores_of(found: Sequence[Mapping[str, Any]], method: str | None, when: str) -> dict[int, dict[str, float]]:
    """The scores of a moment by fact, of those that were measured."""
    some = [x for x in found if (x["method"], x["when"]) == (method, when) and x["fact"] is not None]
    return {x["fact"]: {k: v for k, v in x["scores"].items() if v is not None} for x in some}


def expected(asked: Evaluation, places: Sequence[int], only: Sequence[int]) -> dict[int, dict[str, float]]:
    found = asked.scores(only=only)
    return {
        i: {k: pytest.approx(v, abs=1e-5) for k, v in one.scores.to_dict().items() if v is not None}
        for i, one in zip(places, found, strict=True)
    }


def test_modes_are_read_and_unknown_ones_are_refused() -> None:
    modes = {"single": Mode("single"), "batch:10": Mode("batch", 10), "sequential": Mode("sequential", 1)}
    for text, mode in modes.items():
        assert Mode.parse(text) == mode and Mode.parse(str(mode)) == mode
    for text in ("", "all", "batch", "batch:", "batch:0", "batch:x", "sequential:", "single:2", "batch:-1"):
        with pytest.raises(EditError, match="single, batch:N or sequential"):
            Mode.parse(text)


def test_chunks_take_every_fact_once_and_cut_no_subject() -> None:
    some = [Fact(subject, f"{{}} is {i}", "x") for i, subject in enumerate("abacdbb")]
    assert Mode("single").chunks(some) == [(i,) for i in range(7)]
    assert Mode("sequential").chunks(some) == [(0, 2), (1, 5, 6), (3,), (4,)]
    assert Mode("batch", 3).chunks(some) == [(0, 2, 1, 5, 6), (3, 4)]


def test_checkpoints_are_about_ten_and_end_at_the_end() -> None:
    assert checkpoints([(i,) for i in range(200)]) == [20 * n - 1 for n in range(1, 11)]
    assert checkpoints([(0, 1, 2), (3,)]) == [0, 1]
    assert checkpoints([(0,)]) == [0]


def test_names_that_are_asked_about_are_held_out() -> None:
    fact = Fact("Eiffel Tower", "{} is in", target="Rome", previous="Paris", neighbors=["Rialto Bridge is in"])
    config = held_out(EditConfig(key=KeyConfig(names_weight=3.0)), [fact])
    assert "Rialto Bridge" in names() and config.key.without_names == ("Rialto Bridge",)
    assert held_out(config, [fact]) == config, "once is enough"
    without = EditConfig(key=KeyConfig(names_weight=0.0))
    assert held_out(without, [fact]) is without, "where names do not count, none is held out"


def test_single_edits_are_those_made_by_hand(editable: Editable, tmp_path: Path) -> None:
    before, some, methods = zoo.snapshot(editable), facts(3), ("rome", "memit", "ft")
    report = run(editable, tmp_path / "out", "single", some, methods)
    assert zoo.unchanged(editable, before) and not editable.history.edits
    found = lines(tmp_path / "out")
    moved = False
    for i, fact in enumerate(some):
        asked = Evaluation(editable, [fact])
        assert scores_of(found, None, "before")[i] == expected(asked, [i], [0])[i]
        for method in methods:
            with by_hand(editable, [fact], method).applied(editable):
                assert scores_of(found, method, "after")[i] == expected(asked, [i], [0])[i]
            moved |= scores_of(found, method, "after")[i] != scores_of(found, None, "before")[i]
    assert moved
    # One line for each method and fact, before and after, and one for each edit.
    assert len(found) == 3 * (1 + len(methods)) * 2
    assert report.before.facts == 3 and list(report.methods) == list(methods)
    of_memit = scores_of(found, "memit", "after")
    mean = sum(one["efficacy_magnitude"] for one in of_memit.values()) / 3
    assert report.methods["memit"].after.scores.efficacy_magnitude == pytest.approx(mean)


@pytest.mark.parametrize(
    ("rounds", "methods", "choosing"),
    [(1, ("memit", "emmet", "alphaedit", "ft"), ("memit", "ft")), (2, ("memit", "emmet"), ("memit", "emmet"))],
)
def test_methods_share_the_values_of_a_batch_unless_these_are_chosen_again(
    editable: Editable,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    rounds: int,
    methods: Sequence[str],
    choosing: Sequence[str],
) -> None:
    made: list[str] = []
    real = ffedit.edit

    def counted(editable: Editable, some: Sequence[Fact], method: str, *rest: Any, **named: Any) -> Edit:
        made.append(method)
        return real(editable, some, method, *rest, **named)

    monkeypatch.setattr(ffedit, "edit", counted)
    some, config = facts(5), with_numbers(CONFIG, rounds=rounds)
    run(editable, tmp_path / "out", "batch:3", some, methods, config=config)
    assert made == [*choosing] * 2  # once for each of two chunks
    monkeypatch.undo()
    found = lines(tmp_path / "out")
    for chunk in Mode("batch", 3).chunks(some):
        asked = Evaluation(editable, [some[i] for i in chunk])
        for method in methods:
            with by_hand(editable, [some[i] for i in chunk], method, config=config).applied(editable):
                wanted = expected(asked, chunk, range(len(chunk)))
            assert {i: scores_of(found, method, "after")[i] for i in chunk} == wanted


def test_values_that_cannot_be_chosen_fail_each_method_and_are_tried_once(
    editable: Editable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried: list[str] = []

    def failing(_: Editable, some: Sequence[Fact], *more: Any, **how: Any) -> Edit:
        tried.append(some[0].subject)
        raise EditError("the loss is not finite")

    monkeypatch.setattr(ffedit, "edit", failing)
    report = run(editable, tmp_path, "batch:3", methods=["memit", "alphaedit", "emmet"])
    assert tried == ["Eiffel tower", facts()[3].subject], "once for each batch"
    assert {method: figures.failed for method, figures in report.methods.items()} == dict.fromkeys(report.methods, 5)
    assert {failure["reason"] for failure in report.failures} == {"the loss is not finite"}


@pytest.mark.parametrize("method", ["alphaedit", "ft"])
def test_a_sequence_is_edit_upon_edit(editable: Editable, tmp_path: Path, method: str) -> None:
    before, some = zoo.snapshot(editable), facts(4)
    report = run(editable, tmp_path / "out", "sequential", some, [method])
    assert zoo.unchanged(editable, before) and not editable.history.edits
    found, chunks = lines(tmp_path / "out"), Mode("sequential").chunks(some)
    assert chunks == [(0, 1), (2,), (3,)]
    asked, edits, written = Evaluation(editable, some), list[Edit](), list[int]()
    for chunk in chunks:
        edit = by_hand(editable, [some[i] for i in chunk], method, edits if method == "alphaedit" else ())
        edit.apply_(editable)
        edits, written = [*edits, edit], [*written, *chunk]
        after = scores_of(found, method, "after")
        assert {i: after[i] for i in chunk} == expected(asked, chunk, chunk)
        when = "end" if len(written) == 4 else f"at {len(written)}"
        assert scores_of(found, method, when) == expected(asked, written, written)
    own = report.methods[method]
    assert [row.name for row in own.curve] == ["2", "3", "4"]
    assert own.end is not None and own.end.scores == own.curve[-1].scores
    if method == "alphaedit":  # the keys of the edits before are kept: so it differs from one that forgets them
        assert edits[2].provenance["after"] == [edit.fingerprint() for edit in edits[:2]]


def test_an_edit_that_fails_is_listed_and_the_run_goes_on(
    editable: Editable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    some, real = facts(5), ffedit.edit
    whole = run(editable, tmp_path / "whole", "sequential", some[2:], ["ft"])
    bad = some[0].subject

    def failing(editable: Editable, facts: Sequence[Fact], *rest: Any, **named: Any) -> Edit:
        if facts[0].subject == bad:
            raise EditError("no solution")
        return real(editable, facts, *rest, **named)

    monkeypatch.setattr(ffedit, "edit", failing)
    for mode in ("single", "batch:2", "sequential"):
        report = run(editable, tmp_path / mode, mode, some, ["ft"])
        own = report.methods["ft"]
        assert (own.after.facts, own.failed, own.not_finite) == (3, 2, 0)
        assert [(f["fact"], f["method"], f["reason"]) for f in report.failures] == [
            (0, "ft", "no solution"),
            (1, "ft", "no solution"),
        ]
        # Prompts of facts that are edited in the same batch are left out, and that is listed, too.
        assert f"## Not measured ({2 + len(report.left_out)})" in (tmp_path / mode / "report.md").read_text()
    # What failed left nothing behind: the others are written as if it had not been there.
    assert own.last.scores.efficacy == whole.methods["ft"].last.scores.efficacy


@pytest.mark.parametrize("mode", ["single", "sequential"])
def test_numbers_that_are_not_finite_are_told(
    editable: Editable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: str
) -> None:
    some, real, broken = facts(4)[1:], ffedit.edit, {1: float("nan"), 2: 1e30}

    def breaking(editable: Editable, facts: Sequence[Fact], *rest: Any, **named: Any) -> Edit:
        edit = real(editable, facts, *rest, **named)
        number = broken.get(some.index(facts[0]))
        if number is None:
            return edit
        updates = {at: LowRank(x.dense[:, :1] * 0 + number, x.dense[:1] * 0 + 1e8) for at, x in edit.updates.items()}
        return dataclasses.replace(edit, updates=updates)

    monkeypatch.setattr(ffedit, "edit", breaking)
    before = zoo.snapshot(editable)
    report = run(editable, tmp_path / "out", mode, some, ["ft"])
    own = report.methods["ft"]
    assert zoo.unchanged(editable, before)
    assert (own.after.facts, own.failed, own.not_finite) == (1, 0, 2)
    seconds = [line["seconds"]["solving"] for line in lines(tmp_path / "out") if "seconds" in line]
    assert own.seconds_per_fact["solving"] == pytest.approx(sum(seconds) / 2), "two were written"
    if mode == "sequential":
        assert [(row.name, row.facts) for row in own.curve] == [("1", 1), ("2", 0)], "two were written"
    assert "NaN" in report.failures[0]["reason"] and "not finite" in report.failures[1]["reason"]
    json.loads((tmp_path / "out" / "report.json").read_text(), parse_constant=pytest.fail)
    for text in (tmp_path / "out" / "results.jsonl").read_text().splitlines():
        json.loads(text, parse_constant=pytest.fail)


LONG = "in the city of " * 40
NILE = {"subject": "Nile river", "prompt": "{} is", "target": "Rome", "previous": "Egypt", "case_id": "long"}


@pytest.mark.parametrize(
    ("mode", "long"),
    [
        *(("single", {"prompt": LONG + "{} is"}), ("single", {"generation": [LONG + "{}"]})),
        *(("batch:3", {"generation": [LONG + "{}"]}), ("sequential", {"prompt": LONG + "{} is"})),
    ],
)
def test_a_fact_that_does_not_fit_the_model_is_set_apart(
    editable: Editable, tmp_path: Path, mode: str, long: dict[str, Any]
) -> None:
    report = run(editable, tmp_path / "out", mode, [*facts(2), Fact(**{**NILE, **long})], ["ft"], full=True)
    assert report.before.facts == report.methods["ft"].after.facts == 2
    (failure,) = report.failures
    assert (failure["case_id"], failure["method"]) == ("long", None) and "tokens" in failure["reason"]


@pytest.mark.parametrize("mode", ["batch:3", "sequential"])
def test_a_prompt_that_is_asked_because_of_the_other_facts_sets_its_fact_apart(
    editable: Editable, tmp_path: Path, mode: str
) -> None:
    first, second = facts(2)
    follows = {"prompt": LONG, "target": "Rome", "needs": [first.text]}
    report = run(editable, tmp_path / "a", mode, [first, second, Fact(**NILE, portability=[follows])], ["ft"])
    assert report.before.facts == 2 and [failure["fact"] for failure in report.failures] == [2]
    # A neighbor that asks for a fact of the batch is left out, unless that fact is set apart.
    second = dataclasses.replace(second, neighbors=[{"prompt": LONG + "Nile river is", "target": "Egypt"}])
    some = [first, second, Fact(**{**NILE, "prompt": LONG + "{} is"})]
    report = run(editable, tmp_path / "b", mode, some, ["ft"])
    assert report.before.facts == 1 and [failure["fact"] for failure in report.failures] == [2, 1]


def test_what_cannot_be_run_is_refused_before_any_work(editable: Editable, tmp_path: Path) -> None:
    some = facts(2)
    with pytest.raises(FactError, match="no facts"):
        bench(editable, [], ["ft"], "single", tmp_path / "out")
    with pytest.raises(EditError, match="method 'rmoe' is not known; known are rome"):
        bench(editable, some, ["rmoe"], "single", tmp_path / "out")
    with pytest.raises(EditError, match="no methods"):
        bench(editable, some, [], "single", tmp_path / "out")
    for wrong in (
        *({"config": {"memit": CONFIG}}, {"config": "x"}, {"config": {}}, {"spread": "2"}, {"spread": 0}),
        *({"stats": "x"}, {"text": 3}, {"methods": None}, {"mode": None}, {"out": None}),
    ):
        usual: dict[str, Any] = {"methods": ["rome", "memit"], "mode": "single", "out": tmp_path / "out"}
        with pytest.raises(EditError) as caught:
            bench(editable, some, **{**usual, **wrong})
        assert "\n" not in str(caught.value)
    with pytest.raises(FactError, match="2 facts have the case_id '0'"):
        bench(editable, [some[0], dataclasses.replace(some[1], case_id="0")], ["ft"], "single", tmp_path / "out")
    assert not (tmp_path / "out").exists()
    with pytest.raises(EditError, match="layers 0 to 2"):
        run(editable, tmp_path / "out", layers=[9])


def test_consistency_does_not_depend_on_what_is_edited_together(editable: Editable, tmp_path: Path) -> None:
    texts = (["the Eiffel tower stands in Rome"], ["Rome is the city of Marie Curie", "the river is in Rome"])
    some = [
        dataclasses.replace(fact, generation=("the {} is",), references=tuple(text))
        for fact, text in zip(facts(4)[2:], texts, strict=True)
    ]
    run(editable, tmp_path / "out", "single", some, ["ft"], full=True)
    found = [
        line["scores"]["consistency"]
        for line in lines(tmp_path / "out")
        if line["when"] == "before" and "scores" in line
    ]
    assert found == [one.scores.consistency for one in Evaluation(editable, some, full=True).before]
    assert all(found)


def test_tables_show_what_was_measured_only(editable: Editable, tmp_path: Path) -> None:
    unusable = [{"record": 7, "reason": "no subject"}]
    report = run(editable, tmp_path / "out", "single", facts(3), ["ft"], unusable=unusable)
    text = markdown(report)
    told = (tmp_path / "out" / "report.md").read_text()
    assert told == f"{text}\n## Computed on\n\n- {report.run['hardware'][0]}\n"
    assert "| before | 3 | 0.000 [0.000, 0.658] |" in text and "- record 7: no subject" in text
    assert "| entropy |" not in text and "portability" not in text  # nothing to measure them on
    assert report.comparisons == () and "Method against method" not in text
    assert (number(None), number(0.0), number(0.00012), number(0.5)) == ("-", "0.000", "1.2e-04", "0.500")
    assert report.before.scores.drift is None and "| before | 3 | - |" in text


def test_intervals_are_those_of_the_facts(editable: Editable, tmp_path: Path) -> None:
    report = run(editable, tmp_path / "out", "single", facts(4), ["memit", "ft"])
    found = lines(tmp_path / "out")
    first, second = (scores_of(found, method, "after") for method in ("memit", "ft"))
    (pair,) = report.comparisons
    wanted = sum(second[i]["efficacy_magnitude"] - first[i]["efficacy_magnitude"] for i in range(4)) / 4
    assert pair.names == ("memit", "ft") and pair.facts == 4
    assert pair.differences["efficacy_magnitude"].mean == pytest.approx(wanted)
    bound = report.methods["ft"].after.intervals["efficacy_magnitude"]
    values = torch.tensor([second[i]["efficacy_magnitude"] for i in range(4)])
    assert values.min() <= bound.low <= bound.mean <= bound.high <= values.max()
    known = report.methods["ft"].known
    knew = [i for i, one in scores_of(found, None, "before").items() if one["knew"]]
    assert known is not None and known[0].facts == known[1].facts == len(knew) > 0
    assert report.methods["ft"].after.scores.drift is not None
    assert known[1].scores.drift is None and "drift" not in known[1].intervals, "it is of all facts"


def test_one_method_takes_the_layer_that_was_published_for_it(
    editable: Editable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Several are compared at one layer, which is that of MEMIT."""
    shape = editable.model.config
    row = Published("Tiny", shape.model_type, 3, shape.hidden_size, rome=1, memit=(0, 0), source="a paper")
    monkeypatch.setattr("ffedit.layer_choice.published.PUBLISHED", (row,))
    for methods, layer in ((["rome"], 1), (["rome", "emmet"], 0)):
        report = run(editable, tmp_path / str(layer), some=facts(1), methods=methods, layers=None)
        assert report.run["layers"] == [layer]
