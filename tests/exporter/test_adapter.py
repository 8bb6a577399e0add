"""An edit as a LoRA adapter of PEFT: the same logits as the edited model."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
import zoo
from making import made, on_disk
from safetensors.torch import load_file
from shell import disk, shell
from transformers import AutoModelForCausalLM, PreTrainedModel

import ffedit
from ffedit import CheckError, EditError
from ffedit.exporter.adapter import balanced
from ffedit.loading.names import EMBEDDED

peft: Any = pytest.importorskip("peft")
here = pytest.mark.usefixtures("verified_here")
IDS = torch.arange(12)[None] * 7 % 97


@torch.no_grad()
def logits(model: Any) -> torch.Tensor:
    found: torch.Tensor = model.eval()(input_ids=IDS).logits
    return found.double()


def plain(folder: Path | str) -> PreTrainedModel:
    """A model as anybody loads it, in float32."""
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return model.eval()


@here
@pytest.mark.parametrize("family", ["gpt2", "llama", "gpt_neo", "gpt2_square", "opt"])
def test_peft_gives_the_logits_of_the_edited_model(family: str, tmp_path: Path) -> None:
    base, ranks = on_disk(family, tmp_path / "base"), {0: 3, 2: 1}
    editable = ffedit.load(base)
    edit = made(editable, ranks)
    done = ffedit.export(base, edit, tmp_path / "adapter", format="adapter")
    assert done.checked.peft and done.checked.logits and done.moved is None
    adapted = peft.PeftModel.from_pretrained(plain(base), tmp_path / "adapter")
    before = logits(plain(base))
    with edit.applied(editable):
        wanted = logits(editable.model)
    found = logits(adapted)
    assert torch.allclose(found, wanted, atol=1e-4 * float(wanted.abs().max()))
    assert float((wanted - before).abs().max()) > 1e-2, "the edit does something"
    touched = {name for name, module in adapted.base_model.model.named_modules() if hasattr(module, "lora_A")}
    assert touched == {editable.memories[layer].name for layer in ranks}, "and attention's c_proj is left alone"
    merged = adapted.merge_and_unload()
    assert torch.allclose(logits(merged), wanted, atol=1e-4 * float(wanted.abs().max()))


@here
@pytest.mark.parametrize(
    ("family", "loaded"), [("deepseek_v3", True), ("deepseek_v3", False), ("qwen2_moe", True), ("llama4", False)]
)
def test_peft_is_not_led_to_the_experts_by_the_name_of_a_dense_layer_or_of_a_shared_expert(
    family: str, loaded: bool, tmp_path: Path
) -> None:
    base = on_disk(family, tmp_path / "base")
    editable = ffedit.load(base)
    whole = [at for at, memory in editable.memories.items() if not memory.parameter.endswith("]")]
    ranks_of = {at: 1 + i for i, at in enumerate(whole)}  # PEFT warns that it ignores them, and does not
    kinds = {
        "dense": {at: rank for at, rank in ranks_of.items() if at.expert is None},
        "shared": {at: rank for at, rank in ranks_of.items() if at.expert},
    }
    assert kinds["shared"] and bool(kinds["dense"]) is (family == "deepseek_v3")
    for kind, ranks in kinds.items():
        if ranks:
            edit = made(editable, ranks)
            ffedit.export(editable if loaded else base, edit, tmp_path / kind, format="adapter")
            adapted = peft.PeftModel.from_pretrained(plain(base), tmp_path / kind)
            with edit.applied(editable):
                wanted = logits(editable.model)
            assert torch.allclose(logits(adapted), wanted, atol=1e-4 * float(wanted.abs().max())), kind


@here
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_base_of_16_bits_is_rounded_where_an_adapter_is_not(dtype: torch.dtype, tmp_path: Path) -> None:
    base = on_disk("gpt2", tmp_path / "base", dtype)
    done = ffedit.export(base, made(ffedit.load(base), {0: 1, 2: 2}, size=0.5), tmp_path / "adapter", format="adapter")
    assert done.checked.logits and done.checked.peft


@here
def test_ranks_are_each_layers_own(tmp_path: Path) -> None:
    base = on_disk("gpt2", tmp_path / "base")
    edit = made(ffedit.load(base), {0: 3, 2: 1})
    out = ffedit.export(base, edit, tmp_path / "adapter", format="adapter").folder
    config = json.loads((out / "adapter_config.json").read_text())
    assert config["target_modules"] == ["transformer.h.0.mlp.c_proj", "transformer.h.2.mlp.c_proj"]
    assert config["rank_pattern"] == config["alpha_pattern"] == dict(zip(config["target_modules"], (3, 1), strict=True))
    assert config["fan_in_fan_out"] and config["base_model_name_or_path"] == "base"
    shapes = {name: list(tensor.shape) for name, tensor in load_file(out / "adapter_model.safetensors").items()}
    assert shapes["base_model.model.transformer.h.0.mlp.c_proj.lora_A.weight"] == [3, 128]
    assert shapes["base_model.model.transformer.h.0.mlp.c_proj.lora_B.weight"] == [32, 3]
    assert "PeftModel" in (out / "README.md").read_text() and (out / "ffedit_edits" / "000").is_dir()


def test_factors_are_balanced_and_of_the_true_rank() -> None:
    generator = torch.Generator().manual_seed(0)
    left = 1e4 * torch.randn(32, 2, generator=generator, dtype=torch.float64)
    right = 1e-6 * torch.randn(2, 48, generator=generator, dtype=torch.float64)
    update = ffedit.LowRank(torch.cat([left, left], 1), torch.cat([right, right]))  # rank 2 written as 4
    b, a = balanced(update)
    assert b.shape == (32, 2) and a.shape == (2, 48)
    assert torch.allclose(b @ a, update.dense, rtol=1e-10, atol=1e-12)
    assert torch.allclose(b.norm(dim=0), a.norm(dim=1))
    short = b.half().double() @ a.half().double()
    assert float((short - update.dense).norm()) < 1e-3 * update.norm()


def test_atlas_in_a_fresh_process(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    editable = ffedit.load("atlas")
    edit = made(editable, {0: 1, 2: 2}, size=0.02)
    edit.save(tmp_path / "e")
    done = shell(capsys, "export", tmp_path / "e", "--out", tmp_path / "adapter", "--format", "adapter")
    assert done.code == 0 and "2 tensors, logits" in done.out
    adapted = peft.PeftModel.from_pretrained(plain(EMBEDDED["atlas"]), tmp_path / "adapter")
    with edit.applied(editable):
        wanted = logits(editable.model)
    # The adapter is added to float16 weights in full; in the checkpoint the sum is rounded to float16.
    assert torch.allclose(logits(adapted), wanted, atol=2e-3 * float(wanted.abs().max()))


@here
def test_a_quantised_base_takes_it(tmp_path: Path) -> None:
    torchao = pytest.importorskip("torchao")
    base = on_disk("llama", tmp_path / "base", torch.bfloat16)
    editable = ffedit.load(base)
    edit = made(editable, {0: 2, 2: 1})
    ffedit.export(base, edit, tmp_path / "adapter", format="adapter")
    eight = transformers.TorchAoConfig(torchao.quantization.Int8WeightOnlyConfig())
    quantised = AutoModelForCausalLM.from_pretrained(base, dtype=torch.bfloat16, quantization_config=eight)
    before = logits(editable.model)
    lost = float((logits(quantised) - before).norm())
    with edit.applied(editable):
        wanted = logits(editable.model)
    found = logits(peft.PeftModel.from_pretrained(quantised, tmp_path / "adapter"))
    assert float((found - wanted).norm()) < 1.5 * lost < float((wanted - before).norm())


@here
def test_a_quantised_base_of_the_hub_is_loaded_and_named_as_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    editable = zoo.build("llama")
    asked: dict[str, Any] = {}

    def load(name: str, **options: Any) -> ffedit.Editable:
        asked.update(options)
        return editable

    config = SimpleNamespace(quantization_config={"quant_method": "gptq"})
    monkeypatch.setattr("ffedit.exporter.exporting.local_folder", lambda *_: tmp_path)
    monkeypatch.setattr("ffedit.exporter.exporting.written_config", lambda _: config)
    monkeypatch.setattr("ffedit.exporter.exporting.load_with_edits", load)
    options: dict[str, Any] = {"revision": "v1", "trust_remote_code": True}
    ffedit.export("owner/name", made(editable, {1: 1}), tmp_path / "out", format="adapter", **options)
    assert asked == options
    assert json.loads((tmp_path / "out" / "adapter_config.json").read_text())["revision"] == "v1"


@here
def test_dense_updates_are_refused(tmp_path: Path) -> None:
    base = on_disk("gpt2", tmp_path / "base")
    edit = made(ffedit.load(base), {1: 2}, dense=True)
    before = disk(tmp_path)
    with pytest.raises(EditError, match="export a checkpoint") as caught:
        ffedit.export(base, edit, tmp_path / "adapter", format="adapter")
    assert "\n" not in str(caught.value) and disk(tmp_path) == before


@here
def test_an_adapter_of_another_edit_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    base = on_disk("gpt2", tmp_path / "base")
    monkeypatch.setattr("ffedit.exporter.adapter.balanced", lambda update: (2 * update.left, update.right))
    with pytest.raises(CheckError, match="product"):
        ffedit.export(base, made(ffedit.load(base), {1: 2}), tmp_path / "adapter", format="adapter")


@here
def test_an_adapter_that_was_not_tried_promises_no_logits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    editable = zoo.build("gpt2", True)  # of which there is no base on disk
    assert not ffedit.export(editable, made(editable, {1: 2}), tmp_path / "out", format="adapter").checked.logits
    base = on_disk("gpt2", tmp_path / "base")
    (edit := made(ffedit.load(base), {1: 2})).save(tmp_path / "e")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    checked = ffedit.export(base, edit, tmp_path / "none", format="adapter").checked
    assert not checked.logits and checked.peft is False
    words = ("export", tmp_path / "e", "--model", base, "--out", tmp_path / "adapter", "--format", "adapter")
    done = shell(capsys, *words)
    assert done.code == 0 and "not tried with PEFT" in done.out and "(logits not compared)" in done.out
