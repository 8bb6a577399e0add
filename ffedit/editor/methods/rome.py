"""Rank-one model editing: one fact, one key, one value, the smallest change that joins them.

Meng et al. 2022, arXiv 2202.05262. Several facts are written one after another, each on top of those before it,
always with the same k* in numerator and denominator (arXiv 2403.07175 shows what happens otherwise).
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from ffedit.editor.config import EditConfig, KeyConfig, PromptConfig, ValueConfig
from ffedit.editor.methods.method import Method

if TYPE_CHECKING:
    from ffedit.editor.edit import Edit
    from ffedit.editor.solve import Job

# The numbers that ROME's authors published for GPT-2 XL (arXiv 2202.05262, appendix E.5, and the parameters that came
# with the paper), used for every model. As published: 20 contexts of 5 and 10 tokens, Adam at a rate of 0.5 in the
# layer's own units, at most 20 steps, the end at a loss of 0.05, KL weight 0.0625 at "{} is a", ‖δ‖ of at most
# 4 ‖W k*‖. Not as published: the decay is of (‖δ‖ / ‖W k*‖)², theirs of ‖δ‖ / ‖W k*‖², which is not free of units; the
# divergence is that of the first distribution from the edited one, theirs the other way round, and is read at the
# prompt's last token; k* is one vector everywhere (arXiv 2403.07175); the loss is of the whole object, not of its mean
# token; the text behind C is this project's.
PAPER = EditConfig(
    prompts=PromptConfig(contexts=20, essence_prompts=("{} is a",)),
    key=KeyConfig(context_weight=0.0),
    value=ValueConfig(
        steps=20,
        step_size=0.5,
        optimizer="adam",
        target_probability=2.0,
        target_loss=0.05,
        weight_decay=0.5,
        kl_weight=0.0625,
        penalty_decay=1.0,
    ),
)


def rome(job: Job) -> Edit:
    """Store the facts of `job` in the value matrix of one layer, subject after subject, in each process alike."""
    return job.process_group.in_all(partial(_one_after_another, job))


def _one_after_another(job: Job) -> Edit:
    import torch

    from ffedit.algebra.linalg import diagonal
    from ffedit.algebra.low_rank import LowRank
    from ffedit.algebra.updates import check_exact, equality, rank_one
    from ffedit.editor.edit import restored, write_
    from ffedit.editor.key import build_prompts, read_keys, without_sinks
    from ffedit.editor.provenance import Record, divisions, how_solved
    from ffedit.editor.value import choose_values

    editable, config, groups = job.editable, job.config, job.groups
    (ff,) = job.ff_layers
    record = Record("rome", job)
    kept = record.kept[ff.layer].to(ff.solve_device)
    C = diagonal([job.stats[memory.address].C.to(ff.solve_device) for memory in ff.memories])
    deltas, keys, denominators, prompt_sets, values = [], [], [], [], []
    with restored(ff.memories):
        for i, group in enumerate(groups):

            def progress(stage: str, step: int, steps: int, i: int = i) -> None:
                job.progress(stage, i * steps + step, len(groups) * steps)

            (prompt_set,) = without_sinks(editable, ff, build_prompts(editable, [group], config))
            read = read_keys(editable, ff, [prompt_set])
            K = read.K
            check_exact(K, kept)
            (value,) = choose_values(editable, ff, [prompt_set], K, read.lengths, config.value, progress)
            W = ff.matrix
            metric = read.add_context_moment(C, config.key.context_weight)
            v = value.v.to(W.device)
            delta = equality(W, K, v[:, None], metric, kept) if kept.shape[1] else rank_one(W, K[:, 0], v, metric)
            if i + 1 < len(groups):
                write_(ff, delta)
            deltas.append(delta)
            denominators += divisions(delta, metric)
            keys.append(K)
            prompt_sets.append(prompt_set)
            values.append(value)
    total = LowRank(torch.cat([d.left for d in deltas], 1), torch.cat([d.right for d in deltas]))
    V = torch.stack([value.v for value in values], 1)
    record.add(ff, total, [group[0].subject for group in groups], torch.cat(keys, 1), V, denominators)
    return record.edit(how_solved(groups, prompt_sets, values))


ROME = Method(
    "rome",
    solves="(W+Δ)k = v for one subject after another, Δ of smallest C-norm",
    choose="one fact, or a few: exact, the reference for the others",
    source="Meng et al. 2022, arXiv 2202.05262",
    compute=rome,
    presets={"paper": PAPER},
)
