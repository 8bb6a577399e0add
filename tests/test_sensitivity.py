"""How much of a text hangs on a layer: the gradient, against differences of whole forward passes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import zoo
from torch import Tensor

from ffedit import Corpus, EditError
from ffedit.anatomy import Editable
from ffedit.editor import collect, collect_moments
from ffedit.hooks import replaced
from ffedit.sensitivity import sensitivity

IDS = torch.arange(11) * 7 % 40 + 5
LENGTH = 8


def said(editable: Editable, row: Tensor, layer: int, position: int, added: Tensor) -> float:
    """log P of a row, with something added to what a layer gives at one of its tokens."""

    def add(output: Tensor) -> Tensor:
        moved = output.clone().reshape(len(row), -1)
        moved[position] += added
        return moved.reshape(output.shape)

    with replaced(editable.feed_forward[layer].module, add), torch.no_grad():
        log_probs = editable.model(input_ids=row[None]).logits[0].log_softmax(-1)
    return float(log_probs[:-1].gather(1, row[1:, None]).sum())


# Families whose norms compute in float32 whatever the dtype is: their differences are coarse.
@pytest.mark.parametrize(
    ("family", "dtype", "step", "near"),
    [
        ("gpt2", torch.float64, 1e-4, 1e-6),
        ("gpt_neox", torch.float64, 1e-4, 1e-6),
        ("mixtral", torch.float32, 0.03, 0.02),
    ],
)
def test_it_is_the_squared_gradient_of_the_texts_probability(
    family: str, dtype: torch.dtype, step: float, near: float
) -> None:
    editable = zoo.build(family, dtype=dtype)
    found = sensitivity(editable, IDS, LENGTH, [0, 1])
    assert not any(p.grad is not None for p in editable.model.parameters())
    directions = step * torch.eye(editable.d_model, dtype=dtype)
    for layer, squares in found.items():
        assert squares.shape == IDS.shape and squares[LENGTH - 1] == squares[-1] == 0, "nothing follows"
        for row, position, at in ((IDS[:LENGTH], 3, 3), (IDS[LENGTH:], 1, LENGTH + 1)):
            where = editable, row, layer, position
            slopes = [(said(*where, d) - said(*where, -d)) / (2 * step) for d in directions]
            assert float(squares[at]) == pytest.approx(sum(slope**2 for slope in slopes), rel=near)


def test_memory_that_fails_halves_the_rows_and_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    editable = zoo.build("gpt2", dtype=torch.float64)
    whole = sensitivity(editable, IDS.repeat(4), LENGTH, [1])[1]
    run, limits = Editable.run, [2, 1, 0]

    def narrow(self: Editable, **given: Tensor) -> object:
        if len(given["input_ids"]) > limits[0]:
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory")
        return run(self, **given)

    monkeypatch.setattr(Editable, "run", narrow)
    while limits[0]:
        torch.testing.assert_close(sensitivity(editable, IDS.repeat(4), LENGTH, [1])[1], whole)
        limits.pop(0)
    with pytest.raises(EditError, match="not enough memory to weigh a single row"):
        sensitivity(editable, IDS, LENGTH, [1])


def test_keys_count_by_it(tmp_path: Path) -> None:
    editable = zoo.build("llama", dtype=torch.float64)
    text = "the Eiffel tower is located in Paris . the old river flows through Rome . " * 12
    (tmp_path / "text.txt").write_text(text)
    corpus = Corpus(tmp_path / "text.txt", 150, 0, "fisher")
    moments = collect_moments(editable, editable.memories[1], corpus)
    ids = torch.tensor(editable.tokenizer(text)["input_ids"][:150])
    keys = []
    for first in range(0, 150, 64):
        with editable.feed_forward[1].keys() as entering, torch.no_grad():
            editable.model(input_ids=ids[None, first : first + 64])
        keys.append(entering().double())
    weights = sensitivity(editable, ids, 64, [1])[1] / ids.bincount()[ids]
    weighted = torch.cat(keys) * (weights / weights.mean())[:, None]
    torch.testing.assert_close(moments.sum, weighted.T @ torch.cat(keys), rtol=1e-4, atol=1e-3)
    assert moments.weighting == "fisher" and moments.source.endswith("weighted by fisher")


def test_it_is_of_the_whole_model() -> None:
    """Keys hang on what is below their layer, their weights on what is above it, too."""
    editable, corpus = zoo.build("gpt2"), Corpus(tokens=200, weighting="fisher")
    memory = editable.memories[0]
    first = collect(editable, [memory], corpus)[memory.address]
    with torch.no_grad():
        editable.memories[2].leaf.mul_(3.0)
    again = collect(editable, [memory], corpus)[memory.address]
    assert not torch.equal(first.sum, again.sum) and first.fingerprint == again.fingerprint
