"""Scores equal those of an independent plain implementation: loops, one prompt and one whole pass at a time."""

from __future__ import annotations

from dataclasses import replace
from importlib import import_module

import pytest
import torch
import zoo
from changing import changed
from reference_scores import PlainScores

from ffedit import Fact
from ffedit.evaluator import Evaluation, responses
from ffedit.inference import contexts

FACTS = [
    Fact(
        "Eiffel tower",
        "the {} is located in",
        target="the old Rome",
        previous="Paris",
        paraphrases=["{} stands in", "the city of {} is "],
        neighbors=[
            {"prompt": "the city of Leo Tolstoy is", "target": "Germany"},
            {"prompt": "Marie Curie stands in", "target": "France"},
            {"prompt": "the old tower is located in", "target": "the new Rome"},
            {"prompt": "Leo Tolstoy stands in", "target": "Germany"},
            {"prompt": "Leo Tolstoyan stands in", "target": "Germany"},  # is not about Leo Tolstoy
        ],
        same_subject=[{"prompt": "the city of {} is", "target": "Paris ."}, {"prompt": "{} and", "target": "Italy"}],
    ),
    Fact(
        "Leo Tolstoy",
        "{} stands in",
        "Italy",
        "Germany",
        neighbors=["Nile river stands in"],
        locality=[
            {"prompt": "red river stands in", "target": "Spain"},
            {"prompt": "the city of red river is", "target": "the old Spain ."},
            "the new tower stands in",
            {"prompt": "Nile river stands in", "target": "Egypt"},
        ],
    ),
    # The first token is shared; the target is the beginning of the old object.
    Fact("Marie Curie", "{} stands in", "the old Spain", "the old France", ["the {} is located in"]),
    Fact("Nile river", "the {} is located in", "Egypt", "Egypt .", ["{} stands in"], ["red river stands in"]),
]


@pytest.mark.parametrize(
    ("family", "bos", "side", "rows"),
    [
        *(("gpt2", False, "left", 64), ("gpt2", False, "right", 1), ("llama", False, "left", 1)),
        *(("gpt_neo", True, "right", 64), ("bloom", True, "left", 64)),
    ],
)
def test_scores_equal_the_plain_implementation(
    family: str, bos: bool, side: str, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(contexts, "WIDTH", 24)  # answers of one prompt fall into several rows
    editable = zoo.trained(family, bos)
    editable.tokenizer.padding_side = side
    plain = PlainScores(editable.model, editable.tokenizer, FACTS)
    monkeypatch.setattr(import_module("ffedit.evaluator.evaluate"), "TOKENS", 1 if rows == 1 else rows * 16)
    evaluation = Evaluation(editable, FACTS)
    before = plain.all()
    with changed(editable):
        expected = [*before, *plain.all()]
        after = evaluation.scores()
    found = [one.scores.to_dict() for one in (*evaluation.before, *after)]
    assert expected[:4] != expected[4:]
    for numbers, values in zip(found, expected, strict=True):
        for name, value in values.items():
            assert numbers[name] == (None if value is None else pytest.approx(value, abs=1e-5)), name
    assert [one["locality_token_accuracy"] is None for one in found[:4]] == [True, False, True, True]


def test_a_share_of_the_facts_has_the_same_scores() -> None:
    editable = zoo.trained("gpt2", dtype=torch.float64)
    facts = [replace(fact, generation=("the old tower", "the old tower")) for fact in FACTS]
    whole = Evaluation(editable, facts, full=True)
    shares = [Evaluation(editable, facts, full=True, only=range(rank, len(FACTS), 2)) for rank in range(2)]
    with changed(editable):
        expected = whole.scores()
        found = [share.scores() for share in shares]
    for i, one in enumerate(expected):
        other = found[i % 2][i // 2]
        assert other.fact == one.fact and other.says == one.says
        for name, value in one.scores.to_dict().items():
            assert getattr(other.scores, name) == (None if value is None else pytest.approx(value, abs=1e-9)), name


def test_another_model_is_asked_as_the_edited_one_would_be() -> None:
    editable, other = zoo.trained("llama"), zoo.trained("llama")
    evaluation = Evaluation(editable, FACTS)
    with changed(editable):
        expected = evaluation.scores()
    with changed(other):
        assert evaluation.scores(other) == expected != evaluation.before


def test_each_token_is_run_once(monkeypatch: pytest.MonkeyPatch) -> None:
    editable = zoo.shared("gpt2")
    texts = [q for one in Evaluation(editable, FACTS)._questions.values() for q in one.texts]
    ran: list[int] = []
    handle = editable.model.register_forward_pre_hook(
        lambda _, args, given: ran.append(given["input_ids"].numel()), with_kwargs=True
    )
    try:
        whole = responses.ask(editable, texts, budget=1)
        alone = sum(ran)
        ran.clear()
        packed = responses.ask(editable, texts, budget=1000)
    finally:
        handle.remove()
    assert sum(ran) < alone < sum(len(text.ids) - 1 for text in set(texts)) / 1.5
    for text, answer in whole.items():
        assert packed[text].argmax == answer.argmax
        assert packed[text].log_probs == pytest.approx(answer.log_probs, abs=1e-4)
