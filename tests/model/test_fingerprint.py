"""The fingerprint says which weights these are, and reads each of them once for each state that it was in."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import zoo
from making import made
from torch import Tensor
from writing import CORPUS, FACT, quick

import ffedit
from ffedit.model.editable import Editable
from ffedit.model.fingerprint import fingerprint


@contextmanager
def counted(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """The sizes of the weights that are summed inside the block."""
    module = sys.modules[fingerprint.__module__]
    sizes: list[int] = []
    summed: Callable[[Tensor], int] = vars(module)["_summed"]

    def count(flat: Tensor) -> int:
        sizes.append(len(flat))
        return summed(flat)

    with monkeypatch.context() as patch:
        patch.setattr(module, "_summed", count)
        yield sizes


def afresh(editable: Editable, below: int | None = None) -> str:
    """The fingerprint of one who remembers nothing; what is remembered stays."""
    kept, editable.hashed = editable.hashed, {}
    try:
        return fingerprint(editable, below)
    finally:
        editable.hashed = kept


def test_an_edit_and_its_evaluation_read_each_weight_once_for_each_state(monkeypatch: pytest.MonkeyPatch) -> None:
    editable = zoo.trained("llama")
    editable.hashed = {}
    count = len(list(editable.model.parameters()))
    with counted(monkeypatch) as sizes:
        edit = ffedit.edit(editable, FACT, "rome", layers=[1], config=quick(), stats=CORPUS)
        made = len(sizes)
        assert count <= made <= count + 2, "a value matrix that was tried is another state"
        ffedit.evaluate(editable, FACT, edit)
        assert len(sizes) <= made + 2
        first = fingerprint(editable)
        made = len(sizes)
        assert fingerprint(editable) == first == afresh(editable) and fingerprint(editable, 1)
        assert len(sizes) == made + count, "only the one that forgot reads again"


def scaled(weight: Tensor) -> None:
    with torch.no_grad():
        weight.mul_(1.5)


def entry(weight: Tensor) -> None:
    """One entry, which the sample of a small weight holds too; the sum of a large one tells."""
    with torch.no_grad():
        weight[-1, -1] += 1


def behind(weight: Tensor) -> None:
    weight.data.copy_(weight.data * 1.5)


def replace_output(weight: Tensor) -> None:
    weight.data = weight.data.clone() * 1.5


def stepped(weight: Tensor) -> None:
    weight.requires_grad_(True)
    weight.grad = torch.ones_like(weight)
    torch.optim.Adam([weight], lr=0.1).step()
    weight.grad = None
    weight.requires_grad_(False)


@pytest.mark.parametrize("change", [scaled, entry, behind, replace_output, stepped])
def test_any_way_of_writing_to_a_weight_changes_the_fingerprint(change: Callable[[Tensor], None]) -> None:
    editable = zoo.build("gpt2")
    weight = editable.memories[1].leaf
    before = {below: fingerprint(editable, below) for below in (None, 1, 2)}
    change(weight)
    now = {below: fingerprint(editable, below) for below in (None, 1, 2)}
    assert now == {below: afresh(editable, below) for below in now}
    assert now[None] != before[None] and now[2] != before[2] and now[1] == before[1]


def test_a_state_dict_a_new_parameter_and_undo_are_seen() -> None:
    editable = zoo.build("llama")
    before, kept = fingerprint(editable), {name: w.clone() for name, w in editable.model.state_dict().items()}
    edit = made(editable, {1: 1})
    edit.apply_(editable)
    edited = fingerprint(editable)
    assert edited == afresh(editable) != before
    edit.undo_(editable)
    assert fingerprint(editable) == before
    module: Any = editable.memories[2].module
    module.weight = torch.nn.Parameter(module.weight * 2)
    assert fingerprint(editable) == afresh(editable) != before
    editable.model.load_state_dict(kept)
    assert fingerprint(editable) == before


def test_a_write_behind_torch_that_the_sample_misses_is_seen_with_a_new_cache() -> None:
    editable = zoo.build("gpt2")
    editable.memories[1].module.weight = torch.nn.Parameter(torch.zeros(256, 64))
    before = fingerprint(editable)
    editable.memories[1].leaf.data[0, 1] = 1.0  # the sample takes every fourth entry
    assert fingerprint(editable) == before, "torch counts no write through .data"
    editable.hashed = {}
    assert fingerprint(editable) == afresh(editable) != before


def test_an_added_token_changes_the_fingerprint() -> None:
    editable = zoo.build("gpt2")
    before = fingerprint(editable)
    editable.tokenizer.add_tokens(["<another>"])
    assert fingerprint(editable) == afresh(editable) != before
