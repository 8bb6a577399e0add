"""What an earlier version wrote is read by this one: a folder of each format, as `tests/helpers/golden.py` made it."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import zoo
from golden import GOLDEN, LAYER, bits, described, micro, numbers

import ffedit
from ffedit import Address, Edit
from ffedit.benchmark.folder import Journal
from ffedit.cli.run import read_recipe
from ffedit.editor.recipe import recipe_of
from ffedit.errors import FactError
from ffedit.exporter import history
from ffedit.exporter.adapter import read_factors
from ffedit.files.resuming import load_state
from ffedit.files.tensor_ranges import read_header
from ffedit.locator import Trace

VERSIONS = sorted(path.name for path in GOLDEN.iterdir())
pytestmark = pytest.mark.usefixtures("verified_here")


@pytest.fixture(params=VERSIONS)
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A copy of what a version wrote: reading may not change what is kept."""
    return Path(shutil.copytree(GOLDEN / request.param, tmp_path / "golden"))


@pytest.fixture
def expected(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "expected.json").read_text(encoding="utf-8"))
    return found


def same(found: Any, expected: Any) -> None:
    """Equal; numbers to 1e-9 of their size, since products are summed in another order elsewhere."""
    if isinstance(expected, dict):
        assert found.keys() == expected.keys()
        for name in expected:
            same(found[name], expected[name])
    elif isinstance(expected, list):
        assert len(found) == len(expected)
        for one, other in zip(found, expected, strict=True):
            same(one, other)
    else:
        assert found == (pytest.approx(expected, rel=1e-9, abs=1e-12) if isinstance(expected, float) else expected)


def test_the_formats_of_every_release_are_kept() -> None:
    changelog = (Path(__file__).parents[2] / "CHANGELOG.md").read_text(encoding="utf-8")
    released = re.findall(r"^## ([\d.]+)(?: \(20.*\))?$", changelog, re.MULTILINE)
    assert released and set(released) <= set(VERSIONS), "run tests/helpers/golden.py, and commit what it writes"


def test_golden_edits_are_read(folder: Path, expected: dict[str, Any]) -> None:
    for name, of_edit in expected["edits"].items():
        edit = Edit.load(folder / "edits" / name)
        same(described(edit), of_edit)
    mixture = zoo.build("mixtral")
    with Edit.load(folder / "edits" / "experts").applied(mixture):
        assert [edit.fingerprint() for edit in mixture.history.known.values()] == [
            expected["edits"]["experts"]["fingerprint"]
        ]


def test_a_checkpoint_is_opened_and_undone(folder: Path, expected: dict[str, Any], tmp_path: Path) -> None:
    checkpoint = folder / "checkpoint"
    prints = [expected["edits"][name]["fingerprint"] for name in ("rome", "memit")]
    assert [edit.fingerprint() for edit in history(checkpoint)] == prints
    loaded = ffedit.load(checkpoint)
    assert list(loaded.history.edits) == prints
    for edit in list(loaded.history.edits.values()):
        edit.undo_(loaded)
    one = ffedit.undo(checkpoint, tmp_path / "one", edit=0).folder
    base = ffedit.undo(one, tmp_path / "base").folder
    assert bits(base) == expected["base"]
    assert zoo.unchanged(ffedit.load(base), zoo.snapshot(loaded))
    rome = Edit.load(folder / "edits" / "rome")
    again = ffedit.load(ffedit.export(base, rome, tmp_path / "again").folder)
    assert list(again.history.edits) == prints[:1]


def test_an_adapter_gives_the_edit(folder: Path, expected: dict[str, Any]) -> None:
    change = Edit.load(folder / "edits" / "rome").updates[Address(LAYER)].dense
    (edit,) = history(folder / "adapter")
    assert edit.fingerprint() == expected["edits"]["rome"]["fingerprint"]
    stored = read_header(folder / "adapter" / "adapter_model.safetensors")
    left, right = read_factors(stored, edit.provenance["matrices"][str(LAYER)])
    assert torch.allclose(left @ right, change, rtol=1e-6, atol=1e-6 * float(change.abs().max()))


def test_golden_key_statistics_are_read(folder: Path, expected: dict[str, Any], tmp_path: Path) -> None:
    base = ffedit.undo(ffedit.undo(folder / "checkpoint", tmp_path / "one").folder, tmp_path / "base").folder
    editable = ffedit.load(base)
    (moments,) = ffedit.load_stats(folder / "stats", editable).values()
    same({"sum": numbers(moments.sum), "tokens": moments.count}, expected["statistics"])


def test_a_golden_sequence_of_a_benchmark_is_read(folder: Path, expected: dict[str, Any]) -> None:
    journal, edits = Journal(folder / "bench"), folder / "bench" / "edits" / "alphaedit"
    assert len(journal.lines) == expected["sequence"]["lines"]
    assert journal.done("", "before", 0) and journal.done("alphaedit", "after", 1)
    written = [Edit.load(path) for path in sorted(edits.glob("0*"))]
    same([described(edit) for edit in written], expected["sequence"]["edits"])
    tensors, state = load_state(edits / "weights.safetensors", "no state")
    assert state["chunk"] == 1 and tensors[str(LAYER)].shape == (8, 32)


def test_a_golden_trace_and_recipe_are_read(folder: Path, expected: dict[str, Any]) -> None:
    trace = Trace.from_dict(json.loads((folder / "trace.json").read_text(encoding="utf-8")))
    same({"clean": trace.clean, "tokens": list(trace.tokens), "first": trace.effects[0].tolist()}, expected["trace"])
    with pytest.raises(FactError, match="estimated, not measured"):
        Trace.from_dict({**trace.to_dict(), "exact": False})
    recipe = read_recipe(folder / "recipe.yaml")
    rome = Edit.load(folder / "edits" / "rome")
    assert recipe == recipe_of(rome) and recipe["facts"] == [fact.to_dict() for fact in rome.facts]


def test_the_script_would_write_the_same_model() -> None:
    assert micro().d_model == 8
