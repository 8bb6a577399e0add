"""Folders that hold no whole checkpoint say what they hold and what the next step is."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import zoo
from making import on_disk, weights
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

import ffedit
from ffedit import ModelError
from ffedit.files.shards import INDEX
from ffedit.files.tensor_ranges import contents
from ffedit.loading.load import local_folder

POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n"
PICKLED = "pytorch_model.bin"


@pytest.fixture
def base(tmp_path: Path) -> Path:
    """A checkpoint of three shards."""
    return on_disk("llama", tmp_path / "base", shards="40KB")


def refusal(folder: Path) -> str:
    """The one line with which a folder is refused, whoever asks for it."""
    lines = set()
    for asked in (ffedit.load, local_folder):
        with pytest.raises(ModelError) as caught:
            asked(folder)
        lines.add(str(caught.value))
    (line,) = lines
    assert "\n" not in line and str(folder) in line
    return line


def follow(line: str, tokenizer_of: Path, out: Path, **names: Any) -> Path:
    """Run the Python that a line ends with, save the tokenizer beside the model, and return the folder."""
    exec(line.rpartition(": ")[2], {"DIR": out, "AutoModelForCausalLM": AutoModelForCausalLM, **names})
    AutoTokenizer.from_pretrained(tokenizer_of).save_pretrained(out)
    return out


@pytest.mark.parametrize("file", ["model-00002-of-*.safetensors", "tokenizer.json", "config.json"])
def test_a_pointer_of_git_lfs_is_named(base: Path, file: str) -> None:
    (path,) = base.glob(file)
    path.write_bytes(POINTER)
    line = refusal(base)
    assert f"{path.name} is a Git LFS pointer" in line and line.endswith("lfs pull")


def test_a_pointer_in_place_of_a_gguf_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").write_bytes(POINTER)
    with pytest.raises(ModelError, match="a Git LFS pointer"):
        ffedit.load(tmp_path / "model.gguf")


def test_a_missing_shard_is_named(base: Path) -> None:
    lost = sorted(base.glob("*.safetensors"))[1]
    lost.unlink()
    count = len(list(base.glob("*.safetensors"))) + 1
    assert f"{lost.name} is missing, one of {count} files" in refusal(base)


def test_a_tensor_named_twice_is_refused(base: Path) -> None:
    index = base / INDEX
    before = index.read_text()
    first = next(iter(json.loads(before)["weight_map"]))
    index.write_text(before.replace('"weight_map": {', f'"weight_map": {{"{first}": "other.safetensors",'))
    assert f"it names {first} twice" in refusal(base)
    index.write_text(before)
    one, two = sorted(base.glob("*.safetensors"))[:2]
    name = next(iter(load_file(one)))
    save_file({**load_file(two), name: load_file(one)[name]}, two, metadata={"format": "pt"})
    with pytest.raises(ModelError, match=f"{name} is in both {one.name} and {two.name}"):
        ffedit.load(base)


@pytest.mark.parametrize("file", ["tf_model.h5", "consolidated.00.pth", ""])
def test_weights_that_are_not_read_are_named(base: Path, file: str) -> None:
    for path in base.glob("model*"):
        path.unlink()
    if file:
        (base / file).write_bytes(b"x")
    line = refusal(base)
    assert "no weights in it (model.safetensors, or" in line and (f"; {file} is not read" in line) is bool(file)
    (base / "model.gguf").write_bytes(b"GGUF")
    assert refusal(base).endswith(f"give its GGUF file: {base / 'model.gguf'}")


def test_a_folder_beside_the_model_s_names_it(base: Path) -> None:
    assert refusal(base.parent).endswith(f"give the folder that has it: {base}")
    for name in ("checkpoint-500", "checkpoint-1000"):
        (base.parent / name).mkdir()
        (base.parent / name / "config.json").write_text("{}")
    assert refusal(base.parent).endswith("checkpoint-1000")
    shard = next(iter(sorted(base.glob("*.safetensors"))))
    assert refusal(shard).endswith(f"give the folder that holds it: {base}")


def test_a_missing_tokenizer_is_named(base: Path) -> None:
    for path in base.glob("*token*"):
        path.unlink()
    with pytest.raises(ModelError, match=r"no tokenizer in it \(tokenizer.json was expected\)"):
        ffedit.load(base)


@pytest.mark.parametrize("method", ["gptq", "awq", "bitsandbytes"])
def test_what_becomes_of_a_quantised_model_is_said(base: Path, method: str) -> None:
    declared = {"quant_method": method, "bits": 4, "group_size": 128, "load_in_4bit": True}
    config = json.loads((base / "config.json").read_text())
    (base / "config.json").write_text(json.dumps({**config, "quantization_config": declared}))
    with pytest.raises(ModelError, match=f"quantised \\({method}\\)") as caught:
        ffedit.load(base)
    assert "exported as an adapter; or edit the model in 16 or 32 bits" in str(caught.value)


# Pickled weights ----------------------------------------------------------------------------------


@pytest.mark.parametrize("shards", [1, 2])
def test_the_line_says_how_pickled_weights_are_saved(base: Path, tmp_path: Path, shards: int) -> None:
    tensors = weights(base)
    for path in base.glob("model*"):
        path.unlink()
    files = [PICKLED] if shards == 1 else [f"pytorch_model-{i + 1:05}-of-00002.bin" for i in range(2)]
    where = {name: files[i % shards] for i, name in enumerate(tensors)}
    for file in files:
        torch.save({name: tensors[name] for name in tensors if where[name] == file}, base / file)
    if shards > 1:
        (base / f"{PICKLED}.index.json").write_text(json.dumps({"metadata": {}, "weight_map": where}))
    line = refusal(base)
    assert f"its weights are pickled ({files[0]})" in line
    with pytest.raises(ModelError, match="its weights are pickled"):
        contents(base)
    found = weights(follow(line, base, tmp_path / "whole"))
    assert ffedit.load(tmp_path / "whole").tokenizer.vocab_size == zoo.VOCAB
    assert found.keys() == tensors.keys() and all(torch.equal(found[name], tensors[name]) for name in found)


# Adapters -----------------------------------------------------------------------------------------


@pytest.fixture
def adapted(base: Path, tmp_path: Path) -> tuple[Path, Any]:
    """A folder with an adapter of attention and feed-forward layers, and the live model."""
    peft = pytest.importorskip("peft")
    torch.manual_seed(0)
    config = peft.LoraConfig(
        r=2, target_modules=["q_proj", "down_proj"], init_lora_weights=False, task_type="CAUSAL_LM"
    )
    model = peft.get_peft_model(ffedit.load(base).model, config).eval()
    model.save_pretrained(tmp_path / "adapter")
    return tmp_path / "adapter", model


def test_the_line_says_how_an_adapter_is_merged(adapted: tuple[Path, Any], base: Path, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    folder, model = adapted
    line = refusal(folder)
    assert "is a PEFT adapter, not a model" in line
    whole = follow(line, base, tmp_path / "whole", AutoPeftModelForCausalLM=peft.AutoPeftModelForCausalLM)
    expected, found = zoo.logits(model), zoo.logits(ffedit.load(whole).model)
    assert torch.allclose(found, expected, atol=1e-4 * float(expected.abs().max()))
    assert not torch.allclose(found, zoo.logits(ffedit.load(base).model), atol=1e-2)


def test_a_folder_with_a_model_and_an_adapter_is_refused_with_both_ways(adapted: tuple[Path, Any], base: Path) -> None:
    for path in adapted[0].glob("adapter*"):
        (base / path.name).write_bytes(path.read_bytes())
    line = refusal(base)
    assert "holds a model and a PEFT adapter" in line and "move adapter_config.json elsewhere" in line
    assert "merge_and_unload()" in line


def test_a_live_adapter_is_refused_with_the_hint(adapted: tuple[Path, Any]) -> None:
    for model in (adapted[1], adapted[1].get_base_model()):
        with pytest.raises(ModelError, match=r"this model contains a PEFT adapter.*merge_and_unload\(\)"):
            ffedit.load((model, zoo.words()))
    merged = adapted[1].merge_and_unload()
    assert len(ffedit.load((merged, zoo.words())).layers) == zoo.DEPTH
