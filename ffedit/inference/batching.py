"""Batches that go through a model: how they are cut, how large they may be, and their division when memory fails."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate
from math import ceil
from typing import TypeVar

import torch

from ffedit.model.editable import Editable
from ffedit.model.storage import device_of, free_memory

# How failed allocations are worded: by torch on a CPU (two), CUDA and MPS, by cuBLAS, cuSOLVER and cuDNN, by MAGMA, and
# by Python where there is no memory for the stack of a thread.
FAILED = (
    *("not enough memory", "allocate memory", "out of memory", "_STATUS_ALLOC_FAILED", "MAGMA_ERR_DEVICE_ALLOC"),
    "can't start new thread",
)

# Padded tokens in a batch: more of them leave a CPU's cache between two products.
TOKENS = 2048
# Cost of one more batch, in tokens: a batch of fewer tokens is dominated by reading the weights.
BATCH_COST = 32

# How messages begin when a device fails, because it was removed or a kernel stopped; what follows differs.
DEVICE_FAILED = (
    "CUDA error",
    "CUDA driver error",
    "HIP error",
    "NCCL error",
    "cuDNN error",
    "MPS backend",
    "XPU error",
)

Item = TypeVar("Item")
Result = TypeVar("Result")


def least_cost_runs(count: int, cost: Callable[[int, int], float]) -> list[tuple[int, int]]:
    """Cut `count` items in a row into runs (first, past the last) of least total cost, `cost(first, past the last)`."""
    best: list[tuple[float, int]] = [(0.0, 0)]  # for the items before each: their cost, and where their last run begins
    for end in range(1, count + 1):
        best.append(min((best[first][0] + cost(first, end), first) for first in range(end)))
    runs = []
    while count:
        runs.append((best[count][1], count))
        count = best[count][1]
    return runs


def batches(lengths: Sequence[int], budget: int, cost: int = BATCH_COST) -> Iterator[list[int]]:
    """Yield indices of items, the longest first, in batches of at most `budget` padded tokens (one item at least).

    Items of similar lengths share a batch: padded tokens, and `cost` tokens for each batch, are as few as can be.
    """
    distinct = sorted(set(lengths))
    by_length: dict[int, list[int]] = {length: [] for length in distinct}
    for i, length in enumerate(lengths):
        by_length[length].append(i)
    upto = [0, *accumulate(len(by_length[length]) for length in distinct)]
    runs = least_cost_runs(len(distinct), lambda first, end: (upto[end] - upto[first]) * distinct[end - 1] + cost)
    for first, end in runs:
        members = [i for length in reversed(distinct[first:end]) for i in by_length[length]]
        count, most = upto[end] - upto[first], max(1, budget // max(1, distinct[end - 1]))
        # Parts of about equal size: a small one costs nearly as much as a large one.
        size = ceil(count / ceil(count / most))
        yield from (members[i : i + size] for i in range(0, count, size))


def grouped(items: Iterable[Item], cost: Callable[[Sequence[Item]], int], budget: int) -> Iterator[list[Item]]:
    """Yield neighbouring items in groups that cost at most `budget` (one item at least)."""
    group: list[Item] = []
    for item in items:
        if group and cost([*group, item]) > budget:
            yield group
            group = []
        group.append(item)
    if group:
        yield group


def batch_budget(editable: Editable, least: int, shares: int) -> int:
    """Return how many numbers of one kind a batch may hold: `least`, or 1 / `shares` of a GPU's free memory if more.

    On a CPU `least` should fill the matrix products and leave the machine usable; a GPU needs larger batches.
    """
    free = free_memory(device_of(editable.embedding)) or 0
    return max(least, free // (shares * editable.feed_forward[0].dtype.itemsize))


def split_on_oom(
    work: Callable[[Sequence[Item]], Result], items: Sequence[Item], refusal: Exception
) -> Iterator[Result]:
    """Run `work` on all `items` (one at least); where memory fails, on the halves in order, as often as necessary.

    `work` takes neighbouring items; it may have begun when it fails, and is then called again. `refusal` is raised
    where there is no memory for a single item.
    """
    try:
        result = work(items)
    except (MemoryError, RuntimeError) as error:
        if not out_of_memory(error):
            raise
        if len(items) == 1:
            raise refusal from error
    else:
        yield result
        return
    # Outside the handler, where the error no longer holds the failed work's tensors. cuBLAS and cuSOLVER allocate
    # beside torch's cache, which would keep what they need.
    if torch.accelerator.is_available():
        torch.get_device_module().empty_cache()
    half = len(items) // 2
    yield from split_on_oom(work, items[:half], refusal)
    yield from split_on_oom(work, items[half:], refusal)


@contextmanager
def refuse_out_of_memory(refusal: Exception) -> Iterator[None]:
    """Raise `refusal` where memory fails in the block: for work that cannot be halved."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if not out_of_memory(error):
            raise
        raise refusal from error


def device_failure(error: BaseException) -> str | None:
    """Describe a failure of memory or the device in one line; None for any other error."""
    message = str(error).strip().partition("\n")[0]
    if out_of_memory(error):
        return (
            f"not enough memory ({message or type(error).__name__}); end other programs, or use fewer facts at once, "
            "another --dtype or --device, or a smaller model"
        )
    if message.startswith(DEVICE_FAILED):
        return (
            f"the device failed ({message}); run the same command again, which continues from saved work, or use "
            "another --device"
        )
    return None


def out_of_memory(error: BaseException) -> bool:
    """Return True if memory failed, on whichever device: only CUDA's own allocator raises `torch.OutOfMemoryError`."""
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or any(words in str(error) for words in FAILED)
