"""Combine several edits of one model into one, by solving for the keys of all jointly.

In the sum of two edits each was solved without the other: where their keys overlap, both values are missed. Each edit
holds the keys and values it was solved for, so the union can be solved without optimising any value again.

The edits may have been made on the same weights, or each on top of those before it. The edits of such a sequence were
solved without those that came later, and each counted the contexts of its own subject in full, at the expense of
other text.

A key depends on the layers below. The keys of the lowest layer are reused; those above it change, since the union
changes more below them than each edit did. So from the lowest layer up, keys are read again on each edit's own prompts,
with the union's changes written, and each is given the residual V − W K of its edit.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from types import NoneType
from typing import Any

import torch
from torch import Tensor

from ffedit.algebra.key_moments import KeyMoments
from ffedit.algebra.linalg import double
from ffedit.editor.config import EditConfig
from ffedit.editor.edit import Edit, as_edits, restored
from ffedit.editor.job import Job
from ffedit.editor.key import PromptSet, build_prompts, read_keys, without_sinks
from ffedit.editor.methods import METHODS, check_config, config_from_dict, preset
from ffedit.editor.name_keys import name_moments, names_for
from ffedit.editor.names import MethodName
from ffedit.editor.protect import protected_texts
from ffedit.editor.provenance import Record
from ffedit.editor.solve import store
from ffedit.editor.statistics import by_layer, moments_for
from ffedit.editor.target_layers import check_routes
from ffedit.errors import EditError, choices
from ffedit.facts.fact import Fact, by_subject, check_facts
from ffedit.inference.corpus import Corpus
from ffedit.model.editable import Editable, check_model
from ffedit.model.feed_forward import FeedForward
from ffedit.model.memory import Address
from ffedit.progress import Progress, silent


def combine(
    editable: Editable,
    edits: Iterable[Edit],
    method: MethodName | str = "memit",
    *,
    stats: Corpus | Mapping[Address, KeyMoments] | None = None,
    config: EditConfig | None = None,
    progress: Progress = silent,
) -> Edit:
    """Compute one edit that stores the facts of all `edits`: their keys and values are solved for jointly.

    Args:
        editable: the model on which each edit was computed, or on which the first was, and each other on top of those
            before it; restored afterwards.
        edits: edits of one layer or several, none of them fine-tuned, in the order in which they were made.
        method: one that solves from keys and values: "emmet", "memit" or "alphaedit" ("rome" for one subject).
        stats: second moments of the keys of all their layers, or the text to collect them on.
        config: numbers of the solution; the values are those of the edits.
        progress: called with the progress.

    Raises:
        EditError: the edits have other bases, share a subject, write at different tokens, contain contradicting facts
            or no keys, or there is no solution.
    """
    solvers = {name: candidate for name, candidate in METHODS.items() if candidate.solve is not None}
    if method not in solvers:
        raise EditError(f"method {method!r} cannot combine edits; use one of {choices(method, solvers)}")
    chosen = solvers[method]
    check_model(editable)
    config = config or preset("default", method)
    check_config(config)
    EditError.require(stats, (Corpus, Mapping, NoneType), "a text or its statistics were expected: ffedit.Corpus(path)")
    config, edits = chosen.complete(config), as_edits(edits)
    facts = [fact for edit in edits for fact in edit.facts]
    check_facts(facts)
    if chosen.one_by_one and len(by_subject(facts)) > 1:
        raise EditError(
            f"{method} writes one subject after another, not several jointly; combine with another, such as emmet"
        )
    _check_stack(editable, edits)
    for edit in edits:
        if edit.in_chat != editable.chat:
            words = ("with", "inside") if edit.in_chat else ("without", "outside")
            raise EditError(f"an edit was computed {words[1]} the chat template; load the model {words[0]} it (chat=)")
        keyed = {subject for at in edit.updates for subject in edit.subjects(at)}
        if missing := [fact.subject for fact in edit.facts if fact.subject not in keyed]:
            raise EditError(
                f"the edit of {missing[0]!r} has no key, so it cannot be combined (fine-tuned?); use another method"
            )
    solutions = [solution for edit in edits for solution in _solutions(edit)]
    if shared := [name for name, count in Counter(solved["subject"] for solved, _ in solutions).items() if count > 1]:
        raise EditError(f"two edits change {shared[0]!r}, each by a value of its own; write all its facts in one edit")
    configs = {solved["from"]: numbers for solved, numbers in solutions}
    key_configs = [config_from_dict(numbers).key for numbers in configs.values()]
    entries = tuple(entry for key in (config.key, *key_configs) for entry in key.protect)
    if len(tokens := {key.fact_token: None for key in key_configs}) > 1:
        raise EditError(
            f"the edits write at different tokens: {', '.join(map(str, tokens))}; combine edits of one --fact-token"
        )
    token = next(iter(tokens), config.key.fact_token)
    config = replace(config, key=replace(config.key, protect=entries, fact_token=token))
    prompt_sets = _prompt_sets(editable, edits)
    ff_layers = by_layer(editable, {at for edit in edits for at in edit.updates})
    memories = [memory for ff in ff_layers for memory in ff.memories]
    count, with_names = len(prompt_sets), config.key.names_weight > 0
    stats = moments_for(editable, memories, stats, count, config.seed, progress, names=with_names)
    names = name_moments(editable, ff_layers, [*prompt_sets], config.key, among=names_for(count))
    protected = protected_texts(editable, facts, config.key)
    record = Record(method, Job(editable, facts, ff_layers, config, stats, names=names, protected=protected))
    with restored(memories):
        for i, ff in enumerate(ff_layers):
            W = ff.matrix
            subject_lists, keys, values = zip(*(_solved_in(edit, ff) for edit in edits), strict=True)
            subjects = [subject for subject_list in subject_lists for subject in subject_list]
            K, V = (torch.cat(side, 1).to(W) for side in (keys, values))
            layer_sets = [prompt_sets[subject] for subject in subjects]
            check_routes(editable, ff, subjects, layer_sets)
            layer_keys = read_keys(editable, ff, layer_sets)
            if i:
                V, K = W @ layer_keys.K + V - W @ K, layer_keys.K
            store(chosen, record, ff, subjects, layer_keys, K, V)
            progress("solving", i + 1, len(ff_layers))
    return record.edit([solved for solved, _ in solutions]).noted(configs=configs)


def _check_stack(editable: Editable, edits: Sequence[Edit]) -> None:
    """Refuse edits that were made neither on the model's weights nor on top of those before them."""
    history, touched = editable.history, {at for edit in edits for at in edit.updates if at in editable.memories}
    editable.history = replace(history, edits={**history.edits}, originals={**history.originals})
    with restored([editable.memories[at] for at in touched]):
        try:
            for edit in edits:
                edit.apply_(editable)
        finally:
            editable.history = history


def _solved_in(edit: Edit, ff: FeedForward) -> tuple[list[str], Tensor, Tensor]:
    """Return the subjects, keys [Σ d_ff, n] and joint target values [d_model, n] that an edit solved for in a layer.

    Experts that it did not write to have no share in the values; their keys are 0.
    """
    at = next((memory.address for memory in ff.memories if edit.subjects(memory.address)), None)
    if at is None:
        return [], torch.empty(ff.shape[1], 0), torch.empty(ff.shape[0], 0)
    n = edit.keys[at].shape[1]
    K = torch.cat([double(edit.keys.get(memory.address, torch.zeros(memory.d_ff, n))) for memory in ff.memories])
    values = [double(edit.values[memory.address]) for memory in ff.memories if memory.address in edit.values]
    return edit.subjects(at), K, torch.stack(values).sum(0)


def _prompt_sets(editable: Editable, edits: Sequence[Edit]) -> dict[str, PromptSet]:
    """Rebuild the prompts that the value of each subject was optimised on, without the sinks of its edit's last layer.

    The model must have none of the union's changes.
    """
    by_config: dict[EditConfig, dict[str, Sequence[Fact]]] = {}
    for edit in edits:
        groups = {group[0].subject: group for group in by_subject(edit.facts)}
        for solved, numbers in _solutions(edit):
            subject = solved["subject"]
            by_config.setdefault(config_from_dict(numbers), {})[subject] = groups[subject]
    prompt_sets: dict[str, PromptSet] = {}
    for config, facts_of in by_config.items():
        prompt_sets |= zip(facts_of, build_prompts(editable, list(facts_of.values()), config), strict=True)
    for edit in edits:
        subjects = [solved["subject"] for solved, _ in _solutions(edit)]
        sets, last = [prompt_sets[subject] for subject in subjects], by_layer(editable, edit.updates)[-1]
        prompt_sets |= zip(subjects, without_sinks(editable, last, sets), strict=True)
    return prompt_sets


def _solutions(edit: Edit) -> Iterator[tuple[dict[str, Any], Mapping[str, Any]]]:
    """Yield the record of each value of `edit`, with the fingerprint of its edit in `from`, and that edit's config."""
    for part in edit.provenance.get("parts", [edit.provenance]):  # several in a sum
        name, configs = part.get("fingerprint", edit.fingerprint()), part.get("configs", {})
        for solved in part.get("solved", ()):
            if "subject" not in solved:  # fine-tuned
                continue
            origin = solved.get("from", name)
            yield {**solved, "from": origin}, configs.get(origin, part.get("config", {}))
