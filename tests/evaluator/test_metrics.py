"""Each metric on cases that can be worked out by hand, and bootstrap intervals against their definition."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields
from pathlib import Path
from statistics import harmonic_mean

import numpy as np
import pytest
import torch
import zoo
from shown import shown

from ffedit.algebra.bootstrap import Interval
from ffedit.cli.work.result import evaluated
from ffedit.display.html.result import score_rows
from ffedit.display.terminal.scores import before_after
from ffedit.errors import EditError
from ffedit.evaluator import METRICS, NAMES, Evaluation, Report, formulas, mean_scores, metrics
from ffedit.evaluator.evaluate import evaluate
from ffedit.evaluator.intervals import changes, intervals
from ffedit.evaluator.prompts import Questions
from ffedit.evaluator.scores import FactScores, Scores
from ffedit.facts.fact import Fact


def interval(name: str, values: Sequence[float | None], subjects: Sequence[str] | None = None) -> Interval:
    """The interval of one score alone."""
    return intervals({name: values}, subjects=subjects)[name]


def paired(
    name: str, before: Sequence[float | None], after: Sequence[float | None], subjects: Sequence[str] | None = None
) -> Interval:
    """The interval of the change of one score alone."""
    return changes({name: before}, {name: after}, subjects)[name]


def test_likelihoods_are_means_over_tokens() -> None:
    half, quarter = math.log(0.5), math.log(0.25)
    assert formulas.nll([half, quarter]) == pytest.approx(1.5 * math.log(2))
    assert formulas.likelihood([half, quarter]) == pytest.approx(2**-1.5)
    assert formulas.success([half], [half, quarter]) and not formulas.success([half], [half, half]), "a tie is none"
    assert formulas.success([-800.0], [-801.0]), "far below what a probability can say"
    assert formulas.magnitude([half], [quarter, quarter]) == pytest.approx(0.25)
    assert metrics.harmonic(1.0, 0.5, 0.5) == pytest.approx(0.6) and metrics.harmonic(1.0, None, 1.0) is None
    assert metrics.harmonic(1.0, 0.0, 1.0) == 0


def test_accuracies_with_and_without_teacher_forcing() -> None:
    assert formulas.token_accuracy([1, 2, 9], [1, 2, 3]) == pytest.approx(2 / 3)
    assert formulas.exact_match("Rome, Italy", "Rome") and formulas.exact_match("Rome", "Rome")
    assert not formulas.exact_match("Romeo and", "Rome") and not formulas.exact_match("in Rome", "Rome")
    assert formulas.exact_match("東京です", "東京") and formulas.exact_match("روما هي", "روما")
    assert not formulas.exact_match("Rome", "") and formulas.exact_match("🗼 is", "🗼")
    assert not formulas.exact_match("10,000 men", "10") and not formulas.exact_match("3.5 m", "3")
    assert formulas.exact_match("10, or so", "10") and formulas.exact_match("10.", "10")
    assert not formulas.exact_match("United States.", "United", "United States"), "it is the other object that is said"
    assert formulas.exact_match("United.", "United", "United States")
    assert formulas.exact_match("United States.", "United States", "United")


def test_divergence_and_perplexity() -> None:
    p, q = torch.tensor([0.5, 0.5, 0.0]).log(), torch.tensor([0.25, 0.75, 0.0]).log()
    expected = 0.5 * math.log(2) + 0.5 * math.log(2 / 3)
    assert float(formulas.divergence(p, q)) == pytest.approx(expected, rel=1e-6)
    assert float(formulas.divergence(p, p)) == 0
    assert formulas.perplexity(torch.tensor([0.5, 0.125]).log()) == pytest.approx(4.0)


def test_entropy_of_ngrams() -> None:
    # Bigrams ab bc ca ab: 2, 1, 1 of 4; trigrams abc bca cab: 1, 1, 1.
    expected = (2 / 3 * 1.5 + 4 / 3 * math.log2(3)) / 2
    assert formulas.generation_entropy("a b c a b") == pytest.approx(expected)
    assert formulas.generation_entropy("no no no no no no") == 0 == formulas.generation_entropy("no")


def test_consistency_is_the_cosine_of_weighted_terms() -> None:
    weights = formulas.term_weights(["football is fun", "football pitch"])
    assert weights["football"] == 1 and weights["fun"] == pytest.approx(math.log(3 / 2) + 1)
    assert formulas.reference_consistency("Football is fun", ["football is fun"], weights) == pytest.approx(1)
    assert formulas.reference_consistency("piano", ["football is fun"], weights) == 0
    w = weights["fun"]
    expected = 1 / math.sqrt(1 + 2 * w * w)
    assert formulas.reference_consistency("football", ["football is fun"], weights) == pytest.approx(expected)


def test_intervals_hold_the_mean_and_narrow_with_more_facts(monkeypatch: pytest.MonkeyPatch) -> None:
    draw = np.random.default_rng(1)
    few, many = (draw.normal(0.5, 1.0, size).tolist() for size in (25, 400))
    small, large = interval("drift", few), interval("drift", many)
    assert small.low < small.mean < small.high and large.high - large.low < 0.5 * (small.high - small.low)
    assert large.high - large.low == pytest.approx(2 * 1.96 * np.std(many) / 20, rel=0.1)
    assert not intervals({"drift": [None, 1.0]}) and not intervals({"drift": []})
    assert interval("drift", [1.5, None, 1.5]) == Interval(1.5, 1.5, 1.5), "no share"
    assert interval("drift", many) == large
    monkeypatch.setattr("ffedit.evaluator.intervals.SEED", 1)
    assert interval("drift", many) != large


def test_facts_that_all_agree_do_not_make_certainty() -> None:
    ones, noughts = [1.0] * 30, [0.0] * 30
    wilson = 30 / (30 + 1.959964**2)
    assert interval("efficacy", ones) == Interval(1.0, pytest.approx(wilson), 1.0)
    assert interval("efficacy", noughts) == Interval(0.0, 0.0, pytest.approx(1 - wilson))
    some = interval("efficacy", [1.0] * 20 + [0.0] * 10)
    assert (some.low, some.high) == (pytest.approx(0.4878, abs=1e-4), pytest.approx(0.8077, abs=1e-4))
    halves = intervals({"paraphrase": [0.5] * 30, "drift": noughts, "efficacy_magnitude": [0.5] * 30})
    assert halves["paraphrase"].low == pytest.approx(wilson / 2)
    assert halves["drift"].high == 0 and halves["efficacy_magnitude"].high == 0.5, "no shares"
    nothing, all_up = paired("efficacy", ones, ones), paired("efficacy", noughts, ones)
    assert nothing == Interval(0.0, pytest.approx(wilson - 1), pytest.approx(1 - wilson))
    assert all_up == Interval(1.0, pytest.approx(2 * wilson - 1), 1.0)
    one_up = paired("efficacy", noughts, [1.0] + [0.0] * 29)
    assert one_up.low == pytest.approx(wilson - 1) and 0.05 < one_up.high < 0.2
    parts: dict[str, Sequence[float | None]] = dict.fromkeys(("efficacy", "paraphrase", "specificity"), ones)
    score, change = intervals(parts)["score"], changes(parts, parts)["score"]
    assert (score.low, score.high) == (pytest.approx(wilson), 1.0)
    assert (change.low, change.high) == (pytest.approx(wilson - 1), pytest.approx(1 - wilson))
    few = changes(*[{**parts, "specificity": [1.0] * 2 + [None] * 28}] * 2)
    assert few["score"] == few["specificity"] and few["score"].high > 0.6, "no surer than its least sure part"


def test_an_interval_covers_the_truth_about_as_often_as_it_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ffedit.evaluator.intervals.DRAWS", 400)
    draw = np.random.default_rng(0)
    found = [interval("efficacy", draw.binomial(1, 0.7, 60).astype(float).tolist()) for _ in range(150)]
    covered = sum(one.low <= 0.7 <= one.high for one in found)
    assert 0.87 <= covered / 150 <= 0.99


def test_facts_of_one_subject_are_one_sample() -> None:
    """Every fact written twice is no more evidence: no interval shrinks, of any kind."""
    draw = np.random.default_rng(4)
    names = [f"s{i}" for i in range(40)]
    parts = {"efficacy": draw.binomial(1, 0.7, 40), "paraphrase": draw.uniform(0, 1, 40), "specificity": np.ones(40)}
    once = {name: values.tolist() for name, values in {**parts, "drift": draw.normal(0, 1, 40)}.items()}
    twice = {name: values * 2 for name, values in once.items()}
    later = [{name: values[::-1] for name, values in side.items()} for side in (once, twice)]

    def ends(found: Interval) -> tuple[float, ...]:
        return found.mean, found.low, found.high

    for name, values in once.items():
        assert ends(interval(name, values * 2, names * 2)) == pytest.approx(ends(interval(name, values))), name
        pairs = paired(name, values * 2, later[1][name], names * 2), paired(name, values, later[0][name])
        assert ends(pairs[0]) == pytest.approx(ends(pairs[1])), name
    alone = intervals(once), changes(once, later[0])
    together = intervals(twice, subjects=names * 2), changes(twice, later[1], names * 2)
    as_if_apart = intervals(twice), changes(twice, later[1])
    for own, both, wrong in zip(alone, together, as_if_apart, strict=True):
        assert set(both) == set(own) and "score" in own
        assert all(ends(both[name]) == pytest.approx(ends(own[name])) for name in own)
        assert all(wrong[name].high - wrong[name].low < own[name].high - own[name].low for name in own)
    alike = interval("drift", [0.0, 1.0, 0.5], ["a", "a", "a"])
    assert alike.mean == 0.5 and alike.is_point, "one subject has no interval"
    unequal = interval("drift", [1.0, 1.0, 1.0, 0.5], ["a", "a", "a", "b"])
    assert unequal == Interval(0.875, 0.5, 1.0), "drawn whole"


def test_pairs_know_more_than_two_sides() -> None:
    draw = np.random.default_rng(2)
    before = draw.normal(0, 5, 50)
    after = before + 1 + draw.normal(0, 0.1, 50)
    found = paired("drift", before.tolist(), after.tolist())
    assert found.mean == pytest.approx(1, abs=0.1) and found.high - found.low < 0.1
    assert paired("drift", [None, 1.0, 2.0], [1.0, 2.0, 3.0]) == Interval(1.0, 1.0, 1.0)


def test_the_harmonic_score_is_made_anew_in_every_draw(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ffedit.evaluator.intervals.SEED", 5)
    monkeypatch.setattr("ffedit.evaluator.intervals.DRAWS", 300)
    draw = np.random.default_rng(3)
    parts = {name: draw.binomial(1, 0.6, 40).astype(float) for name in ("efficacy", "paraphrase", "specificity")}
    found = intervals({name: values.tolist() for name, values in parts.items()})["score"]
    generator, scores = np.random.default_rng(5), []
    for counts in generator.multinomial(40, np.full(40, 1 / 40), size=300):
        scores.append(harmonic_mean([float(counts @ values) / 40 for values in parts.values()]))
    assert (found.low, found.high) == pytest.approx(tuple(np.percentile(scores, [2.5, 97.5])))
    assert found.mean == pytest.approx(harmonic_mean([float(values.mean()) for values in parts.values()]))
    same = changes(*({name: values.tolist() for name, values in parts.items()} for _ in range(2)))
    assert same["score"].mean == 0 and same["score"] == same["efficacy"] and 0 < same["score"].high < 0.2


def test_scores_go_through_json_and_known_facts_are_told_apart() -> None:
    facts = [Fact("Eiffel tower", "the {} is in", "Rome", "Paris", case_id=i) for i in range(3)]
    before = tuple(
        FactScores(fact, Scores(generation=0.0, knew=k), "x") for fact, k in zip(facts, (1, 0, 1), strict=True)
    )
    after = tuple(
        FactScores(fact, Scores(generation=g), "y", {"portability/Reasoning": g})
        for fact, g in zip(facts, (1.0, 1.0, 0.0), strict=True)
    )
    assert [FactScores.from_dict(one.to_dict()) for one in after] == list(after)
    report = Report(mean_scores(one.scores for one in before), mean_scores(one.scores for one in after), before, after)
    assert report.known[1] is not None and report.known[1].generation == 0.5
    assert report.kinds == ({}, {"portability/Reasoning": pytest.approx(2 / 3)})
    assert report.changes["generation"].mean == pytest.approx(2 / 3) and "knew" in report.intervals_before


def test_every_metric_says_what_it_is() -> None:
    for name, metric in METRICS.items():
        assert metric.name == name and metric.source and metric.direction in ("up", "keep", "zero", ""), name
        assert metric.meaning or name.endswith("_magnitude"), name
        assert set(metric.generates) <= {field.name for field in fields(Questions)}, name
        assert metric.function is not None or name in ("drift", "perplexity"), name
    assert set(NAMES) <= set(METRICS) and Scores(knew=1.0).knew == 1 and Scores().to_dict().keys() == METRICS.keys()
    with pytest.raises(TypeError, match="there is no score 'kenw'; known are efficacy, "):
        Scores(kenw=1.0)
    with pytest.raises(AttributeError, match="there is no score 'kenw'"):
        _ = Scores().kenw


@pytest.fixture
def install(tmp_path: Path) -> Iterator[Callable[..., None]]:
    """Installs a package of one file whose entry points are metrics, for one test."""
    with pytest.MonkeyPatch.context() as patch:

        def install(module: str, code: str, *points: str) -> None:
            (tmp_path / f"{module}.py").write_text(code)
            (about := tmp_path / f"{module}-1.0.dist-info").mkdir()
            (about / "METADATA").write_text(f"Name: {module}\nVersion: 1.0\n")
            (about / "entry_points.txt").write_text("\n".join(["[ffedit.metrics]", *points]))
            patch.syspath_prepend(tmp_path)
            vars(METRICS).pop("_loaded", None)

        yield install
    vars(METRICS).pop("_loaded", None)


def test_a_metric_of_another_package_that_should_stay_is_damaged_where_it_falls(install: Callable[..., None]) -> None:
    code = (
        "from ffedit.evaluator.metrics import metric\n"
        "def falls(q, now, before):\n    return float(now is before)\n"
        "for name, unit, direction in (('steady', 'share', 'keep'), ('steady_magnitude', 'probability', 'keep'),\n"
        "                              ('calm', 'probability', 'keep'), ('size', 'tokens', 'keep'),\n"
        "                              ('rises', 'share', 'up')):\n"
        "    falls.__name__ = name\n"
        "    globals()[name] = metric(unit, direction, 'holds', 'nowhere')(falls)\n"
    )
    names = ["steady", "steady_magnitude", "calm", "size", "rises"]
    install("holding", code, *(f"{name} = holding:{name}" for name in names))
    fact = Fact("Eiffel tower", "the {} is located in", "Paris .", "Rome")  # what the model says
    found = evaluate(zoo.trained("gpt2"), fact, edited=zoo.trained("gpt2"))
    assert (found.before.steady, found.after and found.after.steady) == (1, 0)
    assert list(found.verdict.damage) == ["steady", "calm"], "a magnitude is judged by its rate"
    assert found.verdict.outcome == "took with damage"
    assert "steady fell from 1.00 to 0.00 and calm fell from 1.00 to 0.00" in found.verdict.text
    row = next(line for line in shown(before_after(found)).splitlines() if line.startswith("steady"))
    assert "keep" in row and "−1.00 !" in row, "the headline shows it, too"
    steady = next(row for row in score_rows(evaluated(zoo.trained("gpt2"), found)) if row["name"] == "steady")
    assert steady["harm"] is True


def test_metrics_of_other_packages_are_metrics_like_ours(install: Callable[..., None]) -> None:
    code = (
        "from ffedit.evaluator.metrics import knew, metric\n"
        "plain = lambda q, now, before: 0.5\nCOUNT = 3\n"
        "@metric('share', 'up', 'neighbors said', 'nowhere', generates=['neighbors'])\n"
        "def said(q, now, before):\n    return float(all(now.generations.says(pair.true) for pair in q.neighbors))\n"
    )
    points = ["said = odd:said", "plain = odd:plain", "knew = odd:knew", "count = odd:COUNT", "to_dict = odd:plain"]
    install("odd", code, *points)
    assert list(METRICS)[-2:] == ["said", "plain"] and METRICS["said"].package == "odd"
    assert set(METRICS.broken) == {"knew (odd)", "count (odd)", "to_dict (odd)"}
    assert "there is 'knew' already, of ffedit" in METRICS.broken["knew (odd)"]
    near = Fact("Eiffel tower", "the {} is in", "Rome", "Paris", neighbors=["Nile river stands in"])
    (found,) = Evaluation(zoo.shared("gpt2"), [near]).before
    assert found.scores.said in (0, 1) and found.scores.plain == 0.5
    assert set(intervals({"said": [1.0] * 9, "plain": [0.5] * 9})) == {"said", "plain"}


def test_a_metric_that_gives_no_finite_number_is_named(install: Callable[..., None]) -> None:
    code = (
        "from ffedit.evaluator.metrics import metric\n"
        "@metric('share', 'keep', 'holds', 'nowhere')\n"
        "def vague(q, now, before):\n    return float('nan')\n"
    )
    install("unsure", code, "vague = unsure:vague")
    with pytest.raises(EditError, match=r"the metric 'vague' failed \(.*nan is not finite"):
        evaluate(zoo.shared("gpt2"), Fact("Eiffel tower", "the {} is in", "Rome", "Paris"))
