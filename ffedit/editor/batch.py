"""Write many facts at once: keys of all, values of all, one solution per layer.

The values are chosen at the last of the layers. Several layers share the work (MEMIT, arXiv 2210.07229, section 4.3):
going up, each stores an equal part of what is then still missing from the residual stream behind the last layer, at the
keys that the changed layers below now give.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from ffedit import hooks, replay
from ffedit.algebra import check_exact, double
from ffedit.anatomy import Editable
from ffedit.editor.config import EditConfig
from ffedit.editor.edit import Edit
from ffedit.editor.job import Job, restored
from ffedit.editor.keys import read
from ffedit.editor.provenance import Record, divisions, how_solved
from ffedit.editor.target import choose_values
from ffedit.editor.wording import Wording, word
from ffedit.errors import EditError
from ffedit.lowrank import LowRank
from ffedit.memory import KeyValueMemory
from ffedit.moments import KeyMoments
from ffedit.tokens import pad

# Share of a change that the residual stream behind the layer may miss before it is no longer "added" to it.
ADDED = 1e-2


@dataclass(frozen=True, eq=False)
class Problem:
    """What one layer is to store.

    Attributes:
        W: value matrix, [d_model, d_ff], float64.
        K: keys, [d_ff, n].
        V: values that they should give, [d_model, n].
        moments: second moment of the keys of other text.
        own: that of the facts' own texts, by the weight they have (`algebra.steadied`), [d_ff, d_ff].
        kept: keys of earlier edits, [d_ff, p].
        config: weights.
    """

    W: Tensor
    K: Tensor
    V: Tensor
    moments: KeyMoments
    own: Tensor
    kept: Tensor
    config: EditConfig

    @cached_property
    def C(self) -> Tensor:
        """What a change is measured in: other text and the facts' own together, [d_ff, d_ff]."""
        return self.moments.C.to(self.own.device) + self.own


@dataclass(frozen=True)
class Solver:
    """How a method solves what one layer is to store.

    Attributes:
        name: of the method, for the provenance.
        solve: the smallest change.
        exact: it exists for independent keys only, so that others are refused before any value is chosen.
        guarantee: what it promises of a solution, and what came of that, for the provenance, plain JSON.
    """

    name: str
    solve: Callable[[Problem], LowRank]
    exact: bool = False
    guarantee: Callable[[Problem, LowRank], Mapping[str, Any]] = lambda problem, delta: {}


def write_batch(solver: Solver, job: Job) -> Edit:
    """Store the facts of `job` in the value matrices of its layers.

    Args:
        solver: solves each layer.
        job: what to write; the values are chosen at the highest layer.

    Raises:
        EditError: there is no solution, or several layers are asked for where they cannot share a value.
    """
    editable, config, groups, memories = job.editable, job.config, job.groups, job.memories
    record, subjects = Record(solver.name, job), [group[0].subject for group in groups]
    wordings = word(editable, groups, config)
    last = memories[-1]
    spread = len(memories) > 1
    # A layer that works alone is read once: nothing below it changes.
    K, own = read_all(editable, last, wordings, 0.0 if spread else config.steady)
    if spread:
        _check_added(editable, last, wordings[0], double(last.value) @ K[:, 0])
    for memory in memories if solver.exact else ():
        keys = K if memory is last else read_all(editable, memory, wordings, 0.0)[0]
        check_exact(keys, record.kept[memory.address].to(keys.device))
    values = choose_values(editable, last, wordings, K, config, job.progress)
    deltas = torch.stack([value.delta for value in values], 1)
    before = _streams(editable, last, wordings) if spread else None
    with restored(memories):
        for i, memory in enumerate(memories):
            W = double(memory.value)
            R = deltas.to(W.device)
            if before is not None:
                K, own = read_all(editable, memory, wordings, config.steady)
                R = (R + (before - _streams(editable, last, wordings)).to(R.device)) / (len(memories) - i)
            kept = record.kept[memory.address].to(W.device)
            problem = Problem(W, K, W @ K + R, job.stats[memory.address], own, kept, config)
            delta = store(record, memory, subjects, solver, problem)
            if memory is not last:
                memory.write_(delta)
            job.progress("solving", i + 1, len(memories))
    return record.edit(how_solved(groups, wordings, values))


def store(record: Record, memory: KeyValueMemory, subjects: Sequence[str], solver: Solver, problem: Problem) -> LowRank:
    """Solve for one layer and note it: the change, which is not written."""
    delta = solver.solve(problem)
    told = divisions(delta, problem.C)
    record.add(memory, delta, subjects, problem.K, problem.V, told, solver.guarantee(problem, delta))
    return delta


def read_all(
    editable: Editable, memory: KeyValueMemory, wordings: Sequence[Wording], weight: float
) -> tuple[Tensor, Tensor]:
    """k* of each wording, [d_ff, n], and `weight` times the second moment of their texts, [d_ff, d_ff], where W is."""
    W = double(memory.value)
    keys, own = [], W.new_zeros(memory.d_ff, memory.d_ff)
    for wording in wordings:
        reading = read(editable, memory, wording)
        keys.append(reading.k.to(W.device))
        own = reading.steadied(own, weight)
    return torch.stack(keys, 1), own


def _streams(editable: Editable, memory: KeyValueMemory, wordings: Sequence[Wording]) -> Tensor:
    """The residual stream behind the layer at each subject, mean over the texts that state its facts, [d_model, n]."""
    return torch.stack([read(editable, memory, wording).stream for wording in wordings], 1)


@torch.no_grad()
def _check_added(editable: Editable, memory: KeyValueMemory, wording: Wording, direction: Tensor) -> None:
    """Make sure that what the value matrix gives is added to the residual stream as it is.

    Raises:
        EditError: it is normalised on the way (Gemma 2, OLMo 2), so layers cannot share δ.
    """
    text = wording.prompts[0].text
    ids, at, block = pad([text.ids]), text.subject_last, {0: editable.layers[memory.address.layer]}

    def stream(added: Tensor) -> Tensor:
        def add(output: Tensor) -> Tensor:
            moved = output.reshape(1, -1, output.shape[-1]).clone()
            moved[0, at] += added.to(moved)
            return moved.reshape(output.shape)

        with hooks.captured(block) as leaving, hooks.replaced(memory.module, add):
            replay.run_to(editable, ids, memory.address.layer)
        return double(leaving[0].reshape(*ids.shape, -1)[0, at])

    before = stream(torch.zeros_like(direction))
    # As large as the stream itself, so that rounding in 16 bits does not hide it.
    probe = (direction * (before.norm().to(direction.device) / direction.norm())).to(before)
    gap = float((stream(probe) - before - probe).norm() / probe.norm())
    if gap > max(ADDED, 8 * torch.finfo(memory.weight.dtype).eps):
        raise EditError(
            f"layer {memory.address} changes its feed-forward output before it reaches the residual stream (by "
            f"{gap:.0%}), so several layers cannot share a value; name one layer"
        )
