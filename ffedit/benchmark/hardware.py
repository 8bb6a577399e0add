"""A record of the machine that a benchmark ran on: times, and the last digits of scores, depend on it.

No decision depends on the record. A run may continue on another machine: its manifest and report then name both.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import psutil
import torch


def hardware(device: torch.device, processes: int) -> dict[str, Any]:
    """Describe this machine as plain JSON, with the model's device; what the platform does not report is None."""
    return {
        "platform": platform.platform(),
        "processor": _processor(),
        "cores": psutil.cpu_count(logical=False),
        "cpus": os.cpu_count(),
        "memory_gib": _gib(psutil.virtual_memory().total),
        "accelerators": _accelerators(),
        "device": device.type,
        "processes": processes,
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,  # with the build
    }


def machines_list(machines: Iterable[Mapping[str, Any]]) -> str:
    """Render the machines of a run as a section of `report.md`."""
    return "\n".join(["## Computed on", "", *(f"- {in_words(machine)}" for machine in machines)])


def in_words(machine: Mapping[str, Any]) -> str:
    """Describe a machine on one line, with its physical cores, or its logical ones where those are not known."""
    words = [f"{machine['processor']}, {machine['cores'] or machine['cpus']} cores, {machine['memory_gib']} GiB"]
    for device in machine["accelerators"]:
        words.append(device["name"] + (f", {device['memory_gib']} GiB" if device["memory_gib"] else ""))
    words.append(f"the model on {machine['device']}")
    words.append(f"processes: {machine['processes']}, threads of each: {machine['threads']}")
    return "; ".join([*words, machine["platform"]])


def _processor() -> str:
    """Return the processor's name as far as the platform reports it."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:  # only Linux has it
        lines = []
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(named, "") or platform.processor() or platform.machine()


def _accelerators() -> list[dict[str, Any]]:
    """List the name and memory of each accelerator that torch finds."""
    kind = torch.accelerator.current_accelerator(check_available=True)
    if kind is None:
        return []
    properties = getattr(torch.get_device_module(kind), "get_device_properties", lambda i: None)  # Apple's has none
    devices = []
    for device in map(properties, range(torch.accelerator.device_count())):
        memory = getattr(device, "total_memory", None)
        size = None if memory is None else _gib(memory)
        devices.append({"name": getattr(device, "name", kind.type), "memory_gib": size})
    return devices


def _gib(size: int) -> int:
    return round(size / 2**30)
