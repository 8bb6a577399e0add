"""What is loaded, and what is refused in one line: folders, devices and dtypes, ready pairs."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest
import torch
import zoo

import ffedit
from ffedit import ModelError
from ffedit.loading import reading


def refusal(source: Any, **options: Any) -> str:
    with pytest.raises(ModelError) as caught:
        ffedit.load(source, **options)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_folders_that_hold_no_model_are_refused(model: Path, tmp_path: Path) -> None:
    assert "config.json" in refusal(tmp_path)
    (tmp_path / "config.json").write_text("{ not json")
    refusal(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "no-such-model"}')
    refusal(tmp_path)
    refusal(tmp_path / "not" / "there")
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((model / name).read_bytes())
    (tmp_path / "model.safetensors").write_bytes((model / "model.safetensors").read_bytes()[:5000])
    refusal(tmp_path)


def test_python_collects_unused_objects_again_after_a_tokenizer_was_read_or_refused(
    model: Path, tmp_path: Path
) -> None:
    ffedit.load(model)
    assert gc.isenabled()
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).write_bytes((model / name).read_bytes())
    (tmp_path / "tokenizer.json").write_text("{")
    refusal(tmp_path)
    assert gc.isenabled()


def test_a_model_that_does_not_fit_into_memory_in_float32_is_refused_with_a_lighter_precision(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    editable = ffedit.load(model)
    weights = sum(weight.numel() for weight in editable.model.parameters())
    for dtype in (torch.float16, torch.bfloat16):
        editable.model.to(dtype).save_pretrained(folder := tmp_path / str(dtype))
        editable.tokenizer.save_pretrained(folder)
    monkeypatch.setattr(reading, "host_memory", lambda: 4 * weights - 1)
    said = refusal(tmp_path / "torch.float16", device="cpu")
    assert "of memory in float32, and" in said and "are free; give dtype bfloat16 (" in said
    assert refusal(tmp_path / "torch.bfloat16", device="cpu", dtype="float32").endswith("or use a machine with more")
    ffedit.load(tmp_path / "torch.bfloat16", device="cpu")
    ffedit.load(tmp_path / "torch.float16", device="cpu", dtype="bfloat16")
    ffedit.load(model, device="cpu", dtype="float32")  # as saved: mapped from the file
    monkeypatch.setattr(reading, "host_memory", lambda: 4 * weights)
    ffedit.load(tmp_path / "torch.float16", device="cpu")


def test_what_is_no_pair_and_options_that_a_pair_has_no_use_for_are_refused() -> None:
    model, words = zoo.model("llama"), zoo.words()
    expected = "found {}; a model's name, its folder or a pair (model, tokenizer) was expected"
    for given, found in [
        (model, "LlamaForCausalLM"),
        ((model,), "LlamaForCausalLM"),
        ((words, model), f"{type(words).__name__}, LlamaForCausalLM"),
        ((model, words, None), f"LlamaForCausalLM, {type(words).__name__}, NoneType"),
    ]:
        with pytest.raises(ModelError) as caught:
            ffedit.load(given)
        assert str(caught.value) == expected.format(found)
    options: dict[str, Any] = {
        "device": "cpu", "dtype": "float16", "revision": "main", "trust_remote_code": True, "device_map": {"": "cpu"}
    }  # fmt: skip
    for name, value in options.items():
        with pytest.raises(ModelError, match=f"^{name}: a pair"):
            ffedit.load((model, words), **{name: value})


def test_a_ready_pair_is_taken_as_it_is() -> None:
    pair = (zoo.model("llama"), zoo.words())
    editable = ffedit.load(pair)
    assert editable.model is pair[0] and editable.tokenizer is pair[1] and not editable.model.training
