"""What else `evaluate` measures: what follows, what moved, sampled text, edited checkpoints, and input that is bad."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import zoo
from changing import changed
from making import made
from pages import said
from shell import FACT as ROW, PROBES, save_model, shell
from shown import shown, words

from ffedit import EditError, Fact, FactError, ModelError, Scores, evaluate
from ffedit.cli.work.result import evaluated
from ffedit.display.html.result import result_page
from ffedit.display.terminal.scores import all_scores, before_after
from ffedit.evaluator import Evaluation, FactScores, GenericText, Report, drift, mean_scores
from ffedit.evaluator.drift import ReferenceDistributions
from ffedit.facts.formats import parse
from ffedit.loading.verify import find_and_verify
from ffedit.model.editable import Editable

KNOWN = Fact(
    "Eiffel tower",
    "the {} is located in",
    "Rome",
    "Paris",
    paraphrases=["{} stands in"],
    neighbors=[{"prompt": "Nile river stands in", "target": "Egypt"}],
    portability=[
        {"prompt": "the city of {} is", "target": "Paris", "kind": "Reasoning"},
        {"prompt": "Marie Curie stands in", "target": "Rome", "kind": "Logical"},
    ],
    locality=[{"prompt": "Leo Tolstoy stands in", "target": "Germany", "kind": "Other"}, "Anna Karenina stands in"],
    generation=["the {} is", "{} stands in"],
    references=["the Eiffel tower stands in Rome", "Rome is a city"],
)


def test_everything_is_measured_where_it_is_there() -> None:
    editable = zoo.trained("gpt2")
    report = evaluate(editable, [KNOWN, Fact("Nile river", "{} stands in", "Rome", "Egypt")], full=True)
    first, second = (one.scores for one in report.facts_before)
    assert first.portability == 0.5 and report.facts_before[0].kinds == {
        "portability/Reasoning": 1.0,
        "portability/Logical": 0.0,
        "portability_token_accuracy/Reasoning": 1.0,
        "portability_token_accuracy/Logical": 0.0,
        "locality/Other": 1.0,
    }
    assert first.locality == first.locality_argmax == 1 and first.divergence is None, "its neighbor is edited, too"
    assert first.entropy is not None and 0 < first.consistency <= 1 and first.knew == 1.0  # type: ignore[operator]
    assert second.knew == 1.0 and second.entropy is second.consistency is second.portability is None
    alone = Evaluation(editable, [KNOWN], full=True)
    assert alone.before[0].scores.neighbor_with_edit is not None and alone.before[0].scores.divergence == 0
    assert alone.before[0].scores.entropy == first.entropy, "its text does not depend on the facts beside it"
    assert Evaluation(editable, [KNOWN]).before[0].scores.entropy is None


def test_where_all_other_facts_follow_from_the_edit_same_subject_is_not_measured() -> None:
    """What follows is asked by portability; a score without prompts is no 0, in no table and in no sentence."""
    follows = [{"prompt": "the city of {} is", "target": "Rome"}]
    near = [{"prompt": "Nile river stands in", "target": "Egypt"}]
    fact = Fact("Eiffel tower", "the {} is located in", "Paris", "Rome", ["{} stands in"], near, portability=follows)
    editable = zoo.trained("gpt2")
    with changed(editable):
        report = evaluate(editable, [fact], edited=zoo.trained("gpt2"))
    assert report.after is not None and report.before.same_subject is report.after.same_subject is None
    assert report.after.portability is not None and report.after.specificity is not None
    assert "same_subject" not in report.intervals_after and "same_subject" not in report.verdict.damage
    record = json.loads(json.dumps(evaluated(editable, report)))
    assert record["before"]["same_subject"] is record["after"]["same_subject"] is None
    assert record["facts"][0]["after"]["same_subject"] is None
    for table in (before_after(report), all_scores(report)):
        assert "not measured: same_subject (give same_subject prompts)" in words(table)
        assert not any(line.startswith("same_subject") for line in shown(table).splitlines())
    assert "same_subject not measured keep" in said(result_page(record))
    calm = replace(report, after=Scores(**{**report.after.to_dict(), "drift": 0.0, "specificity": 1.0}))
    assert calm.verdict.text.endswith("; not measured, since no prompt was given or left: same_subject.")


def test_a_fact_whose_objects_were_never_compared_is_not_said_to_be_likelier() -> None:
    scores = [Scores(efficacy=efficacy, generation=0) for efficacy in (None, 0, 1)]
    some = tuple(FactScores(KNOWN, score, "Paris") for score in scores)
    told = Report(mean_scores(scores), mean_scores(scores), some, some).verdict.text
    assert told == (
        "THE EDIT DID NOT TAKE: for 1 of 3 facts the new object is not more likely than the old, and for 1 of 3 it is "
        "more likely, but the model generates another answer, and for 1 of 3 the model generates another answer."
    )


def test_the_published_form_of_knowedit_is_scored_by_kind() -> None:
    """What names the subject and what does not, with an answer or without: all of one kind count as its locality."""
    relation, others = "Relation_Specificity", ["Marie Curie stands in", "Leo Tolstoy stands in", "red river stands in"]
    record = {
        "subject": "Eiffel tower",
        "prompt": "the Eiffel tower is located in",
        "target_new": "Rome",
        "ground_truth": "Paris",
        "portability": {"Reasoning": [{"prompt": "Nile river stands in", "ground_truth": [["Egypt Paris"]]}]},
        "locality": {
            relation: [
                {"prompt": p, "ground_truth": [[a] if a else []]}
                for p, a in zip(others, ("Rome", "Germany", ""), strict=True)
            ]
            + [{"prompt": "the Eiffel tower and", "ground_truth": [["piano"]]}],
            "Forgetfulness": [{"prompt": "the city of Eiffel tower is", "ground_truth": [["Italy"]]}],
        },
    }
    (fact,) = parse(record).facts
    assert len(fact.same_subject) == len(fact.neighbors) == 2 and len(fact.locality) == 1
    editable, edited = zoo.trained("gpt2"), zoo.trained("gpt2")
    value = edited.memories[1].value
    value.add_(0.4 * torch.randn(value.shape, generator=torch.Generator().manual_seed(3)))

    def says(one: Editable, prompt: str) -> int:
        with torch.no_grad():
            return int(one.model(one.tokenizer(prompt, return_tensors="pt")["input_ids"]).logits[0, -1].argmax())

    report = evaluate(editable, [fact], edited=edited)
    before, after = report.kinds
    assert before[f"locality/{relation}"] == before["locality/Forgetfulness"] == 1.0, "whatever the given answers"
    asked = [*others, "the Eiffel tower and"]
    held = [says(editable, prompt) == says(edited, prompt) for prompt in asked]
    assert after[f"locality/{relation}"] == sum(held) / 4 and 0 < sum(held) < 4
    city = "the city of Eiffel tower is"
    assert after["locality/Forgetfulness"] == (says(editable, city) == says(edited, city))
    assert (before["portability/Reasoning"], before["portability_token_accuracy/Reasoning"]) == (0.0, 0.5)
    told = shown(all_scores(report))
    assert told.index("locality/") < told.index(f"  {relation}") < told.index("portability/\n  Reasoning")


def test_a_sample_of_neighbors_is_kept_where_all_would_be_too_many(monkeypatch: pytest.MonkeyPatch) -> None:
    contexts = [(i,) for i in range(100)]
    monkeypatch.setattr(drift, "NEIGHBOR_BYTES", 4000)
    assert len(ReferenceDistributions(contexts, 10, 100).contexts) == 100
    monkeypatch.setattr(drift, "NEIGHBOR_BYTES", 400)
    some = ReferenceDistributions(contexts, 10, 100)
    assert 4 <= len(some.contexts) <= 16
    shares = [ReferenceDistributions(contexts[rank::2], 10, 100).contexts for rank in range(2)]
    assert some.contexts == shares[0] | shares[1], "two processes sample what one does"
    kept = sorted(some.contexts)
    log_probs = torch.randn(len(kept), 10).log_softmax(-1)
    with pytest.raises(KeyError):  # an edited model's distribution is never taken for the unedited one's
        some.compare(kept, log_probs)
    some.keep(kept, log_probs)
    assert some.compare(kept, log_probs) == [0.0] * len(kept)


def test_where_both_objects_are_one_there_is_nothing_to_compare() -> None:
    """The model says "Paris" already, and no old object is named; and a neighbor is where the subject is to be."""
    known = Fact("Eiffel tower", "the {} is located in", "Paris", paraphrases=["{} stands in"])
    near = Fact(
        "Nile river", "{} stands in", "Rome", "Egypt", neighbors=[{"prompt": "old tower is in", "target": "Rome"}]
    )
    report = evaluate(zoo.trained("gpt2"), [known, near])
    first, second = (one.scores for one in report.facts_before)
    assert first.efficacy is first.paraphrase is first.efficacy_magnitude is second.specificity is None
    assert first.generation == 1 and second.efficacy == 0
    assert "already gives 1 of 2 new objects" in report.verdict.text


def test_an_unrelated_question_may_be_asked_for_another_reason_by_another_fact() -> None:
    """Where it is also a fact of some other subject, a token more of its answer is known: it is no part of locality."""
    asked = {"prompt": "Leo Tolstoy stands in", "target": "Germany"}
    some = [
        Fact("Eiffel tower", "the {} is located in", "Rome", "Paris", locality=[asked]),
        Fact("Leo Tolstoy", "the {} is located in", "Rome", "Spain", same_subject=[asked]),
    ]
    found = Evaluation(zoo.trained("gpt2"), some)
    assert [one.scores.locality_argmax for one in found.scores(only=[0])] == [1.0]


@pytest.mark.parametrize(("start", "ids"), [("", []), ("<s>", [0]), ("<s> </s>", [0, 1])])
@pytest.mark.parametrize("sampled", [True, False])
def test_generic_text_begins_as_texts_do_and_its_beginning_is_no_text(
    start: str, ids: list[int], sampled: bool, tmp_path: Path
) -> None:
    editable, other = (find_and_verify(zoo.model("gemma3", seed=seed), zoo.begun(start), "g") for seed in (0, 1))
    words = "the Eiffel tower is located in Paris . Marie Curie stands in France . "
    (tmp_path / "text.txt").write_text(words * 8)
    generic = GenericText(editable, None if sampled else tmp_path / "text.txt")
    rows = torch.tensor(generic.rows)
    assert rows[:, : len(ids)].tolist() == [ids] * len(rows)
    if not sampled:
        told = editable.tokenizer(words * 8, add_special_tokens=False)["input_ids"]
        assert generic.rows[0][len(ids) :] == told[: rows.shape[1] - len(ids)]
    with torch.no_grad():
        logs = [one.model(input_ids=rows).logits.double().log_softmax(-1) for one in (editable, other)]
        bare = editable.model(input_ids=rows[:, len(ids) :]).logits.double().log_softmax(-1)
    first = max(1, len(ids))  # the first token that something stands before, and that is text
    expected = [math.exp(-float(log[:, first - 1 : -1].gather(-1, rows[:, first:, None]).mean())) for log in logs]
    kl = (logs[0].exp() * (logs[0] - logs[1])).sum(-1)[:, len(ids) :]
    assert generic.perplexity == pytest.approx(expected[0], rel=1e-5)
    assert generic.measure(other) == pytest.approx((float(kl.mean()), expected[1]), rel=1e-4)
    assert kl.mean() > 0.1
    without = math.exp(-float(bare[:, :-1].gather(-1, rows[:, len(ids) + 1 :, None]).mean()))
    assert (abs(without / expected[0] - 1) > 1e-3) == bool(ids), "a model that begins with BOS reads otherwise without"


def test_a_file_that_holds_no_text_is_refused_by_its_name(tmp_path: Path) -> None:
    for name, content in (("no.txt", None), ("empty.txt", b""), ("bytes.txt", b"\xff\xfe\xff")):
        if content is not None:
            (tmp_path / name).write_bytes(content)
        with pytest.raises(EditError, match=name):
            GenericText(zoo.shared("gpt2"), tmp_path / name)


def test_numbers_that_are_not_finite_are_an_error_that_names_the_model() -> None:
    editable = zoo.trained("gpt2")
    evaluation, generic = Evaluation(editable, [KNOWN]), GenericText(editable)
    editable.memories[1].value.fill_(float("nan"))
    for measure in (evaluation.scores, generic.measure):
        with pytest.raises(ModelError, match=r"gpt2: .*not finite \(NaN\)") as caught:
            measure()
        assert "\n" not in str(caught.value)


def test_a_checkpoint_with_another_tokenizer_is_refused() -> None:
    base, other = zoo.trained("gpt2"), zoo.trained("gpt2", True)
    renamed = find_and_verify(other.model, zoo.words(extra=("Atlantis",)), "renamed")
    for wrong, complaint in ((other, "another way"), (renamed, "other tokens: ")):
        with pytest.raises(EditError, match=complaint):
            evaluate(base, [KNOWN], edited=wrong)
    assert evaluate(base, [KNOWN], edited=zoo.trained("gpt2")).after is not None


def test_any_script_is_scored_and_what_is_too_long_is_refused() -> None:
    editable = find_and_verify(zoo.model("gpt2", vocab_size=420), zoo.bytes_bpe(), "bytes")
    facts = [
        Fact("東京", "{}は", "日本", "中国"),
        Fact("روما", "{} في", "مصر", "إيطاليا"),
        Fact("🗼", "the {} is in ", "🇫🇷", "🇮🇹"),
        Fact("Rome", "{} is in  ", "Italy", "Italy and Spain"),
    ]
    report = evaluate(editable, facts)
    for one in report.facts_before:
        assert one.scores.efficacy in (0, 1) and one.scores.paraphrase is None and one.scores.specificity is None
    with pytest.raises(FactError, match="the model reads at most 64") as caught:
        evaluate(editable, [Fact("Rome", "x" * 10_000 + " {} is in", "Italy", "Spain")])
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 200


def test_the_command_shows_everything_with_intervals(
    model: Path, empty: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    second = {**ROW, "subject": "old tower", "previous": "Rome", "target": "Berlin"}
    (empty / "facts.json").write_text(json.dumps([{**ROW, **PROBES}, second]))
    (empty / "text.txt").write_text("the Eiffel tower is located in Paris . " * 9)
    save_model(zoo.build("gpt2", True), empty / "edited")
    asked = ["evaluate", "facts.json", "-m", model, "--edited", "edited", "--text", "text.txt"]
    done = shell(capsys, *asked, "--json", "r.json")
    assert done.code == 0 and "teacher_forced_gap" in done.out and "THE EDIT DID NOT TAKE" in done.out
    found = json.loads((empty / "r.json").read_text())
    assert set(found["intervals"]["change"]["efficacy"]) == {"mean", "low", "high"}
    assert found["known"]["facts"] == 2 and found["after"]["perplexity"] > found["before"]["perplexity"]
    made(zoo.build("gpt2", True), {1: 1}).save(empty / "e")
    assert shell(capsys, *asked, "--edit", "e").code == 2
