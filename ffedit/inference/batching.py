"""Batches that go through a model: how they are cut, how large they may be, and their division when memory fails."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

import torch

from ffedit.model.editable import Editable
from ffedit.model.storage import device_of, free_memory

# How failed allocations are worded: by torch on a CPU (two), CUDA and MPS, by cuBLAS, cuSOLVER and cuDNN, and by MAGMA.
FAILED = ("not enough memory", "allocate memory", "out of memory", "_STATUS_ALLOC_FAILED", "MAGMA_ERR_DEVICE_ALLOC")

# How the failure of a device begins, as of one that was removed or a kernel that stopped; what follows differs.
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


def batches(lengths: Sequence[int], budget: int) -> Iterator[list[int]]:
    """Yield indices of rows, the longest first, in batches of at most `budget` padded tokens (one row at least)."""
    order = sorted(range(len(lengths)), key=lambda i: -lengths[i])
    while order:
        size = max(1, budget // max(1, lengths[order[0]]))
        yield order[:size]
        order = order[size:]


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
    if len(items) == 1:
        with refuse_out_of_memory(refusal):
            done = work(items)
        yield done
        return
    try:
        done = work(items)
    except (MemoryError, RuntimeError) as error:
        if not out_of_memory(error):
            raise
    else:
        yield done
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
    """Return in one line that memory or the device failed; None of any other error."""
    said = str(error).strip().partition("\n")[0]
    if out_of_memory(error):
        return f"not enough memory ({said or type(error).__name__}); use another --device or --dtype, or fewer facts"
    if said.startswith(DEVICE_FAILED):
        return (
            f"the device failed ({said}): it is gone, or its computation stopped; the same command goes on where saved "
            "work allows, or use another --device"
        )
    return None


def out_of_memory(error: BaseException) -> bool:
    """Return True if memory failed, on whichever device: only CUDA's own allocator raises `torch.OutOfMemoryError`."""
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or any(words in str(error) for words in FAILED)
