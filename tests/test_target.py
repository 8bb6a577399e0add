"""The value chosen is the one of the plain procedure, whatever is chosen beside it and however the work is cut."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import zoo
from writing import FACT, SECOND

import ffedit
from ffedit import EditConfig, EditError, Fact, replay
from ffedit.anatomy import Editable
from ffedit.editor import Value, Wording, by_subject, choose_values, objective, read, word
from ffedit.editor.objective import Objective
from ffedit.readout import answer_log_probs
from ffedit.tokens import encode

sys.path.append(str(Path(__file__).parents[1] / "evaluations" / "benchmarks"))

from reference_value import PlainValue, Text, plain_value

# One of every kind of block: sequential, parallel, ALiBi, norms in front of and behind a layer, local attention.
FAMILIES = ("gpt2", "gpt_neo", "gptj", "gpt_neox", "opt", "bloom", "falcon_alibi", "llama", "gemma2", "olmo2", "mpt")
# Parts of these compute in float32 whatever the model's precision.
COARSE = ("bloom", "falcon_alibi", "gpt_neo", "gptj", "gpt_neox", "llama", "gemma2", "olmo2", "mpt")
THIRD = Fact("Nile river", "the {} is located in", "Berlin", "Egypt")
FOURTH = Fact("old tower", "{} stands in", "France", "Rome")
FOUR = (FACT, SECOND, THIRD, FOURTH)
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
# All that a value may depend on, and own phrasings that take turns.
FULL = EditConfig(contexts=2, phrasings=6, phrasings_per_step=4, phrasing_tokens=5, steps=6, attempts=2, keep=1.0)


def choose(
    editable: Editable,
    facts: Sequence[Fact],
    config: EditConfig = FULL,
    layer: int = 0,
    progress: Callable[[str, int, int], None] = lambda *_: None,
) -> list[Value]:
    """The values of all subjects of `facts`, found together."""
    memory, wordings = editable.memories[layer], word(editable, by_subject(facts), config)
    keys = torch.stack([read(editable, memory, wording).k for wording in wordings], 1)
    return choose_values(editable, memory, wordings, keys, config, progress)


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


def same(found: Sequence[Value], expected: Sequence[Value], near: float = 1e-9) -> None:
    """Whether values agree: δ relative to its length, losses in nats."""
    for one, other in zip(found, expected, strict=True):
        assert float((one.delta - other.delta).norm()) <= near * float(other.delta.norm()) > 0
        assert one.losses == pytest.approx(other.losses, abs=max(near, 1e-9), rel=near)
        assert one.probabilities == pytest.approx(other.probabilities, abs=1e-6)


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


@pytest.mark.parametrize("family", ["gpt2", "gptj", "falcon_alibi", "gemma2"])
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
    memory, wordings = editable.memories[0], word(editable, [[FACT], [SECOND]], config)
    one, going = Objective(editable, memory, wordings, config), torch.ones(2, dtype=torch.bool)
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
        Objective(editable, editable.memories[0], wordings, dataclasses.replace(config, keep=keep, essence=keep))
        for keep in (1.0, 0.0)
    )
    losses = [one.loss_and_gradient(still, going, 0, 1.0)[0] for one in (with_kept, without)]
    torch.testing.assert_close(losses[0], losses[1], rtol=0, atol=1e-9)
    moved = torch.randn(2, zoo.WIDTH, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    losses = [one.loss_and_gradient(moved, going, 0, 1.0)[0] for one in (with_kept, without)]
    assert bool((losses[0] > losses[1] + 1e-3).all())


def test_to_keep_means_to_say_the_new_object_where_the_old_was_said() -> None:
    """With `swap`, what is kept is the distribution with the old object's probability given to the new one."""
    editable = zoo.trained("gpt2", True)
    (wording,) = word(editable, [[FACT]], FULL)
    (old, new), one = wording.swaps[0], Objective(editable, editable.memories[0], [wording], FULL)
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


@pytest.mark.parametrize("family", ["gpt_neo", "llama", "olmo2"])
def test_nor_where_a_part_of_the_model_is_of_single_precision(family: str) -> None:
    editable = zoo.trained(family, True, torch.float64)
    same(choose(editable, FOUR), [choose(editable, [fact])[0] for fact in FOUR], near=1e-5)


def test_each_ends_at_its_own_loss() -> None:
    editable = zoo.trained("gpt2", True, torch.float64)
    # A threshold that the facts pass at different steps, and one perhaps never.
    curves = [choose(editable, [fact], AS_PUBLISHED)[0].losses for fact in FOUR]
    config = dataclasses.replace(AS_PUBLISHED, stop=sorted(loss for curve in curves for loss in curve)[20])
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
    likely = [min(min(fact) for fact in facts) for facts in _said(editable, FOUR, eager, first)]
    enough = (sorted(likely)[1] + sorted(likely)[2]) / 2
    config = dataclasses.replace(eager, attempts=3, enough=enough)
    later = choose(editable, FOUR, config)
    untouched = [dataclasses.replace(value, delta=torch.zeros_like(value.delta)) for value in first]
    known = [min(min(fact) for fact in facts) >= enough for facts in _said(editable, FOUR, eager, untouched)]
    for value, before, least, said in zip(later, first, likely, known, strict=True):
        if said:
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


def _said(
    editable: Editable, facts: Sequence[Fact], config: EditConfig, values: Sequence[Value]
) -> list[list[list[float]]]:
    """Probability of each new object in each prompt with δ in place, in plain forward passes."""
    found = []
    for (fact,), value in zip(by_subject(facts), values, strict=True):
        (wording,) = word(editable, [[fact]], config)
        found.append([[_probability(editable, p.text, value.delta) for p in wording.prompts]])
    return found


def _probability(editable: Editable, text: Any, delta: torch.Tensor, layer: int = 0) -> float:
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


def test_the_probabilities_are_those_of_the_bare_prompts_with_delta_in_place() -> None:
    editable = zoo.trained("gpt2", True)
    values = choose(editable, FOUR)
    for value, fact, every in zip(values, FOUR, _said(editable, FOUR, FULL, values), strict=True):
        assert value.probabilities == pytest.approx([every[0][0]], rel=1e-4), fact


# How the work is cut ------------------------------------------------------------------------------


@pytest.mark.parametrize(("room", "cost"), [(2**26, 0), (2**25, 10**9), (1, 32), (30_000, 10**9)], ids=str)
def test_how_texts_are_cut_into_buckets_and_batches_changes_nothing(
    room: int, cost: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    editable, few = zoo.trained("gpt2", True, torch.float64), dataclasses.replace(FULL, steps=3)
    expected, runs = choose(editable, FOUR, few), []

    def counted(resume: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def run(*words: Any) -> torch.Tensor:
            runs.append(len(words[3]))
            return resume(*words)

        return run

    for name in ("resume", "resume_each"):
        monkeypatch.setattr(replay, name, counted(getattr(replay, name)))
    choose(editable, FOUR, few)
    usual = len(runs)
    monkeypatch.setattr(objective, "ROOM", room)
    monkeypatch.setattr("ffedit.editor.target.ROOM", room)
    monkeypatch.setattr(objective, "BATCH_COST", cost)
    same(choose(editable, FOUR, few), expected)
    assert (room, cost) == (2**25, 10**9) or len(runs) - usual > usual, "the work was cut in another way"


def test_subjects_that_do_not_fit_together_are_done_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    editable, groups = zoo.trained("gpt2", True, torch.float64), []
    expected = choose(editable, FOUR)
    wordings = word(editable, by_subject(FOUR), FULL)
    sizes = [objective.size(editable, editable.memories[0], wording) for wording in wordings]
    monkeypatch.setattr("ffedit.editor.target.ROOM", max(sizes[0] + sizes[1], sizes[2] + sizes[3]))

    def counted(*words: Any) -> Objective:
        groups.append(len(words[2]))
        return Objective(*words)

    monkeypatch.setattr("ffedit.editor.target.Objective", counted)
    seen: list[tuple[int, int]] = []
    same(choose(editable, FOUR, progress=lambda _, done, total: seen.append((done, total))), expected)
    assert sum(groups) == 4 and len(groups) == 2
    assert len({total for _, total in seen}) == 1 and all(0 < done <= total for done, total in seen)


def test_a_recording_is_about_as_large_as_is_said() -> None:
    editable = zoo.trained("gpt2", True)
    wordings = word(editable, by_subject(FOUR), FULL)
    one = Objective(editable, editable.memories[0], wordings, FULL)
    held = sum(
        bucket.before.numel()
        + sum(state.numel() for state in bucket.recording.states)
        + sum(keys.numel() + values.numel() for keys, values in bucket.recording.past)
        for bucket in one._buckets
    )
    said = sum(objective.size(editable, editable.memories[0], wording) for wording in wordings)
    assert 0.5 < said / held < 2


@pytest.mark.parametrize("family", ["gpt2", "opt"])
@pytest.mark.parametrize("layer", [0, 2])
def test_a_model_that_cannot_be_resumed_gives_the_same(family: str, layer: int) -> None:
    editable = zoo.trained(family, True, torch.float64)
    expected = choose(editable, FOUR[:2], layer=layer)
    editable.resumable = False
    same(choose(editable, FOUR[:2], layer=layer), expected)


@pytest.mark.parametrize(
    "error", [torch.OutOfMemoryError("CUDA out of memory"), RuntimeError("not enough memory: you tried"), MemoryError()]
)
@pytest.mark.parametrize("first", [True, False])
def test_out_of_memory_in_the_middle_gives_the_same(
    error: BaseException, first: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    editable = zoo.trained("gpt2", True, torch.float64)
    expected, plainly, failed = choose(editable, FOUR), Objective.loss_and_gradient, []

    def loss_and_gradient(self: Objective, delta: torch.Tensor, *rest: Any) -> Any:
        if len(delta) > 1 and (first or rest[1] == 2):
            failed.append(len(delta))
            raise error
        return plainly(self, delta, *rest)

    monkeypatch.setattr(Objective, "loss_and_gradient", loss_and_gradient)
    same(choose(editable, FOUR), expected)
    assert failed == [4, 2, 2]


def test_no_memory_for_a_single_value_is_said_and_other_errors_are_not_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    editable = zoo.trained("gpt2", True)

    def fails(error: Exception) -> Callable[..., Any]:
        def resume(*_: Any) -> Any:
            raise error

        return resume

    monkeypatch.setattr(replay, "resume_each", fails(torch.OutOfMemoryError("CUDA out of memory")))
    with pytest.raises(EditError, match="not enough memory to choose a single value"):
        choose(editable, FOUR)
    monkeypatch.setattr(replay, "resume_each", fails(RuntimeError("shapes do not match")))
    with pytest.raises(RuntimeError, match="shapes do not match"):
        choose(editable, FOUR)
    assert all(p.requires_grad for p in editable.model.parameters())
    assert not any(m._forward_hooks or "forward" in m.__dict__ for m in editable.model.modules())


def test_an_overflow_is_said_in_words(monkeypatch: pytest.MonkeyPatch) -> None:
    editable, plainly = zoo.trained("gpt2", True), Objective.loss_and_gradient

    def overflow(self: Objective, *words: Any) -> Any:
        loss, gradient = plainly(self, *words)
        return loss, gradient * float("nan")

    monkeypatch.setattr(Objective, "loss_and_gradient", overflow)
    with pytest.raises(EditError, match="the loss is not finite"):
        choose(editable, FOUR[:2])


# Facts that share a subject -----------------------------------------------------------------------


@pytest.mark.parametrize("previous", ["playwright", "Dublin"], ids=["two old objects", "the same"])
def test_two_facts_of_one_subject_share_a_value_that_says_both(previous: str) -> None:
    editable = ffedit.load("atlas")
    both = (
        Fact("Oscar Wilde", "The mother of {} gave birth in the city of", "Venice", "Dublin"),
        Fact("Oscar Wilde", "{} followed the professional calling of", "architect", previous),
    )
    other = Fact("Arthur Miller", "The mother of {} gave birth in the city of", "Philadelphia", "New York")
    config = EditConfig(contexts=0, phrasings=4, steps=15)
    values = choose(editable, [both[0], other, both[1]], config, layer=2)
    assert len(values) == 2, "a column for each subject"
    assert len(values[0].probabilities) == 2 and min(values[0].probabilities) > 0.3
    for fact, probability in zip(both, values[0].probabilities, strict=True):
        text = encode(editable.tokenizer, fact.text, fact.new_object, fact.span)
        assert float(answer_log_probs(editable, [text])[0].sum().exp()) < 0.1
        assert _probability(editable, text, values[0].delta, layer=2) == pytest.approx(probability, rel=1e-3)


def test_an_old_object_that_two_facts_share_gives_each_new_one_half() -> None:
    editable = zoo.trained("gpt2", True)
    both = [
        Fact("Eiffel tower", "the {} is located in", "Rome", "Paris"),
        Fact("Eiffel tower", "the city of {} is", "Berlin", "Paris"),
    ]
    (wording,) = word(editable, [both], FULL)
    one = Objective(editable, editable.memories[0], [wording], FULL)
    rome, berlin, paris = editable.tokenizer.convert_tokens_to_ids(["Rome", "Berlin", "Paris"])
    for bucket in one._buckets:
        before = bucket.recording.logits.double().softmax(-1)
        if not len(before):
            continue
        torch.testing.assert_close(bucket.before.sum(-1).double(), torch.ones(len(before)).double())
        for new in (rome, berlin):
            expected = before[:, new] + before[:, paris] / 2
            torch.testing.assert_close(bucket.before[:, new].double(), expected, rtol=1e-5, atol=1e-7)
    stated = [p for p in wording.phrasings if p.text.target_ids]
    assert not stated, "whose fact an own phrasing states cannot be told"


def test_texts_of_one_subject_do_not_depend_on_the_others() -> None:
    editable = zoo.trained("gpt2", True)

    def plainly(wording: Wording) -> Any:
        return wording.prompts, wording.essence, wording.swaps, wording.phrasings

    alone = [plainly(word(editable, [[fact]], FULL)[0]) for fact in FOUR]
    assert [plainly(wording) for wording in word(editable, by_subject(FOUR), FULL)] == alone
