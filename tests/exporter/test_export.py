"""A checkpoint comes back in a fresh process with the same numbers, or does not go out at all."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import zoo
from making import check_here, made
from safetensors.torch import load_file, save_file
from torch.nn.functional import linear
from writing import quick

import ffedit
from ffedit import CheckError, Edit, EditError, Fact
from ffedit.exporter import checkpoint, history
from ffedit.files.tensor_ranges import contents
from ffedit.inference.corpus import Corpus
from ffedit.model import products
from ffedit.model.editable import Editable

FACT = Fact("Eiffel tower", "the {} is located in", "Rome", "Paris", ["{} stands in"])
TEXT = "the Eiffel tower is located in Rome"
# One process for all cases: from_pretrained as anybody would call it, no ffedit.
FRESH = """
import json, sys, torch
from transformers import AutoModelForCausalLM, AutoTokenizer
for folder in sys.argv[1:]:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder)
    ids = tokenizer(TEXT, return_tensors="pt")["input_ids"]
    saved = str(model.dtype)
    with torch.no_grad():
        own = model(input_ids=ids).logits.double()
        wide = model.float()(input_ids=ids).logits.double()
    print(json.dumps({"dtype": saved, "ids": ids[0].tolist(),
                      "own": own.tolist(), "float32": wide.tolist()}))
"""


@dataclass
class Case:
    editable: Editable
    edit: Edit
    report: ffedit.Report
    before: dict[str, torch.Tensor]
    folder: Path
    logits: torch.Tensor
    fresh: dict[str, Any]


def load_saved(family: str, dtype: torch.dtype, folder: Path) -> Editable:
    """A model that comes from a checkpoint in `dtype`."""
    editable = zoo.trained(family, True, dtype)
    editable.model.save_pretrained(folder)
    editable.tokenizer.save_pretrained(folder)
    return ffedit.load(folder)


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Case]]:
    base = tmp_path_factory.mktemp("export")
    wanted = {"gpt2": torch.float32, "llama": torch.bfloat16, "gpt_neo": torch.float16}
    made: dict[str, Case] = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FFEDIT_CACHE", str(base / "cache"))
        for family, dtype in wanted.items():
            editable = load_saved(family, dtype, base / f"{family}-base")
            before = zoo.snapshot(editable)
            config = quick()
            edit = ffedit.edit(editable, [FACT], "rome", layers=[1], config=config, stats=Corpus(tokens=300))
            report = ffedit.evaluate(editable, [FACT], edit)
            edit = edit.scored(report)
            if family != "llama":  # one fresh process is enough
                patch.setattr("ffedit.exporter.exporting.check_fresh", check_here)
            folder = ffedit.export(editable, edit, base / "out" / family).folder
            patch.undo()
            patch.setenv("FFEDIT_CACHE", str(base / "cache"))
            ids = editable.tokenizer(TEXT, return_tensors="pt")["input_ids"]
            with edit.applied(editable), torch.no_grad():
                logits = editable.model(input_ids=ids).logits.double()
            made[family] = Case(editable, edit, report, before, folder, logits, {})
    command = [sys.executable, "-c", f"TEXT = {TEXT!r}{FRESH}", *(str(case.folder) for case in made.values())]
    lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    for case, line in zip(made.values(), lines, strict=True):
        case.fresh = json.loads(line)
    yield made


here = pytest.mark.usefixtures("verified_here")


@pytest.mark.parametrize(
    ("family", "dtype", "computed"),
    [("gpt2", "float32", "own"), ("llama", "bfloat16", "own"), ("gpt_neo", "float16", "float32")],
)
def test_a_fresh_process_sees_the_same_logits(cases: dict[str, Case], family: str, dtype: str, computed: str) -> None:
    case = cases[family]
    assert case.fresh["dtype"].removeprefix("torch.") == dtype
    assert torch.equal(torch.tensor(case.fresh[computed], dtype=torch.float64), case.logits)
    assert case.fresh["ids"] == case.editable.tokenizer(TEXT)["input_ids"]
    assert zoo.unchanged(case.editable, case.before), "the model in memory is as before"


def test_the_folder_holds_everything_that_is_needed(cases: dict[str, Case]) -> None:
    for case in cases.values():
        files = {path.name for path in case.folder.iterdir()}
        assert {"config.json", "generation_config.json", "tokenizer.json", "README.md", "ffedit_edits"} <= files
        assert not any(name.endswith((".bin", ".pt", ".pkl")) for name in files)
        assert case.folder.stat().st_mode & 0o777 == 0o755
    assert {path.name for path in case.folder.parent.iterdir()} == set(cases)


def test_the_model_card_says_what_was_edited_and_how_it_scored(cases: dict[str, Case]) -> None:
    case = cases["llama"]
    card = (case.folder / "README.md").read_text(encoding="utf-8")
    front = card.split("---")[1]
    assert f"base_model: {Path(case.editable.name).name}\n" in front and "library_name: transformers" in front
    assert FACT.text in card and "Rome" in card and "Paris" in card
    assert case.report.after is not None
    before = case.report.before.to_dict()
    for name, value in case.report.after.to_dict().items():
        was = before[name]
        assert value is None or f"| {name} | {'' if was is None else f'{was:.3f}'} | {value:.3f} |" in card
    assert f"fingerprint {case.edit.fingerprint()}; method: " in card and "https://" not in card
    (embedded,) = history(case.folder)
    assert "`ffedit show . --recipe`" in card and embedded.provenance["config"]["seed"] == 0


@here
def test_a_ready_pair_is_saved_from_memory(cases: dict[str, Case], tmp_path: Path) -> None:
    case = ready(cases["gpt2"])
    out = ffedit.export(case.editable, case.edit, tmp_path / "out").folder
    written, streamed = load_file(out / "model.safetensors"), load_file(case.folder / "model.safetensors")
    assert written.keys() == streamed.keys() and all(torch.equal(written[name], streamed[name]) for name in written)
    assert [edit.fingerprint() for edit in history(out)] == [case.edit.fingerprint()]
    kept = load_file(out / "ffedit_edits" / "originals.safetensors")
    (name,) = kept
    assert name == case.editable.memories[1].parameter and torch.equal(kept[name], case.before[name])
    undone = load_file(ffedit.undo(out, tmp_path / "undone").folder / "model.safetensors")
    assert all(torch.equal(undone[name], case.before[name]) for name in undone)


@here
@pytest.mark.parametrize(
    ("family", "damage"), [("gpt2", "lost"), ("gpt2", "added"), ("mixtral", "zeroed"), ("gpt_oss", "zeroed")]
)
def test_a_model_that_is_written_from_memory_is_compared_by_its_hashes_where_it_would_not_fit_twice(
    family: str, damage: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = zoo.build(family)
    given.model.name_or_path = ""
    editable = ffedit.load((given.model, given.tokenizer))
    edit = made(editable, {next(iter(editable.memories)): 1})
    monkeypatch.setattr("ffedit.exporter.verification.has_room", lambda size: False)
    checked = ffedit.export(editable, edit, tmp_path / "out").checked
    assert not checked.logits and checked.tensors == len(contents(tmp_path / "out"))
    save = checkpoint._save
    told = {"zeroed": "is not what is in memory", "lost": "was not written", "added": "does not have"}[damage]

    def damaged(editable: Any, folder: Path) -> None:
        """The last value matrix is zero, or lost, or there twice."""
        save(editable, folder)
        weights = load_file(folder / "model.safetensors")
        value = [n for n in weights if n.endswith(("w2.weight", "down_proj", "mlp.c_proj.weight"))][-1]
        weights[value] = weights[value].clone()
        (weights[value][-1] if weights[value].ndim == 3 else weights[value]).zero_()
        if damage == "added":
            weights["more"] = weights[value].clone()
        if damage == "lost":
            del weights[value]
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})

    monkeypatch.setattr(checkpoint, "_save", damaged)
    with pytest.raises(CheckError, match=told):
        ffedit.export(editable, edit, tmp_path / "damaged")
    assert not (tmp_path / "damaged").exists()


@here
def test_a_ready_pair_is_verified_as_the_other_process_runs_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given = zoo.build("llama")
    given.model.name_or_path = ""
    editable = ffedit.load((given.model, given.tokenizer))
    # The other process runs the model without an `Editable`; an `Editable` is made to compute something else.
    monkeypatch.setattr(products, "LARGE", 1)
    monkeypatch.setattr(products, "product", lambda states, weight, bias: 1.01 * linear(states, weight, bias))
    ffedit.export(editable, made(editable, {1: 1}), tmp_path / "out")


@here
@pytest.mark.parametrize("called", [None, ["GPT2Model"]])
def test_a_model_that_was_never_saved_is_the_same_once_it_is(
    cases: dict[str, Case], tmp_path: Path, called: list[str] | None
) -> None:
    given = cases["gpt2"].editable
    settings = {**given.model.config.to_dict(), "architectures": called, "_name_or_path": ""}
    model = type(given.model)(type(given.model.config)(**settings)).eval()
    model.load_state_dict(given.model.state_dict())
    editable = ffedit.load((model, given.tokenizer))
    edit = made(editable, {1: 1})
    (again,) = history(ffedit.export(editable, edit, tmp_path / "out").folder)
    assert again.fingerprint() == edit.fingerprint()
    edit.check(editable)


# When it fails ------------------------------------------------------------------------------------


def ready(case: Case) -> Case:
    """The same, but a model that stands on no disk."""
    editable = ffedit.load(case.editable.name)
    editable.model.name_or_path = ""
    return replace(case, editable=ffedit.load((editable.model, editable.tokenizer)))


def nothing_left(case: Case, folder: Path) -> bool:
    return list(folder.iterdir()) == [] and zoo.unchanged(case.editable, case.before)


@here
def test_a_target_that_holds_something_is_refused_without_force(cases: dict[str, Case], tmp_path: Path) -> None:
    case, target = cases["gpt2"], tmp_path / "out"
    target.mkdir()
    (target / "mine.txt").write_text("keep me")
    with pytest.raises(EditError, match="exists already"):
        ffedit.export(case.editable, case.edit, target)
    with pytest.raises(EditError, match="holds no weights, so ffedit did not write it"):
        ffedit.export(case.editable, case.edit, target, force=True)
    assert [path.name for path in target.iterdir()] == ["mine.txt"]
    (target / "model.safetensors").write_bytes(b"an earlier export")
    ffedit.export(case.editable, case.edit, target, force=True)
    assert not (target / "mine.txt").exists() and (target / "config.json").exists()
    assert [path.name for path in tmp_path.glob("[!f]*")] == ["out"] and list(tmp_path.glob(".*")) == []


@here
def test_an_export_that_reads_back_differently_is_not_left_there(
    cases: dict[str, Case], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = ready(cases["gpt2"])
    save = case.editable.model.save_pretrained

    def forget_the_edit(folder: Path, state_dict: dict[str, torch.Tensor]) -> None:
        save(folder, state_dict=case.before)

    (folder := tmp_path / "here").mkdir()
    monkeypatch.setattr(case.editable.model, "save_pretrained", forget_the_edit)
    with pytest.raises(CheckError, match="is not what is in memory; nothing was written"):
        ffedit.export(case.editable, case.edit, folder / "out")
    assert nothing_left(case, folder)
