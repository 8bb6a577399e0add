"""Write many facts at once: read all keys, optimise all values, solve each layer once.

The values are chosen at the last of the layers. Several layers share the update (MEMIT, arXiv 2210.07229, section 4.3):
from the lowest up, each stores an equal share of the residual still missing from the residual stream behind the last
layer, at the keys computed with the layers below already changed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from ffedit.algebra.key_moments import KeyMoments
from ffedit.algebra.linalg import Moment, blocks_of, diagonal, double
from ffedit.algebra.low_rank import LowRank
from ffedit.algebra.updates import check_exact
from ffedit.editor.config import EditConfig
from ffedit.editor.edit import Edit
from ffedit.editor.job import Job, restored, write_
from ffedit.editor.key import read_keys, without_sinks, zero_moment
from ffedit.editor.methods.method import Method
from ffedit.editor.prompts import PromptSet, build_prompts
from ffedit.editor.provenance import Record, divisions, how_solved
from ffedit.editor.target_layers import check_routes
from ffedit.editor.value import choose_values
from ffedit.errors import EditError
from ffedit.inference import replay
from ffedit.model import hooks
from ffedit.model.editable import Editable
from ffedit.model.feed_forward import FeedForward
from ffedit.model.tokenization import pad

# Largest relative deviation of the change in the residual stream from a multiple of the change in the layer's output.
ADDED = 1e-2


@dataclass(frozen=True, eq=False)
class Problem:
    """Equations that one layer is to satisfy.

    Attributes:
        W: value matrix, of all memories joined, [d_model, Σ d_ff], float64.
        K: keys, [Σ d_ff, n].
        V: target values of the keys, [d_model, n].
        moments: second moment of the keys of other text, of each memory.
        own: weighted second moment of the spread of the facts' keys over their contexts
            (`algebra.updates.add_context_moment`), [Σ d_ff, Σ d_ff].
        kept: keys of earlier edits, [Σ d_ff, p].
        config: all numbers; the method's own are `config.of(name, kind)`.
    """

    W: Tensor
    K: Tensor
    V: Tensor
    moments: Sequence[KeyMoments]
    own: Moment
    kept: Tensor
    config: EditConfig

    @cached_property
    def C(self) -> Moment:
        """Metric C of the norm ‖Δ‖_C: moments of other text plus `own`, [Σ d_ff, Σ d_ff]."""
        pairs = zip(self.moments, blocks_of(self.own), strict=True)
        return diagonal([moments.C.to(own.device).add_(own) for moments, own in pairs])  # C is a new tensor each time


def write_batch(method: Method, job: Job) -> Edit:
    """Solve for the edit that stores the facts of `job` in the value matrices of its layers.

    Args:
        method: solves each layer.
        job: what to write; the values are chosen at the highest layer.
    """
    assert method.solve is not None
    editable, config, groups, ff_layers = job.editable, job.config, job.groups, job.ff_layers
    record, subjects = Record(method.name, job), [group[0].subject for group in groups]
    last, spread = ff_layers[-1], len(ff_layers) > 1
    prompt_sets = without_sinks(editable, last, build_prompts(editable, groups, config))
    keys = before = read_keys(editable, last, prompt_sets)
    gain = _gain(editable, last, prompt_sets[0], last.matrix @ keys.K[:, 0]) if spread else 1.0
    for ff in ff_layers if method.exact else ():
        K = keys.K if ff is last else read_keys(editable, ff, prompt_sets).K
        check_exact(K, record.kept[ff.layer].to(K.device))
    values = choose_values(editable, last, prompt_sets, keys.K, keys.lengths, config.value, job.progress)
    V, deltas = (torch.stack(columns, 1) for columns in ([v.v for v in values], [v.delta for v in values]))
    with restored(job.memories):
        for i, ff in enumerate(ff_layers):
            W = ff.matrix
            if spread:  # a single layer keeps its keys, since nothing below it changes
                check_routes(editable, ff, subjects, prompt_sets)
                keys = read_keys(editable, ff, prompt_sets)
                now = keys if ff is last else read_keys(editable, last, prompt_sets)
                reached = (now.streams - before.streams) / gain
                V = W @ keys.K + ((deltas - reached.to(deltas)) / (len(ff_layers) - i)).to(W)
            own = keys.add_context_moment(zero_moment(ff), config.key.context_weight)
            kept = record.kept[ff.layer].to(W.device)
            moments = [job.stats[memory.address] for memory in ff.memories]
            problem = Problem(W, keys.K, V.to(W.device), moments, own, kept, config)
            delta = method.solve(problem)
            note(record, ff, subjects, method, problem, delta)
            if ff is not last:
                write_(ff, delta)
            job.progress("solving", i + 1, len(ff_layers))
    return record.edit(how_solved(groups, prompt_sets, values))


def note(
    record: Record, ff: FeedForward, subjects: Sequence[str], method: Method, problem: Problem, delta: LowRank
) -> None:
    """Add the solution of one layer to the record; it is not written."""
    denominators = divisions(delta, problem.C)
    record.add(ff, delta, subjects, problem.K, problem.V, denominators, method.guarantee(problem, delta))


@torch.no_grad()
def _gain(editable: Editable, ff: FeedForward, prompt_set: PromptSet, direction: Tensor) -> float:
    """Measure the factor on the layer's output where it is added to the residual stream: 1 except in Granite.

    Where the output is normalised before it is added (Gemma 2, OLMo 2), there is none, and layers cannot share δ.
    """
    text = prompt_set.prompts[0]
    ids, at, block = pad([text.ids]), text.site, {0: editable.layers[ff.layer]}

    def stream(added: Tensor) -> Tensor:
        def add(output: Tensor) -> Tensor:
            moved = output.reshape(1, -1, output.shape[-1]).clone()
            moved[0, at] += added.to(moved)
            return moved.reshape(output.shape)

        with hooks.capture(block) as leaving, hooks.replace_output(ff.module, add):
            replay.run_to(editable, ids, ff.layer)
        return double(leaving[0].reshape(*ids.shape, -1)[0, at])

    before = stream(torch.zeros_like(direction))
    # As large as the stream itself, so that the probe survives rounding in 16 bits.
    probe = (direction * (before.norm().to(direction.device) / direction.norm())).to(before)
    moved = stream(probe) - before
    gain = float(moved @ probe / (probe @ probe))
    gap = float((moved - gain * probe).norm() / moved.norm().clamp(min=1e-30))
    near = max(ADDED, 8 * torch.finfo(ff.dtype).eps)
    if not gap <= near:
        raise EditError(
            f"layer {ff.layer} changes its feed-forward output before it reaches the residual stream (by "
            f"{gap:.0%}), so several layers cannot share a value; name one layer"
        )
    return 1.0 if abs(gain - 1) <= near else gain
