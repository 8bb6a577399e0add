"""How an output reaches the residual stream is found, verified and inverted; lengths of δ mean the same everywhere."""

from __future__ import annotations

import pytest
import torch
import zoo
from torch import Tensor
from writing import FACT, quick

from ffedit import Editable
from ffedit.algebra.linalg import double
from ffedit.editor.key import LayerKeys, PromptSet, build_prompts, read_keys
from ffedit.editor.output_map import DAMPING, OutputMap, find_output_map, least_squares
from ffedit.editor.value import choose_values
from ffedit.inference import replay
from ffedit.model.hooks import capture, replace_output
from ffedit.model.tokenization import pad

LAYER = 1
NORMED = ["gemma2", "gemma3", "olmo2"]


def found(family: str) -> tuple[Editable, list[PromptSet], LayerKeys, Tensor, OutputMap]:
    editable = zoo.build(family)
    ff = editable.feed_forward[LAYER]
    prompt_sets = build_prompts(editable, [[FACT]], quick(contexts=0))
    keys = read_keys(editable, ff, prompt_sets)
    outputs = ff.matrix @ keys.K
    return (
        editable,
        prompt_sets,
        keys,
        outputs,
        find_output_map(editable, ff, prompt_sets[0].prompts[0], outputs[:, 0]),
    )


def stream(editable: Editable, prompt_set: PromptSet, delta: Tensor) -> Tensor:
    """Return the residual stream behind the layer with δ added to its output at the subject's last token."""
    text, ff = prompt_set.prompts[0], editable.feed_forward[LAYER]
    ids = pad([text.ids])

    def add(output: Tensor) -> Tensor:
        output = output.reshape(len(text.ids), -1).clone()
        output[text.site] += delta.to(output)
        return output.reshape(1, len(text.ids), -1)

    with torch.no_grad(), capture({0: editable.layers[LAYER]}) as leaving, replace_output(ff.module, add):
        replay.run_to(editable, ids, LAYER)
    return double(leaving[0].reshape(len(text.ids), -1)[text.site])


@pytest.mark.parametrize("family", NORMED)
def test_a_norm_behind_the_layer_is_found_and_its_gain_counts(family: str) -> None:
    editable, (prompt_set,), _, outputs, way = found(family)
    assert way.known and way.norm is not None and "Norm" in type(way.norm).__name__ and way.factor == 1.0
    delta = torch.randn(len(outputs), 1, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    moved = stream(editable, prompt_set, delta[:, 0]) - stream(editable, prompt_set, 0 * delta[:, 0])
    torch.testing.assert_close((way(outputs + delta) - way(outputs))[:, 0], moved, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("family", [*NORMED, "granite", "llama"])
def test_one_unit_of_delta_moves_the_stream_about_as_far_as_it_can(family: str) -> None:
    """Measured by the stream's length, δ behind a norm would be as long as it likes: only its direction counts."""
    editable, (prompt_set,), keys, outputs, way = found(family)
    unit = way.units(outputs, keys.streams)
    across = outputs.roll(1, 0)
    across -= outputs * (outputs * across).sum() / outputs.square().sum()
    moved = [
        float(
            (
                stream(editable, prompt_set, (size * unit * across / across.norm())[:, 0])
                - stream(editable, prompt_set, 0 * across[:, 0])
            ).norm()
        )
        for size in (0.1, 1.0, 100.0)
    ]
    if way.norm is None:
        assert moved[1] == pytest.approx(float(keys.streams.norm()), rel=1e-3)
    else:  # a tenth of a unit turns W k* by a tenth, and a hundred units hardly more than a few
        assert moved[0] < 0.25 * moved[1] and moved[2] < 3 * moved[1]


@pytest.mark.parametrize("family", NORMED)
def test_an_output_is_changed_so_that_the_stream_moves_as_wanted(family: str) -> None:
    *_, outputs, way = found(family)
    reachable = way(outputs + 0.3 * outputs.roll(1, 0)) - way(outputs)
    change = way.output_change(outputs, reachable)
    left = way(outputs + change) - way(outputs) - reachable
    assert float(left.norm()) < 0.05 * float(reachable.norm())
    beyond = outputs + way.output_change(outputs, 1e3 * reachable)
    torch.testing.assert_close(beyond.norm(), outputs.norm(), rtol=1e-4, atol=0)


def test_damped_least_squares_is_solved_row_by_row() -> None:
    """Of each row of its own gain: rows of other lengths, and one of zeros, change nothing in a row."""
    generator = torch.Generator().manual_seed(0)
    J = torch.eye(8) + 0.1 * torch.randn(8, 8, generator=generator)
    rows = torch.randn(4, 8, generator=generator) * torch.tensor([1e-3, 1.0, 1e3, 0.0])[:, None]
    found = least_squares(lambda x: x @ J.T, lambda r: r @ J, rows)
    for x, r in zip(found[:3], rows[:3], strict=True):
        damping = DAMPING * (J.T @ r).square().sum() / r.square().sum()
        expected = torch.linalg.solve(J.T @ J + damping * torch.eye(8), J.T @ r)
        torch.testing.assert_close(x / r.norm(), expected / r.norm(), rtol=1e-3, atol=1e-4)
        assert float((x - torch.linalg.solve(J, r)).norm()) > 3e-3 * float(r.norm()), "the damping counts"
    assert not found[3].any()


@pytest.mark.parametrize("family", [*NORMED, "granite", "llama"])
def test_the_largest_length_binds_on_every_architecture(family: str) -> None:
    editable, prompt_sets, keys, outputs, way = found(family)
    config = quick(contexts=0, steps=30, max_delta_norm=0.2, weight_decay=0.0, kl_weight=0.0).value
    (value,) = choose_values(editable, editable.feed_forward[LAYER], prompt_sets, keys, config)
    assert float(value.delta.norm()) == pytest.approx(0.2 * float(way.units(outputs, keys.streams)), rel=1e-4)
