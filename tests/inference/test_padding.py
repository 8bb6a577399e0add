"""Prompts of very different lengths go through together, padded, and each gets the numbers that it has alone.

Answers are scored on rows padded on the right; what a model says by itself goes on from rows padded on the left. The
models are random and sharp, so that a token too many, a wrong position or padding that can be seen moves every number.
"""

from __future__ import annotations

from collections.abc import Sequence
from inspect import signature
from typing import Any

import pytest
import torch
import zoo
from torch import Tensor

from ffedit.evaluator import responses
from ffedit.inference import contexts, generation
from ffedit.model.editable import Editable
from ffedit.model.tokenization import Encoded

LENGTHS = (1, 2, 31, 7, 19, 3, 12)
COUNT = 6
# Positions that are learned, learned with an offset, rotated, and only seen as distances; a window beside them.
FAMILIES = ["gpt2", "opt", "llama", "gpt_neox", "bloom", "mpt", "gpt_neo", "gemma3"]
families = pytest.mark.parametrize("family", FAMILIES)


def prompts() -> list[list[int]]:
    """Token ids; none is that of padding."""
    draw = torch.Generator().manual_seed(1)
    return [torch.randint(3, zoo.VOCAB, (length,), generator=draw).tolist() for length in LENGTHS]


def answered() -> list[Encoded]:
    """The same, of which the last third is the answer."""
    return [Encoded("", tuple(ids), max(1, 2 * len(ids) // 3)) for ids in prompts()]


@torch.no_grad()
def alone(editable: Editable, ids: Sequence[int]) -> Tensor:
    """Log-probabilities of the next token after each of `ids`, [tokens, vocabulary]: one row, whole, unpadded."""
    logits: Tensor = editable.model(input_ids=torch.tensor([list(ids)]), use_cache=False).logits[0]
    return logits.log_softmax(-1)


def distance(editable: Editable, texts: Sequence[Encoded]) -> float:
    """How far the answers' log-probabilities, all asked together, are from those of single rows; nats."""
    found, worst = responses.ask(editable, texts, budget=10_000), 0.0
    for text in texts:
        single = alone(editable, text.ids)
        for i, value in enumerate(found[text].log_probs, start=text.answer):
            worst = max(worst, abs(value - float(single[i - 1, text.ids[i]])))
    return worst


def strayed(editable: Editable, monkeypatch: pytest.MonkeyPatch) -> float:
    """How far the distributions that free generation draws from, of all prompts together, are from single rows; nats.

    The tokens that are said are those that were generated: so each step is held against a whole pass of its own.
    """
    steps: list[Tensor] = []

    def choose(logits: Tensor, step: int) -> Tensor:
        steps.append(logits.log_softmax(-1))
        return logits.argmax(-1, keepdim=True)

    monkeypatch.setattr(generation, "greedy", choose)
    monkeypatch.setattr(Editable, "ends", frozenset())  # every row goes on, so that each step has all of them
    order = sorted(range(len(LENGTHS)), key=lambda i: -LENGTHS[i])  # the longest first, as rows go into a batch
    said, worst = generation.continuations(editable, prompts(), COUNT), 0.0
    assert len(steps) == COUNT and all(len(one) == len(LENGTHS) for one in steps), "one batch of all"
    for row, i in enumerate(order):
        single = alone(editable, [*prompts()[i], *said[i]])
        for step, together in enumerate(steps):
            worst = max(worst, float((together[row] - single[LENGTHS[i] + step - 1]).abs().max()))
    return worst


@families
def test_answers_scored_together_have_the_numbers_of_single_rows(family: str) -> None:
    assert distance(zoo.shared(family), answered()) < 1e-3


@families
def test_what_is_said_together_is_what_is_said_alone(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert strayed(zoo.shared(family), monkeypatch) < 1e-3


@families
def test_padding_that_is_seen_or_moves_a_position_would_be_noticed(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The two tests above fail where padding is on the wrong side, is not masked, or shifts positions."""
    editable = zoo.shared(family)

    def left(rows: Sequence[Sequence[int]]) -> Tensor:
        longest = max(map(len, rows))
        return torch.tensor([[*([0] * (longest - len(row))), *row] for row in rows])

    with monkeypatch.context() as broken:
        broken.setattr(contexts, "pad", left)
        broken.setattr(editable, "packed", 0)
        assert distance(editable, answered()) > 1e-2
    trees = contexts.longest_packed(editable, max(LENGTHS)) >= 7
    run, places = editable.run, signature(editable.model.forward).parameters

    def seen(**given: Any) -> Any:
        return run(**{name: value for name, value in given.items() if name != "attention_mask"})

    def moved(**given: Any) -> Any:
        if "position_ids" in given:
            given["position_ids"] = given["position_ids"] // 2
        return run(**given)

    for wrong in [seen, *([moved] if "position_ids" in places else [])]:
        with monkeypatch.context() as broken:
            broken.setattr(editable, "run", wrong)
            assert strayed(editable, broken) > 1e-2, wrong.__name__
            # Without a mask, transformers sets texts apart where positions begin anew: rightly, as none share a token.
            assert wrong is seen or not trees or distance(editable, answered()) > 1e-2, "several texts in a row"
