"""Weights in 16 bits, tied, in shards: an edit lands as it should, rounded once."""

from __future__ import annotations

from itertools import permutations
from pathlib import Path

import pytest
import torch
import transformers
import zoo
from making import made, on_disk, same, weights, written_by_hand
from shown import shown
from writing import CORPUS, FACT, quick

import ffedit
from ffedit.algebra.rounding import lost_in_rounding
from ffedit.display.terminal.show import edit_view
from ffedit.editor.write import write as write_facts
from ffedit.evaluator.responses import ask
from ffedit.safety.guardrails import Limits, breaches

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=str)


# 16 and 32 bits -----------------------------------------------------------------------------------


@dtypes
@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_the_sum_is_rounded_once_and_undone_to_the_bit(family: str, dtype: torch.dtype) -> None:
    editable = zoo.trained(family, True, dtype)
    before = zoo.snapshot(editable)
    W = editable.memories[1].value.clone()
    edit = write_facts(editable, [FACT], "memit", [1], quick(), CORPUS)
    assert zoo.unchanged(editable, before) and W.dtype == dtype
    delta = edit.updates[editable.memories[1].address].dense
    assert delta.dtype == torch.float64 and delta.norm() > 0
    with edit.applied(editable):
        assert torch.equal(editable.memories[1].value, (W.double() + delta).to(dtype))
    assert zoo.unchanged(editable, before)


@dtypes
def test_what_is_measured_is_what_is_in_the_rounded_weights(dtype: torch.dtype) -> None:
    editable = zoo.trained("gpt2", True, dtype)
    # So small that most of it is lost in 16 bits.
    edit = made(editable, {1: 1}, size=0.02)
    report = ffedit.evaluate(editable, [FACT], edit)
    rounded = zoo.trained("gpt2", True, dtype)
    memory = rounded.memories[1]
    memory.set_((memory.value.double() + edit.updates[memory.address].dense).to(dtype))
    assert report.after == ffedit.evaluate(editable, [FACT], edited=rounded).after
    text = editable.encode(FACT.text, FACT.target, FACT.span)
    with edit.applied(editable):
        assert ask(editable, [text]) == ask(rounded, [text])


def test_what_rounding_loses_is_told_with_the_adapter_that_keeps_it() -> None:
    for dtype, share in ((torch.bfloat16, 0.1), (torch.float16, 0.01), (torch.float32, 0.0)):
        editable = zoo.trained("gpt2", True, dtype)
        edit = made(editable, {1: 1}, size=0.01)
        memory = editable.memories[1]
        W, delta = memory.value.double(), edit.updates[memory.address].dense
        with edit.applied(editable):
            lost = float((memory.value.double() - W - delta).norm() / delta.norm())
        assert lost == pytest.approx(lost_in_rounding(W, delta, dtype)) and lost > share
        report = ffedit.evaluate(editable, [FACT], edit)
        said = [b.words for b in breaches(editable, edit, report, Limits(rounding=share)) if b.limit == "rounding"]
        kind = str(dtype).removeprefix("torch.")
        assert len(said) == 1 and f"{kind} rounds" in said[0] and f"{lost:.0%} of Δ is lost" in said[0]
        assert "--format adapter" in said[0]
        assert not any(b.limit == "rounding" for b in breaches(editable, edit, report, Limits(rounding=lost)))


@pytest.mark.usefixtures("verified_here")
def test_the_adapter_keeps_what_rounding_loses(tmp_path: Path) -> None:
    folder = on_disk("llama", tmp_path / "base", torch.bfloat16)
    editable = ffedit.load(folder)
    edit = made(editable, {1: 1}, size=0.01)
    ffedit.export(editable, edit, tmp_path / "adapter", format="adapter")
    stored = weights(tmp_path / "adapter")
    left, right = (next(v for name, v in stored.items() if f"lora_{side}" in name).double() for side in "BA")
    torch.testing.assert_close(left @ right, edit.updates[editable.memories[1].address].dense, rtol=1e-5, atol=1e-9)


# Tied and sharded ---------------------------------------------------------------------------------


@pytest.mark.usefixtures("verified_here")
@pytest.mark.parametrize(
    ("family", "dtype"), [("gpt2", torch.float32), ("gpt2", torch.float16), ("gemma", torch.bfloat16)], ids=str
)
def test_tied_embeddings_in_shards_stay_tied(tmp_path: Path, family: str, dtype: torch.dtype) -> None:
    folder = on_disk(family, tmp_path / "base", dtype)
    editable = ffedit.load(folder)
    assert editable.unembedding.weight is editable.embedding.weight
    embedding = editable.embedding.weight.clone()
    edit = made(editable, {0: 1, 2: 2})
    ffedit.export(editable, edit, tmp_path / "out")
    before, after = weights(folder), weights(tmp_path / "out")
    names = {p.name for p in folder.glob("*.safetensors")}
    assert len(names) > 2 and names == {p.name for p in (tmp_path / "out").glob("*.safetensors")}
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed == {editable.memories[layer].parameter for layer in (0, 2)}
    again = ffedit.load(tmp_path / "out")
    assert again.unembedding.weight is again.embedding.weight and again.model.dtype == editable.model.dtype
    with edit.applied(editable):
        assert torch.equal(zoo.logits(again.model), zoo.logits(editable.model))
        assert torch.equal(editable.embedding.weight, embedding)


# Computed in another precision than the checkpoint's -------------------------------------------------


@pytest.mark.usefixtures("tensors_only")
@pytest.mark.parametrize(("stored", "computed"), permutations(["float32", "bfloat16", "float16"], 2))
def test_an_edit_is_rounded_to_the_bases_dtype_whatever_is_computed_in(
    tmp_path: Path, stored: str, computed: str
) -> None:
    kind = getattr(torch, stored)
    base = on_disk("llama", tmp_path / "base", kind)
    editable = ffedit.load(base, device="cpu", dtype=computed)
    memory, edit = editable.memories[1], made(editable, {1: 1})
    used = torch.float32 if computed == "float16" else getattr(torch, computed)  # on a CPU
    assert memory.saved_dtype == kind and memory.weight.dtype == used
    sum_ = memory.value.double() + edit.updates[memory.address].dense
    with edit.applied(editable):
        assert torch.equal(memory.value, sum_.to(kind).to(used))
    out = ffedit.export(editable, edit, tmp_path / "out").folder
    assert same(weights(out), written_by_hand(weights(base), editable, edit))
    assert same(weights(out), weights(ffedit.export(base, edit, tmp_path / "streamed").folder))
    edit.apply_(editable)
    second = made(editable, {2: 1}, seed=1)
    out = ffedit.export(editable, second, tmp_path / "memory").folder
    assert {tensor.dtype for tensor in weights(out).values()} == {kind}


@pytest.mark.usefixtures("verified_here")
def test_a_pair_is_taken_in_the_dtype_that_it_has(tmp_path: Path) -> None:
    base = on_disk("llama", tmp_path / "base", torch.bfloat16)
    model = transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    editable = ffedit.load((model, transformers.AutoTokenizer.from_pretrained(base)))
    edit = made(editable, {1: 1})
    out = weights(ffedit.export(editable, edit, tmp_path / "out").folder)
    with edit.applied(editable):
        name = editable.memories[1].parameter
        assert out[name].dtype == torch.float32 and torch.equal(out[name], editable.memories[1].weight)


def test_an_edit_says_what_its_base_is_saved_in(tmp_path: Path) -> None:
    base = on_disk("llama", tmp_path / "base", torch.float16)
    editable = ffedit.load(base, device="cpu")
    edit = write_facts(editable, [FACT], "rome", [1], quick(), CORPUS)
    assert edit.provenance["dtype"] == "float16" and edit.computed_in == torch.float32
    lines = [line.split() for line in shown(edit_view(edit, tmp_path), width=200).splitlines()]
    assert all([*row] in lines for row in (("base", edit.base), ("dtype", "float16"), ("computed_in", "float32")))
