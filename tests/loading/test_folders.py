"""Folders that hold no whole checkpoint say what they hold and what the next step is; `convert` takes that step."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import zoo
from making import on_disk, weights
from safetensors.torch import load_file, save_file
from shell import shell

import ffedit
from ffedit import FFEditError, ModelError
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


def pickled(base: Path, shards: int) -> dict[str, torch.Tensor]:
    """Turn a checkpoint's weights into pickled ones, of one file or several."""
    tensors = weights(base)
    for path in base.glob("model*"):
        path.unlink()
    if shards == 1:
        torch.save(tensors, base / PICKLED)
        return tensors
    where = {name: f"pytorch_model-{i % shards + 1:05}-of-{shards:05}.bin" for i, name in enumerate(tensors)}
    for file in set(where.values()):
        torch.save({name: tensors[name] for name in tensors if where[name] == file}, base / file)
    (base / f"{PICKLED}.index.json").write_text(json.dumps({"metadata": {}, "weight_map": where}))
    return tensors


@pytest.mark.parametrize("shards", [1, 2])
def test_the_command_in_the_line_converts_pickled_weights(
    base: Path, tmp_path: Path, shards: int, capsys: pytest.CaptureFixture[str]
) -> None:
    expected = pickled(base, shards)
    line = refusal(base)
    assert "its weights are pickled" in line
    command = line.partition("first: ffedit ")[2].replace("DIR", str(tmp_path / "whole")).split()
    ran = shell(capsys, *command)
    assert ran.code == 0, ran.err
    found = weights(tmp_path / "whole")
    assert found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in found)
    assert len(contents(tmp_path / "whole")) == len(expected) and not list((tmp_path / "whole").glob("*.bin"))
    assert ffedit.load(tmp_path / "whole").tokenizer.vocab_size == zoo.VOCAB


class Bomb:
    """Makes a folder when it is unpickled."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.folder),)


@pytest.mark.parametrize("what", ["code", "a number", "no names"])
def test_what_is_more_than_tensors_is_not_converted(base: Path, tmp_path: Path, what: str) -> None:
    executed, out = tmp_path / "executed", tmp_path / "whole"
    content = {
        "code": {"weight": Bomb(executed)},
        "a number": {"weight": torch.zeros(2), "step": 3},
        "no names": [torch.zeros(2)],
    }[what]
    pickled(base, 1)
    torch.save(content, base / PICKLED)
    with pytest.raises(ModelError, match="it holds more than named tensors") as caught:
        ffedit.convert(base, out)
    assert "\n" not in str(caught.value) and not executed.exists() and not out.exists()


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


def test_the_command_in_the_line_merges_an_adapter(
    adapted: tuple[Path, Any], base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, model = adapted
    line = refusal(folder)
    assert f"is an adapter of {base}, not a model" in line
    ran = shell(capsys, *line.partition("first: ffedit ")[2].replace("DIR", str(tmp_path / "whole")).split())
    assert ran.code == 0, ran.err
    expected, found = zoo.logits(model), zoo.logits(ffedit.load(tmp_path / "whole").model)
    assert torch.allclose(found, expected, atol=1e-4 * float(expected.abs().max()))
    assert not torch.allclose(found, zoo.logits(ffedit.load(base).model), atol=1e-2)


def test_a_folder_with_a_model_and_an_adapter_is_refused_with_both_ways(adapted: tuple[Path, Any], base: Path) -> None:
    for path in adapted[0].glob("adapter*"):
        (base / path.name).write_bytes(path.read_bytes())
    line = refusal(base)
    assert "holds a model and an adapter of" in line and "move adapter_config.json elsewhere" in line
    assert "ffedit convert" in line


def test_a_live_adapter_is_refused_with_the_hint(adapted: tuple[Path, Any]) -> None:
    for model in (adapted[1], adapted[1].get_base_model()):
        with pytest.raises(ModelError, match=r"this model contains a PEFT adapter.*merge_and_unload\(\)"):
            ffedit.load((model, zoo.words()))
    merged = adapted[1].merge_and_unload()
    assert len(ffedit.load((merged, zoo.words())).layers) == zoo.DEPTH


def test_what_cannot_be_converted_is_refused_in_a_line(base: Path, adapted: tuple[Path, Any], tmp_path: Path) -> None:
    folder, out = adapted[0], tmp_path / "whole"
    for change, word in (
        ("none", "no such folder"),
        ("model", "holds neither adapter_config.json nor pickled weights"),
        ("base", "names no base"),
        ("weights", "no adapter_model.safetensors"),
    ):
        if change == "base":
            (folder / "adapter_config.json").write_text("{}")
        if change == "weights":
            (folder / "adapter_model.safetensors").unlink()
        source = {"none": tmp_path / "no", "model": base}.get(change, folder)
        base_given = str(base) if change == "weights" else None
        with pytest.raises(FFEditError, match=word) as caught:
            ffedit.convert(source, out, base=base_given)
        assert "\n" not in str(caught.value) and not out.exists()
