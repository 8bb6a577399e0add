"""Rank-one model editing: one fact, one key, one value, the smallest change that joins them.

Meng et al. 2022, arXiv 2202.05262. Several facts are written one after another, each on top of those before it,
always with the same k* in numerator and denominator (arXiv 2403.07175 shows what happens otherwise). The solution is
`algebra.equality` with a single key.
"""

from __future__ import annotations

import torch

from ffedit.algebra.block_diagonal import diagonal
from ffedit.algebra.low_rank import LowRank
from ffedit.algebra.updates import check_exact, equality
from ffedit.editor.edit import Edit
from ffedit.editor.job import Job, restored, write_
from ffedit.editor.key import read, without_sinks
from ffedit.editor.prompts import build_prompts
from ffedit.editor.provenance import Record, divisions, how_solved
from ffedit.editor.value import choose_values
from ffedit.progress import Progress


def rome(job: Job) -> Edit:
    """Store the facts of `job` in the value matrix of one layer, subject after subject.

    Raises:
        EditError: nothing in the layer responds to a subject, or the loss is not finite.
    """
    editable, config, groups = job.editable, job.config, job.groups
    (ff,) = job.ff_layers
    record = Record("rome", job)
    kept = record.kept[ff.layer].to(ff.solve_device)
    C = diagonal([job.stats[part.address].C.to(ff.solve_device) for part in ff.parts])
    deltas, keys, factors, prompt_sets, values = [], [], [], [], []
    with restored(ff.parts):
        for i, group in enumerate(groups):
            prompt_set = without_sinks(editable, ff, *build_prompts(editable, [group], config))
            reading = read(editable, ff, prompt_set)
            k = reading.k[:, None].to(ff.solve_device)
            check_exact(k, kept)
            length, part = reading.stream.norm()[None].cpu(), _part(job.progress, i, len(groups))
            (value,) = choose_values(editable, ff, [prompt_set], k, length, config, part)
            W = ff.matrix
            around = reading.add_context_moment(C, config.context_weight)
            delta = equality(W, k, value.v[:, None].to(W.device), around, kept)
            if i + 1 < len(groups):
                write_(ff, delta)
            deltas.append(delta)
            factors += divisions(delta, around)
            keys.append(k)
            prompt_sets.append(prompt_set)
            values.append(value)
    total = LowRank(torch.cat([d.left for d in deltas], 1), torch.cat([d.right for d in deltas]))
    V = torch.stack([value.v for value in values], 1)
    subjects, K = [group[0].subject for group in groups], torch.cat(keys, 1)
    record.add(ff, total, subjects, K, V, factors)
    return record.edit(how_solved(groups, prompt_sets, values))


def _part(progress: Progress, index: int, count: int) -> Progress:
    """Progress of one subject among `count`."""
    return lambda stage, done, total: progress(stage, index * total + done, count * total)
