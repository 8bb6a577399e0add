"""Solve several edits of one model again, as one.

The sum of two edits writes each as if the other were not there: where their keys overlap, both values are missed. The
keys and values that each was solved for are kept with it, so the union can be solved without choosing any value again.
Those of a layer above another edited one were read with that one's own change below, and are taken as they are.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

import torch

from ffedit.algebra import double
from ffedit.anatomy import Editable
from ffedit.conflicts import check_facts
from ffedit.editor import alphaedit, emmet, memit
from ffedit.editor.batch import Problem, Solve, read_all
from ffedit.editor.config import EditConfig
from ffedit.editor.corpus import Corpus
from ffedit.editor.edit import Edit
from ffedit.editor.job import Job
from ffedit.editor.provenance import Record, divisions
from ffedit.editor.statistics import moments_for
from ffedit.editor.wording import word
from ffedit.errors import EditError
from ffedit.facts import by_subject
from ffedit.memory import Address
from ffedit.moments import KeyMoments
from ffedit.progress import Progress, silent

SOLVERS: Mapping[str, Solve] = {"emmet": emmet.solve, "memit": memit.solve, "alphaedit": alphaedit.solve}


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
        editable: the model that each of them was computed on.
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
    groups = {group[0].subject: group for group in by_subject(facts)}
    wordings = dict(zip(groups, word(editable, list(groups.values()), config), strict=True))
    memories = [editable.memories[at] for at in sorted({at for edit in edits for at in edit.updates})]
    stats = moments_for(editable, memories, stats, len(groups), config.seed, progress)
    layers = [memory.address.layer for memory in memories]
    record = Record(method, Job(editable, facts, layers, config, stats))
    for i, memory in enumerate(memories):
        at, W = memory.address, double(memory.value)
        some = [edit for edit in edits if edit.subjects(at)]
        subjects = [subject for edit in some for subject in edit.subjects(at)]
        twice = next((subject for subject, count in Counter(subjects).items() if count > 1), None)
        if twice is not None:
            raise EditError(f"{twice!r} is edited twice in layer {at} and has one key; write all its facts in one edit")
        K = torch.cat([edit.keys[at].to(W.device) for edit in some], 1)
        V = torch.cat([edit.values[at].to(W.device) for edit in some], 1)
        _, own = read_all(editable, memory, [wordings[subject] for subject in subjects], config.steady)
        problem = Problem(W, K, V, stats[at], own, record.kept[at].to(W.device), config)
        delta = SOLVERS[method](problem)
        record.add(memory, delta, subjects, K, V, divisions(delta, problem.C))
        progress("solving", i + 1, len(memories))
    return record.edit(
        [
            {**solved, "from": edit.fingerprint()}
            for edit in edits
            for part in edit.provenance.get("parts", [edit.provenance])  # of a sum
            for solved in part["solved"]
        ]
    )
