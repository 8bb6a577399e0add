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

import hashlib
import logging
import platform
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache

import torch
from torch import Tensor

from ffedit.errors import EditError
from ffedit.files import cache
from ffedit.files.resuming import load_state, save_state
from ffedit.inference import replay
from ffedit.model.editable import Editable

logger = logging.getLogger(__name__)

# Timed: `TOKENS` states times a weight of `SIDE`² numbers, 2 GFLOP, the best of so many.
TOKENS, SIDE, ROUNDS = 1024, 1024, 3
# bfloat16 is taken where it is so many times as fast, and where keys differ by no more than this share of their norm.
# A number is rounded by up to 0.4 %, and a few layers add up several of these.
FASTER, AGREES = 1.5, 0.05


def wanted(editable: Editable) -> torch.dtype:
    """Return the dtype that passes that only average should be computed in, by the speed of the model's device."""
    own: torch.dtype = editable.model.dtype
    if own != torch.float32 or not editable.dtype_open or bfloat16_speed(editable.device) < FASTER:
        return own
    return torch.bfloat16


def averaging(editable: Editable, layer: int) -> torch.dtype:
    """Return the dtype in which they are computed up to `layer`: the `wanted` one, where its keys agree."""
    own, dtype = editable.model.dtype, wanted(editable)
    if dtype != own and not (off := _differs(editable, layer)) <= AGREES:
        logger.info("computed in float32: in bfloat16, the keys of layer %d differ by %.2g of their norm", layer, off)
        return own
    if own == torch.float32 and editable.dtype_open:
        times = bfloat16_speed(editable.device)
        logger.info(
            "computed in %s: bfloat16 is %.2g times as fast as float32 on this %s", dtype, times, editable.device
        )
    return dtype


def computed_in(editable: Editable, dtype: torch.dtype) -> AbstractContextManager[object]:
    """In the block, passes of the model are computed in `dtype`, which `averaging` returned."""
    if dtype == editable.model.dtype:
        return nullcontext()
    return torch.autocast(editable.device.type, dtype)


@lru_cache
def bfloat16_speed(device: torch.device) -> float:
    """Return how many times as fast as float32 a device multiplies in bfloat16; measured once, and cached."""
    if device.type == "cpu":
        unit = torch.backends.cpu.get_cpu_capability()
    else:
        unit = torch.get_device_module(device).get_device_name(device)
    about = device.type, unit, platform.node(), torch.__version__, torch.get_num_threads()
    path = cache.path("speed", hashlib.sha256(repr(about).encode()).hexdigest()[:24], ".safetensors")
    try:
        return float(load_state(path, "holds no speed")[1])
    except (EditError, TypeError, ValueError):
        pass
    states = torch.ones(TOKENS, SIDE, device=device)
    weight = torch.ones(SIDE, SIDE, device=device)

    def rounded() -> Tensor:
        return states.bfloat16() @ weight.bfloat16()

    plain, half = _seconds(lambda: states @ weight), _seconds(rounded)
    cache.write(path, lambda made: save_state(made, {}, plain / half))
    return plain / half


def _seconds(product: Callable[[], Tensor]) -> float:
    """Return the seconds of a product, the best of `ROUNDS`."""
    best = float("inf")
    for _ in range(ROUNDS):
        started = time.perf_counter()
        float(product()[0, 0])  # waits for the device
        best = min(best, time.perf_counter() - started)
    return best


@torch.no_grad()
def _differs(editable: Editable, layer: int) -> float:
    """Return how much the keys of a few tokens differ in bfloat16, as a share of their norm."""
    ids, read = editable.probe_ids(16), []
    for dtype in (torch.float32, torch.bfloat16):
        with editable.feed_forward[layer].keys() as keys, computed_in(editable, dtype):
            replay.run_to(editable, ids, layer)
            read.append(keys().float())
    return float((read[1] - read[0]).norm() / read[0].norm())
