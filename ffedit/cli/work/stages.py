"""Seconds of each stage of a command, its products, and their share of the machine's own speed.

The time before a progress call belongs to the stage that the call reports; before the call that opens a stage (nothing
is done yet), it is logged as "between". Operations are those of matrix products and attention, not of factorisations
(Cholesky); their ceiling is the fastest of a few square products, in float32 or, if that is faster here, in bfloat16.
"""

from __future__ import annotations

import logging
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from ffedit.inference.precision import bfloat16_speed, float32_product, least_seconds
from ffedit.progress import Progress

logger = logging.getLogger(__name__)

SIDE, ROUNDS = 1536, 8  # the ceiling is measured on products of SIDE × SIDE matrices, 7 GFLOP each
SHORT = 0.5  # seconds; a shorter stage is logged without its share


class Products(TorchDispatchMode):
    """Counts the floating-point operations of the products within a block, two for each multiply and add."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.operations = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        count = flop_registry.get(func._overloadpacket)
        if count is not None:
            self.operations += count(*args, **(kwargs or {}), out_val=result)
        return result


@contextmanager
def timed_stages(progress: Progress) -> Iterator[Progress]:
    """Pass calls on to `progress`, and log each stage's figures when the block ends."""
    seconds, operations = defaultdict[str, float](float), defaultdict[str, int](int)
    last, counted = time.perf_counter(), 0

    def charge(stage: str) -> None:
        nonlocal last, counted
        now = time.perf_counter()
        seconds[stage] += now - last
        operations[stage] += products.operations - counted
        last, counted = now, products.operations

    def called(stage: str, done: int, total: int) -> None:
        charge(stage if done else "between")
        progress(stage, done, total)

    with Products() as products:
        yield called
        charge("between")
    ceiling = fastest_products() if any(operations.values()) else 0.0
    for stage, spent in seconds.items():
        words = f"{spent:.1f} s"
        if operations[stage] and spent >= SHORT:
            speed = operations[stage] / spent
            words += (
                f", {operations[stage] / 1e12:.2f} TFLOP at {100 * speed / ceiling:.0f} % of {ceiling / 1e12:.2f}/s"
            )
        logger.info("%s: %s", stage, words)


def fastest_products() -> float:
    """Return the operations per second of the fastest of a few products on the CPU, or the accelerator."""
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    device = accelerator or torch.device("cpu")
    seconds = least_seconds(float32_product(SIDE, SIDE, device), ROUNDS)
    return max(1.0, bfloat16_speed(device)) * 2 * SIDE**3 / seconds
