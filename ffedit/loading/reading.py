"""Read checkpoints of any storage with transformers: compare what they declare and hold, and shorten errors."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import transformers

from ffedit.errors import FFEditError, ModelError, brief
from ffedit.model.storage import host_memory

SLACK = 1 << 26  # weights that a config may declare beyond twice the stored ones


def check_declared(name: str, auto: Any, config: Any, weights: int, tensors: int, source: str) -> str:
    """Return the name of a config's model class; refuse a config of far more weights than its `source` holds.

    The model is made on "meta" and takes no memory, but each layer takes time: more layers than tensors are refused
    before. If a few weights are missing, `check_loaded` says which.
    """
    layers = getattr(config.get_text_config(), "num_hidden_layers", 0)
    if isinstance(layers, int) and layers > tensors:
        raise ModelError(f"{name}: its config declares {layers:,} layers, and the {source} holds {tensors:,} tensors")
    with readable(f"{name}: no model can be made from its config"), torch.device("meta"):
        model = auto.from_config(config)
    declared = sum(weight.numel() for weight in model.parameters())
    if declared > 2 * weights + SLACK:
        raise ModelError(
            f"{name}: its config declares {declared:,} weights, and the {source} holds {weights:,}; fetch it anew"
        )
    return type(model).__name__


def check_loaded(name: str, info: Mapping[str, Any], source: str, expected: str) -> None:
    """Refuse a model that did not find all weights in its `source`, according to transformers' loading info."""
    for key, stored, needed in info["mismatched_keys"]:
        raise ModelError(f"{name}: {key} is {list(stored)} in the {source}, {list(needed)} was expected")
    for key in sorted(info["missing_keys"]):
        raise ModelError(f"{name}: {key} is missing from the {source}; {expected}")


def check_memory(name: str, weights: int, dtype: torch.dtype, choosable: bool = True) -> None:
    """Refuse, by a ModelError, to read a model of so many `weights` if they do not fit into the free CPU memory.

    They are unpacked or converted to `dtype`, which the user can choose if `choosable`.
    """
    needed, halved, free = weights * dtype.itemsize, weights * torch.bfloat16.itemsize, host_memory()
    if needed > free:
        lighter = f"give dtype bfloat16 ({halved / 1e9:.2g} GB), or " if choosable and halved <= free else ""
        raise ModelError(
            f"{name}: its weights take {needed / 1e9:.2g} GB of memory in {str(dtype).removeprefix('torch.')}, and "
            f"{free / 1e9:.2g} GB are free; {lighter}use a machine with more"
        )


@contextmanager
def readable(what: str, advice: str = "") -> Iterator[None]:
    """Raise a one-line error, `what` with the reason and `advice`, if something cannot be read."""
    try:
        yield
    except FFEditError:
        raise
    except Exception as error:  # a broken file may fail anywhere in transformers, with any error
        raise ModelError(f"{what}: {brief(error)}{advice}") from error


@contextmanager
def uncollected() -> Iterator[None]:
    """Turn off Python's search for cycles of unused objects: making millions of objects then takes half as long."""
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            gc.enable()


@contextmanager
def quiet() -> Iterator[None]:
    """Disable transformers' progress bars and warnings; it warns of a vocabulary that it was not given."""
    logging = transformers.utils.logging
    bars, verbosity = logging.is_progress_bar_enabled(), logging.get_verbosity()
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()
