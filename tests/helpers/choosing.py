"""What the tests of values share: facts, short optimisations, values chosen together, and plain probabilities."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from writing import FACT, SECOND

from ffedit import EditConfig, Fact, PromptConfig, ValueConfig
from ffedit.editor.key import build_prompts, read_keys
from ffedit.editor.value import Value, choose_values
from ffedit.facts.fact import by_subject
from ffedit.model.editable import Editable

THIRD = Fact("Nile river", "the {} is located in", "Berlin", "Egypt")
FOURTH = Fact("old tower", "{} stands in", "France", "Rome")
FOUR = (FACT, SECOND, THIRD, FOURTH)
# All that a value may depend on: contexts, several essence prompts, falling penalties.
FULL = EditConfig(
    prompts=PromptConfig(contexts=2, essence_prompts=("{} is a", "the old {}")),
    value=ValueConfig(steps=8, step_size=0.15),
)


def choose(
    editable: Editable,
    facts: Sequence[Fact],
    config: EditConfig = FULL,
    layer: int = 0,
    progress: Callable[[str, int, int], None] = lambda *_: None,
    **how: Any,
) -> list[Value]:
    """The values of all subjects of `facts`, found together."""
    place, prompt_sets = editable.feed_forward[layer], build_prompts(editable, by_subject(facts), config)
    keys = read_keys(editable, place, prompt_sets)
    return choose_values(editable, place, prompt_sets, keys, config.value, progress, **how)


def same(found: Sequence[Value], expected: Sequence[Value], near: float = 1e-9) -> None:
    """Whether values agree: δ relative to its length, losses in nats."""
    for one, other in zip(found, expected, strict=True):
        assert float((one.delta - other.delta).norm()) <= near * float(other.delta.norm()) > 0
        assert one.losses == pytest.approx(other.losses, abs=max(near, 1e-9), rel=near)
        assert one.probabilities == pytest.approx(other.probabilities, abs=1e-6)


def said(
    editable: Editable, facts: Sequence[Fact], config: EditConfig, values: Sequence[Value]
) -> list[list[list[float]]]:
    """Probability of each new object in each prompt with δ in place, in plain forward passes."""
    found = []
    for (fact,), value in zip(by_subject(facts), values, strict=True):
        (prompt_set,) = build_prompts(editable, [[fact]], config)
        found.append([[probability(editable, text, value.delta) for text in prompt_set.prompts]])
    return found


def probability(editable: Editable, text: Any, delta: torch.Tensor, layer: int = 0) -> float:
    def add(_: Any, __: Any, output: torch.Tensor) -> torch.Tensor:
        moved = output.reshape(1, len(text.ids), -1).clone()
        moved[0, text.subject_last] += delta.to(moved)
        return moved.reshape(output.shape)

    handle = editable.memories[layer].module.register_forward_hook(add)
    try:
        with torch.no_grad():
            log_probs = editable.model(input_ids=torch.tensor([text.ids])).logits[0].log_softmax(-1)
    finally:
        handle.remove()
    return float(sum(log_probs[i - 1, text.ids[i]] for i in range(text.answer, len(text.ids))).exp())
