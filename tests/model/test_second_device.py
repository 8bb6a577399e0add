"""On a device that has no float64, such as Apple's, everything runs and finds what the CPU finds."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from shell import process

from ffedit.algebra import linalg
from ffedit.editor.methods import METHODS

WHOLE_LINE = Path(__file__).parents[1] / "helpers" / "whole_line.py"


def test_the_whole_line_runs_without_float64_and_finds_the_same(tmp_path: Path) -> None:
    # A process of its own: autograd counts the devices once, in its first backward pass.
    ran = process(WHOLE_LINE, "gpt2", tmp_path)
    assert ran.code == 0, ran.err
    apart = json.loads(ran.out.splitlines()[-1])
    assert set(METHODS) <= apart.keys() and len(apart) >= 20
    for step, (count, difference) in apart.items():
        # Adam divides a gradient by its size, however small that is.
        assert count and difference < (1e-2 if step.startswith("ft") else 1e-4), f"{step}: {difference}"


def test_a_model_on_two_devices_is_the_same_model(tmp_path: Path) -> None:
    """One layer of two that are edited is on the CPU, the other on the device; so are what is before and behind all."""
    ran = process(WHOLE_LINE, "llama", tmp_path, "0-1", "1-3")
    assert ran.code == 0, ran.err
    first, last = (json.loads(line) for line in ran.out.splitlines()[-2:])
    for apart in (first, last):
        assert {"stats", "locate state", "rome", "memit", "evaluate memit"} <= apart.keys()
        assert all(count and difference < 1e-4 for count, difference in apart.values()), apart


@pytest.mark.parametrize("error", [TypeError("float64 is not supported"), RuntimeError("Required aspect fp64")])
def test_a_device_is_asked_for_float64_once(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[torch.device] = []

    def ones(*_: object, device: torch.device, **__: object) -> None:
        asked.append(device)
        raise error

    device = torch.device("xpu", 7)
    with monkeypatch.context() as without:
        without.setattr(torch, "ones", ones)
        assert not linalg.has_float64(device) and not linalg.has_float64(device)
    assert asked == [device]
    linalg.has_float64.cache_clear()
    assert linalg.has_float64(torch.device("cpu"))
