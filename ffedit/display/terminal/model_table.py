"""A model in one line and in a table: its size, the parts that ffedit found, and the machine that it runs on."""

from __future__ import annotations

from pathlib import Path

import torch
from rich.console import Group
from rich.filesize import decimal
from rich.table import Table
from rich.text import Text

from ffedit.display.terminal.tables import folded, left, named_values, plain_table, ranges, spaced
from ffedit.editor.provenance import versions
from ffedit.editor.statistics import bytes_needed
from ffedit.facts.text import counted
from ffedit.files import cache
from ffedit.loading.names import in_words
from ffedit.model.editable import Editable
from ffedit.model.memory import Address, KeyValueMemory

MOST_NAME = 24


def model_line(model: Editable) -> Text:
    """Describe the model in one line: name, parameters, layers, widths, device, dtypes."""
    memories: list[KeyValueMemory] = list(model.memories.values())
    widths = sorted({memory.d_ff for memory in memories})
    parts = [
        f"{_count(_parameters(model)[0])} parameters",
        f"{len(model.layers)} layers",
        f"d_model {memories[0].shape[0]}",
        f"d_ff {'–'.join(map(str, widths[:: max(1, len(widths) - 1)]))}",
        str(model.device),
        _dtypes(memories[0]),
        *(["in its chat template"] if model.chat else []),
    ]
    return Text(short_name(model), style="bold").append(f"  {' · '.join(parts)}", style="not bold")


def short_name(model: Editable) -> str:
    """Return the name of a model, or only the last part of a long one."""
    return model.name if len(model.name) <= MOST_NAME else Path(model.name).name


def memory_table(editable: Editable) -> Group:
    """Render the value matrices found, equal layers in one row, and the other parts that ffedit uses."""
    alike: dict[tuple[str, ...], list[Address]] = {}
    for address, memory in sorted(editable.memories.items()):
        alike.setdefault(_description(memory), []).append(address)
    table = plain_table(*left("layers"), *folded("value matrix", "shape", "stored", "dtype", "bias", "edit"))
    for description, addresses in alike.items():
        layers = ranges(address.layer for address in addresses)
        if experts := {address.expert for address in addresses if address.expert is not None}:
            layers += f" (experts {ranges(experts)})"
        table.add_row(*map(Text, (layers, *description)))
    statistics = bytes_needed([max(editable.memories.values(), key=lambda memory: memory.d_ff)])
    weights, error = _parameters(editable)[1], editable.probe_error
    within = f" within {error:.1e} of its scale" if error else ", to the last bit"
    reruns = "resumable, from the layer and token where something changed"
    if not editable.resumable:
        reruns = "not resumable at a token: whole rows from the changed layer on (slower, same results)"
    dtype = str(next(iter(editable.memories.values())).saved_dtype).removeprefix("torch.")
    unpacked = f"{editable.unpacked} in its files, unpacked to {dtype}; an export is in {dtype}, to be quantised anew"
    details = named_values(
        *([("converted from", in_words(editable.source))] if editable.source else []),
        *([("quantised", unpacked)] if editable.unpacked else []),
        ("shape", "[d_model, d_ff]; transposed: stored as [d_ff, d_model]"),
        ("final norm", editable.norm or "none found before the unembedding"),
        ("unembedding", _path(editable)),
        ("reruns", reruns),
        ("probe", f"W k + b is the observed output{within}"),
        (
            "memory",
            f"{decimal(weights)} of weights, {decimal(statistics)} more to edit (moments of the keys)",
        ),
    )
    return spaced(table, details)


def environment() -> Table:
    """Render the versions, the devices and the cache that ffedit uses."""
    sizes = cache.sizes()
    devices = [f"cpu ({counted(torch.get_num_threads(), 'thread')})"]
    if torch.accelerator.is_available():
        devices.insert(0, f"{torch.accelerator.device_count()} × {torch.accelerator.current_accelerator()}")
    files = f"{counted(len(sizes), 'file')}, {decimal(sum(sizes.values()))}"
    return named_values(
        ("versions", ", ".join(f"{name} {version}" for name, version in versions().items())),
        ("devices", ", ".join(devices)),
        ("cache", f"{files}, in {cache.folder()}; {cache.bounds()}"),
    )


def _description(memory: KeyValueMemory) -> tuple[str, ...]:
    numbers = {str(memory.address.layer), str(memory.address.expert)}
    path = ".".join("*" if name in numbers else name for name in memory.name.split("."))
    stored = "transposed" if memory.stored_transposed else "as is"
    bias, edit = "no" if memory.bias is None else "yes", "as an adapter" if memory.quantised else "yes"
    return path, str(list(memory.shape)), stored, _dtypes(memory), bias, edit


def _dtypes(memory: KeyValueMemory) -> str:
    """Return the precision of the checkpoint, and, if it differs, that of the layer's computation."""
    saved, used = (str(dtype).removeprefix("torch.") for dtype in (memory.saved_dtype, memory.dtype))
    saved = "quantised" if memory.quantised else saved
    return used if saved == used else f"{saved}, computed in {used}"


def _path(editable: Editable) -> str:
    paths = (path for path, module in editable.model.named_modules() if module is editable.unembedding)
    tied = getattr(editable.unembedding, "weight", None) is getattr(editable.embedding, "weight", 0)
    return next(paths, type(editable.unembedding).__name__) + (", tied to the embedding" if tied else "")


def _parameters(editable: Editable) -> tuple[int, int]:
    """Return the number of parameters and their bytes; tied weights count once."""
    parameters = list(editable.model.parameters())
    return sum(p.numel() for p in parameters), sum(p.numel() * p.element_size() for p in parameters)


def _count(parameters: int) -> str:
    for unit, size in (("B", 1e9), ("M", 1e6), ("K", 1e3)):
        if parameters >= size:
            return f"{parameters / size:.3g}{unit}"
    return str(parameters)
