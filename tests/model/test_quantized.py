"""A quantised model is read and measured; it is not written to, and its edits leave as adapters."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import transformers
import zoo
from making import made, on_disk, weights
from safetensors.torch import save_file
from shown import shown
from torch import Tensor, nn
from writing import CORPUS, FACT, SECOND, quick

import ffedit
from ffedit import Corpus, EditError
from ffedit.display.terminal.model_table import memory_table
from ffedit.editor.write import write as write_facts
from ffedit.model.editable import Editable
from ffedit.model.fingerprint import fingerprint
from ffedit.safety.guardrails import breaches


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
    return pack(zoo.trained("llama", True).model, kind, ".layers.")


def pack(model: nn.Module, kind: type[nn.Module], inside: str) -> Editable:
    """Quantise the linear maps whose paths contain `inside`."""
    linear = [(path, m) for path, m in model.named_modules() if isinstance(m, nn.Linear) and inside in path]
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
    assert "as an adapter" in shown(memory_table(editable), width=200) and "adapter" not in shown(
        memory_table(plain), width=200
    )
    trace = ffedit.locate(editable, FACT, samples=2)
    assert trace.effects.max() > 0 and trace.layer in range(3)
    assert ffedit.evaluate(editable, [FACT]).before.knew == 1.0
    x = torch.randn(3, 32, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(memory.attend(x), editable.model.model.layers[1].mlp(x), rtol=1e-4, atol=1e-5)
    (text := tmp_path / "text.txt").write_text("the Eiffel tower is located in Paris . " * 20)
    assert ffedit.inspect_memory(editable, "1.7", corpus=Corpus(text)).slot.index == 7
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
            EditError, match="is quantised, so it cannot be changed; export the edit as an adapter"
        ) as said:
            work()
        assert "\n" not in str(said.value) and "--format adapter" in str(said.value)
    for method, layers in (("ft", [1]), ("memit", [0, 1])):
        with pytest.raises(EditError, match="cannot write to layers"):
            write_facts(editable, facts, method, layers, quick(), CORPUS)
    for module in (memory.module for memory in editable.memories.values()):
        module.forward = torch.no_grad()(module.forward)  # type: ignore[method-assign]
    with pytest.raises(EditError, match="its kernels pass no gradient on this device"):
        write_facts(editable, facts, "memit", [1], quick(), CORPUS)
    assert zoo.unchanged(editable, before) and not (tmp_path / "out").exists() and not editable.history.edits


def test_a_mixture_with_a_quantised_expert_is_refused_before_the_work(monkeypatch: pytest.MonkeyPatch) -> None:
    editable = pack(zoo.build("qwen2_moe", True).model, Integers, ".shared_expert.")
    monkeypatch.setattr("ffedit.editor.write.moments_for", pytest.fail)
    with pytest.raises(EditError, match=r"layer 1 of .* is a mixture with quantised experts"):
        write_facts(editable, [FACT], "memit", [1], quick(), CORPUS)


def test_several_facts_of_a_quantised_model_are_written_in_one_round() -> None:
    """A second round would have to write the first into its weights."""
    editable = quantised(Packed)
    before = zoo.snapshot(editable)
    once, usual = (
        write_facts(editable, [FACT, SECOND], "memit", [1], quick(rounds=rounds), CORPUS) for rounds in (1, 2)
    )
    at = editable.memories[1].address
    assert usual.rank == 2 and torch.equal(once.updates[at].dense, usual.updates[at].dense)
    assert zoo.unchanged(editable, before)


@kinds
@pytest.mark.usefixtures("verified_here")
def test_an_edit_of_a_quantised_model_is_measured_beside_it_and_leaves_as_an_adapter(
    tmp_path: Path, kind: type[nn.Module]
) -> None:
    editable = quantised(kind)
    memory, before, first = editable.memories[1], zoo.snapshot(editable), zoo.logits(editable.model)
    edit = write_facts(editable, [FACT], "memit", [1], quick(), CORPUS)
    keys, values = edit.keys[memory.address], edit.values[memory.address]
    delta = edit.updates[memory.address]
    wanted = values - memory.value.double() @ keys
    assert float((delta @ keys - wanted).norm()) < 0.05 * float(wanted.norm())
    report = ffedit.evaluate(editable, [FACT], edit)
    assert report.after is not None and report.after.efficacy_magnitude > report.before.efficacy_magnitude
    assert not [b for b in breaches(editable, edit, report) if b.limit == "rounding"]
    with edit.applied(editable):
        edited = zoo.logits(editable.model)
    # The same with plain numbers: what the quantised module gives, and what is beside it.
    plain = nn.Linear(memory.d_ff, memory.shape[0], bias=False)
    plain.weight = nn.Parameter((memory.value.double() + delta.dense).float())
    module = editable.model.get_submodule(memory.name)
    editable.model.set_submodule(memory.name, plain)
    torch.testing.assert_close(zoo.logits(editable.model), edited, rtol=1e-4, atol=1e-4)
    editable.model.set_submodule(memory.name, module)
    assert zoo.unchanged(editable, before) and torch.equal(zoo.logits(editable.model), first)
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
    edit = write_facts(editable, [FACT], "rome", [1], quick(), CORPUS)
    before = zoo.logits(model)
    with edit.applied(editable):
        assert not torch.equal(zoo.logits(model), before)
    assert torch.equal(zoo.logits(model), before)
    with pytest.raises(EditError, match="is quantised, so it cannot be changed"):
        edit.apply_(editable)


@pytest.mark.usefixtures("verified_here")
def test_fp8_is_edited_unpacked_and_exported_without_its_quantisation(tmp_path: Path) -> None:
    """transformers unpacks it where no device multiplies in FP8; the export's config declares no FP8 any more."""
    if torch.accelerator.is_available():
        pytest.skip("a device may multiply in FP8")
    base = on_disk("llama", tmp_path / "base", torch.bfloat16, shards="1GB")
    packed: dict[str, Tensor] = {}
    for name, weight in weights(base).items():
        packed[name] = weight
        if weight.ndim == 2 and "layers" in name:
            scale = weight.float().abs().max() / 448
            packed[name] = (weight.float() / scale).to(torch.float8_e4m3fn)
            packed[name.replace("weight", "weight_scale_inv")] = scale.reshape(1, 1)
    save_file(packed, base / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((base / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    (base / "config.json").write_text(json.dumps(config))
    editable = ffedit.load(base)
    assert editable.unpacked == "fp8" and not editable.memories[1].quantised
    assert "fp8 in its files, unpacked to bfloat16" in shown(memory_table(editable), width=200)
    edit = made(editable, {1: 1})
    for i, asked in enumerate((editable, base)):
        folder = ffedit.export(asked, edit, tmp_path / f"out{i}").folder
        assert "quantization_config" not in json.loads((folder / "config.json").read_text())
        assert {weight.dtype for weight in weights(folder).values()} == {torch.bfloat16}
        with edit.applied(editable):
            assert torch.equal(zoo.logits(ffedit.load(folder).model), zoo.logits(editable.model))
    assert ffedit.export(base, edit, tmp_path / "adapter", format="adapter").folder.is_dir()
