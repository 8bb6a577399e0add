"""Precision of passes that only average over thousands of tokens: bfloat16, where this processor multiplies it faster.

Key statistics and the keys of names run more tokens than all else that an edit needs, and are used as means, in which
the rounding of single numbers averages out. In such a pass torch's autocast rounds the factors of a float32 model's
products to bfloat16; norms, softmax and the sums of the statistics stay in float32. The solution of an edit, and
every score, is computed in the model's own precision.

Nothing is assumed about a processor: a product is timed in both precisions, from weights in float32 as the model's are,
once for a machine and a version of torch; and the keys of a few tokens are compared in the model itself. A `--dtype`
that the user chose is kept.
"""

from __future__ import annotations

import logging
import platform
import timeit
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache

import torch
from torch import Tensor, nn

from ffedit.files import cache
from ffedit.files.resuming import kept
from ffedit.inference import replay
from ffedit.inference.distributed import ProcessGroup
from ffedit.model.editable import Editable
from ffedit.model.fingerprint import fingerprint
from ffedit.model.products import ROWS, fast_products

logger = logging.getLogger(__name__)

# The timed product: `TOKENS` states by a weight of `SIDE`² numbers, 2 GFLOP. `TRIED` states come first: a ratio below
# `SLOW` means that bfloat16 is emulated, and the whole product would take ten seconds.
TOKENS, SIDE, TRIED, SLOW = 1024, 1024, 32, 0.1
# bfloat16 is used if it is at least `FASTER` times as fast, and keys differ by at most `AGREES` of their norm. A number
# is rounded by up to 0.4 %, and the roundings of several layers add up.
FASTER, AGREES = 1.5, 0.05


def averaging_dtype(editable: Editable) -> torch.dtype:
    """Return the dtype of passes that only average: the model's own, or bfloat16; decided once for a model.

    The keys are compared in the last layer, where most roundings have added up, so that the dtype is the same for all.
    """
    dtype: torch.dtype = editable.model.dtype
    if dtype != torch.float32 or not editable.auto_dtype:
        return dtype
    if editable.averaging is None:
        speed = bfloat16_speed(editable.device)
        error = 0.0
        if speed >= FASTER:
            error = _kept("agreement", (*_machine(editable.device), fingerprint(editable)), lambda: _differs(editable))
        editable.averaging = torch.bfloat16 if speed >= FASTER and error <= AGREES else dtype
        compared = f", keys differ by {error:.2g}" if speed >= FASTER else ""
        message = "averages in %s: bfloat16 is %.2g times as fast as float32%s"
        logger.info(message, editable.averaging, speed, compared)
    return editable.averaging


def agree_on_dtype(editable: Editable, group: ProcessGroup) -> None:
    """Let all processes average in the dtype that the first one chooses, since it depends on a timing."""
    if group.size > 1:
        name = group.by_first(lambda: str(averaging_dtype(editable)).removeprefix("torch."))
        editable.averaging = getattr(torch, name)


def computed_in(editable: Editable, dtype: torch.dtype) -> AbstractContextManager[object]:
    """Compute passes of the model inside the block in `dtype`, which `averaging_dtype` returned."""
    if dtype == editable.model.dtype:
        return nullcontext()
    return torch.autocast(editable.device.type, dtype)


@lru_cache
def bfloat16_speed(device: torch.device) -> float:
    """Return how many times as fast as float32 a device multiplies in bfloat16, 0 where it does not; kept in the cache.

    It is measured anew for each device, version of torch, number of threads, and `products.ROWS`.
    """
    return _kept("speed", _machine(device), lambda: _measured_speed(device))


def _machine(device: torch.device) -> tuple[object, ...]:
    """Return all that the speed and the rounding of a product on `device` depend on."""
    unit = torch.backends.cpu.get_cpu_capability()
    if device.type != "cpu":
        unit = getattr(torch.get_device_module(device), "get_device_name", str)(device)  # Apple's has none
    return device.type, unit, platform.node(), torch.__version__, torch.get_num_threads(), ROWS


def _kept(kind: str, key: tuple[object, ...], measure: Callable[[], float]) -> float:
    """Return the number that `measure` returned for `key` the first time; it is kept in the cache."""
    tensors = kept(cache.entry(kind, repr(key)), lambda: {"number": torch.tensor(measure(), dtype=torch.float64)})
    return float(tensors["number"])


def _measured_speed(device: torch.device) -> float:
    """Time products in both precisions and return their ratio, 0 where a device has no bfloat16."""
    states, weight = torch.ones(TOKENS, SIDE, device=device), torch.ones(SIDE, SIDE, device=device)

    def ratio(rows: int) -> float:
        """Return the ratio for a product of `rows` states; like autocast, it rounds the weight each time."""
        seconds = least_seconds(float32_product(rows, SIDE, device))
        return seconds / least_seconds(lambda: float((states[:rows].bfloat16() @ weight.bfloat16())[0, 0]))

    try:
        tried = ratio(TRIED)
        return ratio(TOKENS) if tried > SLOW else tried
    except (RuntimeError, TypeError):  # each backend refuses in its own way
        return 0.0


def float32_product(rows: int, side: int, device: torch.device) -> Callable[[], float]:
    """Return a function to time: it multiplies ones, [rows, side] by [side, side], as a model's layers do.

    It returns an entry of the product, which is `side`.
    """
    # Not initialised at first: that would draw from the generator of whoever calls.
    layer: nn.Linear = torch.nn.utils.skip_init(nn.Linear, side, side, bias=False, device=device)
    layer.requires_grad_(False).weight.fill_(1.0)
    states = torch.ones(rows, side, device=device)

    def multiply() -> float:
        with fast_products(layer):
            return float(layer(states)[0, 0])

    return multiply


def least_seconds(work: Callable[[], object], count: int = 3) -> float:
    """Return the least time, in seconds, of `count` runs of `work` after a first one.

    Devices compute asynchronously, so `work` on one has to end by reading a number.
    """
    work()
    return min(timeit.repeat(work, number=1, repeat=count))


@torch.no_grad()
def _differs(editable: Editable) -> float:
    """Return how much the last layer's keys of a few tokens differ in bfloat16, as a share of their norm."""
    ids, last, read = editable.probe_ids(16), editable.feed_forward[-1], list[Tensor]()
    for dtype in (torch.float32, torch.bfloat16):
        with last.keys() as keys, computed_in(editable, dtype):
            replay.run_to(editable, ids, last.layer)
            read.append(keys().float())
    return float((read[1] - read[0]).norm() / read[0].norm())
