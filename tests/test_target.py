"""The value chosen is the one of the plain procedure, whatever is chosen beside it and however the work is cut."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import zoo
from choosing import FOUR, FULL, choose, said, same
from writing import FACT, SECOND

import ffedit
from ffedit import EditConfig, Fact
from ffedit.anatomy import Editable
from ffedit.editor import word
from ffedit.editor.objective import Objective

sys.path.append(str(Path(__file__).parents[1] / "evaluations" / "benchmarks"))

from reference_value import PlainValue, Text, plain_value

# One of every kind of block: sequential, local attention, parallel, no module for the layer, ALiBi and residual inside,
# norms in front of and behind a layer, norms behind alone.
FAMILIES = ("gpt2", "gpt_neo", "gptj", "opt", "bloom", "gemma2", "olmo2")
# Parts of these compute in float32 whatever the model's precision.
COARSE = ("bloom", "gpt_neo", "gptj", "gemma2", "olmo2")
# Four prompts and weights that are sums of powers of two: their means are exact in every precision.
AS_PUBLISHED = EditConfig(
    contexts=3,
    phrasings=0,
    swap=False,
    attempts=1,
    steps=20,
    step_size=0.3,
    essence=0.25,
    essence_prompts=("{} is a", "the old {}"),
    weight_decay=0.5,
    clamp=8.0,
)


def plain(editable: Editable, fact: Fact, config: EditConfig, layer: int = 0) -> PlainValue:
    """The reference's value on the same texts."""

    def texts(some: Sequence[Any]) -> list[Text]:
        return [Text(p.text.ids, p.text.answer, p.text.subject_last) for p in some]

    (wording,), memory = word(editable, [[fact]], config), editable.memories[layer]
    return plain_value(
        editable.model,
        memory.module,
        memory.value,
        texts(wording.prompts),
        texts(wording.essence),
        steps=config.steps,
        step_size=config.step_size,
        relative=not config.absolute,
        cosine=config.anneal,
        clamp=config.clamp,
        weight_decay=config.weight_decay,
        kl_weight=config.essence,
        stop=config.stop,
    )


# As published -------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
def test_alone_a_value_is_the_one_of_the_plain_procedure(family: str) -> None:
    editable = zoo.trained(family, True, torch.float64)
    (value,), expected = choose(editable, [SECOND], AS_PUBLISHED), plain(editable, SECOND, AS_PUBLISHED)
    near = 1e-6 if family in COARSE else 1e-10
    assert float((value.v - expected.v).norm()) <= near * float(expected.delta.norm())
    assert value.losses == pytest.approx(expected.losses, abs=near)
    torch.testing.assert_close(value.v - value.delta, expected.v - expected.delta, rtol=1e-9, atol=1e-12)
    assert value.losses[-1] < value.losses[0] - 0.05, "it learns"


@pytest.mark.parametrize("family", ["gpt2", "gptj", "bloom", "gemma2"])
def test_in_single_precision_the_loss_runs_along_the_same_curve(family: str) -> None:
    editable = zoo.trained(family, True)
    (value,), expected = choose(editable, [SECOND], AS_PUBLISHED), plain(editable, SECOND, AS_PUBLISHED)
    assert value.losses == pytest.approx(expected.losses, abs=1e-3)


@pytest.mark.parametrize(
    "changed",
    [
        {"absolute": True, "step_size": 0.05},
        {"anneal": False},
        {"clamp": 0.3},
        {"stop": 5.0},
        {"essence": 0.0, "weight_decay": 0.0},
        {"contexts": 0},
    ],
    ids=lambda changed: next(iter(changed)),
)
def test_every_setting_means_what_it_means_there(changed: dict[str, Any]) -> None:
    editable, config = zoo.trained("gpt2", True, torch.float64), dataclasses.replace(AS_PUBLISHED, **changed)
    (value,), expected = choose(editable, [FACT], config), plain(editable, FACT, config)
    assert float((value.v - expected.v).norm()) <= 1e-10 * float(expected.delta.norm())
    assert len(value.losses) == len(expected.losses) and (config.stop == 0 or 1 < len(value.losses) < config.steps)
    usual = plain(editable, FACT, AS_PUBLISHED)
    assert float((usual.v - expected.v).norm()) > 1e-3 * float(expected.delta.norm()), "the setting matters"


@pytest.mark.parametrize("family", ["gpt2", "opt", "gpt2_square"])
@pytest.mark.parametrize("own", [False, True])
def test_the_gradient_is_that_of_differences(family: str, own: bool) -> None:
    editable = zoo.trained(family, True, torch.float64)
    config = dataclasses.replace(FULL, phrasings=6 if own else 0)
    place, wordings = editable.feed_forward[0], word(editable, [[FACT], [SECOND]], config)
    one, going = Objective(editable, place, wordings, config), torch.ones(2, dtype=torch.bool)
    delta = 0.2 * torch.randn(2, zoo.WIDTH, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    for step in (0, 1):
        gradient = one.loss_and_gradient(delta, going, step, 0.5)[1]
        for row, entry in ((0, 0), (0, 7), (1, zoo.WIDTH - 1)):
            losses = []
            for sign in (1, -1):
                moved = delta.clone()
                moved[row, entry] += sign * 1e-5
                losses.append(one.loss_and_gradient(moved, going, step, 0.5)[0])
            slope = (losses[0] - losses[1]) / 2e-5
            size = float(gradient.norm())
            assert float(gradient[row, entry]) == pytest.approx(float(slope[row]), rel=1e-4, abs=1e-6 * size)
            assert abs(float(slope[1 - row])) <= 1e-6 * size, "no loss depends on another's δ"


def test_what_is_kept_costs_nothing_while_nothing_has_moved() -> None:
    editable = zoo.trained("gpt2", True, torch.float64)
    config = dataclasses.replace(FULL, swap=False, own=0.0)
    wordings = word(editable, [[FACT], [SECOND]], config)
    still, going = torch.zeros(2, zoo.WIDTH).double(), torch.ones(2, dtype=torch.bool)
    with_kept, without = (
        Objective(editable, editable.feed_forward[0], wordings, dataclasses.replace(config, keep=keep, essence=keep))
        for keep in (1.0, 0.0)
    )
    losses = [one.loss_and_gradient(still, going, 0, 1.0)[0] for one in (with_kept, without)]
    torch.testing.assert_close(losses[0], losses[1], rtol=0, atol=1e-9)
    moved = torch.randn(2, zoo.WIDTH, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    losses = [one.loss_and_gradient(moved, going, 0, 1.0)[0] for one in (with_kept, without)]
    assert bool((losses[0] > losses[1] + 1e-3).all())


def test_to_keep_means_to_say_the_new_object_where_the_old_wassaid() -> None:
    """With `swap`, what is kept is the distribution with the old object's probability given to the new one."""
    editable = zoo.trained("gpt2", True)
    (wording,) = word(editable, [[FACT]], FULL)
    (old, new), one = wording.swaps[0], Objective(editable, editable.feed_forward[0], [wording], FULL)
    assert editable.tokenizer.convert_ids_to_tokens([old, new]) == ["Paris", "Rome"]
    seen = 0
    for bucket in one._buckets:
        plainly = bucket.recording.logits.double().softmax(-1)
        expected = plainly.clone()
        expected[:, new] += expected[:, old]
        expected[:, old] = 0
        torch.testing.assert_close(bucket.before.double(), expected, rtol=1e-5, atol=1e-7)
        seen += len(expected)
    assert seen == sum(len(p.kept) for p in (*wording.essence, *wording.phrasings)) > 3


# Company ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["gpt2", "opt", "gpt2_square"])
def test_what_is_found_for_one_subject_does_not_depend_on_the_others(family: str) -> None:
    editable = zoo.trained(family, True, torch.float64)
    bounded = dataclasses.replace(FULL, clamp=0.3, absolute=True)  # the bounds differ, then
    alone = [choose(editable, [fact], bounded)[0] for fact in FOUR]
    assert any(float(v.delta.norm()) > 0.299 * float((v.v - v.delta).norm()) for v in alone), "the bound is reached"
    same(choose(editable, FOUR, bounded), alone)
    same(choose(editable, FOUR[::-1], bounded), alone[::-1])


@pytest.mark.parametrize("family", ["gpt_neo", "olmo2"])
def test_nor_where_a_part_of_the_model_is_of_single_precision(family: str) -> None:
    editable = zoo.trained(family, True, torch.float64)
    same(choose(editable, FOUR), [choose(editable, [fact])[0] for fact in FOUR], near=1e-5)


def test_among_many_each_holds_back_and_earlier_edits_count() -> None:
    editable = zoo.trained("gpt2", True, torch.float64)
    corpus, d_ff = ffedit.Corpus(tokens=400), editable.memories[0].d_ff
    config = dataclasses.replace(FULL, weight_decay=0.5, crowding=float(2 * d_ff))

    def losses(*facts: Fact, after: tuple[ffedit.Edit, ...] = ()) -> list[list[float]]:
        edit = ffedit.edit(editable, facts, "alphaedit", [0], config, corpus, after=after)
        return [one["loss"] for one in edit.provenance["solved"]]

    def expected(times: float, *facts: Fact) -> list[Any]:
        values = choose(editable, facts, dataclasses.replace(config, weight_decay=0.5 * times))
        return [pytest.approx(value.losses) for value in values]

    assert losses(FACT) == expected(1, FACT)
    assert losses(*FOUR) == expected(1 + 2 * 3, *FOUR)
    first = ffedit.edit(editable, FOUR[1:3], "alphaedit", [0], config, corpus)
    with first.applied(editable):
        later = losses(FACT, after=(first,))
    assert later == expected(1 + 2 * 2, FACT), "a sequence is a batch whose facts come one by one"


def test_each_ends_at_its_own_loss() -> None:
    editable = zoo.trained("gpt2", True, torch.float64)
    # A threshold that the facts pass at different steps, one perhaps never, and none meets to the last bit.
    curves = [choose(editable, [fact], AS_PUBLISHED)[0].losses for fact in FOUR]
    below, above = sorted(loss for curve in curves for loss in curve)[19:21]
    config = dataclasses.replace(AS_PUBLISHED, stop=(above + below) / 2)
    together, alone = choose(editable, FOUR, config), [choose(editable, [fact], config)[0] for fact in FOUR]
    same(together, alone)
    lengths = [len(value.losses) for value in together]
    assert len(set(lengths)) > 1 and min(lengths) < config.steps
    for value, curve in zip(together, curves, strict=True):
        assert all(loss >= config.stop for loss in value.losses[:-1])
        assert value.losses == pytest.approx(curve[: len(value.losses)], abs=1e-9)


def test_further_attempts_are_for_those_that_do_not_say_it_yet() -> None:
    editable = zoo.trained("gpt2", True, torch.float64)
    eager = dataclasses.replace(FULL, phrasings=0, steps=10, attempts=1, clamp=20.0, step_size=1.0, keep=0.0)
    first = choose(editable, FOUR, eager)
    likely = [min(min(fact) for fact in facts) for facts in said(editable, FOUR, eager, first)]
    enough = (sorted(likely)[1] + sorted(likely)[2]) / 2
    config = dataclasses.replace(eager, attempts=3, enough=enough)
    later = choose(editable, FOUR, config)
    untouched = [dataclasses.replace(value, delta=torch.zeros_like(value.delta)) for value in first]
    known = [min(fact[0] for fact in facts) >= enough for facts in said(editable, FOUR, eager, untouched)]
    for value, before, least, is_known in zip(later, first, likely, known, strict=True):
        if is_known:
            assert not value.losses
            continue
        assert value.losses[:10] == pytest.approx(before.losses, rel=1e-12)
        if least >= enough:
            assert torch.allclose(value.delta, before.delta, rtol=1e-9) and len(value.losses) == 10
        else:
            assert len(value.losses) in (20, 30) and not torch.allclose(value.delta, before.delta)
    assert {len(value.losses) > 10 for value in later} == {True, False}
    alone = [choose(editable, [fact], config)[0] for fact in FOUR]
    same(*([value for value in some if value.losses] for some in (later, alone)))


def test_what_is_said_already_is_left_alone() -> None:
    editable = zoo.trained("gpt2", True, torch.float64)
    known = Fact("Eiffel tower", "the {} is located in", "Paris", "Rome")
    config = dataclasses.replace(FULL, phrasings=0, contexts=0, attempts=2)
    left, written = choose(editable, [known, SECOND], config)
    assert not left.losses and not left.delta.any() and left.probabilities[0] > 0.5
    assert written.losses and written.delta.any()


def test_the_probabilities_are_those_of_the_bare_prompts_with_delta_in_place() -> None:
    editable = zoo.trained("gpt2", True)
    values = choose(editable, FOUR)
    for value, fact, every in zip(values, FOUR, said(editable, FOUR, FULL, values), strict=True):
        assert value.probabilities == pytest.approx([every[0][0]], rel=1e-4), fact
