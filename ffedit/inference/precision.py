"""Precision of passes that only average over thousands of tokens: bfloat16, where this processor multiplies it faster.

Key statistics and the keys of names run more tokens than all else that an edit needs, and enter it as means, in which
the rounding of single numbers averages out. In such a pass torch's autocast rounds the factors of a float32 model's
products to bfloat16; norms, softmax and the sums of the statistics stay in float32. What is solved for, and every
score, is computed in the model's own precision.

Nothing is assumed of a processor. A product is timed in both precisions, from weights in float32 as the model's are,
once for a machine and a version of torch; and the keys of a few tokens are compared in the model itself. A `--dtype`
that the user gave is kept.
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

# Timed: a product of `TOKENS` states and a weight of `SIDE`² numbers, 2 GFLOP. First of `TRIED` states only: where
# bfloat16 is emulated, as is told by a ratio below `SLOW`, the whole product would take ten seconds.
TOKENS, SIDE, TRIED, SLOW = 1024, 1024, 32, 0.1
# bfloat16 is taken where it is so many times as fast, and where keys differ by no more than this share of their norm.
# A number is rounded by up to 0.4 %, and the layers below add up several of these.
FASTER, AGREES = 1.5, 0.05


def averaging_dtype(editable: Editable) -> torch.dtype:
    """Return the dtype of passes that only average: the model's own, or bfloat16; decided once for a model.

    The keys are compared in the last layer, where most roundings have added up, so that the dtype is the same for all.
    """
    own: torch.dtype = editable.model.dtype
    if own != torch.float32 or not editable.auto_dtype:
        return own
    if editable.averaging is None:
        times = bfloat16_speed(editable.device)
        off = 0.0
        if times >= FASTER:
            off = _kept("agreement", (*_machine(editable.device), fingerprint(editable)), lambda: _differs(editable))
        editable.averaging = torch.bfloat16 if times >= FASTER and off <= AGREES else own
        compared = f", keys differ by {off:.2g}" if times >= FASTER else ""
        words = "averages in %s: bfloat16 is %.2g times as fast as float32%s"
        logger.info(words, editable.averaging, times, compared)
    return editable.averaging


def agree_on_dtype(editable: Editable, group: ProcessGroup) -> None:
    """Let all processes average in the dtype that the first one chooses, since it depends on a timing."""
    if group.size > 1:
        name = group.by_first(lambda: str(averaging_dtype(editable)).removeprefix("torch."))
        editable.averaging = getattr(torch, name)


def computed_in(editable: Editable, dtype: torch.dtype) -> AbstractContextManager[object]:
    """In the block, passes of the model are computed in `dtype`, which `averaging_dtype` returned."""
    if dtype == editable.model.dtype:
        return nullcontext()
    return torch.autocast(editable.device.type, dtype)


@lru_cache
def bfloat16_speed(device: torch.device) -> float:
    """Return how many times as fast as float32 a device multiplies in bfloat16, 0 where it does not; kept in the cache.

    It is of a device, the version of torch, the number of threads, and the rows that oneDNN multiplies.
    """
    return _kept("speed", _machine(device), lambda: _measured_speed(device))


def _machine(device: torch.device) -> tuple[object, ...]:
    """Return what the numbers of a product on `device` depend on."""
    unit = torch.backends.cpu.get_cpu_capability()
    if device.type != "cpu":
        unit = getattr(torch.get_device_module(device), "get_device_name", str)(device)  # Apple's has none
    return device.type, unit, platform.node(), torch.__version__, torch.get_num_threads(), ROWS


def _kept(kind: str, about: tuple[object, ...], measure: Callable[[], float]) -> float:
    """Return what `measure` returned for `about` the first time; it is kept in the cache."""
    made = kept(cache.entry(kind, repr(about)), lambda: {"number": torch.tensor(measure(), dtype=torch.float64)})
    return float(made["number"])


def _measured_speed(device: torch.device) -> float:
    """Time products in both precisions and return their ratio, 0 where a device has no bfloat16."""
    states, weight = torch.ones(TOKENS, SIDE, device=device), torch.ones(SIDE, SIDE, device=device)

    def compared(rows: int) -> float:
        """Return the ratio for a product of so many rows; autocast rounds the weight each time, too."""
        own = least_seconds(float32_product(rows, SIDE, device))
        return own / least_seconds(lambda: float((states[:rows].bfloat16() @ weight.bfloat16())[0, 0]))

    try:
        times = compared(TRIED)
        return compared(TOKENS) if times > SLOW else times
    except (RuntimeError, TypeError):  # each backend refuses in its own way
        return 0.0


def float32_product(rows: int, side: int, device: torch.device) -> Callable[[], float]:
    """Return a product of [rows, side] and [side, side] numbers, each 1, that runs as a model's layers do, to be timed.

    It returns a number of its result, `side`.
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
    """Return the seconds that `work` takes once it has run: the least of `count`.

    A device works on while Python goes on: work on one has to end with a number that is read.
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
