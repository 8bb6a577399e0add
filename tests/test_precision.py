"""Weights in 16 bits, tied, in shards, compiled, quantised: an edit lands as it should, and nothing else is touched."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
import zoo
from making import made, on_disk, same, verified_here, weights, written_by_hand  # noqa: F401
from rich.console import Console, RenderableType
from torch import Tensor, nn
from writing import CORPUS, FACT, quick

import ffedit
from ffedit import Corpus, EditError, Fact, editor
from ffedit.anatomy import Editable
from ffedit.card import model_card
from ffedit.describe import anatomy_table
from ffedit.fingerprint import fingerprint
from ffedit.guardrails import Limits, breaches, lost_in_rounding
from ffedit.readout import answer_log_probs
from ffedit.showing import edit_view

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=str)
IDS = torch.arange(2, 12)[None]


def logits(model: Any) -> Tensor:
    with torch.no_grad():
        found: Tensor = model(input_ids=IDS).logits
    return found


def printed(view: RenderableType) -> str:
    shown = io.StringIO()
    Console(file=shown, width=200).print(view)
    return shown.getvalue()


# 16 and 32 bits -----------------------------------------------------------------------------------


@dtypes
@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_the_sum_is_rounded_once_and_undone_to_the_bit(family: str, dtype: torch.dtype) -> None:
    editable = zoo.trained(family, True, dtype)
    before = zoo.snapshot(editable)
    W = editable.memories[1].value.clone()
    edit = editor.write(editable, [FACT], "memit", [1], quick(), CORPUS)
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
        assert torch.equal(answer_log_probs(editable, [text])[0], answer_log_probs(rounded, [text])[0])


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
        assert len(said) == 1 and f"{lost:.0%} of Δ is lost in {kind}" in said[0] and "--format adapter" in said[0]
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
@dtypes
@pytest.mark.parametrize("family", ["gpt2", "gemma"])
def test_shards_with_tied_embeddings_stay_so(tmp_path: Path, family: str, dtype: torch.dtype) -> None:
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
        assert torch.equal(logits(again.model), logits(editable.model))
        assert torch.equal(editable.embedding.weight, embedding)


# Computed in another precision than the checkpoint's -------------------------------------------------

OTHERS = [
    ("bfloat16", "float32"),
    ("float16", "float32"),
    ("float16", "bfloat16"),
    ("bfloat16", "float16"),
    ("float32", "float16"),
    ("float32", "bfloat16"),
]
others = pytest.mark.parametrize(("stored", "computed"), OTHERS)


@pytest.mark.usefixtures("verified_here")
@others
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
    out = ffedit.export(editable, edit, tmp_path / "out")
    assert same(weights(out), written_by_hand(weights(base), editable, edit))
    assert same(weights(out), weights(ffedit.export(base, edit, tmp_path / "streamed")))
    edit.apply_(editable)
    second = made(editable, {2: 1}, seed=1)
    out = ffedit.export(editable, second, tmp_path / "memory")
    assert {tensor.dtype for tensor in weights(out).values()} == {kind}


@pytest.mark.usefixtures("verified_here")
def test_a_pair_is_taken_in_the_dtype_that_it_has(tmp_path: Path) -> None:
    base = on_disk("llama", tmp_path / "base", torch.bfloat16)
    model = transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    editable = ffedit.load((model, transformers.AutoTokenizer.from_pretrained(base)))
    edit = made(editable, {1: 1})
    out = weights(ffedit.export(editable, edit, tmp_path / "out"))
    with edit.applied(editable):
        name = editable.memories[1].parameter
        assert out[name].dtype == torch.float32 and torch.equal(out[name], editable.memories[1].weight)


def test_a_number_that_the_computing_dtype_cannot_hold_is_refused(tmp_path: Path) -> None:
    editable = zoo.trained("gpt2", True, torch.float16)
    memory = replace(editable.memories[1], saved_dtype=torch.float32)
    editable.feed_forward[1] = replace(editable.feed_forward[1], parts=(memory,))
    vars(editable).pop("memories")
    with pytest.raises(EditError, match="too large for the weights"):
        made(editable, {1: 1}, size=1e3).apply_(editable)


def test_an_edit_says_what_its_base_is_saved_in(tmp_path: Path) -> None:
    base = on_disk("llama", tmp_path / "base", torch.float16)
    editable = ffedit.load(base, device="cpu")
    edit = editor.write(editable, [FACT], "rome", [1], quick(), CORPUS)
    assert edit.provenance["dtype"] == "float16" and edit.computed_in == torch.float32
    assert f"base weights: fingerprint {edit.base}, float16\n" in model_card(str(base), [edit])
    assert f"fingerprint {edit.base}, float16, computed in float32 " in printed(edit_view(edit, tmp_path))
    both = edit + made(editable, {0: 1}, fact=Fact("Marie Curie", "{} stands in", "Spain"))
    assert both.provenance["dtype"] == "float16" and both.computed_in == torch.float32


# As they were found -------------------------------------------------------------------------------


def state(model: nn.Module) -> list[Any]:
    """Everything about a model but its weights that ffedit might leave changed."""
    hooks = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    modules = [
        (name, m.training, m._compiled_call_impl, "forward" in vars(m), [len(getattr(m, hook)) for hook in hooks])
        for name, m in model.named_modules()
    ]
    return [*modules, *((name, p.requires_grad, p.grad) for name, p in model.named_parameters())]


def everything(editable: Editable) -> list[Any]:
    """What is done to a model, and what comes of it as plain numbers."""
    fact = Fact(FACT.subject, FACT.prompt, FACT.target, FACT.previous, paraphrases=("{} stands in",))
    trace = ffedit.locate(editable, fact, "state", samples=2)
    estimate = ffedit.locate(editable, fact, samples=2, approximate=True)
    edit = editor.write(editable, [fact], "memit", [1], quick(), CORPUS)
    tuned = editor.write(editable, [fact], "ft", [1], quick(tune_steps=2))
    report = ffedit.evaluate(editable, [fact], edit)
    assert report.after is not None
    solved = [one.updates[editable.memories[1].address].dense.tolist() for one in (edit, tuned)]
    found = trace.to_dict(), estimate.effects.tolist(), solved, report.before.to_dict(), report.after.to_dict()
    return json.loads(json.dumps(found))


def dropping() -> nn.Module:
    """A model that knows something, and that drops a tenth of it in every pass while it is trained."""
    model = zoo.trained("gpt2", True).model
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.1
    return model


def test_a_model_in_training_is_read_in_evaluation_and_trains_on() -> None:
    expected = everything(zoo.trained("gpt2", True))
    model = dropping().train()
    model.transformer.h[2].eval()
    model.transformer.ln_f.weight.requires_grad_(False)
    model.transformer.h[0].register_forward_hook(lambda *_: None)
    before = state(model)
    editable = ffedit.load((model, zoo.words(True)))
    assert editable.model is model and state(model) == before
    assert everything(editable) == expected and state(model) == before
    assert not torch.equal(logits(model), logits(model)), "it drops again"


def test_it_trains_on_after_an_error_too() -> None:
    model = dropping().train()
    editable, before = ffedit.load((model, zoo.words(True))), state(model)

    def fail(*_: Any) -> None:
        assert not model.training and not model.transformer.drop.training
        raise RuntimeError("on the way")

    handle = model.transformer.h[1].register_forward_hook(fail)
    for work in (
        lambda: ffedit.locate(editable, FACT, samples=2),
        lambda: editor.write(editable, [FACT], "rome", [1], quick(), CORPUS),
        lambda: ffedit.evaluate(editable, [FACT]),
    ):
        with pytest.raises(RuntimeError, match="on the way"):
            work()
    handle.remove()
    assert state(model) == before


def compiled_whole(model: nn.Module, backend: Any) -> Any:
    return torch.compile(model, backend=backend)


def compiled_in_place(model: nn.Module, backend: Any) -> Any:
    model.compile(backend=backend)
    return model


def compiled_by_layer(model: nn.Module, backend: Any) -> Any:
    for layer in model.transformer.h:  # type: ignore[union-attr]
        layer.compile(backend=backend)
    return model


@pytest.mark.parametrize("compiled", [compiled_whole, compiled_in_place, compiled_by_layer])
def test_a_compiled_model_is_worked_on_and_stays_compiled(compiled: Callable[[nn.Module, Any], Any]) -> None:
    expected = ffedit.locate(zoo.trained("gpt2", True), FACT, samples=2)
    graphs: list[Any] = []

    def backend(graph: Any, _: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    model = compiled(zoo.trained("gpt2", True).model, backend)
    first = logits(model)
    count = len(graphs)
    before = state(getattr(model, "_orig_mod", model))
    editable = ffedit.load((model, zoo.words(True)))
    assert editable.model is getattr(model, "_orig_mod", model)
    found = ffedit.locate(editable, FACT, samples=2)
    assert (found.effects == expected.effects).all() and found.effects.any()
    assert state(editable.model) == before and len(graphs) == count > 0, "nothing is compiled anew for our hooks"
    with made(editable, {1: 1}).applied(editable):
        torch.testing.assert_close(logits(model), logits(zoo_edited()), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(logits(model), first, rtol=1e-5, atol=1e-5)
    assert len(graphs) == count
    torch.compiler.reset()


def zoo_edited() -> nn.Module:
    """The same model with the same edit, never compiled."""
    editable = zoo.trained("gpt2", True)
    made(editable, {1: 1}).apply_(editable)
    return editable.model


# Quantised ----------------------------------------------------------------------------------------


class Packed(nn.Module):
    """W in 8 bits with a scale for each row, kept in buffers, as GPTQ and AWQ keep theirs."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        W = linear.weight.detach().float()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.bias = linear.bias
        self.register_buffer("scales", W.abs().amax(1, keepdim=True) / 127)
        self.register_buffer("levels", (W / self.scales).round().to(torch.int8))

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, (self.levels * self.scales).to(x), self.bias)


class Integers(nn.Linear):
    """The same in a parameter of whole numbers, as bitsandbytes keeps it."""

    def __init__(self, linear: nn.Linear) -> None:
        nn.Module.__init__(self)
        other = Packed(linear)
        self.in_features, self.out_features, self.bias = other.in_features, other.out_features, linear.bias
        self.weight = nn.Parameter(other.levels, requires_grad=False)
        self.scales = other.scales

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, (self.weight * self.scales).to(x), self.bias)


def quantised(kind: type[nn.Module]) -> Editable:
    """A model that knows something, all linear maps of its layers quantised."""
    model = zoo.trained("llama", True).model
    linear = [(path, m) for path, m in model.named_modules() if isinstance(m, nn.Linear) and ".layers." in path]
    for path, module in linear:
        model.set_submodule(path, kind(module))
    return ffedit.load((model, zoo.words(True)))


kinds = pytest.mark.parametrize("kind", [Packed, Integers])


@kinds
def test_a_quantised_model_is_read_and_measured(tmp_path: Path, kind: type[nn.Module]) -> None:
    plain, editable = zoo.trained("llama", True), quantised(kind)
    memory, W = editable.memories[1], plain.memories[1].value
    step = W.abs().amax(1, keepdim=True) / 127
    assert memory.quantised and memory.shape == W.shape and memory.dtype == torch.float32
    assert bool(((memory.value - W).abs() <= 0.51 * step).all()) and not torch.equal(memory.value, W)
    assert editable.resumable and editable.ragged and editable.probe_error < 1e-5
    assert fingerprint(editable) == fingerprint(quantised(kind)) != fingerprint(plain)
    other, below = quantised(kind), fingerprint(editable, 1)
    memory.held[-1].view(-1)[0] += 1
    assert fingerprint(editable) != fingerprint(other) and fingerprint(editable, 1) == below
    memory.held[-1].view(-1)[0] -= 1
    assert "as an adapter" in printed(anatomy_table(editable)) and "adapter" not in printed(anatomy_table(plain))
    trace = ffedit.locate(editable, FACT, samples=2)
    assert trace.effects.max() > 0 and trace.layer in range(3)
    assert ffedit.evaluate(editable, [FACT]).before.knew == 1.0
    x = torch.randn(3, 32, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(memory.attend(x), editable.model.model.layers[1].mlp(x), rtol=1e-4, atol=1e-5)
    (text := tmp_path / "text.txt").write_text("the Eiffel tower is located in Paris . " * 20)
    assert ffedit.inspect_memory(editable, "1.7", Corpus(text)).slot.index == 7
    assert ffedit.inspect_prompt(editable, "the Eiffel tower is located in").prompt


@kinds
def test_a_quantised_model_is_not_written_to(tmp_path: Path, kind: type[nn.Module]) -> None:
    editable = quantised(kind)
    edit = made(editable, {1: 1})
    before = zoo.snapshot(editable)
    facts = [FACT]
    for work in (
        lambda: edit.apply_(editable),
        lambda: editable.memories[1].write_(edit.updates[editable.memories[1].address]),
        lambda: ffedit.export(editable, edit, tmp_path / "out"),
    ):
        with pytest.raises(
            EditError, match="is quantised and is not written to; export the edit as an adapter"
        ) as said:
            work()
        assert "\n" not in str(said.value) and "--format adapter" in str(said.value)
    for method, layers in (("ft", [1]), ("memit", [0, 1])):
        with pytest.raises(EditError, match="is quantised, so that nothing can be written on the way"):
            editor.write(editable, facts, method, layers, quick(), CORPUS)
    for module in (part.module for part in editable.memories.values()):
        module.forward = torch.no_grad()(module.forward)  # type: ignore[method-assign]
    with pytest.raises(EditError, match="kernels that pass no gradient on this device"):
        editor.write(editable, facts, "memit", [1], quick(), CORPUS)
    assert zoo.unchanged(editable, before) and not (tmp_path / "out").exists() and not editable.history.edits


@kinds
@pytest.mark.usefixtures("verified_here")
def test_an_edit_of_a_quantised_model_is_measured_beside_it_and_leaves_as_an_adapter(
    tmp_path: Path, kind: type[nn.Module]
) -> None:
    editable = quantised(kind)
    memory, before, first = editable.memories[1], zoo.snapshot(editable), logits(editable.model)
    edit = editor.write(editable, [FACT], "memit", [1], quick(), CORPUS)
    keys, values = edit.keys[memory.address], edit.values[memory.address]
    delta = edit.updates[memory.address]
    wanted = values - memory.value.double() @ keys
    assert float((delta @ keys - wanted).norm()) < 0.05 * float(wanted.norm())
    report = ffedit.evaluate(editable, [FACT], edit)
    assert report.after is not None and report.after.efficacy_magnitude > report.before.efficacy_magnitude
    assert not [b for b in breaches(editable, edit, report) if b.limit == "rounding"]
    with edit.applied(editable):
        edited = logits(editable.model)
    # The same with plain numbers: what the quantised module gives, and what is beside it.
    plain = nn.Linear(memory.d_ff, memory.shape[0], bias=False)
    plain.weight = nn.Parameter((memory.value.double() + delta.dense).float())
    module = editable.model.get_submodule(memory.name)
    editable.model.set_submodule(memory.name, plain)
    torch.testing.assert_close(logits(editable.model), edited, rtol=1e-4, atol=1e-4)
    editable.model.set_submodule(memory.name, module)
    assert zoo.unchanged(editable, before) and torch.equal(logits(editable.model), first)
    ffedit.export(editable, edit, tmp_path / "adapter", format="adapter")
    stored = weights(tmp_path / "adapter")
    name = f"base_model.model.{memory.name}"
    product = stored[f"{name}.lora_B.weight"].double() @ stored[f"{name}.lora_A.weight"].double()
    torch.testing.assert_close(product, delta.dense, rtol=1e-5, atol=1e-7)


def test_what_a_library_packed_is_what_it_unpacks(tmp_path: Path) -> None:
    pytest.importorskip("torchao")
    from torchao.quantization import Int8WeightOnlyConfig

    folder = on_disk("llama", tmp_path / "base", torch.bfloat16)
    eight = transformers.TorchAoConfig(Int8WeightOnlyConfig())
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, quantization_config=eight)
    editable = ffedit.load((model, zoo.words(True)))
    memory = editable.memories[1]
    assert memory.quantised and memory.dtype == torch.bfloat16
    assert torch.equal(memory.value, model.get_submodule(memory.name).weight.dequantize().to(torch.bfloat16))
    assert ffedit.locate(editable, FACT, samples=2).layer in range(3)
    edit = editor.write(editable, [FACT], "rome", [1], quick(), CORPUS)
    before = logits(model)
    with edit.applied(editable):
        assert not torch.equal(logits(model), before)
    assert torch.equal(logits(model), before)
    with pytest.raises(EditError, match="is quantised and is not written to"):
        edit.apply_(editable)
