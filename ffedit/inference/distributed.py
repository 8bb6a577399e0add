"""Division of work among several processes: each takes every size-th item, and all of them receive every result.

`accelerate launch` (or torchrun) starts the same command N times and gives each process its rank; a command that was
started alone is a group of size 1. Processes exchange JSON, sent as the bytes of its text: received data is never
executed, and a float is received as the float that was sent.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from math import prod
from typing import Any, TypeVar, cast

import torch
from accelerate import PartialState
from torch import Tensor

from ffedit import errors
from ffedit.errors import EditError, FFEditError, ProcessError, brief
from ffedit.inference.batching import device_failure

Item = TypeVar("Item")
Result = TypeVar("Result")
# One process may have hours of work left when another has finished.
PATIENCE = timedelta(days=7)


@dataclass(frozen=True)
class ProcessGroup:
    """Group of processes that work on one task, as seen by one of them."""

    rank: int = 0  # number of this process, from 0 on
    size: int = 1  # number of processes

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.size:
            raise ValueError(f"process {self.rank} of {self.size}: a rank from 0 to {self.size - 1} was expected")

    @property
    def first(self) -> bool:
        """True if this process writes and shows the results of all."""
        return self.rank == 0

    def share(self, items: Sequence[Item]) -> list[Item]:
        """Return this process's part of `items`: every size-th, from its rank on."""
        return list(items[self.rank :: self.size])

    def gather(self, value: Any) -> list[Any]:
        """Return the `value` (of JSON's types) of every process, by rank. All must call this, and wait for the last.

        Tuples come back as lists, and NaN and infinities as they are.
        """
        text = json.dumps(value).encode()
        if self.size == 1:
            return [json.loads(text)]
        texts = _all(torch.frombuffer(bytearray(text), dtype=torch.uint8), self.size)
        return [json.loads(bytes(text.tolist())) for text in texts]

    def exchange(self, own: Sequence[Tensor]) -> list[Tensor]:
        """Return the tensors of all items, in order; `own` are those of this process's `share`, all of one dtype.

        They are on the CPU where there are several processes.
        """
        if self.size == 1:
            return list(own)
        shapes = self.gather([[str(tensor.dtype).removeprefix("torch."), *tensor.shape] for tensor in own])
        dtype = getattr(torch, next(name for listed in shapes for name, *_ in listed))
        flat = torch.cat([torch.zeros(0, dtype=dtype), *(tensor.detach().cpu().flatten() for tensor in own)])
        shares = [
            [
                part.view(shape)
                for part, (_, *shape) in zip(row.split([prod(s) for _, *s in listed]), listed, strict=True)
            ]
            for row, listed in zip(_all(flat, self.size), shapes, strict=True)
        ]
        return interleaved(shares)

    def in_all(self, work: Callable[[], Result]) -> Result:
        """Call `work`, which must exchange nothing, in every process; an `FFEditError` in one is raised in all.

        Where memory or a device fails in one of them, all others raise an `EditError` that names it.
        """
        if self.size == 1:
            return work()
        result: Result | None = None
        error: Exception | None = None
        words = ""
        try:
            result = work()
        except FFEditError as raised:
            error, words = raised, str(raised)
        except (MemoryError, RuntimeError) as raised:  # memory or a device failed, perhaps here alone
            if device_failure(raised) is None:
                raise
            error = raised.with_traceback(None)  # the traceback holds the tensors of the failed work
            words = f"the process of rank {self.rank} (of {self.size}) failed: {brief(raised)}"
        problems = self.gather(None if error is None else [type(error).__name__, words])
        if error is not None:
            raise error
        for name, words in filter(None, problems):
            raise getattr(errors, name, EditError)(words)
        return cast(Result, result)

    def by_first(self, work: Callable[[], Any]) -> Any:
        """Call `work` in the first process only, and return its result (plain JSON) in all of them.

        An `FFEditError` of `work` is raised in every process, as is an `EditError` where memory or a device fails.
        """
        return self.gather(self.in_all(lambda: work() if self.first else None))[0]

    def agree(self, settings: Callable[[], Mapping[str, Any]]) -> None:
        """Raise an EditError where the `settings` (plain JSON) of a process differ from those of the first.

        `settings` is called only where there are several processes.
        """
        if self.size == 1:  # settings take time
            return
        first, *others = self.gather(dict(self.in_all(settings)))
        for rank, other in enumerate(others, 1):
            differ = [f"{key} {value}, and {other.get(key)}" for key, value in first.items() if value != other.get(key)]
            if differ:
                raise EditError(
                    f"the processes of rank 0 and {rank} differ: {'; '.join(differ)}; give all processes the same "
                    "files, options and versions"
                )

    def wait(self) -> None:
        """Wait until every process has reached this call."""
        if self.size > 1:
            with _together():
                _state().wait_for_everyone()

    def disband(self) -> None:
        """End the group when its work is done: all processes call this once, and exchange nothing afterwards.

        Threads of the process group may still hold tensors that Python made. One that frees them at interpreter
        shutdown aborts the process, and a finished run would be reported as a failed one.
        """
        if self.size > 1:
            _state().destroy_process_group()


ALONE = ProcessGroup()


def interleaved(shares: Sequence[Sequence[Item]]) -> list[Item]:
    """Return the items of all processes in their order, from the share of each (`ProcessGroup.share`)."""
    size = len(shares)
    return [shares[i % size][i // size] for i in range(sum(map(len, shares)))]


def launched() -> bool:
    """Return True if this command was started as one of several processes."""
    return int(os.environ.get("WORLD_SIZE", "1")) > 1 and "RANK" in os.environ


def process_group() -> ProcessGroup:
    """Return the group that this command was started in; size 1 unless `accelerate launch` or torchrun started it."""
    if not launched():
        return ProcessGroup()
    state = _state()
    return ProcessGroup(state.process_index, state.num_processes)


def own_device() -> torch.device | None:
    """Return this process's device, an accelerator of its own in a group; None where the process is alone."""
    return _state().device if launched() else None


def _state() -> PartialState:
    """Return accelerate's state of this process; the first call connects the processes."""
    # Without an accelerator `cpu` must be set, or every process is taken for a single one.
    return PartialState(cpu=not torch.accelerator.is_available(), timeout=PATIENCE)


def _all(own: Tensor, size: int) -> list[Tensor]:
    """Return the tensors [n] of all processes, by rank, on the CPU; they may differ in length."""
    device = _state().device
    with _together():
        lengths = [torch.zeros(1, dtype=torch.long, device=device) for _ in range(size)]
        torch.distributed.all_gather(lengths, torch.tensor([len(own)], device=device))
        padded = own.new_zeros(max(int(length) for length in lengths), device=device)
        padded[: len(own)] = own.to(device)
        gathered = [torch.empty_like(padded) for _ in range(size)]
        torch.distributed.all_gather(gathered, padded)
    return [numbers[: int(length)].cpu() for numbers, length in zip(gathered, lengths, strict=True)]


@contextmanager
def _together() -> Iterator[None]:
    """Raise a ProcessError, in one line, where an exchange fails because another process has ended."""
    try:
        yield
    except RuntimeError as error:  # Gloo's and NCCL's words for a closed connection differ by system and version
        raise ProcessError(
            "another process of this run has ended; the same command continues from saved work "
            f"({str(error).splitlines()[0][:120]})"
        ) from error
