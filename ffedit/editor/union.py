"""Solve several edits of one model again, as one.

The sum of two edits writes each as if the other were not there: where their keys overlap, both values are missed. The
keys and values that each was solved for are kept with it, so the union can be solved without choosing any value again.

A key depends on the layers below. Those of the lowest layer are taken as they are; above it each edit read its keys
with its own change below, and the union changes more there. So going up, the keys are read again with the union's
change in place, in the texts that the edit was worded in, and each is to receive the residual V − W K that its edit
asked for. The division of the work between layers stays that of the edits.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from ffedit.algebra import double
from ffedit.anatomy import Editable
from ffedit.conflicts import check_facts
from ffedit.corpus import Corpus
from ffedit.editor import alphaedit, emmet, memit
from ffedit.editor.batch import Problem, Solver, read_all, store
from ffedit.editor.config import EditConfig
from ffedit.editor.edit import Edit
from ffedit.editor.job import Job, restored
from ffedit.editor.provenance import Record
from ffedit.editor.statistics import moments_for
from ffedit.editor.wording import Wording, word
from ffedit.errors import EditError
from ffedit.facts import Fact, by_subject
from ffedit.memory import Address
from ffedit.moments import KeyMoments
from ffedit.progress import Progress, silent

SOLVERS: Mapping[str, Solver] = {one.name: one for one in (emmet.SOLVER, memit.SOLVER, alphaedit.SOLVER)}


def combine(
    editable: Editable,
    edits: Sequence[Edit],
    method: str = "memit",
    stats: Corpus | Mapping[Address, KeyMoments] | None = None,
    config: EditConfig | None = None,
    progress: Progress = silent,
) -> Edit:
    """One edit that stores the facts of all `edits`.

    Args:
        editable: the model that each of them was computed on; as before afterwards.
        edits: of one layer or several, none of them fine-tuned.
        method: "emmet", "memit" or "alphaedit".
        stats: second moments of the keys of all their layers, or the text to collect them on.
        config: weights; the values are those of the edits.
        progress: told how far it is.

    Raises:
        EditError: other bases, one subject in two edits, facts that contradict each other, an edit without keys, or no
            solution.
    """
    if method not in SOLVERS:
        raise EditError(f"method {method!r} solves no batch from keys and values; there is {', '.join(SOLVERS)}")
    config, facts = config or EditConfig(), [fact for edit in edits for fact in edit.facts]
    check_facts(facts)
    for edit in edits:
        edit.check(editable)
        keyed = {subject for at in edit.updates for subject in edit.subjects(at)}
        lost = next((fact.subject for fact in edit.facts if fact.subject not in keyed), None)
        if lost is not None:
            raise EditError(f"what was written of {lost!r} has no key to solve for (fine-tuned?); write it anew")
    wordings = _wordings(editable, edits)
    memories = [editable.memories[at] for at in sorted({at for edit in edits for at in edit.updates})]
    stats = moments_for(editable, memories, stats, len(wordings), config.seed, progress)
    layers = [memory.address.layer for memory in memories]
    record = Record(method, Job(editable, facts, layers, config, stats))
    with restored(memories):
        for i, memory in enumerate(memories):
            at, W = memory.address, double(memory.value)
            some = [edit for edit in edits if edit.subjects(at)]
            subjects = [subject for edit in some for subject in edit.subjects(at)]
            twice = next((subject for subject, count in Counter(subjects).items() if count > 1), None)
            if twice is not None:
                raise EditError(
                    f"{twice!r} is edited twice in layer {at} and has one key; write all its facts in one edit"
                )
            V = torch.cat([edit.values[at].to(W.device) for edit in some], 1)
            K = torch.cat([edit.keys[at].to(W.device) for edit in some], 1)
            again, own = read_all(editable, memory, [wordings[subject] for subject in subjects], config.steady)
            if i:
                V, K = W @ again + V - W @ K, again
            problem = Problem(W, K, V, stats[at], own, record.kept[at].to(W.device), config)
            memory.write_(store(record, memory, subjects, SOLVERS[method], problem))
            progress("solving", i + 1, len(memories))
    found = [one for edit in edits for one in _solved(edit)]
    configs = {solved["from"]: numbers for solved, numbers in found}
    return record.edit([solved for solved, _ in found]).noted(configs=configs)


def _solved(edit: Edit) -> Iterator[tuple[dict[str, Any], Mapping[str, Any]]]:
    """How each value of `edit` was found, `from` which edit it is, and the numbers of that one."""
    for part in edit.provenance.get("parts", [edit.provenance]):  # of a sum
        name, configs = part.get("fingerprint", edit.fingerprint()), part.get("configs", {})
        for solved in part["solved"]:
            origin = solved.get("from", name)
            yield {**solved, "from": origin}, configs.get(origin, part.get("config", {}))


def _wordings(editable: Editable, edits: Sequence[Edit]) -> dict[str, Wording]:
    """The texts that the value of each subject was chosen in."""
    alike: dict[EditConfig, dict[str, Sequence[Fact]]] = {}
    for edit in edits:
        groups = {group[0].subject: group for group in by_subject(edit.facts)}
        for solved, numbers in _solved(edit):
            subject = solved["subject"]
            alike.setdefault(EditConfig.from_dict(numbers), {})[subject] = groups[subject]
    found: dict[str, Wording] = {}
    for config, some in alike.items():
        found.update(zip(some, word(editable, list(some.values()), config), strict=True))
    return found
