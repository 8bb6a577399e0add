"""Running on from a layer and a position gives what the whole forward pass gives, on every architecture."""

from __future__ import annotations

import dataclasses

import pytest
import torch
import zoo
from torch import Tensor

from ffedit.inference import replay
from ffedit.inference.replay import Past, Prefix
from ffedit.model.editable import Editable
from ffedit.model.hooks import capture, replace_output
from ffedit.model.tokenization import pad

ROWS = ([3, 14, 15, 9, 26, 53, 58], [27, 18, 28], [31, 41, 59, 26, 5])
LENGTHS = torch.tensor([len(row) for row in ROWS])


def whole(editable: Editable, ids: Tensor) -> Tensor:
    with torch.no_grad():
        return editable.model(input_ids=ids, use_cache=False).logits


def every_read(start: int = 0) -> Tensor:
    """All (row, position) pairs from `start` on that are not padding."""
    return torch.tensor([(row, p) for row, ids in enumerate(ROWS) for p in range(start, len(ids))])


def close(found: Tensor, expected: Tensor) -> bool:
    found, expected = found.detach(), expected.detach()
    return float((found - expected).abs().max()) <= 1e-5 * float(expected.abs().max())


@pytest.mark.parametrize("family", zoo.FAMILIES)
def test_padding_on_the_right_changes_no_number(family: str) -> None:
    editable = zoo.shared(family)
    logits = replay.forward(editable, pad(ROWS), every_read())
    expected = torch.cat([whole(editable, torch.tensor([row]))[0] for row in ROWS])
    assert close(logits, expected)


@pytest.mark.parametrize("family", zoo.FAMILIES)
def test_a_recording_holds_what_the_model_computed(family: str) -> None:
    editable = zoo.shared(family)
    recording = replay.record(editable, pad(ROWS), every_read(), ("feed_forward", "attention"))
    assert close(recording.logits, replay.forward(editable, pad(ROWS), every_read()))
    assert len(recording.states) == zoo.DEPTH + 1 and len(recording.outputs["attention"]) == zoo.DEPTH
    assert torch.equal(recording.ids, pad(ROWS))
    with capture(dict(enumerate(editable.layers))) as given:
        whole(editable, pad(ROWS))
    for layer in range(zoo.DEPTH):
        assert close(recording.states[layer + 1], given[layer])
        for part in ("feed_forward", "attention"):
            assert recording.outputs[part][layer].shape == recording.states[0].shape


@pytest.mark.filterwarnings("error::FutureWarning")  # a person would see what transformers warns of
@pytest.mark.parametrize("family", zoo.FAMILIES)
def test_a_rerun_from_every_layer_and_position_gives_the_whole_pass(family: str) -> None:
    editable = zoo.shared(family)
    recording = replay.record(editable, pad(ROWS), every_read())
    expected = whole(editable, pad(ROWS))
    for layer in range(zoo.DEPTH + 1):
        for start in range(max(LENGTHS)):
            rows = torch.tensor([row for row, length in enumerate(LENGTHS) if length > start])
            read = torch.tensor([(i, p) for i, row in enumerate(rows) for p in range(start, LENGTHS[row])])
            states = recording.states[layer][rows, start:]
            found = replay.resume(editable, recording, layer, states, rows, start, read)
            assert close(found, expected[rows[read[:, 0]], read[:, 1]]), (layer, start)


def altered(editable: Editable, layer: int, row: int, position: int, change: Tensor) -> Tensor:
    """Logits of one row when `change` is added to what enters `layer` at `position`, in one plain pass."""

    def add(state: Tensor) -> Tensor:
        state = state.clone()
        state[:, position] += change
        return state

    with replace_output(editable.layers[layer - 1], add):
        return whole(editable, torch.tensor([ROWS[row]]))[0]


@pytest.mark.parametrize("family", zoo.FAMILIES)
def test_an_altered_state_is_carried_on_for_the_rows_chosen(family: str) -> None:
    editable = zoo.shared(family)
    recording = replay.record(editable, pad(ROWS), every_read())
    rows, layer, start = torch.tensor([2, 0, 2]), 1, 2
    change = torch.randn(3, zoo.WIDTH, generator=torch.Generator().manual_seed(1))
    states = recording.states[layer][rows, start:].clone()
    states[torch.arange(3), torch.tensor([0, 1, 2])] += change
    for resumable in (True, False):
        read = torch.tensor([(i, len(ROWS[row]) - 1) for i, row in enumerate(rows)])
        some = dataclasses.replace(editable, resumable=resumable)
        found = replay.resume(some, recording, layer, states, rows, start, read)
        expected = [altered(editable, layer, int(row), start + i, change[i])[-1] for i, row in enumerate(rows)]
        assert close(found, torch.stack(expected)), resumable


@pytest.mark.parametrize("family", ["gpt2", "gpt_neo", "gemma3", "falcon", "bloom", "opt"])
@pytest.mark.parametrize("start", [0, 2])
def test_gradients_flow_to_the_states(family: str, start: int) -> None:
    editable = zoo.shared(family)
    recording = replay.record(editable, torch.tensor([ROWS[0]]), torch.tensor([[0, 6]]))
    states = recording.states[1][:, start:].clone().requires_grad_()
    logits = replay.resume(editable, recording, 1, states, torch.tensor([0]), start, torch.tensor([[0, 6]]))
    weights = torch.randn(logits.shape, generator=torch.Generator().manual_seed(0))
    (gradient,) = torch.autograd.grad((logits * weights).sum(), states)
    step = torch.zeros(states.shape[1:])
    step[0] = 1e-2 * torch.randn(zoo.WIDTH, generator=torch.Generator().manual_seed(1))
    ahead, behind = (altered(editable, 1, 0, start, sign * step[0])[-1] for sign in (1, -1))
    slope = float(((ahead - behind) * weights[0]).sum()) / 2
    assert float((gradient[0] * step).sum()) == pytest.approx(slope, rel=0.02, abs=2e-3)


@pytest.mark.parametrize("family", zoo.FAMILIES)
@pytest.mark.parametrize("resumable", [True, False])
def test_final_states_unembedded_together_give_the_logits(family: str, resumable: bool) -> None:
    editable = dataclasses.replace(zoo.shared(family), resumable=resumable)
    recording = replay.record(editable, pad(ROWS), every_read())
    expected = whole(editable, pad(ROWS))
    rows, start = torch.tensor([0, 2]), 2
    read = torch.tensor([[0, 3], [0, 6], [1, 4]])
    for layer in range(zoo.DEPTH + 1):
        states = recording.states[layer][rows, start:]
        for at in (None, read):
            leaving = replay.run_layers(editable, recording, range(layer, zoo.DEPTH), states, rows, start, at)
            final = leaving[read[:, 0], read[:, 1] - start]
            assert close(editable.logits_of(final), expected[rows[read[:, 0]], read[:, 1]])
        for stop in range(layer, zoo.DEPTH):
            leaving = replay.run_layers(editable, recording, range(layer, stop), states, rows, start)
            assert close(leaving[0], recording.states[stop][0, start:])
            assert close(leaving[1, : len(ROWS[2]) - start], recording.states[stop][2, start : len(ROWS[2])])
    assert all("forward" not in module.__dict__ for module in editable.model.modules())


def test_what_is_read_twice_counts_once_in_gradients() -> None:
    editable = zoo.shared("llama")
    recording = replay.record(editable, torch.tensor([ROWS[0]]), torch.tensor([[0, 6]]))
    read, towards = torch.tensor([[0, 4], [0, 6], [0, 4]]), []
    for at in (None, read):
        states = recording.states[1][:, 2:].clone().requires_grad_()
        leaving = replay.run_layers(editable, recording, range(1, zoo.DEPTH), states, torch.tensor([0]), 2, at)
        final = leaving[read[:, 0], read[:, 1] - 2]
        towards.append(torch.autograd.grad(final.square().sum(), states)[0])
    assert close(towards[0], towards[1])


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_a_skipped_layer_is_restored_even_when_the_block_raises(family: str) -> None:
    editable = zoo.shared(family)
    with pytest.raises(KeyError), editable.skipping(editable.layers[:1], torch.zeros(1)):
        raise KeyError
    assert "forward" not in editable.layers[0].__dict__


def test_a_recording_survives_being_rerun() -> None:
    editable = zoo.shared("llama")
    recording = replay.record(editable, pad(ROWS), every_read())
    kept = [(keys.clone(), values.clone()) for keys, values in recording.past]
    for _ in range(2):
        states = recording.states[1][:, 1:]
        replay.resume(editable, recording, 1, states, torch.arange(3), 1, torch.tensor([[0, 6]]))
    assert all(
        torch.equal(a, b) for old, new in zip(kept, recording.past, strict=True) for a, b in zip(old, new, strict=True)
    )


@pytest.mark.parametrize("family", zoo.FAMILIES)
def test_running_to_a_layer_shows_what_a_whole_pass_shows_up_to_there(family: str) -> None:
    editable = zoo.shared(family)
    modules = {layer: editable.memories[layer].module for layer in range(zoo.DEPTH)}
    blocks = dict(enumerate(editable.layers))
    with capture(modules, inputs=True) as keys, capture(blocks) as states:
        whole(editable, pad(ROWS))
    for layer in range(zoo.DEPTH):
        with capture(modules, inputs=True) as some, capture({0: blocks[layer]}) as leaving:
            replay.run_to(editable, pad(ROWS), layer)
        assert set(some) == set(range(layer + 1)), "no layer above runs"
        assert all(close(found, keys[at]) for at, found in some.items()) and close(leaving[0], states[layer])
    assert all("forward" not in module.__dict__ for module in editable.model.modules())


def test_running_to_a_layer_unembeds_one_position_only() -> None:
    editable = zoo.shared("gpt2")
    with capture({0: editable.unembedding}) as given:
        replay.run_to(editable, pad(ROWS), 1)
    assert given[0].shape == (1, 1, zoo.VOCAB)


@pytest.mark.parametrize("family", zoo.FAMILIES)
def test_rows_resume_each_from_a_position_of_its_own(family: str) -> None:
    editable = zoo.shared(family)
    assert editable.resumable and editable.ragged
    ids = torch.randint(2, 40, (3, 9), generator=torch.Generator().manual_seed(0))
    rows, starts = torch.tensor([2, 0, 1, 2]), torch.tensor([1, 4, 0, 6])
    read = torch.tensor([[0, 2], [0, 3], [1, 6], [2, 1], [3, 8]])
    whole = replay.forward(editable, ids, torch.stack([rows[read[:, 0]], read[:, 1]], 1))
    read = torch.stack([read[:, 0], read[:, 1] - starts[read[:, 0]]], 1)
    inside = (starts[:, None] + torch.arange(3)).clamp(max=8)
    recording = replay.record(editable, ids, read[:0])
    for layer in (0, 2):
        past = Past(recording.past).above(layer)
        assert [len(keys) for keys, _ in past.layers] == [1] * layer + [3] * (zoo.DEPTH - layer)
        assert [keys.shape[2] for keys, _ in past.layers[:layer]] == [1] * layer
        prefixes = [Prefix(past, int(row), range(int(start))) for row, start in zip(rows, starts, strict=True)]
        states = recording.states[layer][rows[:, None], inside]
        found = replay.resume_after(editable, prefixes, layer, ids[rows[:, None], inside], states, read)
        torch.testing.assert_close(found, whole, rtol=1e-4, atol=1e-4)
