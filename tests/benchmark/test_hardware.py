"""What a benchmark was computed on is written down, with what it was drawn with; another machine may go on with it."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch
import zoo
from benching import facts, run, timeless
from shell import disk

from ffedit import EditError, __version__
from ffedit.benchmark.hardware import hardware
from ffedit.editor import provenance
from ffedit.evaluator import drift, generations, intervals
from ffedit.model.editable import Editable

CPU = torch.device("cpu")


@pytest.fixture
def editable() -> Editable:
    return zoo.trained("gpt2", True)


def manifest(out: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((out / "manifest.json").read_text())
    return found


def accelerated(monkeypatch: pytest.MonkeyPatch, *names: str, module: Any = None) -> None:
    """A machine with some GPUs."""
    about = SimpleNamespace(get_device_properties=lambda i: SimpleNamespace(name=names[i], total_memory=80 * 2**30))
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available=False: torch.device("cuda"))
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: len(names))
    monkeypatch.setattr(torch, "get_device_module", lambda kind: about if module is None else module)


def test_this_machine_is_named() -> None:
    found = hardware(CPU, 2)
    processor, cores, memory = found.partition(";")[0].rsplit(", ", 2)
    assert abs(int(memory.removesuffix(" GiB")) * 2**30 - psutil.virtual_memory().total) <= 2**29
    assert int(cores.removesuffix(" cores")) in range(1, psutil.cpu_count() + 1)
    about = f"the model on cpu; processes: 2, threads of each: {torch.get_num_threads()}; torch {torch.__version__}; "
    assert about in found
    names = Path("/proc/cpuinfo")
    if names.exists() and "model name" in (text := names.read_text()):
        assert f": {processor}\n" in text


def test_every_accelerator_is_named_with_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    accelerated(monkeypatch, "NVIDIA A100", "NVIDIA H100")
    assert "; NVIDIA A100, 80 GiB; NVIDIA H100, 80 GiB; the model on cuda; " in hardware(torch.device("cuda:1"), 1)
    accelerated(monkeypatch, "one that says nothing of itself", module=SimpleNamespace())
    assert "; cuda; the model on cpu; " in hardware(CPU, 1)


def test_the_run_goes_on_on_another_machine_and_both_are_named(
    editable: Editable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, some = tmp_path / "out", facts(2)
    first = run(editable, out, some=some, methods=["ft"])
    assert manifest(out)["hardware"] == [hardware(CPU, 1)] == first.run["hardware"]
    again = run(editable, out, some=some, methods=["ft"])
    assert manifest(out)["hardware"] == [hardware(CPU, 1)], "one machine is named once"
    here = hardware(CPU, 1)
    accelerated(monkeypatch, "NVIDIA A100")
    monkeypatch.setattr(provenance.torch, "__version__", f"{torch.__version__.partition('+')[0]}+cu999")
    there = hardware(CPU, 1)
    elsewhere = run(editable, out, some=some, methods=["ft"])
    assert here != there and manifest(out)["hardware"] == [here, there]
    assert timeless(first) == timeless(again) == timeless(elsewhere)
    assert json.loads((out / "report.json").read_text())["run"]["hardware"] == [here, there]
    lines = (out / "report.md").read_text().splitlines()
    assert lines[lines.index("## Computed on") + 2 :] == [f"- {here}", f"- {there}"]
    assert "NVIDIA A100, 80 GiB" in there


def test_a_folder_of_an_earlier_version_is_refused_by_its_version(editable: Editable, tmp_path: Path) -> None:
    """Also where its manifest has another form."""
    (tmp_path / "manifest.json").write_text(json.dumps({"versions": {"ffedit": "0.1.0"}, "hardware": [{"cores": 2}]}))
    with pytest.raises(EditError, match=r"results of other versions \(ffedit 0.1.0 there, .* now\)"):
        run(editable, tmp_path, some=facts(2), methods=["ft"])


def test_a_run_of_another_torch_of_other_seeds_or_without_its_machines_is_refused(
    editable: Editable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    report = run(editable, out, some=facts(2), methods=["ft"])
    seeds = {"drift": drift.DRIFT_SEED, "sampled_text": generations.SAMPLE_SEED, "bootstrap": intervals.SEED}
    found = manifest(out)
    assert found["run"]["seeds"] == report.run["seeds"] == {**seeds, "bootstrap_draws": intervals.DRAWS}
    assert found["versions"]["ffedit"] == __version__

    def refused(content: dict[str, Any], told: str) -> None:
        (out / "manifest.json").write_text(json.dumps(content))
        before = disk(out)
        with pytest.raises(EditError, match=told):
            run(editable, out, some=facts(2), methods=["ft"])
        assert disk(out) == before

    for damage in ({}, {"hardware": None}, {"hardware": "a machine"}, {"hardware": [{}]}):
        refused({name: value for name, value in found.items() if name != "hardware"} | damage, "not a manifest")
    other = {**found["run"], "seeds": {**found["run"]["seeds"], "drift": seeds["drift"] + 1}}
    refused({**found, "run": other}, r"another run \(seeds.drift \d+ there, \d+ now\)")
    monkeypatch.setattr(provenance.torch, "__version__", "99.1.0+cpu")
    refused(found, r"other versions \(torch .* there, 99.1.0 now\)")
