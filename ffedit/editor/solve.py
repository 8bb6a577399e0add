"""Write facts: check them, read all keys, optimise all values, and solve each layer once for the smallest change.

The values are chosen at the last of the layers. Several layers share the update (MEMIT, arXiv 2210.07229, section 4.3):
from the lowest up, each stores an equal share of the residual still missing from the residual stream behind the last
layer, at the keys computed with the layers below already changed.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from hashlib import sha256
from pathlib import Path

import torch
from torch import Tensor

from ffedit.algebra.key_moments import KeyMoments
from ffedit.algebra.linalg import Moment, blocks_of, diagonal, double
from ffedit.algebra.updates import check_exact
from ffedit.editor.config import EditConfig
from ffedit.editor.edit import Edit, restored, write_
from ffedit.editor.key import LayerKeys, PromptSet, build_prompts, read_keys, without_sinks, zero_moment
from ffedit.editor.methods import Method, check_method, preset
from ffedit.editor.provenance import Record, divisions, how_solved
from ffedit.editor.statistics import moments_for
from ffedit.editor.target_layers import check_routes, find_ff_layers, routing
from ffedit.editor.value import choose_values
from ffedit.errors import EditError
from ffedit.facts.fact import Fact, FactToken, by_subject, check_facts
from ffedit.facts.text import counted
from ffedit.files import cache
from ffedit.inference import replay
from ffedit.inference.batching import refuse_out_of_memory
from ffedit.inference.corpus import Corpus
from ffedit.inference.routing import mixtures
from ffedit.loading.distributed import ALONE, ProcessGroup
from ffedit.model import hooks
from ffedit.model.editable import Editable
from ffedit.model.feed_forward import FeedForward
from ffedit.model.fingerprint import fingerprint
from ffedit.model.memory import Address, KeyValueMemory
from ffedit.model.storage import device_of, gives_gradient
from ffedit.model.tokenization import pad
from ffedit.progress import Progress, silent
from ffedit.version import __version__

logger = logging.getLogger(__name__)

# Largest relative deviation of the change in the residual stream from a multiple of the change in the layer's output.
ADDED = 1e-2


@dataclass(frozen=True, eq=False)
class Job:
    """Specification of one edit to compute."""

    editable: Editable  # the model; a method leaves it unchanged, whether it returns or fails
    facts: Sequence[Fact]  # what to write
    ff_layers: Sequence[FeedForward]  # the memories of each layer to write to, in ascending order
    config: EditConfig  # all numbers
    stats: Mapping[Address, KeyMoments]  # second moments of the keys of these layers, for methods that use them
    after: Sequence[Edit] = ()  # earlier edits, applied to the model, whose keys are to keep their outputs
    progress: Progress = silent  # called with the progress
    process_group: ProcessGroup = ALONE  # processes that share the work, all of which compute the same edit

    @property
    def memories(self) -> list[KeyValueMemory]:
        """All memories that may change."""
        return [memory for ff in self.ff_layers for memory in ff.memories]

    @property
    def groups(self) -> list[list[Fact]]:
        """Facts grouped by subject."""
        return by_subject(self.facts)


@dataclass(frozen=True, eq=False)
class Problem:
    """Equations that one layer is to satisfy."""

    W: Tensor  # value matrix, of all memories joined, [d_model, Σ d_ff], float64
    K: Tensor  # keys, [Σ d_ff, n]
    V: Tensor  # target values of the keys, [d_model, n]
    moments: Sequence[KeyMoments]  # second moment of the keys of other text, of each memory
    # weighted second moment of the spread of the facts' keys over their contexts
    # (`algebra.updates.add_context_moment`), [Σ d_ff, Σ d_ff]
    own: Moment
    kept: Tensor  # keys of earlier edits, [Σ d_ff, p]
    config: EditConfig  # all numbers; the method's own are `config.of(name, kind)`

    @cached_property
    def C(self) -> Moment:
        """Metric C of the norm ‖Δ‖_C: moments of other text plus `own`, [Σ d_ff, Σ d_ff]."""
        pairs = zip(self.moments, blocks_of(self.own), strict=True)
        return diagonal([moments.C.to(own.device).add_(own) for moments, own in pairs])  # C is a new tensor each time


def write(
    editable: Editable,
    facts: Sequence[Fact],
    method: str,
    layers: Sequence[int],
    config: EditConfig | None = None,
    stats: Corpus | Mapping[Address, KeyMoments] | None = None,
    after: Sequence[Edit] = (),
    progress: Progress = silent,
    process_group: ProcessGroup = ALONE,
) -> Edit:
    """Compute an edit that writes `facts` into `layers`; arguments and errors are those of `ffedit.edit`."""
    chosen = check_method(method)
    check_facts(facts)
    if not chosen.layers and len(layers) != 1:
        raise EditError(f"{method} writes to one layer, found {list(layers)}; name one")
    if not layers or len(set(layers)) < len(layers):
        raise EditError(f"layers {list(layers)} were asked for; name at least one, and each once")
    depth = len(editable.layers)
    for layer in layers:
        if not 0 <= layer < depth:
            raise EditError(f"layer {layer} was asked for, but {editable.name} has layers 0 to {depth - 1}")
    config, groups = chosen.complete(config or preset("default", method)), by_subject(facts)
    in_reach(editable, facts, chosen, range(max(layers), max(layers) + 1), config.key.fact_token)
    prompt_sets = build_prompts(editable, groups, config) if set(layers) & set(mixtures(editable)) else []
    ff_layers = find_ff_layers(editable, sorted(layers), prompt_sets)
    memories = [memory for ff in ff_layers for memory in ff.memories]
    check_after(editable, after)
    if any(memory.quantised for memory in memories):
        _check_quantised(editable, chosen, ff_layers)
    moments: Mapping[Address, KeyMoments] = {}
    if chosen.statistics:
        moments = moments_for(editable, memories, stats, len(groups), config.seed, progress, process_group)
    refusal = EditError(
        f"not enough memory to write {counted(len(facts), 'fact')} by {method}: beside the model, some matrices of "
        "d_ff² float64 numbers are needed; write fewer facts or layers, or use another --device"
    )
    with refuse_out_of_memory(refusal):
        job = Job(editable, facts, ff_layers, config, moments, after, progress, process_group)
        edit = write_batch(chosen, job) if chosen.compute is None else chosen.compute(job)
        if prompt_sets:
            edit = edit.noted(routing=routing(job, edit, prompt_sets))
    logger.info("edit %s by %s, layers %s", edit.fingerprint(), method, edit.layers)
    return edit


def write_batch(method: Method, job: Job) -> Edit:
    """Solve for the edit that stores the facts of `job` in the value matrices of its layers."""
    solver = method.solve
    assert solver is not None
    editable, config, groups, ff_layers = job.editable, job.config, job.groups, job.ff_layers
    record, subjects = Record(method.name, job), [group[0].subject for group in groups]
    last, spread = ff_layers[-1], len(ff_layers) > 1
    in_all = job.process_group.in_all
    prompt_sets = in_all(lambda: without_sinks(editable, last, build_prompts(editable, groups, config)))
    keys = before = read_keys(editable, last, prompt_sets, job.process_group)
    gain = in_all(lambda: _gain(editable, last, prompt_sets[0], last.matrix @ keys.K[:, 0])) if spread else 1.0
    for ff in ff_layers if method.exact else ():
        K = keys.K if ff is last else read_keys(editable, ff, prompt_sets, job.process_group).K
        check_exact(K, record.kept[ff.layer].to(K.device))
    unfinished = _unfinished(job, prompt_sets)
    values = choose_values(
        editable, last, prompt_sets, keys.K, keys.lengths, config.value, job.progress, job.process_group, unfinished
    )
    V, deltas = (torch.stack(columns, 1) for columns in ([v.v for v in values], [v.delta for v in values]))

    def solve(ff: FeedForward, keys: LayerKeys, V: Tensor) -> None:
        problem = problem_of(record, ff, keys, keys.K, V)
        delta = solver(problem)
        division, guarantee = divisions(delta, problem.C), method.guarantee(problem, delta)
        record.add(ff, delta, subjects, problem.K, problem.V, division, guarantee)
        if ff is not last:
            write_(ff, delta)

    with restored(job.memories):
        for i, ff in enumerate(ff_layers):
            if spread:  # a single layer keeps its keys, since nothing below it changes
                in_all(partial(check_routes, editable, ff, subjects, prompt_sets))
                keys = read_keys(editable, ff, prompt_sets, job.process_group)
                now = keys if ff is last else read_keys(editable, last, prompt_sets, job.process_group)
                reached = (now.streams - before.streams) / gain
                kept = ff.matrix @ keys.K
                V = kept + ((deltas - reached.to(deltas)) / (len(ff_layers) - i)).to(kept)
            in_all(partial(solve, ff, keys, V))
            job.progress("solving", i + 1, len(ff_layers))
    cache.forget(unfinished)
    return record.edit(how_solved(groups, prompt_sets, values))


def _unfinished(job: Job, prompt_sets: Sequence[PromptSet]) -> Path:
    """Return the path that keeps an interrupted choice of values, by all that they depend on."""
    texts = [[(text.ids, text.answer, text.site) for text in prompt_set.texts] for prompt_set in prompt_sets]
    about = [
        __version__,
        fingerprint(job.editable),
        job.ff_layers[-1].layer,
        job.config.value,
        texts,
        job.process_group,
    ]
    return cache.path("values", sha256(repr(about).encode()).hexdigest()[:24], ".safetensors")


def problem_of(record: Record, ff: FeedForward, read: LayerKeys, K: Tensor, V: Tensor) -> Problem:
    """Return the equations of one layer, which is to give the keys K the values V.

    `read` are the subjects' keys in the model as it is, whose spread over contexts is part of C.
    """
    job, W = record.job, ff.matrix
    own = read.add_context_moment(zero_moment(ff), job.config.key.context_weight)
    moments = [job.stats[memory.address] for memory in ff.memories]
    return Problem(W, K, V.to(W.device), moments, own, record.kept[ff.layer].to(W.device), job.config)


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


def in_reach(editable: Editable, facts: Sequence[Fact], method: Method, layers: range, token: FactToken) -> range:
    """Return those of `layers` from which a value written at `token` reaches every answer; EditError if there is none.

    Fine-tuning writes no value at a token, but changes the layer at all of them.
    """
    last = len(editable.layers) - 1
    if last not in layers or not method.statistics:
        return layers
    texts = (replace(editable.encode(fact.text, fact.new_object, fact.span), fact_token=token) for fact in facts)
    if all(text.site == text.answer - 1 for text in texts):
        return layers
    if len(layers) > 1:
        return layers[:-1]
    lower = "" if last == 0 else "name layer 0, or " if last == 1 else f"name a layer from 0 to {last - 1}, or "
    raise EditError(
        f"layer {last} is the last of {editable.name}: no layer after it carries what it writes at the token "
        f"{token} to the end of the prompt, where the answer is read; {lower}read the key there (--fact-token last)"
    )


def check_after(editable: Editable, after: Sequence[Edit]) -> None:
    """Refuse earlier edits of another model, and those that are not in its weights.

    What the keys of preserved edits give is read from the weights, so an edit that is not there would be kept as if it
    were. The keys of an edit that was computed on the weights as they are, and is not in them, may be kept nonetheless.
    """
    for edit in after:
        for at, delta in edit.updates.items():
            shape = list(editable.memories[at].shape) if at in editable.memories else "none"
            if shape != list(delta.shape):
                raise EditError(
                    f"the earlier edit {edit.fingerprint()} changes a value matrix {list(delta.shape)} in layer {at}, "
                    f"where {editable.name} has {shape}; leave it out, or load the model that it was made for"
                )
    unknown = {name: edit for edit in after if (name := edit.fingerprint()) not in editable.history.known}
    current = fingerprint(editable) if unknown else ""
    for name, edit in unknown.items():
        if edit.base != current:
            raise EditError(
                f"the earlier edit {name} was computed on other weights than {editable.name} has, and is not in its "
                "history (a checkpoint that ffedit exports carries one); apply it first, or leave it out"
            )


def _check_quantised(editable: Editable, method: Method, ff_layers: Sequence[FeedForward]) -> None:
    """Refuse what would have to write to quantised weights on the way, or to pass gradients where none pass."""
    if len(ff_layers) > 1 or not method.statistics:
        raise EditError(
            f"{editable.name} is quantised, so that nothing can be written on the way to {method.name} in layers "
            f"{[ff.layer for ff in ff_layers]}; give one layer, and a method with key statistics (memit)"
        )
    with hooks.eval_mode(editable.model):
        modules = [memory.module for memory in ff_layers[0].memories if memory.quantised]
        if not all(gives_gradient(module, device_of(module)) for module in modules):
            raise EditError(
                f"{editable.name} is quantised with kernels that pass no gradient on this device, which the choice of "
                "a value needs; use another --device, or edit the model in 16 or 32 bits and export an adapter"
            )
