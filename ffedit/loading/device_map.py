"""Devices on which a model is loaded: one, all that there are, or all of them with offloading of the rest.

What does not fit an accelerator is offloaded to CPU memory or to the disk (`model.storage`).
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from textwrap import shorten
from typing import Any, TypeAlias

import torch
from accelerate.utils import convert_file_size_to_int

from ffedit.errors import ModelError
from ffedit.loading.distributed import own_device

DeviceMap: TypeAlias = "str | Mapping[str, int | str | torch.device]"
DEVICE_MAPS = ("auto", "balanced", "balanced_low_0", "sequential")


def spread_over(
    device: str,
    device_map: DeviceMap | None,
    offload_folder: str | Path | None,
    max_memory: Mapping[int | str, int | str] | None,
) -> dict[str, Any]:
    """Return transformers' arguments for the devices: all it finds, one device, or nothing on a CPU-only machine.

    Raises ModelError for an impossible device, map, folder or size.
    """
    if device_map is None:
        if offload_folder is not None or max_memory is not None:
            raise ModelError("a folder to offload to or a largest memory was given without a device map; give auto")
        return {"device_map": _whole(device)}
    if device != "auto":
        raise ModelError(f"device {device!r} and a device map were given; give one of them")
    if isinstance(device_map, str) and device_map not in DEVICE_MAPS:
        raise ModelError(f"device map {device_map!r} is not known; give {', '.join(DEVICE_MAPS)}")
    if offload_folder is not None and Path(offload_folder).exists() and not Path(offload_folder).is_dir():
        raise ModelError(f"{offload_folder}: is a file; a folder to offload weights to was expected")
    for size in (max_memory or {}).values():
        try:
            convert_file_size_to_int(size)
        except ValueError as error:
            raise ModelError(f"a memory of {size!r} is not known; give a number of bytes, or 20GB, 512MB") from error
    return {
        "device_map": device_map if isinstance(device_map, str) else dict(device_map),
        "offload_folder": None if offload_folder is None else str(offload_folder),
        "max_memory": None if max_memory is None else dict(max_memory),
    }


def _whole(device: str) -> str | None:
    """Return the device map of a model that is not offloaded."""
    own = own_device() if device == "auto" else None
    if own is not None:
        device = str(own)
    elif device == "auto":
        return "auto" if torch.accelerator.is_available() else None
    try:
        kind = torch.device(device).type
    except RuntimeError as error:
        raise ModelError(f"device {device!r} is not known; give auto, cpu, or one that torch knows") from error
    if kind == "cpu":
        return None
    try:
        held = not torch.empty(1, device=device).is_meta
    except (AssertionError, ImportError, RuntimeError) as error:  # device types raise different errors
        why = shorten(str(error).partition("\n")[0], 60, placeholder=" …")
        raise ModelError(f"device {device!r} cannot be used ({why}): {_accelerators()}") from error
    if not held:
        raise ModelError(f"device {device!r} holds no weights; give auto, cpu, or an accelerator")
    return device


def _accelerators() -> str:
    """Describe the accelerators that torch finds, and what to give instead of one that it does not."""
    build, kind = f"torch {torch.__version__}", torch.accelerator.current_accelerator()
    if kind is None:
        return f"{build} was built for CPUs only; give auto or cpu, or install a torch that was built for the device"
    if not (count := torch.accelerator.device_count()):
        return f"{build} was built for {kind.type}, but finds none; give auto or cpu, or see whether its driver works"
    names = ", ".join(f"{kind.type}:{i}" for i in range(count))
    return f"{build} finds {names}; give auto, cpu, or one of these"
