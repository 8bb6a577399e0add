"""Every guardrail can be broken, says its number when it is, and is silent on a good small edit."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import zoo
from shell import FACT as ROW, disk, shell
from writing import CORPUS, FACT, SECOND, collect_moments, quick

from ffedit import Corpus, Edit, Fact, LowRank, evaluate
from ffedit.editor.protect import beginning_keys
from ffedit.editor.write import write as write_facts
from ffedit.evaluator import FactScores, Report, Scores
from ffedit.model.editable import Editable
from ffedit.model.memory import Address
from ffedit.safety.guardrails import Breach, Limits, breaches
from ffedit.safety.require import parse_requirements, unmet

pytestmark = pytest.mark.usefixtures("warm_cache")

AT = Address(1)
LOOSE = Limits(
    believed=1.0, unknown=1.0, alike=1.0, norm_ratio=1e9, division=0.0, keys=0.0, drift=1e9, perplexity=1e9,
    rounding=1e9, convergence=1e9,
)  # fmt: skip


def report(**after: float) -> Report:
    """Measured: one fact, known and not yet changed, and nothing else moved but what is given."""
    one = FactScores(FACT, Scores(efficacy=0.0, generation=0.0), "Paris .")
    return Report(Scores(perplexity=10.0), Scores(**{"drift": 0.0, "perplexity": 10.0, **after}), (one,), (one,))


def write(editable: Editable, *facts: Fact, **numbers: Any) -> Edit:
    return write_facts(editable, facts or (FACT,), "emmet", [1], quick(**numbers), CORPUS)


def scaled(edit: Edit, factor: float) -> Edit:
    delta = edit.updates[AT]
    assert isinstance(delta, LowRank)
    return dataclasses.replace(edit, updates={AT: LowRank(factor * delta.left, delta.right)})


def broken(editable: Editable, edit: Edit, measured: Report, **limits: float) -> dict[str, Breach]:
    """What is broken where only `limits` count."""
    found = breaches(editable, edit, measured, dataclasses.replace(LOOSE, **limits))
    assert all("\n" not in breach.words for breach in found)
    return {breach.limit: breach for breach in found}


def test_a_good_small_edit_breaks_nothing() -> None:
    editable = zoo.trained("gpt2", True)
    # So much text is enough.
    corpus = Corpus(tokens=9600)
    small = write_facts(editable, [FACT, SECOND], "emmet", [1], quick(max_delta_norm=0.1), corpus)
    small.apply_(editable)
    small.undo_(editable)
    assert breaches(editable, small, report(drift=0.01)) == []
    assert breaches(editable, small, dataclasses.replace(report(), after=None, facts_after=None)) == []


def test_facts_believed_or_unknown_before_break_a_limit() -> None:
    editable = zoo.trained("gpt2", True)
    edit = write(editable, max_delta_norm=0.1)
    believed = FactScores(FACT, Scores(efficacy=1.0), "Paris")
    ignorant = FactScores(SECOND, Scores(efficacy=0.0, knew=0.0), "Berlin .")
    measured = dataclasses.replace(report(), facts_before=(*report().facts_before, believed, believed, ignorant))
    found = broken(editable, edit, measured, believed=0.0, unknown=0.0)
    assert {name: breach.value for name, breach in found.items()} == {"believed": 0.5, "unknown": 0.25}
    assert (
        "believed new objects before the edit: 50% of" in found["believed"].words and "25% of" in found["unknown"].words
    )
    assert broken(editable, edit, measured, believed=0.5, unknown=0.25) == {}


def test_a_change_that_is_large_beside_the_weights_breaks_its_limit() -> None:
    editable = zoo.trained("gpt2", True)
    edit = write(editable, FACT, SECOND, max_delta_norm=0.1)
    ratio = edit.provenance["norm_ratio"] / 2**0.5
    for factor, limit, breaks in ((1.0, 1.01, False), (1.0, 0.99, True), (3.0, 1.01, True), (3.0, 3.01, False)):
        found = broken(editable, scaled(edit, factor), report(), norm_ratio=limit * ratio)
        assert set(found) == ({"norm_ratio"} if breaks else set())
        assert all(breach.value == pytest.approx(factor * ratio, rel=1e-6) for breach in found.values())
    assert broken(editable, scaled(edit, float("nan")), report()).keys() >= {"norm_ratio"}


def test_what_is_lost_in_rounding() -> None:
    editable, full = zoo.trained("gpt2", True, torch.bfloat16), zoo.trained("gpt2", True)
    edit = scaled(write(editable, max_delta_norm=0.01), 0.1)
    memory = editable.memories[1]
    W, delta = memory.value.double(), edit.updates[AT].dense
    written = (W + delta).bfloat16().double() - W
    lost = float((written - delta).norm() / delta.norm())
    assert lost > 0.1
    found = broken(editable, edit, report(), rounding=0.1)
    assert (
        found["rounding"].value == pytest.approx(lost)
        and "bfloat16 rounds part of the change" in found["rounding"].words
    )
    assert broken(full, edit, report(), rounding=0.1) == {}
    assert broken(editable, scaled(edit, 0.0), report(), rounding=0.1) == {}, "of nothing, nothing is lost"


def test_a_key_that_is_nearly_one_of_ordinary_text_breaks_its_limit() -> None:
    editable = zoo.trained("gpt2", True)
    edit = write(editable, FACT, SECOND, context_weight=0.0)
    C, d_ff = collect_moments(editable, editable.memories[1], CORPUS).C, editable.memories[1].d_ff
    # Of each key, what neither the other nor the kept one holds: one over the diagonal of the inverse of JᵀC⁻¹J.
    J = torch.cat([beginning_keys(editable, [editable.feed_forward[1]])[1], edit.keys[AT]], 1)
    gram = J.T @ torch.linalg.solve(C, J)
    smallest = float((1 / torch.linalg.inv(gram).diagonal())[-2:].min()) / d_ff
    assert broken(editable, edit, report(), division=0.99 * smallest) == {}
    found = broken(editable, edit, report(), division=1.01 * smallest)
    assert found["division"].value == pytest.approx(smallest, rel=1e-6) and "division factor" in found["division"].words


def test_statistics_of_too_little_text_break_their_limit() -> None:
    editable = zoo.trained("gpt2", True)
    d_ff = editable.memories[1].d_ff
    limit = Limits(keys=1.0)
    for tokens, breaks in ((d_ff + 3, False), (d_ff + 2, True)):  # each of three rows begins with a token that is out
        edit = write_facts(editable, [FACT], "emmet", [1], quick(max_delta_norm=0.1), Corpus(tokens=tokens))
        sum_ = collect_moments(editable, editable.memories[1], Corpus(tokens=tokens)).sum
        singular = int(torch.linalg.matrix_rank(sum_, rtol=1e-6, hermitian=True)) < d_ff
        assert singular or not breaks, "what the limit speaks of"
        found = breaches(editable, edit, report(), limit)
        assert [breach.limit for breach in found] == (["keys"] if breaks else [])
        for breach in found:
            assert breach.value == (d_ff - 1) / d_ff and f"{d_ff - 1} keys, 0.99 of d_ff" in breach.words
            assert "`ffedit stats --tokens 132 --out DIR`" in breach.words


def test_a_text_for_c_that_is_too_short_breaks_its_limit() -> None:
    editable = zoo.trained("gpt2", True)
    edit = write(editable, max_delta_norm=0.1)
    apart = collect_moments(editable, editable.memories[1], CORPUS).convergence
    assert apart is not None and edit.provenance["statistics"]["1"]["convergence"] == apart
    assert broken(editable, edit, report(), convergence=1.01 * apart) == {}
    found = broken(editable, edit, report(), convergence=0.99 * apart)
    assert (
        found["convergence"].value == apart
        and f"would disturb other text {apart:.0%} less" in found["convergence"].words
    )
    assert f"`ffedit stats --tokens {2 * CORPUS.tokens} --out DIR`" in found["convergence"].words
    bare = {at: {"tokens": one["tokens"]} for at, one in edit.provenance["statistics"].items()}
    assert broken(editable, edit.noted(statistics=bare), report(), convergence=0.0) == {}, "it does not say"


def test_an_expert_is_judged_by_the_keys_that_came_to_it() -> None:
    editable = zoo.trained("mixtral", True)
    edit = write(editable, max_delta_norm=0.1)
    moments = {at: collect_moments(editable, editable.memories[at], CORPUS) for at in edit.updates}
    shares = {at: one.keys / editable.memories[at].d_ff for at, one in moments.items()}
    assert all(one.keys < one.count for one in moments.values())
    for limit in (0.99 * min(shares.values()), 1.01 * max(shares.values())):
        found = breaches(editable, edit, report(), dataclasses.replace(LOOSE, keys=limit))
        assert [breach.value for breach in found] == [share for share in shares.values() if share < limit]


def test_a_division_factor_is_that_of_all_written_experts() -> None:
    """Its mean over ordinary text is the number of all their keys."""
    editable = zoo.trained("mixtral", True)
    edit = write(editable, FACT, SECOND, max_delta_norm=0.1)
    assert len(edit.updates) > 1
    d_ff = sum(editable.memories[at].d_ff for at in edit.updates)
    factor = min(edit.provenance["division"][str(next(iter(edit.updates)))]) / d_ff
    assert broken(editable, edit, report(), division=1.01 * factor)["division"].value == pytest.approx(factor)


def test_the_subjects_that_are_sinks_are_counted() -> None:
    editable = zoo.trained("gpt2", True)
    edit, solved = write(editable, max_delta_norm=0.1), [{"subject": name, "sinks": 1} for name in ("Rome", "Paris")]
    words = broken(editable, edit.noted(solved=solved), report())["sinks"].words
    assert words.startswith("the edited token of 'Rome' and 1 more subject is an attention sink")


def test_subjects_whose_keys_are_alike_within_the_edit() -> None:
    editable = zoo.trained("gpt2", True)
    edit = write(editable, FACT, SECOND, Fact("old tower", "the {} is located in", "Rome", "Paris"))
    unit = torch.nn.functional.normalize(edit.keys[AT], dim=0)
    cosine = (unit.T @ unit - 2 * torch.eye(3).double()).max()
    found = broken(editable, edit, report(), alike=0.99 * float(cosine))
    assert (
        found["alike"].value == pytest.approx(float(cosine))
        and "'Eiffel tower' and 'old tower'" in found["alike"].words
    )
    assert broken(editable, edit, report(), alike=1.01 * float(cosine)) == {}


def test_subjects_whose_keys_are_alike_to_those_of_an_edit_in_the_model() -> None:
    editable = zoo.trained("gpt2", True)
    first = write(editable, SECOND, FACT)
    first.apply_(editable)
    other = write(editable, Fact("old tower", "the {} is located in", "Rome", "Paris"))
    cosine = float(torch.cosine_similarity(first.keys[AT][:, 1], other.keys[AT][:, 0], dim=0))
    found = broken(editable, other, report(), alike=0.99 * cosine)
    assert found["alike"].value == pytest.approx(cosine) and "'old tower' and 'Eiffel tower'" in found["alike"].words
    # The same subject written anew is the same key: no sign of anything.
    again = write(editable, dataclasses.replace(FACT, target="Berlin", prompt="the city of {} is"))
    near = broken(editable, again, report(), alike=0.9)
    assert "alike" not in near or "'Eiffel tower' and 'Eiffel tower'" not in near["alike"].words
    first.undo_(editable)
    assert broken(editable, other, report(), alike=0.99 * cosine) == {}


def test_a_fine_tuned_edit_has_no_keys_to_be_alike() -> None:
    editable = zoo.trained("gpt2", True)
    edit = write_facts(editable, [FACT, SECOND], "ft-l", [1], quick(ft_steps=1))
    assert broken(editable, edit, report(), alike=0.0, division=1.0, keys=1e9) == {}


def test_generic_text_that_drifts_or_gets_unlikely() -> None:
    editable = zoo.trained("gpt2", True)
    edit, limits = write(editable, max_delta_norm=0.1), Limits(convergence=1.0)
    found = breaches(editable, edit, report(drift=0.25, perplexity=12.0), limits)
    assert {breach.limit: breach.value for breach in found} == {"drift": 0.25, "perplexity": pytest.approx(1.2)}
    assert "0.25 nats" in found[0].words and "factor 1.20" in found[1].words
    assert breaches(editable, edit, report(drift=0.1, perplexity=11.0), limits) == []
    assert len(breaches(editable, edit, report(drift=float("nan"), perplexity=float("nan")), limits)) == 2


def test_the_numbers_of_a_real_report_are_used() -> None:
    editable = zoo.trained("gpt2", True)
    edit = scaled(write(editable), 300.0)
    measured = evaluate(editable, [FACT], edit)
    assert measured.after is not None and measured.after.drift is not None and measured.after.perplexity is not None
    found = {breach.limit: breach.value for breach in breaches(editable, edit, measured)}
    assert found["drift"] == measured.after.drift > 0.1
    assert found["perplexity"] == pytest.approx(measured.after.perplexity / (measured.before.perplexity or 0.0))


# --require ----------------------------------------------------------------------------------------

# Means of rounded numbers.
RATES = {"efficacy": 0.7999999999999999, "specificity": 0.9499996, "paraphrase": 0.8000000000000002}


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("efficacy>=0.8,paraphrase<=0.8", ""),
        ("efficacy<0.8", "efficacy<0.8 is not met: it is 0.8"),
        ("paraphrase>0.8", "paraphrase>0.8 is not met: it is 0.8"),
        ("specificity>=0.95", "specificity>=0.95 is not met: it is 0.9499996"),
        ("locality>0", "locality>0 cannot be measured: no prompts for it are given, or all are left out; no edit was"),
    ],
)
def test_scores_are_compared_up_to_rounding(text: str, told: str) -> None:
    error = unmet(parse_requirements(text), Scores(**RATES))
    assert (error is None) == (not told) and told in str(error or "")


# The command --------------------------------------------------------------------------------------


def test_apply_warns_and_with_strict_refuses(
    empty: Path, model: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "ffedit.cli.work.solving.preset",
        lambda *_: quick(max_delta_norm=20.0, step_size=2.0, steps=1, weight_decay=0.0),
    )
    (empty / "fact.json").write_text(json.dumps(ROW))
    before = disk(empty)
    words = ["apply", "fact.json", "-m", model, "--corpus", model.parent / "corpus.txt", "--layer", "1", "--out", "e"]
    strict, done = shell(capsys, *words, "--strict"), shell(capsys, *words)
    assert strict.code == done.code == 3 and disk(empty) == before
    assert strict.err.startswith("error: --strict: ") and strict.err.endswith("; no edit was saved\n")
    assert strict.err.count("\n") == 1 and "‖Δ‖/‖W‖" in strict.err
    assert "Guardrail: the change of layer 1 is so large that other text will suffer.\n" in done.out
    forced = shell(capsys, *words, "--verbose", "--force")
    assert forced.code == 0, "so wild an edit does not take"
    assert "(limit 3); try another layer" in forced.out.replace("\n", " ")
    assert any("‖Δ‖/‖W‖" in words for words in Edit.load("e").provenance["warnings"])


def test_strict_lets_a_good_edit_pass(
    empty: Path, model: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ffedit.cli.work.solving.preset", lambda *_: quick(steps=30, step_size=0.1))
    (empty / "fact.json").write_text(json.dumps(ROW))
    words = ["-m", model, "--corpus", model.parent / "corpus.txt", "--layer", "0", "--out", "e", "--strict"]
    done = shell(capsys, "apply", "fact.json", *words)
    assert (done.code, done.err) == (0, "") and "Guardrail" not in done.out
    assert Edit.load("e").provenance["warnings"] == []
