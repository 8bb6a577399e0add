"""How much may go through a model at once, and how to tell that it was too much."""

from __future__ import annotations

import torch

from ffedit.anatomy import Editable


def room(editable: Editable, least: int, shares: int) -> int:
    """How many numbers of one kind a batch may hold: `least`, or one of so many `shares` of what a GPU has free.

    On a CPU `least` should fill the matrix products and leave the machine usable; a GPU wants more.
    """
    weight = editable.memories[0].weight
    if not weight.is_cuda:
        return least
    free, _ = torch.cuda.mem_get_info(weight.device)
    return max(least, free // (shares * weight.element_size()))


def out_of_memory(error: BaseException) -> bool:
    """Whether memory failed; torch has no class of its own for an allocation that fails on a CPU."""
    failed = any(words in str(error) for words in ("not enough memory", "allocate memory"))
    return failed or isinstance(error, torch.OutOfMemoryError | MemoryError)
