"""What is no answer is taken for none, and what is not asked is counted."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import pytest
import zoo
from learning import learned
from speaking import speaking
from torch import Tensor, nn

import ffedit
from ffedit import Fact
from ffedit.evaluator import Evaluation, left_out
from ffedit.evaluator.evaluate import evaluate
from ffedit.facts.formats import parse
from ffedit.inference import generation
from ffedit.model.editable import Editable
from ffedit.model.tokenization import Encoded

FACT = Fact(
    "Eiffel tower",
    "the {} is located in",
    "Rome",
    paraphrases=["{} stands in"],
    neighbors=["Nile river stands in", {"prompt": "Marie Curie stands in", "target": "France"}],
    same_subject=["{} is a", {"prompt": "the city of {} is", "target": "Paris"}],
    locality=["Mount Everest stands in"],
)


@contextmanager
def saying(editable: Editable, token: int) -> Iterator[None]:
    """The model says one token first, whatever it is asked."""

    def push(module: nn.Module, args: object, logits: Tensor) -> Tensor:
        logits = logits.clone()
        logits[..., token] += 1000
        return logits

    handle = editable.unembedding.register_forward_hook(push)
    try:
        yield
    finally:
        handle.remove()


@pytest.mark.parametrize("said", ["</s>", " ", "\n"])
def test_the_end_and_blanks_are_no_answer(said: str) -> None:
    editable = speaking("gpt2")
    tokens = {editable.tokenizer.decode([i]): i for i in range(len(editable.tokenizer))}
    token = int(editable.tokenizer.eos_token_id) if said == "</s>" else tokens[said]
    prompt = editable.encode("Paris is in")
    with saying(editable, token):
        assert generation.own_answers(editable, [prompt]) == [None]
        instead = generation.with_own_answers(editable, [prompt])[0]
        word = editable.tokenizer.decode(instead.target_ids)
        assert instead.ids[: instead.answer] == prompt.ids and word.strip() and token != instead.target_ids[0]
    (own,) = generation.own_answers(editable, [prompt])
    assert own is not None and own == generation.with_own_answers(editable, [prompt])[0]


def test_where_the_model_ends_the_likeliest_word_is_traced_and_not_known() -> None:
    editable = zoo.trained("gpt2")
    with saying(editable, int(editable.tokenizer.eos_token_id)):
        trace = ffedit.locate(editable, FACT, samples=2, layers=[1])
    assert trace.answer.strip() == "Paris" and not trace.known
    assert ffedit.locate(editable, FACT, samples=2, layers=[1]).known


def test_an_end_of_text_is_no_answer_to_compare_with() -> None:
    editable = zoo.trained("gpt2")
    with saying(editable, int(editable.tokenizer.eos_token_id)):
        (found,) = Evaluation(editable, [FACT]).before
    scores = found.scores
    assert scores.efficacy is scores.paraphrase is scores.locality is scores.knew is None
    assert scores.specificity is not None and scores.same_subject is not None, "where the object is named"
    names = ("efficacy", "paraphrase", "specificity", "same_subject", "locality")
    assert found.left_out == {f"{name}/unsaid": 1 for name in names}
    told = [str(one) for one in left_out([found])]
    assert told[2] == (
        "specificity: 1 neighbor of 1 fact left out: no object is named, and the model says none before the edit"
    )
    (usual,) = Evaluation(editable, [FACT]).before
    assert usual.left_out == {} and usual.scores.efficacy is not None


def test_a_neighbor_without_an_object_is_left_out_though_the_model_answers_it_elsewhere(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    real = generation.own_answers

    def own_answers(editable: Editable, prompts: Sequence[Encoded]) -> list[Encoded | None]:
        """The model says nothing after the fact's prompt."""
        answers = zip(prompts, real(editable, prompts), strict=True)
        return [None if prompt.text == FACT.text else answer for prompt, answer in answers]

    monkeypatch.setattr(generation, "own_answers", own_answers)
    fact = replace(FACT, neighbors=FACT.neighbors[:1], locality=("Nile river stands in",))
    (found,) = Evaluation(zoo.trained("gpt2"), [fact], full=True).before
    assert found.left_out["specificity/unsaid"] == 1 and found.scores.specificity is None


def test_prompts_that_the_same_edit_changes_are_counted() -> None:
    first = replace(FACT, previous="Paris", locality=({"prompt": "Nile river stands in"},))
    first = Fact.from_dict({**first.to_dict(), "locality": ["Nile river stands in"]})
    other = Fact("Nile river", "{} stands in", "Madrid", "Egypt")
    third = Fact("Eiffel tower", "{} is a", "Spain", "Italy")
    report = evaluate(zoo.trained("gpt2"), [first, other, third])
    assert report.facts_before[0].left_out == {"specificity/edited": 1, "same_subject/edited": 1, "locality/edited": 1}
    assert [(one.score, one.count, one.what) for one in report.left_out] == [
        ("specificity", 1, "neighbor of 1 fact"),
        ("same_subject", 1, "same-subject prompt of 1 fact"),
        ("locality", 1, "unrelated question of 1 fact"),
    ]


def test_a_question_that_needs_several_edits_is_asked_once_when_all_are_made() -> None:
    rewrites = [
        {"prompt": "the {} is located in", "subject": "Eiffel tower", "target_new": {"str": "Rome"}},
        {"prompt": "{} stands in", "subject": "Nile river", "target_new": {"str": "Madrid"}},
    ]
    prompt_sets = ["Marie Curie stands in", "Mount Everest stands in", "Leo Tolstoy stands in"]
    facts = parse({"requested_rewrite": rewrites, "questions": prompt_sets, "new_answer": "France"}).facts
    editable = zoo.trained("gpt2")
    first, last = Evaluation(editable, facts).before
    assert first.scores.portability is None and last.scores.portability == 1 == last.kinds["portability/multi-hop"]
    assert last.left_out.get("portability/alone") is None
    (alone,) = Evaluation(editable, facts[1:]).before
    assert alone.scores.portability is None and alone.left_out["portability/alone"] == 3
    assert [Fact.from_dict(fact.to_dict()) for fact in facts] == list(facts)


def test_of_a_character_that_the_last_token_cuts_nothing_is_left() -> None:
    editable = replace(zoo.shared("gpt2"), tokenizer=zoo.bytes_bpe())
    ids = editable.tokenizer.encode("東京", add_special_tokens=False)
    assert len(ids) > 3 and generation.words(editable, ids) == "東京"
    assert generation.words(editable, ids[:-1]) == "東"


@pytest.mark.parametrize(("behind", "said"), [(",000 men", 0), (".5 men", 0), (", in all", 1), (" men", 1)])
def test_a_number_is_said_whole(behind: str, said: int) -> None:
    """Whether the model says 10 or 10,000 is decided by the second token behind the 10."""
    tokenizer = zoo.bytes_bpe()
    editable = learned("gpt2", tokenizer, [tokenizer(f"the city of old tower is 10{behind}")["input_ids"]])
    neighbor = {"prompt": "the city of old tower is", "target": "10"}
    (found,) = Evaluation(editable, [Fact("Eiffel tower", "the {} is located in", "Rome", neighbors=[neighbor])]).before
    assert found.scores.neighbor_generation == said
