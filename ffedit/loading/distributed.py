"""Several processes share the work: each takes every size-th item, and all of them get to know every result.

`accelerate launch` (or torchrun) starts the same command N times and tells each process its rank; a command that was
started alone is a crew of one. What processes tell each other is JSON, sent as the bytes of its text: nothing that
arrives can be code, and a float arrives as the float that was sent.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor

if TYPE_CHECKING:
    from accelerate import PartialState

Item = TypeVar("Item")
# One process may have hours of work left when another is done with its own.
PATIENCE = timedelta(days=7)


@dataclass(frozen=True)
class ProcessGroup:
    """The processes that work on one task, as one of them sees it.

    Attributes:
        rank: which of them this is, from 0 on.
        size: how many there are.
    """

    rank: int = 0
    size: int = 1

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.size:
            raise ValueError(f"process {self.rank} of {self.size}: a rank from 0 to {self.size - 1} was expected")

    @property
    def first(self) -> bool:
        """Whether this process writes and shows what all of them found."""
        return self.rank == 0

    def share(self, items: Sequence[Item]) -> list[Item]:
        """This process's part of `items`: every size-th, from its rank on."""
        return list(items[self.rank :: self.size])

    def gather(self, value: Any) -> list[Any]:
        """What every process gave, by rank; all of them must call this, and wait here for the last.

        Args:
            value: of JSON's types; tuples come back as lists, and NaN and infinities as they are.
        """
        text = json.dumps(value).encode()
        if self.size == 1:
            return [json.loads(text)]
        device = _state().device
        own = torch.frombuffer(bytearray(text), dtype=torch.uint8).to(device)
        lengths = _all(torch.tensor([len(own)], device=device), self.size)
        padded = own.new_zeros(max(int(length) for length in lengths))
        padded[: len(own)] = own
        texts = zip(_all(padded, self.size), lengths, strict=True)
        return [json.loads(bytes(row[: int(length)].tolist())) for row, length in texts]

    def wait(self) -> None:
        """Wait until every process has come here."""
        if self.size > 1:
            _state().wait_for_everyone()

    def disband(self) -> None:
        """End the crew when its work is done: all of them call this, once, and tell each other nothing afterwards.

        Threads of the process group may still hold tensors that Python made. One that frees them while the interpreter
        is taken down aborts the process, and a finished run would be told as one that failed.
        """
        if self.size > 1:
            _state().destroy_process_group()


def launched() -> bool:
    """Whether this command was started as one of several processes."""
    return int(os.environ.get("WORLD_SIZE", "1")) > 1 and "RANK" in os.environ


def left_alone() -> bool:
    """Whether `accelerate launch` was to start several processes, and started this one only.

    It does so where it sees no several GPUs and is not told `--multi_gpu`; it names an address for the processes to
    meet at nonetheless, and gives none of them a rank.
    """
    return {"ACCELERATE_MIXED_PRECISION", "MASTER_ADDR"} <= set(os.environ) and "WORLD_SIZE" not in os.environ


def process_group() -> ProcessGroup:
    """The processes that this command was started as; one alone unless `accelerate launch` or torchrun started it."""
    if not launched():
        return ProcessGroup()
    state = _state()
    return ProcessGroup(state.process_index, state.num_processes)


def own_device() -> torch.device | None:
    """Where this process computes, each of a crew on an accelerator of its own; None where it is alone."""
    return _state().device if launched() else None


def _state() -> PartialState:
    """What accelerate knows of this process; the processes find each other when it is first asked."""
    from accelerate import PartialState

    # Without an accelerator it must be told so, or it takes every process for one that is alone.
    return PartialState(cpu=not torch.accelerator.is_available(), timeout=PATIENCE)


def _all(own: Tensor, size: int) -> list[Tensor]:
    """A tensor of one shape from every process, by rank."""
    found = [torch.empty_like(own) for _ in range(size)]
    torch.distributed.all_gather(found, own)
    return found
