"""Write facts: refuse what cannot be written, find the memories and their statistics, and let the method solve."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

import torch

from ffedit.algebra.key_moments import KeyMoments
from ffedit.editor.checks import check_layers, check_preserved, check_quantised, in_reach
from ffedit.editor.config import EditConfig
from ffedit.editor.edit import Edit
from ffedit.editor.job import Job
from ffedit.editor.key import build_prompts
from ffedit.editor.methods import check_config, check_method, preset
from ffedit.editor.name_keys import NameMoment, name_moments, names_for
from ffedit.editor.protect import protected_texts
from ffedit.editor.solve import solve
from ffedit.editor.statistics import moments_for
from ffedit.editor.target_layers import find_ff_layers, routing
from ffedit.errors import EditError
from ffedit.facts.fact import Fact, by_subject, check_facts
from ffedit.facts.text import counted
from ffedit.inference.batching import refuse_out_of_memory
from ffedit.inference.corpus import Corpus
from ffedit.inference.distributed import ALONE, ProcessGroup
from ffedit.inference.precision import agree_on_dtype
from ffedit.inference.routing import mixtures
from ffedit.model.editable import Editable
from ffedit.model.memory import Address
from ffedit.progress import Progress, silent

logger = logging.getLogger(__name__)


# The caller may have turned off gradients, which the choice of a value needs.
@torch.inference_mode(False)
@torch.enable_grad()
def write(
    editable: Editable,
    facts: Sequence[Fact],
    method: str,
    layers: Sequence[int],
    config: EditConfig | None = None,
    stats: Corpus | Mapping[Address, KeyMoments] | None = None,
    preserve: Sequence[Edit] = (),
    progress: Progress = silent,
    process_group: ProcessGroup = ALONE,
) -> Edit:
    """Compute an edit that writes `facts` into `layers`; arguments and errors are those of `ffedit.edit`."""
    chosen = check_method(method)
    check_facts(facts)
    check_layers(editable, chosen, layers)
    config, groups = config or preset("default", method), by_subject(facts)
    check_config(config)
    config = chosen.complete(config)
    in_reach(editable, facts, chosen, range(max(layers), max(layers) + 1), config.key.fact_token)
    prompt_sets = build_prompts(editable, groups, config) if set(layers) & set(mixtures(editable)) else []
    ff_layers = find_ff_layers(editable, sorted(layers), prompt_sets)
    memories = [memory for ff in ff_layers for memory in ff.memories]
    check_preserved(editable, preserve)
    check_quantised(editable, chosen, ff_layers)
    protected = protected_texts(editable, facts, config.key) if chosen.statistics else None
    moments: Mapping[Address, KeyMoments] = {}
    names: Mapping[int, NameMoment] = {}
    if chosen.statistics:
        subjects = len(groups) + len(preserve)  # each earlier edit has at least one
        edited, named, among = [group[0].subject for group in groups], config.key.names_weight > 0, names_for(subjects)
        agree_on_dtype(editable, process_group)

        def read_statistics() -> tuple[Mapping[Address, KeyMoments], Mapping[int, NameMoment]]:
            moments = moments_for(editable, memories, stats, subjects, config.seed, progress, named)
            return moments, name_moments(editable, ff_layers, edited, config.key, among=among)

        moments, names = process_group.in_all(read_statistics)
    refusal = EditError(
        f"not enough memory to write {counted(len(facts), 'fact')} by {method}: beside the model, some matrices of "
        "d_ff² float64 numbers are needed; write fewer facts or layers, or use another --device"
    )
    with refuse_out_of_memory(refusal):
        job = Job(editable, facts, ff_layers, config, moments, preserve, progress, process_group, names, protected)
        edit = solve(chosen, job) if chosen.compute is None else chosen.compute(job)
        if prompt_sets:
            edit = edit.noted(routing=routing(job, edit, prompt_sets))
    logger.info("edit %s by %s, layers %s", edit.fingerprint(), method, edit.layers)
    return edit
