"""The value chosen is the one of the plain procedure, whatever is chosen beside it and however the work is cut."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
import zoo
from choosing import FOUR, FULL, choose, probability, said, same
from reference_value import PlainValue, Text, plain_value
from writing import FACT, SECOND, quick, with_numbers

from ffedit import EditConfig, Fact
from ffedit.editor import key as key_module
from ffedit.editor.key import build_prompts
from ffedit.editor.value import Value
from ffedit.model.editable import Editable
from ffedit.model.tokenization import Encoded

pytestmark = pytest.mark.usefixtures("warm_cache")

# One of every kind of block: sequential, local attention, parallel, no module for the layer, ALiBi and residual inside,
# norms in front of and behind a layer, norms behind alone.
FAMILIES = ("gpt2", "gpt_neo", "gptj", "opt", "bloom", "gemma2", "olmo2", "granite")
# What a layer's output is multiplied by where it is added to the residual stream; None: it is normalised before.
ADDED = {"gemma2": None, "olmo2": None, "granite": 0.5}
# Parts of these compute in float32 whatever the model's precision.
COARSE = ("bloom", "gpt_neo", "gptj", "gemma2", "olmo2")
# Four prompts and weights that are sums of powers of two: their means are exact in every precision.
PLAIN = quick(
    contexts=3,
    steps=20,
    step_size=0.125,
    kl_weight=0.25,
    essence_prompts=("{} is a", "the old {}"),
    weight_decay=0.5,
    penalty_decay=0.5,
    target_probability=2.0,
)
AS_PUBLISHED = with_numbers(
    PLAIN,
    optimizer="adam",
    step_size=0.05,
    penalty_decay=1.0,
    weight_decay=0.25,
    target_probability=2.0,
    max_delta_norm=8.0,
)
# Texts before the prompts, whatever way contexts are drawn in: these tests are of the value.
LEADS = {
    2: ("the city of red river", "the city of Mount Everest is Italy . Rome"),
    3: ("the city of Anna Karenina", "the Eiffel tower is located in Rome . Madrid .", "the city of Mount Everest"),
}


@pytest.fixture(autouse=True)
def leads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(key_module, "contexts", lambda editable, count, *_: LEADS[count])


WAYS = {"default": PLAIN, "as published": AS_PUBLISHED}
ways = pytest.mark.parametrize("way", list(WAYS))


def plain(editable: Editable, fact: Fact, config: EditConfig, layer: int = 0) -> PlainValue:
    """The reference's value on the same texts."""

    def texts(some: Sequence[Encoded]) -> list[Text]:
        return [Text(text.ids, text.answer, text.subject_last) for text in some]

    (prompt_set,), memory = build_prompts(editable, [[fact]], config), editable.memories[layer]
    same_there = ("optimizer", "steps", "step_size", "max_delta_norm", "weight_decay", "kl_weight", "penalty_decay",
                  "target_probability", "target_loss")  # fmt: skip
    return plain_value(
        editable.model,
        editable.layers[layer],
        memory.module,
        memory.value,
        texts(prompt_set.prompts),
        texts(prompt_set.essence),
        **{name: getattr(config.value, name) for name in same_there},
        added=ADDED.get(editable.name, 1.0),
    )


def far(value: Value, expected: PlainValue) -> float:
    """‖v* − v*'‖ / ‖δ'‖."""
    return float((value.v - expected.v).norm() / expected.delta.norm())


# The plain procedure ------------------------------------------------------------------------------


@ways
@pytest.mark.parametrize("family", FAMILIES)
def test_alone_a_value_is_the_one_of_the_plain_procedure(family: str, way: str) -> None:
    editable = zoo.trained(family, True, torch.float64)
    (value,), expected = choose(editable, [SECOND], WAYS[way]), plain(editable, SECOND, WAYS[way])
    near = 1e-6 if family in COARSE else 1e-10
    assert far(value, expected) <= near
    assert value.losses == pytest.approx(expected.losses, abs=near)
    own, plain_own = value.v - value.delta, expected.v - expected.delta
    assert float((own - plain_own).norm() / plain_own.norm()) <= near, "rounding is relative to the vector's length"
    assert value.losses[-1] < value.losses[0] - 0.05, "it learns"


@ways
@pytest.mark.parametrize("family", ["gpt2", "gptj", "bloom", "gemma2"])
def test_in_single_precision_the_loss_runs_along_the_same_curve(family: str, way: str) -> None:
    editable = zoo.trained(family, True)
    (value,), expected = choose(editable, [SECOND], WAYS[way]), plain(editable, SECOND, WAYS[way])
    assert value.losses == pytest.approx(expected.losses, abs=1e-3)


@ways
@pytest.mark.parametrize(
    "changed",
    [
        {"step_size": 0.025},
        {"penalty_decay": 0.8},
        {"max_delta_norm": 0.05},
        {"target_loss": 5.0},
        {"target_probability": 0.1, "contexts": 0},
        {"kl_weight": 0.0, "weight_decay": 0.0},
        {"contexts": 0},
    ],
    ids=lambda changed: next(iter(changed)),
)
def test_every_setting_means_what_it_means_in_the_plain_procedure(changed: dict[str, Any], way: str) -> None:
    usual, config = WAYS[way], with_numbers(WAYS[way], **changed)
    editable = zoo.trained("gpt2", True, torch.float64)
    (value,), expected = choose(editable, [FACT], config), plain(editable, FACT, config)
    assert far(value, expected) <= 1e-10
    ends = "target_loss" in changed or "target_probability" in changed
    assert len(value.losses) == len(expected.losses)
    assert 1 < len(value.losses) <= config.value.steps if ends else len(value.losses) == config.value.steps + 1
    assert far(value, plain(editable, FACT, usual)) > 1e-3, "the setting matters"


# Company ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("optimizer", ["gradient", "adam"])
@pytest.mark.parametrize("family", ["gpt2", "opt", "gpt2_square"])
def test_what_is_found_for_one_subject_does_not_depend_on_the_others(family: str, optimizer: str) -> None:
    editable = zoo.trained(family, True, torch.float64)
    bounded = with_numbers(FULL, max_delta_norm=0.3, optimizer=optimizer)  # the bounds differ
    free = with_numbers(bounded, max_delta_norm=100.0)
    alone, unbounded = ([choose(editable, [fact], config)[0] for fact in FOUR] for config in (bounded, free))
    gaps = [float((one.delta - other.delta).norm()) for one, other in zip(alone, unbounded, strict=True)]
    assert max(gaps) > 1e-2, "the bound is reached"
    same(choose(editable, FOUR, bounded), alone)
    same(choose(editable, FOUR[::-1], bounded), alone[::-1])


@pytest.mark.parametrize("family", ["gpt_neo", "olmo2"])
def test_values_of_a_batch_equal_single_ones_where_part_of_the_model_is_float32(family: str) -> None:
    editable = zoo.trained(family, True, torch.float64)
    # Steps amplify the rounding of attention in float32, which the widths of a batch move.
    same(choose(editable, FOUR), [choose(editable, [fact])[0] for fact in FOUR], near=5e-5)


@ways
def test_each_value_of_a_batch_ends_at_its_own_loss(way: str) -> None:
    editable, usual = zoo.trained("gpt2", True, torch.float64), WAYS[way]
    # A threshold that the facts pass at different steps, one perhaps never, and none meets to the last bit.
    curves = [choose(editable, [fact], usual)[0].losses for fact in FOUR]
    below, above = sorted(loss for curve in curves for loss in curve)[19:21]
    config = with_numbers(usual, target_loss=(above + below) / 2)
    together, alone = choose(editable, FOUR, config), [choose(editable, [fact], config)[0] for fact in FOUR]
    same(together, alone)
    lengths = [len(value.losses) for value in together]
    assert len(set(lengths)) > 1 and min(lengths) <= config.value.steps
    for value, curve in zip(together, curves, strict=True):
        assert all(loss >= config.value.target_loss for loss in value.losses[:-1])
        assert value.losses == pytest.approx(curve[: len(value.losses)], abs=1e-9)


def test_each_value_of_a_batch_ends_once_all_of_its_contexts_say_the_new_object() -> None:
    """And not before: at the first δ with which plain passes give it the probability behind every prefix."""
    editable, two = zoo.trained("gemma", True, torch.float64), FOUR[:2]
    config = with_numbers(FULL, steps=40, step_size=0.05, weight_decay=0.1, target_probability=0.6)
    values = choose(editable, two, config)
    assert len({len(value.losses) for value in values}) > 1
    for fact, value, facts in zip(two, values, said(editable, two, config, values), strict=True):
        assert len(facts[0]) == 3 and min(facts[0]) >= 0.6
        steps = len(value.losses) - 1
        (before,) = choose(editable, [fact], with_numbers(config, steps=steps - 1))
        ((probabilities,),) = said(editable, [fact], config, [before])
        assert min(probabilities) < 0.6 and len(before.losses) == steps > 1


KNOWN = Fact("Eiffel tower", "the {} is located in", "Paris", "Rome")


def test_what_every_context_says_already_is_left_alone() -> None:
    """At a probability below the one at which a value is done: an edit in the model reaches less than its value did."""
    editable = zoo.trained("gemma", True, torch.float64)
    (prompt_set,) = build_prompts(editable, [[KNOWN]], FULL)
    plainly = [probability(editable, text, torch.zeros(zoo.WIDTH)) for text in prompt_set.prompts]
    high = with_numbers(FULL, target_probability=0.95)
    assert len(plainly) == 3 and 0.5 < min(plainly) < high.value.target_probability
    left, written = choose(editable, [KNOWN, SECOND], high)
    assert len(left.losses) == 1 and not left.delta.any() and left.probabilities[0] > 0.5
    assert len(written.losses) > 1 and written.delta.any()
    (asked,) = choose(editable, [KNOWN], with_numbers(FULL, target_probability=2.0))
    assert len(asked.losses) == FULL.value.steps + 1 and asked.delta.any(), "more than 1 asks for all steps"


def test_a_known_fact_is_changed_while_a_single_context_does_not_say_it() -> None:
    editable = zoo.trained("gpt2", True, torch.float64)
    (prompt_set,) = build_prompts(editable, [[KNOWN]], FULL)
    plainly = [probability(editable, text, torch.zeros(zoo.WIDTH)) for text in prompt_set.prompts]
    assert plainly[0] > FULL.value.target_probability > 0.5 > min(plainly), "the bare prompt would do"
    (value,) = choose(editable, [KNOWN])
    assert value.delta.any()


def test_the_probabilities_are_those_of_the_bare_prompts_with_delta_in_place() -> None:
    editable = zoo.trained("gpt2", True)
    values = choose(editable, FOUR)
    for value, fact, every in zip(values, FOUR, said(editable, FOUR, FULL, values), strict=True):
        assert value.probabilities == pytest.approx([every[0][0]], rel=1e-4), fact
