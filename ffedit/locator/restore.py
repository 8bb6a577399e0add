"""Compute restored runs, each from the first layer and token that it changes.

A restoration at token i and layer l changes nothing below l and nothing left of i. All restorations of a batch of facts
that begin at the same layer are sorted by their token and split into groups; a group resumes (`replay`) above that
layer, at its first token, with attention keys and values of the earlier tokens from the corrupted runs, and applies the
unembedding at the answers' positions only.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

import torch
from torch import Tensor

from ffedit.errors import ModelError
from ffedit.inference import generation, replay
from ffedit.inference.batching import split_on_oom
from ffedit.locator.cases import Batch, Run, at_once
from ffedit.locator.result import span_of
from ffedit.model.editable import Editable
from ffedit.model.hooks import replace_output
from ffedit.model.tokenization import Encoded

# Tokens at which a group of runs is complete: fewer do not fill a matrix product, more recompute needless positions.
LEAST = 128
# Lower bound on the memory limit of a group, in tokens.
FEWEST = 512
# Logits computed at once: the unembedding is the largest matrix, and needs more rows than one group has.
UNEMBEDDED = 2**21


@dataclass(frozen=True)
class Restoration:
    """Restoration of one clean state, or of the outputs of one window.

    Attributes:
        case: index of the fact in the batch.
        position: of the restored token.
        inside: layers whose outputs are restored; empty for a state.
        first: the layer that the run begins at; for a state, the one that it enters.
        row: index of its result.
    """

    case: int
    position: int
    inside: range
    first: int
    row: int


@dataclass(frozen=True, eq=False)
class Final:
    """Final states of some runs, to be unembedded.

    Attributes:
        states: of the last layer, at the positions whose next token is an answer's, [reads, d_model].
        texts: of each run.
        places: index (row of the results, sample, answer) of each run, [runs, 3].
    """

    states: Tensor
    texts: list[Encoded]
    places: Tensor


def plan(batch: Batch, run: Run, depth: int) -> tuple[list[Restoration], list[tuple[int, int, int]]]:
    """List every restoration that can have an effect, and the index (case, layer, token) of each result.

    Besides the window, the layer alone is restored at the subject's last token; its index has the token −1.
    """
    found: list[Restoration] = []
    places: list[tuple[int, int, int]] = []

    def add(case: int, layer: int, position: int, window: int, place: int) -> None:
        inside = range(0) if run.kind == "state" else span_of(layer, window, depth)
        first = layer + 1 if run.kind == "state" else inside[0]
        last_of_all = batch.cases[case].encoded.answer - 1
        # A state that no later attention layer reads changes the logits at its own token only.
        if position == last_of_all or first < depth - (run.kind != "state"):
            found.append(Restoration(case, position, inside, first, len(places)))
        places.append((case, layer, place))

    for index, case in enumerate(batch.cases):
        for layer in range(depth) if run.layers is None else run.layers:
            every = range(case.subject[0], case.encoded.answer)
            for position in every if run.token is None else [case.position(run.token)]:
                add(index, layer, position, run.window, position)
            if run.window > 1:
                add(index, layer, case.encoded.subject_last, 1, -1)
    return found, places


@torch.no_grad()
def restore(
    editable: Editable, batch: Batch, run: Run, advance: Callable[[float], None]
) -> tuple[list[tuple[int, int, int]], Tensor]:
    """Run every restoration of `batch`.

    Returns:
        the indices (case, layer, token) and the log-probabilities of the answers there, [indices, samples, answers],
        nats; NaN beyond a case's own number of samples.
    """
    depth = len(editable.layers)
    wanted, places = plan(batch, run, depth)
    samples, answers = max(case.samples for case in batch.cases), len(batch.cases[0].answers)
    # A restoration that is not run has no effect, so the corrupted run's log-probability stands for it.
    corrupted = torch.full((len(batch.cases), samples, answers), torch.nan, dtype=torch.float64)
    for index, case in enumerate(batch.cases):
        for answer in range(answers):
            begin = batch.row(index, answer, 0)
            corrupted[index, : case.samples, answer] = batch.log_probs[begin : begin + case.samples]
    found = corrupted[[case for case, _, _ in places]]
    by_layer: dict[int, list[Restoration]] = defaultdict(list)
    for one in wanted:
        by_layer[one.first].append(one)
    vocabulary = int(editable.model.config.get_text_config().vocab_size)
    waiting: list[Final] = []
    done, most = 0, max(FEWEST, at_once(editable) // editable.feed_forward[0].parts[0].d_ff)
    for first in sorted(by_layer):
        for group in _groups(batch, by_layer[first], most):
            for final in _run_group(editable, batch, run, first, group):
                waiting.append(final)
                if sum(len(one.states) for one in waiting) * vocabulary >= UNEMBEDDED:
                    _unembed(editable, waiting, found)
                    waiting = []
            done += len(group)
            advance(done / len(wanted))
    _unembed(editable, waiting, found)
    return places, found


def _unembed(editable: Editable, waiting: list[Final], found: Tensor) -> None:
    """Write the answers' log-probabilities of the runs in `waiting` into `found`."""
    if waiting:
        texts = [text for final in waiting for text in final.texts]
        logits = replay.logits_of(editable, torch.cat([final.states for final in waiting]))
        places = torch.cat([final.places for final in waiting])
        found[places.unbind(-1)] = generation.answer_sums(logits, texts).double().cpu()


def _groups(batch: Batch, restorations: list[Restoration], most: int) -> Iterator[list[Restoration]]:
    """Group restorations at neighbouring tokens: enough to fill a batch, and at most `most` tokens."""
    some: list[Restoration] = []
    tokens = longest = 0
    for one in sorted(restorations, key=lambda r: (r.position, r.case)):
        case = batch.cases[one.case]
        size = max(len(e.ids) for e in case.answers) - 1
        start = some[0].position if some else one.position
        added = case.samples * len(case.answers) * (max(longest, size) - start)
        full = tokens + added > most
        if some and (full or (tokens >= LEAST and one.position > some[-1].position)):
            yield some
            some, tokens, longest = [], 0, 0
            added = case.samples * len(case.answers) * (size - one.position)
        some.append(one)
        tokens, longest = tokens + added, max(longest, size)
    if some:
        yield some


def _run_group(editable: Editable, batch: Batch, run: Run, first: int, group: list[Restoration]) -> Iterator[Final]:
    """Run a group, split in halves whenever memory runs out.

    Raises:
        ModelError: memory does not suffice for a single restoration.
    """
    refusal = ModelError("not enough memory for a single restoration; trace with fewer samples")
    yield from split_on_oom(lambda some: _run(editable, batch, run, first, some), group, refusal)


def _run(editable: Editable, batch: Batch, run: Run, first: int, group: Sequence[Restoration]) -> Final:
    entries = [
        (number, one, answer, sample)
        for number, one in enumerate(group)
        for answer in range(len(batch.cases[one.case].answers))
        for sample in range(batch.cases[one.case].samples)
    ]
    texts = [batch.cases[one.case].answers[answer] for _, one, answer, _ in entries]
    rows = torch.tensor([batch.row(one.case, answer, sample) for _, one, answer, sample in entries])
    clean = torch.tensor([batch.row(one.case, answer, -1) for _, one, answer, _ in entries])
    positions = torch.tensor([one.position for _, one, _, _ in entries])
    start, end = int(positions.min()), max(len(text.ids) for text in texts) - 1
    each = torch.arange(len(entries))
    states = batch.recording.states[first][rows, start:end]
    if run.kind == "state":
        states[each, positions - start] = batch.recording.states[first][clean, positions]
    narrow = True
    with ExitStack() as stack:
        for part in {run.kind, run.sever} - {"state", None}:
            assert part is not None
            modules, outputs = editable.outputs_of(part), batch.recording.outputs[part]
            for layer in range(first, len(modules)):
                restored = torch.tensor([part == run.kind and layer in one.inside for _, one, _, _ in entries])
                held = each if part == run.sever else each[restored]
                if len(held):
                    source = torch.where(restored, clean, rows)[held]
                    change = _put(outputs[layer][source, positions[held]], held, positions[held] - end, len(entries))
                    stack.enter_context(replace_output(modules[layer], change))
                    narrow = narrow and not (part == "feed_forward" and layer == len(modules) - 1)
        reads = generation.answer_reads(texts)
        final = replay.final_states(editable, batch.recording, first, states, rows, start, reads, narrow)
    places = torch.tensor([(one.row, sample, answer) for _, one, answer, sample in entries])
    return Final(final, texts, places)


def _put(values: Tensor, rows: Tensor, positions: Tensor, count: int) -> Callable[[Tensor], Tensor]:
    """Return a function that writes `values` [n, d_model] into an output at (rows, positions), counted from the end.

    From the end, since a model that cannot be resumed also runs the positions left of the group's first token.
    """

    def change(output: Tensor) -> Tensor:
        changed = output.reshape(count, -1, output.shape[-1]).clone()
        changed[rows, positions] = values.to(changed.device)
        return changed.reshape(output.shape)

    return change
