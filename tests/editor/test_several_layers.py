"""Several layers share the work of one batch, where the model lets them."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import zoo
from storing import BARE, BATCH, FACTS, clean, write
from torch import Tensor
from writing import quick

from ffedit import Edit, EditError
from ffedit.editor.key import build_prompts, read_keys
from ffedit.editor.output_map import find_output_map
from ffedit.editor.value import choose_values
from ffedit.facts.fact import by_subject
from ffedit.model.memory import Address


def only(edit: Edit, layers: Sequence[int]) -> Edit:
    """The part of an edit that changes `layers`."""
    return dataclasses.replace(edit, updates={Address(i): edit.updates[Address(i)] for i in layers}, keys={}, values={})


@pytest.mark.parametrize("method", BATCH)
@pytest.mark.parametrize(("family", "gain"), [("gpt2", 1.0), ("llama", 1.0), ("falcon", 1.0), ("granite", 0.5)])
def test_layers_share_the_work(family: str, gain: float, method: str) -> None:
    """The residual stream behind the last layer reaches its target, and the first layer alone does not get it there."""
    editable, last = zoo.trained(family, True), 1
    numbers: dict[str, Any] = {"contexts": 1, "alphaedit_null_share": 0.5}
    edit = write(editable, FACTS, method, [1, 0], **numbers)
    assert edit.layers == [0, 1] and edit.provenance["layers"] == [0, 1]
    place = editable.feed_forward[last]
    config = quick(**numbers)
    prompt_sets = build_prompts(editable, by_subject(FACTS), config)

    def streams() -> Tensor:
        return read_keys(editable, place, prompt_sets).streams

    keys = read_keys(editable, place, prompt_sets)
    values, before = choose_values(editable, place, prompt_sets, keys, config.value), keys.streams
    deltas = torch.stack([value.delta for value in values], 1)
    lower = editable.memories[0]
    asked = edit.values[lower.address] - lower.value.double() @ edit.keys[lower.address]
    torch.testing.assert_close(asked, deltas / 2, rtol=1e-4, atol=1e-6, msg="an equal part to each layer")
    left = []
    for layers in ([0], [0, 1]):
        with only(edit, layers).applied(editable):
            left.append(float((before + gain * deltas - streams()).norm() / (gain * deltas).norm()))
    assert left[1] < 0.5 * left[0] and left[0] > 0.1
    if method == "emmet":
        assert left[1] < 1e-3


def test_keys_are_read_with_the_layers_below_changed() -> None:
    editable = zoo.trained("gpt2", True)
    both, place = write(editable, FACTS, "emmet", [0, 1]), editable.feed_forward[1]
    prompt_sets = build_prompts(editable, by_subject(FACTS), quick())
    with only(both, [0]).applied(editable):
        changed = read_keys(editable, place, prompt_sets).K
    torch.testing.assert_close(both.keys[Address(1)], changed)
    unchanged = read_keys(editable, place, prompt_sets).K
    assert not torch.allclose(unchanged, changed, rtol=1e-3)


@pytest.mark.parametrize("family", ["gemma2", "olmo2"])
def test_layers_whose_output_is_normalised_share_what_it_moves_behind_the_norm(family: str) -> None:
    editable, last = zoo.trained(family, True), 1
    ff, config = editable.feed_forward[last], quick(**BARE)
    prompt_sets = build_prompts(editable, by_subject(FACTS), config)
    keys = read_keys(editable, ff, prompt_sets)
    values = choose_values(editable, ff, prompt_sets, keys, config.value)
    v, delta = (torch.stack(own, 1) for own in ([x.v for x in values], [x.delta for x in values]))
    way = find_output_map(editable, ff, prompt_sets[0].prompts[0], v[:, 0])
    wanted = way(v) - way(v - delta)
    edit, left = write(editable, FACTS, "emmet", [0, 1], **BARE), []
    for layers in ([0], [0, 1]):
        with only(edit, layers).applied(editable):
            moved = read_keys(editable, ff, prompt_sets).streams - keys.streams
        left.append(float((wanted - moved).norm() / wanted.norm()))
    assert way.norm is not None and left[0] > 0.2 and left[1] < 0.15


def test_layers_whose_way_into_the_stream_is_not_known_cannot_share(monkeypatch: pytest.MonkeyPatch) -> None:
    editable = zoo.trained("gpt2", True)
    before = zoo.snapshot(editable)
    block = editable.layers[1]
    squash = block.register_forward_hook(
        lambda _, args, out: (out[0].tanh(), *out[1:]) if isinstance(out, tuple) else out.tanh()
    )
    try:
        with pytest.raises(
            EditError, match=r"layer 1 changes its feed-forward output .* cannot share a value; name one"
        ):
            write(editable, FACTS, "memit", [0, 1], **BARE)
        assert write(editable, FACTS, "memit", [1], **BARE).layers == [1]
    finally:
        squash.remove()
    assert clean(editable, before)


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_layers_share_the_work_in_16_bits_too(family: str) -> None:
    editable = zoo.trained(family, True, torch.bfloat16)
    assert write(editable, FACTS, "memit", [0, 1], **BARE).layers == [0, 1]
