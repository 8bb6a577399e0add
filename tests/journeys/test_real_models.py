"""The journey on three real models: load, locate, apply, evaluate, export, open in a fresh process, undo.

It takes minutes and 15 GB of memory, so it runs where FFEDIT_REAL_MODELS names a folder with `gguf/NAME.gguf`, and is
skipped elsewhere; run it before a release. Qwen is computed in bfloat16 where the processor multiplies in it: elsewhere
that takes six times as long as float32.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch
from shell import process, shell

import ffedit
from ffedit.locator import CLEAR

FOLDER = os.environ.get("FFEDIT_REAL_MODELS")
KNOWN = getattr(torch.cpu, "get_capabilities", dict)()  # torch 2.8 does not tell
SHORT = "bfloat16" if KNOWN.get("avx512_bf16") or torch.cuda.is_available() else "float32"
MODELS = {"smollm2": "float32", "gemma3-270m": "float32", "qwen2.5-1.5b": SHORT}
FACT = Path(__file__).parents[2] / "edits" / "eiffel-tower.json"
OPENED = """
import json, sys, torch
from transformers import AutoModelForCausalLM, AutoTokenizer
model = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype="auto").eval()
tokenizer = AutoTokenizer.from_pretrained(sys.argv[1])
ids = tokenizer(sys.argv[2], return_tensors="pt").input_ids
said = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=3, do_sample=False)
print(json.dumps([str(model.dtype), tokenizer.decode(said[0, ids.shape[1]:])]))
"""


def found(name: str) -> Path:
    if FOLDER is None:
        pytest.skip("needs FFEDIT_REAL_MODELS=DIR with gguf/NAME.gguf")
    path = Path(FOLDER) / "gguf" / f"{name}.gguf"
    if not path.exists():
        pytest.skip(f"{path} is not there")
    return path


@pytest.fixture(autouse=True)
def few_names() -> None:
    """Count all names that ship, as a user's edit does."""


@pytest.fixture(scope="session", autouse=True)
def little_text() -> None:
    """Collect statistics on the default number of tokens, as a user's edit does."""


@pytest.fixture(scope="session", autouse=True)
def one_precision() -> None:
    """Measure how fast bfloat16 is, as a user's edit does."""


@pytest.mark.parametrize("name", MODELS)
def test_a_real_model_is_edited_exported_and_undone(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model, dtype = found(name), MODELS[name]
    out, result = tmp_path / "edited", tmp_path / "result.json"
    options = ("--model", model, "--dtype", dtype)
    done = shell(capsys, "apply", FACT, *options, "--out", tmp_path / "edit", "--export", out, "--json", result)
    assert done.code == 0, done.err
    about = json.loads(result.read_text())
    assert about["before"]["generation"] == 0.0 and about["after"]["generation"] == 1.0
    trace = about["facts"][0]["trace"]
    first, end = trace["subject"]
    recalled = max(
        effect
        for row in trace["effects"]
        for effect in row[first:end]
        if isinstance(effect, float) and effect == effect
    )
    assert recalled >= CLEAR * (trace["clean"] - trace["corrupted"]) > 0, "the exact trace shows a site at the subject"

    (fact,) = ffedit.read_facts(FACT)
    opened = process("-c", OPENED, out, fact.text)
    assert opened.code == 0, opened.err
    stored, said = json.loads(opened.out)
    assert said.split()[0].strip(",.") == fact.target and stored.startswith("torch.")
    undone = shell(capsys, "undo", out, "--out", tmp_path / "as-before")
    assert undone.code == 0, undone.err
    opened = process("-c", OPENED, tmp_path / "as-before", fact.text)
    assert json.loads(opened.out)[1].split()[0].strip(",.") == fact.previous
    # Last, so that a verdict that is short hides nothing of the way.
    assert about["verdict"]["outcome"] == "took" and about["warnings"] == []
