"""Single edits and batches: each chunk of facts is written into the unedited model, by one method after another.

Most of a method's cost is the optimisation of the values v*, which depend on the facts, the layer and the unedited
model only. So they are computed once per chunk, saved in `edits/values-…`, and the update is solved anew for each
closed-form method (`ffedit.combine`). ROME for one subject is EMMET for one key. Three cases compute their own values:
several layers that share the update, ROME with several subjects (written one after another), and fine-tuning.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from hashlib import sha256

import ffedit
from ffedit.benchmark.folder import EDITS, UNEDITED
from ffedit.benchmark.task import Scorer, Task, check_finite, saved
from ffedit.editor import METHODS, Edit, EditConfig, combine
from ffedit.errors import FFEditError
from ffedit.facts.fact import Fact, by_subject
from ffedit.loading.distributed import ProcessGroup


def edit_single_or_batch(task: Task) -> None:
    """Measure every chunk by every method; in single mode, each process takes its own share of the facts."""
    chunks = list(enumerate(task.mode.chunks(task.facts)))
    if task.mode.name == "single":
        chunks, task = task.process_group.share(chunks), replace(task, process_group=ProcessGroup())
    for chunk, facts in chunks:
        missing = [method for method in task.methods if not task.journal.done(method, "after", chunk)]
        if missing or not task.journal.done(UNEDITED, "before", chunk):
            _edit_chunk(task, chunk, facts, missing)


def _edit_chunk(task: Task, chunk: int, facts: tuple[int, ...], methods: list[str]) -> None:
    scorer = Scorer(task, facts)
    scorer.record_before(chunk)
    edits = Chunk(task, chunk, [task.facts[i] for i in scorer.facts])
    for method in methods:
        try:
            edit = check_finite(edits.by(method))
            about = {name: edit.provenance[name] for name in ("seconds", "norm_ratio")}
            with edit.applied(task.editable):
                scorer.record_edited(scorer.facts, method, "after", chunk, about)
        except FFEditError as error:
            task.record_failure(scorer.facts, method, chunk, error)


class Chunk:
    """Facts that are written at once, and the values that the methods share."""

    def __init__(self, task: Task, chunk: int, facts: Sequence[Fact]) -> None:
        self._task, self._name, self._facts = task, f"{chunk:05d}", facts
        self._no_values: dict[EditConfig, FFEditError] = {}

    def by(self, method: str) -> Edit:
        """Return the edit of a method; its provenance has the `seconds` of choosing values and of solving."""
        task = self._task
        if task.mode.name == "single":
            return self._make(method)
        # The first process computes and saves the edit; the others load it.
        path = task.folder / EDITS / method / self._name
        task.process_group.by_first(lambda: saved(path, partial(self._make, method)).fingerprint())
        return Edit.load(path)

    def _make(self, method: str) -> Edit:
        task, config, started = self._task, self._task.configs[method], time.perf_counter()
        if not self._shares_values(method):
            layers = task.layers_of(method)
            edit = ffedit.edit(task.editable, self._facts, method, layers, config, task.stats, progress=task.progress)
            return timed(edit, 0.0, started)
        values = self._values(config)
        started, solver = time.perf_counter(), "emmet" if method == "rome" else method
        edit = values if method == "memit" else combine(task.editable, [values], solver, task.stats, config)
        return timed(edit, sum(values.provenance["seconds"].values()), started)

    def _shares_values(self, method: str) -> bool:
        """Decide whether a method uses the values that do not depend on the method."""
        one_key = method != "rome" or len(by_subject(self._facts)) == 1
        return METHODS[method].statistics and len(self._task.layers) == 1 and one_key

    def _values(self, config: EditConfig) -> Edit:
        """Return the MEMIT edit, which holds the shared values, from the folder if it is there.

        An error is remembered and raised again without a second attempt.
        """
        if config in self._no_values:
            raise self._no_values[config]
        task = self._task
        numbers = sha256(json.dumps(config.to_dict()).encode()).hexdigest()[:8]

        def choose() -> Edit:
            started = time.perf_counter()
            layers = task.layers
            edit = ffedit.edit(task.editable, self._facts, "memit", layers, config, task.stats, progress=task.progress)
            return timed(edit, 0.0, started)

        try:
            return saved(task.folder / EDITS / f"values-{numbers}" / self._name, choose)
        except FFEditError as error:
            self._no_values[config] = error
            raise


def timed(edit: Edit, choosing: float, started: float) -> Edit:
    """Return the edit with its seconds in the provenance: `choosing` values, and solving since `started`."""
    return edit.noted(seconds={"choosing": choosing, "solving": time.perf_counter() - started})
