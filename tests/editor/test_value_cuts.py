"""However the work of choosing values is cut, resumed or halved, the values are the same."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import zoo
from choosing import FOUR, FULL, choose, same
from writing import CORPUS, with_numbers

from ffedit import EditError
from ffedit.editor.key import build_prompts
from ffedit.editor.value import Objective, size
from ffedit.editor.write import write
from ffedit.facts.fact import by_subject
from ffedit.files import cache
from ffedit.inference import replay


@pytest.mark.parametrize(("room", "cost"), [(2**26, 0), (2**25, 10**9), (1, 32), (30_000, 10**9)], ids=str)
def test_how_texts_are_cut_into_buckets_and_batches_changes_nothing(
    room: int, cost: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    editable, few = zoo.trained("gpt2", True, torch.float64), with_numbers(FULL, steps=3)
    expected, runs = choose(editable, FOUR, few), []

    def counted(resume: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def run(*words: Any) -> torch.Tensor:
            runs.append(len(words[3]))
            return resume(*words)

        return run

    monkeypatch.setattr(replay, "resume_after", counted(replay.resume_after))
    choose(editable, FOUR, few)
    usual = len(runs)
    monkeypatch.setattr("ffedit.editor.value.ROOM", room)
    monkeypatch.setattr("ffedit.editor.value.BATCH_COST", cost)
    same(choose(editable, FOUR, few), expected)
    assert (room, cost) == (2**25, 10**9) or len(runs) - usual > usual, "the work was cut in another way"


def test_subjects_that_do_not_fit_together_are_done_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    editable, groups = zoo.trained("gpt2", True, torch.float64), []
    expected = choose(editable, FOUR)
    prompt_sets = build_prompts(editable, by_subject(FOUR), FULL)
    sizes = [size(editable, editable.feed_forward[0], prompt_set) for prompt_set in prompt_sets]
    monkeypatch.setattr("ffedit.editor.value.ROOM", max(sizes[0] + sizes[1], sizes[2] + sizes[3]))

    def counted(*words: Any) -> Objective:
        groups.append(len(words[2]))
        return Objective(*words)

    monkeypatch.setattr("ffedit.editor.value.Objective", counted)
    seen: list[tuple[int, int]] = []
    same(choose(editable, FOUR, progress=lambda _, done, total: seen.append((done, total))), expected)
    assert sum(groups) == 4 and len(groups) == 2
    assert len({total for _, total in seen}) == 1 and all(0 < done <= total for done, total in seen)


def test_a_recording_is_about_as_large_as_is_said() -> None:
    editable = zoo.trained("gpt2", True)
    prompt_sets = build_prompts(editable, by_subject(FOUR), FULL)
    one = Objective(editable, editable.feed_forward[0], prompt_sets, FULL.value.kl_weight)
    pasts = {prefix.past for prefix in one._prefixes}
    kept = sum(side.numel() for past in pasts for layer in past.layers for side in layer)
    held = one._before.numel() + one._states.numel() + kept
    said = sum(size(editable, editable.feed_forward[0], prompt_set) for prompt_set in prompt_sets)
    assert 0.5 < said / held < 2


@pytest.mark.parametrize("family", ["gpt2", "opt"])
@pytest.mark.parametrize("layer", [0, 2])
def test_a_model_that_cannot_be_resumed_gives_the_same(family: str, layer: int) -> None:
    editable = zoo.trained(family, True, torch.float64)
    # Behind the last layer, δ moves what is read at the subject itself alone.
    facts = [dataclasses.replace(fact, prompt="the city of {}") for fact in FOUR[:2]] if layer == 2 else FOUR[:2]
    expected = choose(editable, facts, layer=layer)
    editable.resumable = False
    same(choose(editable, facts, layer=layer), expected)


def test_a_value_on_which_nothing_depends_stays() -> None:
    """Rounding is no direction, however long the steps are."""
    editable = zoo.trained("gpt2", True, torch.float64)
    config = with_numbers(FULL, essence_prompts=("{} is a",))
    (value,) = choose(editable, FOUR[:1], config, layer=2)
    assert float(value.delta.norm()) < 1e-9 and len(value.losses) == FULL.value.steps + 1


def test_an_overflow_is_said_in_words(monkeypatch: pytest.MonkeyPatch) -> None:
    editable, plainly = zoo.trained("gpt2", True), Objective.loss_and_gradient

    def overflow(self: Objective, *words: Any) -> Any:
        loss, gradient, *found = plainly(self, *words)
        return loss, lambda: gradient() * float("nan"), *found

    monkeypatch.setattr(Objective, "loss_and_gradient", overflow)
    with pytest.raises(EditError, match="the loss is not finite"):
        choose(editable, FOUR[:2])


def test_a_choice_that_was_killed_goes_on_with_the_same_bits(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    editable, unfinished = zoo.trained("gpt2", True), tmp_path / "values.safetensors"
    few = with_numbers(FULL, steps=3)
    monkeypatch.setattr("ffedit.editor.value.ROOM", 1)  # every value in a group of its own
    monkeypatch.setattr("ffedit.editor.value.SAVED_EVERY", 0.0)
    expected, begun = choose(editable, FOUR, few), []

    def objective(*words: Any) -> Objective:
        begun.append(words[2])
        if len(begun) == 3:
            raise KeyboardInterrupt
        return Objective(*words)

    monkeypatch.setattr("ffedit.editor.value.Objective", objective)
    with pytest.raises(KeyboardInterrupt):
        choose(editable, FOUR, few, unfinished=unfinished)
    values = choose(editable, FOUR, few, unfinished=unfinished)
    assert len(begun) == 3 + 2, "the first two were kept"
    for value, other in zip(values, expected, strict=True):
        assert torch.equal(value.v, other.v) and torch.equal(value.delta, other.delta)
        assert (value.losses, value.probabilities) == (other.losses, other.probabilities)
    unfinished.write_bytes(unfinished.read_bytes()[:-9])  # cut off: chosen anew
    assert torch.equal(choose(editable, FOUR, few, unfinished=unfinished)[0].v, expected[0].v)


def test_a_finished_edit_keeps_no_values_in_the_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ffedit.editor.value.ROOM", 1)
    monkeypatch.setattr("ffedit.editor.value.SAVED_EVERY", 0.0)
    write(zoo.trained("gpt2", True), list(FOUR[:2]), "memit", [0], with_numbers(FULL, steps=3), CORPUS)
    assert not list(cache.folder().glob("values/*.safetensors"))
