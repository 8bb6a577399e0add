"""Drift is measured from kept states, and from the edited layer on: with the same bits as by whole passes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import zoo
from writing import FACT, SECOND, write

from ffedit.evaluator import drift
from ffedit.evaluator.drift import GenericText
from ffedit.files import cache
from ffedit.model.editable import Editable


def states() -> list[Path]:
    return [path for path in cache.entries() if path.parent.name == "states"]


def runs(editable: Editable, seen: list[int]) -> list[torch.utils.hooks.RemovableHandle]:
    """Note the number of each block that runs."""

    def note(layer: int) -> torch.utils.hooks.RemovableHandle:
        return (
            editable.feed_forward[layer]
            .memories[0]
            .module.register_forward_hook(lambda module, args, output: seen.append(layer))
        )

    return [note(layer) for layer in range(len(editable.layers))]


@pytest.mark.parametrize("family", ["gpt2", "mixtral", "bloom", "gemma2"])
def test_kept_states_and_the_layers_above_give_what_whole_passes_give(family: str) -> None:
    editable = zoo.trained(family, True)
    edit = write(editable, layer=1, max_delta_norm=5.0)
    generic = [GenericText(editable, layer=layer) for layer in (None, 1, 1)]
    with edit.applied(editable):
        measured = [(text.perplexity, *text.measure()) for text in generic]
    assert measured[0] == measured[1] == measured[2] and measured[0][1] > 0
    assert len(states()) == 1


def test_only_what_an_edit_can_change_runs() -> None:
    editable, seen = zoo.trained("gpt2", True), list[int]()
    edit = write(editable, layer=1, max_delta_norm=0.1)
    GenericText(editable, layer=1)
    hooks = runs(editable, seen)
    generic = GenericText(editable, layer=1)
    assert seen == [], "the distributions are read from what was kept"
    with edit.applied(editable):
        generic.measure()
    assert sorted(set(seen)) == [1, 2]
    for hook in hooks:
        hook.remove()


def test_states_are_kept_of_the_unedited_model_only_and_damaged_ones_are_made_anew() -> None:
    editable = zoo.trained("gpt2", True)
    edit, other = (write(editable, fact, layer=1, max_delta_norm=5.0) for fact in (FACT, SECOND))
    with edit.applied(editable):
        edited = GenericText(editable, layer=1)
        assert states() == []
        with other.applied(editable):
            assert edited.measure()[0] > 0
    first = GenericText(editable, layer=1)
    assert first.perplexity != edited.perplexity
    (kept,) = states()
    kept.write_bytes(kept.read_bytes()[:-7])
    assert GenericText(editable, layer=1).perplexity == first.perplexity
    GenericText(editable, layer=2)
    assert len(states()) == 2


def test_another_model_is_measured_as_a_whole() -> None:
    editable = zoo.trained("gpt2", True)
    generic, changed = GenericText(editable, layer=1), zoo.build("gpt2", True)
    assert generic.measure(changed) == GenericText(editable).measure(changed)


def test_distributions_are_compared_a_few_rows_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    editable = zoo.trained("gpt2", True)
    edit, texts = write(editable, layer=1, max_delta_norm=5.0), list[tuple[float, ...]]()
    length, read, sizes = len(GenericText(editable).rows[0]), editable.logits_of, list[int]()
    monkeypatch.setattr(editable, "logits_of", lambda states: (sizes.append(len(states)), read(states))[1])
    for rows in (16, 3, 1):
        monkeypatch.setattr(drift, "BUDGET", 2 * rows * length)
        monkeypatch.setattr(drift, "LOGITS", rows * length * editable.vocabulary)
        monkeypatch.setattr(drift, "PIECE", 5 * editable.vocabulary)  # which divides no row
        sizes.clear()
        text = GenericText(editable)
        with edit.applied(editable):
            texts.append((text.perplexity, *text.measure()))
        assert max(sizes) == rows * length and sum(sizes) == 3 * 16 * length
    assert texts[1] == pytest.approx(texts[0], rel=1e-6) and texts[2] == pytest.approx(texts[0], rel=1e-6)
