"""Solve for an edit: prompts -> keys -> values -> the smallest change -> store, for all facts or subject by subject.

The values are chosen at the last of the layers. Several layers share the update (`Spread`), each at the keys computed
with the layers below already changed. A method that writes one by one (ROME) solves for each subject on top of the
changes of those before it.

Each value is chosen as if it were written alone. Where keys overlap, the other δ reach a subject, too, and the model
does not say some new objects. In a further round (`ValueConfig.rounds`) the values are chosen again with all facts
written: where the new object is likely enough nothing is added, elsewhere the δ that is missing.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from ffedit.algebra.low_rank import LowRank
from ffedit.algebra.updates import check_exact
from ffedit.editor.edit import Edit, restored
from ffedit.editor.job import Job, Method, Problem
from ffedit.editor.key import LayerKeys, PromptSet, build_prompts, read_keys, without_sinks
from ffedit.editor.provenance import Record, how_solved
from ffedit.editor.spread import Spread
from ffedit.editor.target_layers import check_routes
from ffedit.editor.value import Value, choose_values
from ffedit.facts.fact import Fact
from ffedit.files import cache
from ffedit.model.feed_forward import FeedForward
from ffedit.model.fingerprint import fingerprint
from ffedit.progress import Progress, part
from ffedit.version import __version__


def solve(method: Method, job: Job) -> Edit:
    """Compute the edit that stores the facts of `job` in the value matrices of its layers."""
    record, groups, solved = Record(method.name, job), job.groups, []
    batches = [[group] for group in groups] if method.one_by_one else [groups]
    with restored(job.memories):
        for i, batch in enumerate(batches):
            progress = part(job.progress, i, 1, len(batches))
            solved += _solve_batch(method, record, batch, progress, is_last=i + 1 == len(batches))
    return record.edit(solved)


def _solve_batch(
    method: Method, record: Record, groups: Sequence[Sequence[Fact]], progress: Progress, is_last: bool
) -> list[dict[str, object]]:
    """Store the facts of several subjects, and describe how each value was chosen.

    The changes stay in the weights, except that of the last layer in the last batch, which nothing reads again.
    """
    job, subjects = record.job, [group[0].subject for group in groups]
    editable, ff_layers, group, config = job.editable, job.ff_layers, job.process_group, job.config
    last = ff_layers[-1]

    def read_prompts() -> tuple[list[PromptSet], LayerKeys]:
        prompt_sets = without_sinks(editable, last, build_prompts(editable, groups, config))
        keys = read_keys(editable, last, prompt_sets)
        for ff in ff_layers if method.exact else ():
            K = keys.K if ff is last else read_keys(editable, ff, prompt_sets).K
            check_exact(K, record.kept[ff.layer].to(K.device))
        return prompt_sets, keys

    prompt_sets, keys = group.in_all(read_prompts)

    def progress_again(stage: str, step: int, steps: int) -> None:
        progress(f"{stage} again", step, steps)

    def solve_for(values: Sequence[Value], write: bool) -> None:
        spread = Spread(editable, last, prompt_sets, keys, values) if len(ff_layers) > 1 else None
        layer_keys, V = keys, torch.stack([value.v for value in values], 1)
        for i, ff in enumerate(ff_layers):
            if spread is not None:  # a single layer keeps its keys, since nothing below it changes
                check_routes(editable, ff, subjects, prompt_sets)
                layer_keys = read_keys(editable, ff, prompt_sets)
                V = spread.values(ff, layer_keys, len(ff_layers) - i)
            store(method, record, ff, subjects, layer_keys, layer_keys.K, V, write or ff is not last)
            progress("solving", i + 1, len(ff_layers))

    def read_with(values: Sequence[Value]) -> LayerKeys:
        solve_for(values, write=True)
        return read_keys(editable, last, prompt_sets)

    quantised = any(memory.quantised for memory in job.memories)  # these cannot be written to between rounds
    rounds = 1 if quantised else config.value.rounds_of(len(groups))
    unfinished = _unfinished(job, prompt_sets)
    values = choose_values(editable, last, prompt_sets, keys, config.value, progress, group, unfinished)
    for _ in range(1, rounds):  # interrupted, these start again: they depend on all that the change does
        with restored(job.memories):
            layer_keys = group.in_all(partial(read_with, values))
            more = choose_values(editable, last, prompt_sets, layer_keys, config.value, progress_again, group)
        values = [value.then(added) for value, added in zip(values, more, strict=True)]
        record.forget()
    group.in_all(partial(solve_for, values, write=not is_last))
    cache.forget(unfinished)
    return how_solved(groups, prompt_sets, values)


def store(
    method: Method,
    record: Record,
    ff: FeedForward,
    subjects: Sequence[str],
    layer_keys: LayerKeys,
    K: Tensor,
    V: Tensor,
    write: bool = True,
) -> None:
    """Solve one layer for the change that gives the keys K [Σ d_ff, n] the values V [d_model, n], and record it.

    `layer_keys` are the subjects' keys in the current model; their spread over contexts is part of C. With `write` the
    change is written into the weights, too.
    """
    job, W = record.job, ff.matrix
    assert method.solve is not None
    spread = layer_keys.context_spread(job.config.key.context_weight)
    moments, names = [job.stats[memory.address] for memory in ff.memories], job.names.get(ff.layer)
    problem = Problem(W, K, V.to(W.device), moments, spread, record.kept[ff.layer].to(W.device), job.config, names)
    delta = method.solve(problem)
    record.add(ff, subjects, problem, delta)
    if write:
        for memory, right in zip(ff.memories, ff.split(delta.right, 1).values(), strict=True):
            memory.write_(LowRank(delta.left, right))


def _unfinished(job: Job, prompt_sets: Sequence[PromptSet]) -> Path:
    """Return the path of an interrupted first choice of values, by all that they depend on."""
    texts = [
        [(text.ids, text.answer, text.site) for text in (*prompt_set.texts, *prompt_set.mentions)]
        for prompt_set in prompt_sets
    ]
    roles = [(p.fact_of, len(p.essence), len(p.keep), p.mention_share) for p in prompt_sets]
    addresses = [str(memory.address) for memory in job.ff_layers[-1].memories]
    inputs = [__version__, fingerprint(job.editable), addresses, job.process_group, job.config.value, texts, roles]
    return cache.entry("values", repr(inputs))
