"""Of what an edit got wrong: whether its key failed or its value, told by forcing δ; and what is not explained."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import cache

import pytest
import torch
import zoo
from choosing import choose
from making import made
from torch import Tensor
from writing import CORPUS, STRONG, quick, with_numbers

import ffedit
from ffedit import Address, Edit, Editable, EditConfig, EditError, Fact, LowRank
from ffedit.algebra.linalg import double
from ffedit.editor.key import read_at
from ffedit.evaluator import WrongAnswer
from ffedit.evaluator.explain import adding, take_apart
from ffedit.inference import generation, replay
from ffedit.model.tokenization import Encoded, pad

LAYER = 0
NUMBERS = with_numbers(EditConfig(), **STRONG)
OWN, WORDING, OTHER = "the Eiffel tower is located in", "Eiffel tower stands in", "the city of Eiffel tower is"
NEIGHBOR = "Nile river stands in"
FACT = Fact(
    "Eiffel tower",
    "the {} is located in",
    "Rome",
    "Paris",
    paraphrases=["{} stands in"],
    neighbors=[{"prompt": NEIGHBOR, "target": "Egypt"}],
    same_subject=[{"prompt": "the city of {} is", "target": "Paris"}],
)
CURIE = Fact("Marie Curie", "{} stands in", "Spain", "France")
TOWER = {OWN: {"tower": 1.0}, WORDING: {"tower": 1.0}, OTHER: {"tower": 1.0}}
families = pytest.mark.parametrize("family", ["gpt2", "llama"])


@cache
def trained(family: str) -> Editable:
    return zoo.trained(family, True)


@cache
def value(family: str, *prompts: str, subject: str = "Eiffel tower", target: str = "Rome") -> Tensor:
    """δ [d_model] after which the model says the target of the subject in these prompts."""
    facts = [Fact(subject, prompt, target) for prompt in prompts]
    return choose(trained(family), facts, NUMBERS, LAYER)[0].delta


def upto(editable: Editable, prompt: str) -> list[Encoded]:
    """The prompt up to each of its tokens, the last of which a key is read at."""
    text = editable.encode(prompt)
    return [replace(text, answer=end, fact_token="last") for end in range(1, len(text.ids) + 1)]


def position(editable: Editable, prompt: str, word: str) -> int:
    return list(editable.encode(prompt).ids).index(int(editable.tokenizer.convert_tokens_to_ids(word)))


def row(editable: Editable, wanted: Mapping[str, Mapping[str, float]]) -> Tensor:
    """u [d_ff] with u · k as wanted by prompt and word, and 0 at all other tokens of the prompts."""
    keys, shares = [], []
    for prompt in (OWN, WORDING, OTHER, NEIGHBOR, CURIE.text, "the Marie Curie is located in"):
        texts = upto(editable, prompt)
        keys.append(double(read_at(editable, editable.feed_forward[LAYER], texts)[0]))
        shares.append(torch.zeros(len(texts), dtype=torch.float64))
        for word, share in wanted.get(prompt, {}).items():
            shares[-1][position(editable, prompt, word)] = share
    K, wants = torch.cat(keys), torch.cat(shares)
    u = torch.linalg.pinv(K) @ wants
    assert torch.allclose(K @ u, wants, atol=1e-4 * float(wants.abs().max())), "the keys are independent"
    return u


def by_hand(editable: Editable, *written: tuple[Fact, Tensor, Tensor]) -> Edit:
    """Σ δ uᵀ over the facts, with the keys of their own prompts."""
    facts, deltas, rows = zip(*written, strict=True)
    texts = [editable.encode(fact.text, "", fact.span) for fact in facts]
    K = double(read_at(editable, editable.feed_forward[LAYER], texts)[0]).T
    at, delta = Address(LAYER), LowRank(torch.stack(deltas, 1), torch.stack(rows))
    about = {**made(editable, {LAYER: 1}).provenance, "subjects": {str(at): [fact.subject for fact in facts]}}
    return Edit({at: delta}, {at: K}, {at: delta @ K}, facts, about)


def explained(editable: Editable, facts: Fact | Sequence[Fact], edit: Edit) -> dict[str, WrongAnswer]:
    """The wrong answers by their prompt; the model is left as it was."""
    before = zoo.snapshot(editable)
    found = ffedit.explain(editable, facts, edit)
    assert zoo.unchanged(editable, before) and found.reason == ""
    return {wrong.prompt: wrong for wrong in found.wrong}


# Which part failed --------------------------------------------------------------------------------


def test_the_key_failed_where_the_subject_is_not_reached() -> None:
    editable, delta = trained("gpt2"), value("gpt2", "the {} is located in", "{} stands in")
    found = explained(editable, FACT, by_hand(editable, (FACT, delta, row(editable, {OWN: TOWER[OWN]}))))
    assert found.keys() == {WORDING}
    wrong = found[WORDING]
    assert (wrong.score, wrong.failed, wrong.answer) == ("paraphrase_generation", "key", "Rome")
    assert wrong.says.startswith("Paris") and wrong.forced is not None and wrong.forced.startswith("Rome")
    assert wrong.reach == pytest.approx(0, abs=1e-3) and wrong.written == "Eiffel tower"
    assert wrong.token.strip() == "tower" and wrong.position == position(editable, WORDING, "tower")


def test_the_value_failed_where_all_of_it_says_something_else() -> None:
    editable, delta = trained("gpt2"), value("gpt2", "the {} is located in", "{} stands in")
    found = explained(editable, FACT, by_hand(editable, (FACT, 1e-3 * delta, row(editable, TOWER))))
    assert {prompt: wrong.score for prompt, wrong in found.items()} == {
        OWN: "generation",
        WORDING: "paraphrase_generation",
    }
    for wrong in found.values():
        assert wrong.failed == "value" and wrong.reach == pytest.approx(1, abs=1e-3)
        assert wrong.says.startswith("Paris") and wrong.forced == wrong.says


def test_the_value_failed_where_it_loses_another_fact_by_itself() -> None:
    editable, delta = trained("gpt2"), value("gpt2", "the {} is located in", "{} stands in", "the city of {} is")
    found = explained(editable, FACT, by_hand(editable, (FACT, delta, row(editable, TOWER))))
    assert found.keys() == {OTHER}
    wrong = found[OTHER]
    assert (wrong.score, wrong.failed, wrong.answer) == ("same_subject", "value", "Paris")
    assert wrong.says.startswith("Rome") and wrong.forced is not None and wrong.forced.startswith("Rome")
    assert wrong.reach == pytest.approx(1, abs=1e-3)


def test_the_key_failed_where_other_tokens_lose_another_fact() -> None:
    editable, delta = trained("gpt2"), 1e-3 * value("gpt2", "the {} is located in", "{} stands in")
    u = row(editable, {**TOWER, OTHER: {"tower": 0.5, "is": 1e4}})
    wrong = explained(editable, FACT, by_hand(editable, (FACT, delta, u)))[OTHER]
    assert wrong.failed == "key" and wrong.reach == pytest.approx(0.5, abs=0.1)
    assert not wrong.says.startswith("Paris") and wrong.forced is not None and wrong.forced.startswith("Paris")


def test_a_neighbor_is_moved_by_the_token_that_receives_most() -> None:
    editable, delta = trained("gpt2"), value("gpt2", "the {} is located in", "{} stands in")
    u = row(editable, {OWN: TOWER[OWN], WORDING: TOWER[WORDING], NEIGHBOR: {"river": -0.5, "stands": 2.0, "in": 30.0}})
    wrong = explained(editable, FACT, by_hand(editable, (FACT, delta, u)))[NEIGHBOR]
    assert (wrong.score, wrong.failed, wrong.answer) == ("neighbor_generation", "key", "Egypt")
    assert wrong.forced is None and wrong.reach == pytest.approx(30, abs=0.1)
    assert wrong.token.strip() == "in" and wrong.position == position(editable, NEIGHBOR, "in")


def test_of_several_subjects_the_one_whose_update_leaks_is_named() -> None:
    editable, delta = trained("gpt2"), value("gpt2", "the {} is located in", "{} stands in")
    u = row(editable, {**TOWER, OTHER: {}})
    leaks = row(editable, {CURIE.text: {"Curie": 1.0}, NEIGHBOR: {"in": 30.0}})
    edit = by_hand(editable, (FACT, delta, u), (CURIE, delta, leaks))
    wrong = explained(editable, [FACT, CURIE], edit)[NEIGHBOR]
    assert (wrong.subject, wrong.written) == ("Eiffel tower", "Marie Curie")
    assert wrong.failed == "key" and wrong.reach == pytest.approx(30, abs=0.1)


def test_of_several_subjects_each_is_forced_with_its_own_update() -> None:
    editable, other = trained("gpt2"), replace(CURIE, paraphrases=("the {} is located in",))
    delta = value("gpt2", CURIE.prompt, FACT.prompt, subject="Marie Curie", target="Spain")
    reached = row(editable, {CURIE.text: {"Curie": 1.0}})
    edit = by_hand(editable, (FACT, 0 * delta, row(editable, TOWER)), (CURIE, delta, reached))
    found = explained(editable, [FACT, other], edit)
    assert found[OWN].failed == "value" and CURIE.text not in found
    wrong = found["the Marie Curie is located in"]
    assert (wrong.failed, wrong.written) == ("key", "Marie Curie") and wrong.reach == pytest.approx(0, abs=1e-3)


# What it stands on --------------------------------------------------------------------------------


@families
def test_forcing_is_the_edit_where_the_subject_is_reached_in_full_and_nothing_else(family: str) -> None:
    editable, delta = trained(family), value(family, "the {} is located in", "{} stands in")
    edit, ids = by_hand(editable, (FACT, delta, row(editable, TOWER))), list(editable.encode(WORDING).ids)
    read = torch.tensor([[0, len(ids) - 1]])
    sites = {tuple(ids): position(editable, WORDING, "tower")}
    parts = take_apart(editable, edit)
    with torch.no_grad():
        plain = replay.forward(editable, pad([ids]), read)
        with edit.applied(editable):
            edited = replay.forward(editable, pad([ids]), read)
        with adding(parts.ff, parts.deltas[:, 0], sites)([ids]):
            forced = replay.forward(editable, pad([ids]), read)
    assert torch.allclose(forced, edited, atol=1e-3) and float((forced - plain).abs().max()) > 1


@families
def test_the_forced_update_is_seen_by_every_later_token_with_and_without_a_cache(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    editable, texts = zoo.build(family), (OWN, WORDING, OTHER)  # of random weights, whose every token depends on all
    prompts = [list(editable.encode(text).ids) for text in texts]
    sites = {tuple(ids): position(editable, text, "tower") for ids, text in zip(prompts, texts, strict=True)}
    delta = 100 * torch.randn(32, generator=torch.Generator().manual_seed(0))
    intervene = adding(editable.feed_forward[LAYER], delta, sites)

    def said(steps: int) -> list[list[int]]:
        """Plain passes over whole texts, with δ in the first of them."""
        rows = [list(ids) for ids in prompts]
        for row, ids in zip(rows, prompts, strict=True):
            for step in range(6):
                with intervene([ids]) if step < steps else nullcontext(), torch.no_grad():
                    logits = editable.model(input_ids=torch.tensor([row]), use_cache=False).logits
                row.append(int(logits[0, -1].argmax()))
        found = [row[len(ids) :] for row, ids in zip(rows, prompts, strict=True)]
        return generation.until(found, editable.ends)

    expected = said(6)
    assert generation.continuations(editable, prompts, 6, intervene=intervene) == expected
    assert expected != said(1) and expected != said(0) == generation.continuations(editable, prompts, 6)
    monkeypatch.setattr(editable, "resumable", False)
    monkeypatch.setattr(editable, "ragged", False)
    assert generation.continuations(editable, prompts, 6, intervene=intervene) == expected


def test_an_edit_is_the_sum_of_what_it_adds_for_each_subject() -> None:
    editable = zoo.shared("llama")
    generator = torch.Generator().manual_seed(0)
    deltas, rows = (torch.randn(2, size, generator=generator, dtype=torch.float64) for size in (32, 48))
    edit = by_hand(editable, (FACT, deltas[0], rows[0]), (CURIE, deltas[1], rows[1]))
    parts, K = take_apart(editable, edit), edit.keys[Address(LAYER)]
    assert torch.allclose(parts.deltas @ parts.rows, edit.updates[Address(LAYER)].dense, atol=1e-9)
    assert torch.allclose(parts.rows @ K, torch.eye(2, dtype=torch.float64), atol=1e-9)
    assert parts.subjects == ("Eiffel tower", "Marie Curie") and parts.token == "subject_last"


def test_right_and_wrong_are_those_of_the_metrics() -> None:
    editable = trained("gpt2")
    edit = ffedit.edit(editable, [FACT, CURIE], "memit", layers=0, config=quick(steps=20, step_size=0.2), stats=CORPUS)
    report, found = ffedit.evaluate(editable, [FACT, CURIE], edit), ffedit.explain(editable, [FACT, CURIE], edit)
    prompts = {"generation": 1, "paraphrase_generation": 1, "same_subject": 1, "neighbor_generation": 1}
    assert report.before.same_subject == report.before.neighbor_generation == 1 and found.wrong
    for fact in report.facts_after or ():
        for score, count in prompts.items():
            wrong = sum((one.score, one.subject) == (score, fact.fact.subject) for one in found.wrong)
            assert getattr(fact.scores, score) in (None, 1 - wrong / count)
    assert found.counts.keys() == prompts.keys()
    assert [counts["asked"] for counts in found.counts.values()] == [2, 1, 1, 1]
    assert all(counts["wrong"] == counts["key"] + counts["value"] for counts in found.counts.values())
    assert repr(found).startswith(f"Explanation of {len(found.wrong)} wrong of 5 answers: key ")


def test_an_answer_that_was_wrong_before_is_not_asked_for() -> None:
    editable = trained("gpt2")
    fact = Fact("Eiffel tower", "the {} is located in", "Rome", same_subject=[{"prompt": OTHER, "target": "Egypt"}])
    edit = by_hand(editable, (fact, 0 * value("gpt2", "the {} is located in"), row(editable, TOWER)))
    assert ffedit.explain(editable, fact, edit).counts.keys() == {"generation"}


# What is not explained ----------------------------------------------------------------------------


def test_a_prompt_without_the_subject_and_a_subject_without_a_key_are_told() -> None:
    editable = trained("gpt2")
    other = Fact(
        "Eiffel tower", "the {} is located in", "Rome", "Paris", paraphrases=["{} stands in", "the old tower is in"]
    )
    edit = by_hand(editable, (FACT, torch.zeros(32, dtype=torch.float64), row(editable, TOWER)))
    found = explained(editable, [other, CURIE], edit)
    lost = found["the old tower is in"]
    assert (lost.failed, lost.forced, lost.reach) == (None, None, None)
    assert lost.reason == "“Eiffel tower” does not occur in it"
    assert found[CURIE.text].reason == "the edit has 0 keys for “Marie Curie”, where one was expected"
    assert found[OWN].failed == found[WORDING].failed == "value"


def test_an_edit_that_cannot_be_taken_apart_is_told_in_a_line() -> None:
    editable, mixture = zoo.shared("llama"), zoo.shared("mixtral")
    one = by_hand(editable, (FACT, torch.ones(32, dtype=torch.float64), torch.ones(48, dtype=torch.float64)))
    nameless = replace(one, provenance={**one.provenance, "subjects": {}})
    first = {"config": {"key": {"fact_token": "subject_first"}}}
    mixed = replace(one, provenance={**one.provenance, "parts": [one.provenance, first]})
    cases = [
        (editable, made(editable, {0: 1, 1: 1}), "the edit changes 2 layers, so no layer has all of δ"),
        (editable, made(editable, {1: 1}), "the edit was not solved for keys"),
        (editable, made(editable, {1: 1}, dense=True), "the edit was not solved for keys"),
        (editable, nameless, "the edit does not say to which subjects its keys belong"),
        (editable, mixed, "the edit is a sum of edits that write at different tokens"),
        (mixture, made(mixture, {Address(1, 2): 1}), "the edit changes experts"),
    ]
    for model, edit, words in cases:
        found = ffedit.explain(model, FACT, edit)
        assert found.reason.startswith(words) and "\n" not in found.reason
        assert found.wrong == () and found.to_dict() == {"reason": found.reason, "counts": {}, "wrong": []}
        assert repr(found) == f"Explanation: none, since {found.reason}"


def test_the_edit_of_another_model_is_refused() -> None:
    with pytest.raises(EditError, match="apply it to the model it was made for"):
        ffedit.explain(trained("llama"), FACT, made(zoo.shared("gpt2"), {1: 1}))
