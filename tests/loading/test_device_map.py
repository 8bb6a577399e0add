"""A device that cannot be used is told in one line: what was found instead, and what to do."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from shell import ASKED, disk, shell

from ffedit import ModelError
from ffedit.loading.load import spread_over

CUDA = torch.device("cuda")
# More than any machine has.
MISSING = "cuda:97"


def finding(monkeypatch: pytest.MonkeyPatch, kind: torch.device | None, count: int) -> None:
    """A build of torch for some kind of accelerator, on a machine with so many of them."""
    monkeypatch.setattr(torch, "__version__", "2.9.9")
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available=False: kind)
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: count)


@pytest.mark.parametrize(
    ("kind", "count", "told"),
    [
        (None, 0, "torch 2.9.9 was built for CPUs only; give auto or cpu, or install a torch that was built for the"),
        (CUDA, 0, "torch 2.9.9 was built for cuda, but finds none; give auto or cpu, or check its driver"),
        (CUDA, 2, "torch 2.9.9 finds cuda:0, cuda:1; give auto, cpu, or one of these"),
        (torch.device("mps"), 1, "torch 2.9.9 finds mps:0; give auto, cpu, or one of these"),
    ],
)
def test_a_missing_device_is_refused_with_what_there_is(
    kind: torch.device | None, count: int, told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    finding(monkeypatch, kind, count)
    with pytest.raises(ModelError) as caught:
        spread_over(MISSING, None, None, None)
    said = str(caught.value)
    assert said.startswith(f"device '{MISSING}' cannot be used (") and f"): {told}" in said and "\n" not in said


def test_torchs_own_words_are_cut_to_a_few(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **how: object) -> None:
        raise RuntimeError("CUDA error: out of memory\nCompile with `TORCH_USE_CUDA_DSA`")

    finding(monkeypatch, CUDA, 1)
    monkeypatch.setattr(torch, "empty", fail)
    with pytest.raises(ModelError, match=r"'cuda:0' cannot be used \(CUDA error: out of memory\): torch 2.9.9 finds"):
        spread_over("cuda:0", None, None, None)


@pytest.mark.parametrize("device", ["foo", "", "cuda:x", "meta", "privateuseone"])
def test_an_unknown_device_is_refused(device: str) -> None:
    words = rf"device '{device}' (is not known|cannot hold weights|cannot be used \(.*\): torch .*); give auto"
    with pytest.raises(ModelError, match=words):
        spread_over(device, None, None, None)


@pytest.mark.parametrize("device", ["cpu", "cpu:0"])
def test_the_cpu_is_always_there(device: str) -> None:
    assert spread_over(device, None, None, None) == {"device_map": None}


def test_a_missing_device_is_refused_before_the_model_is_read(
    empty: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    finding(monkeypatch, None, 0)
    Path("model").mkdir()
    Path("model/config.json").write_text("not JSON")
    Path("model/model.safetensors").write_text("nor weights")
    before = disk(empty)
    ran = shell(capsys, "apply", *ASKED, "--model", "./model", "--device", MISSING, "--out", "e")
    assert ran.code == 1 and "torch 2.9.9 was built for CPUs only" in ran.err
    assert ran.err.count("\n") == 1 and disk(empty) == before
