"""A record of the machine that a benchmark ran on: times, and the last digits of scores, depend on it.

No decision depends on the record. A run may continue on another machine: its manifest and report then name both.
"""

from __future__ import annotations

import platform
from pathlib import Path

import psutil
import torch


def hardware(device: torch.device, processes: int) -> str:
    """Describe this machine on one line, with the model's device; what the platform does not report is left out."""
    cores = psutil.cpu_count(logical=False) or psutil.cpu_count()
    words = [f"{processor()}, {cores} cores, {_gib(psutil.virtual_memory().total)}", *_accelerators()]
    words.append(f"the model on {device.type}")
    words.append(f"processes: {processes}, threads of each: {torch.get_num_threads()}")
    return "; ".join([*words, f"torch {torch.__version__}", platform.platform()])


def processor() -> str:
    """Return the processor's name as far as the platform reports it."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:  # only Linux has it
        lines = []
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(named, "") or platform.processor() or platform.machine()


def _accelerators() -> list[str]:
    """Return the name and memory of each accelerator that torch finds."""
    kind = torch.accelerator.current_accelerator(check_available=True)
    if kind is None:
        return []
    properties = getattr(torch.get_device_module(kind), "get_device_properties", lambda i: None)  # MPS has none
    names = []
    for device in map(properties, range(torch.accelerator.device_count())):
        memory = getattr(device, "total_memory", None)
        names.append(getattr(device, "name", kind.type) + ("" if memory is None else f", {_gib(memory)}"))
    return names


def _gib(size: int) -> str:
    return f"{round(size / 2**30)} GiB"
