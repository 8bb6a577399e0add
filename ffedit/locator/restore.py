"""Effects of restoring clean states in the corrupted runs of a batch of facts.

A restoration at token i and layer l changes nothing below l and nothing left of i, so its run begins there (`replay`),
with attention keys and values of the earlier tokens from the corrupted runs, and applies the unembedding only where the
answer is read. Restorations at one token share a pass through the model, whatever their layers: each enters it at its
own layer, so that a layer's weights are read once for many of them.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor, nn

from ffedit.algebra.linalg import double
from ffedit.errors import ModelError
from ffedit.inference import generation, replay
from ffedit.inference.batching import split_on_oom
from ffedit.locator.cases import Batch, Run, numbers_at_once
from ffedit.locator.result import positions_of, span_of
from ffedit.model.editable import Editable
from ffedit.model.hooks import replace_output
from ffedit.model.tokenization import Encoded

# Tokens at which a group of runs is complete: fewer do not fill a matrix product, more recompute needless positions.
LEAST = 128
# Lower bound on the memory limit of a group, in tokens.
FEWEST = 512
# Logits computed at once: the unembedding is the largest matrix, and needs more rows than one group has.
UNEMBEDDED = 2**21
# Lower bound on the rows that are unembedded at once: a product of fewer reads a large matrix at half the speed.
LEAST_ROWS = 128


class Restoration(NamedTuple):
    """Restoration of one clean state, or of the outputs of one window, which gives one effect."""

    row: int  # index of the effect
    case: int  # index of the fact in the batch
    layer: int  # the layer of the effect
    token: int  # position of the restored token
    alone: bool  # whether the layer is restored without a window around it
    first: int  # layer that the run begins at; for a state, the layer that it enters
    inside: range  # layers whose outputs are restored; empty for a state


class Final(NamedTuple):
    """Final states of some runs, to be unembedded."""

    states: Tensor  # last layer's output where the next token is an answer's, [reads, d_model]
    texts: list[Encoded]  # prompt and answer of each run
    indices: Tensor  # (row of the effects, sample, answer) of each run, [runs, 3]


def _restorations(batch: Batch, run: Run, depth: int) -> list[Restoration]:
    """List the restorations; besides the window, the layer alone is restored at the subject's last token."""
    result: list[Restoration] = []
    for index, case in enumerate(batch.cases):
        sites = [(token, False) for token in positions_of(run.tokens, case.subject, case.encoded.answer)]
        if run.window > 1:
            sites.append((case.encoded.subject_last, True))
        for layer in range(depth) if run.layers is None else run.layers:
            for token, alone in sites:
                inside = range(0) if run.kind == "state" else span_of(layer, 1 if alone else run.window, depth)
                first = layer + 1 if run.kind == "state" else inside[0]
                result.append(Restoration(len(result), index, layer, token, alone, first, inside))
    return result


@torch.no_grad()
def restore(
    editable: Editable, batch: Batch, run: Run, advance: Callable[[float], None]
) -> tuple[list[Restoration], Tensor]:
    """Run every restoration of `batch`; ModelError where memory does not suffice for a single one.

    Return them and the answers' log-probabilities, [restorations, samples, answers], nats; NaN beyond a case's own
    number of samples.
    """
    depth = len(editable.layers)
    restorations = _restorations(batch, run, depth)
    # A state that no later attention layer reads changes the logits at its own token only.
    running = [
        r
        for r in restorations
        if r.token == batch.cases[r.case].encoded.answer - 1 or r.first < depth - (run.kind != "state")
    ]
    samples, answers = max(case.samples for case in batch.cases), len(batch.cases[0].answers)
    # A restoration that is not run has no effect, so the corrupted run's log-probability stands for it.
    corrupted = torch.full((len(batch.cases), samples, answers), torch.nan, dtype=torch.float64)
    for index, case in enumerate(batch.cases):
        corrupted[index, : case.samples] = batch.log_probs_of(index)[1:]
    log_probs = corrupted[[r.case for r in restorations]]
    least_rows = max(LEAST_ROWS, UNEMBEDDED // editable.vocabulary)
    refusal = ModelError("not enough memory for a single restoration; trace with fewer samples")
    waiting: list[Final] = []
    completed = 0
    max_tokens = max(FEWEST, numbers_at_once(editable) // editable.feed_forward[0].memories[0].d_ff)
    for group in _groups(batch, running, max_tokens):
        for final in split_on_oom(partial(_run, editable, batch, run), group, refusal):
            waiting.append(final)
            if sum(len(runs.states) for runs in waiting) >= least_rows:
                _unembed(editable, waiting, log_probs)
                waiting = []
        completed += len(group)
        advance(completed / len(running))
    _unembed(editable, waiting, log_probs)
    return restorations, log_probs


def _unembed(editable: Editable, waiting: list[Final], log_probs: Tensor) -> None:
    """Write the answers' log-probabilities of the runs in `waiting` into `log_probs`."""
    if waiting:
        texts = [text for final in waiting for text in final.texts]
        logits = editable.logits_of(torch.cat([final.states for final in waiting]))
        indices = torch.cat([final.indices for final in waiting])
        log_probs[indices.unbind(-1)] = double(generation.answer_sums(logits, texts)).cpu()


def _groups(batch: Batch, restorations: list[Restoration], max_tokens: int) -> Iterator[list[Restoration]]:
    """Group restorations at neighbouring tokens: enough to fill a batch, and at most `max_tokens` tokens.

    Restorations at one token are ordered by layer.
    """
    group: list[Restoration] = []
    tokens = longest = 0
    for restoration in sorted(restorations, key=lambda r: (r.token, r.first, r.case)):
        case = batch.cases[restoration.case]
        size = max(len(e.ids) for e in case.answers) - 1
        start = group[0].token if group else restoration.token
        added = case.samples * len(case.answers) * (max(longest, size) - start)
        full = tokens + added > max_tokens
        if group and (full or (tokens >= LEAST and restoration.token > group[-1].token)):
            yield group
            group, tokens, longest = [], 0, 0
            added = case.samples * len(case.answers) * (size - restoration.token)
        group.append(restoration)
        tokens, longest = tokens + added, max(longest, size)
    if group:
        yield group


class Entry(NamedTuple):
    """One corrupted run with one restoration."""

    restoration: Restoration
    row: int  # row of the corrupted run in the recording
    clean: int  # row of the clean run in the recording
    text: Encoded  # the prompt with the answer
    result: tuple[int, int, int]  # row of the effects, sample, answer


def _run(editable: Editable, batch: Batch, run: Run, group: Sequence[Restoration]) -> Final:
    """Run a group of restorations through the layers; each enters at its own layer."""
    recording, depth = batch.recording, len(editable.layers)
    entries = [
        Entry(r, batch.row(r.case, answer, sample), batch.row(r.case, answer, -1), text, (r.row, sample, answer))
        for r in sorted(group, key=lambda r: r.first)
        for answer, text in enumerate(batch.cases[r.case].answers)
        for sample in range(batch.cases[r.case].samples)
    ]
    texts = [entry.text for entry in entries]
    rows, clean = (torch.tensor(indices) for indices in ([e.row for e in entries], [e.clean for e in entries]))
    positions = torch.tensor([entry.restoration.token for entry in entries])
    start, end = int(positions.min()), max(len(text.ids) for text in texts) - 1
    reads = generation.answer_reads(texts)
    firsts = [entry.restoration.first for entry in entries]
    bounds = [*dict.fromkeys(firsts), depth]
    states = recording.states[bounds[0]][:0, start:end]
    for first, stop in pairwise(bounds):
        count = bisect_right(firsts, first)
        new = slice(len(states), count)
        entering = recording.states[first][rows[new], start:end]
        if run.kind == "state":
            tokens = positions[new]
            entering[torch.arange(len(tokens)), tokens - start] = recording.states[first][clean[new], tokens]
        states = torch.cat([states.to(entering.device), entering])
        layers = range(first, stop)
        with ExitStack() as stack:
            changes = list(_changes(editable, batch, run, entries[:count], layers, end))
            for module, change in changes:
                stack.enter_context(replace_output(module, change))
            # With `read`, a hook on the last feed-forward layer would receive only the positions that are read.
            last = editable.outputs_of("feed_forward")[-1]
            narrow = stop == depth and all(module is not last for module, _ in changes)
            read = reads[reads[:, 0] < count] if narrow else None
            states = replay.run_layers(editable, recording, layers, states, rows[:count], start, read)
    final = states[reads[:, 0], reads[:, 1] - start]
    return Final(final, texts, torch.tensor([entry.result for entry in entries]))


def _changes(
    editable: Editable, batch: Batch, run: Run, entries: Sequence[Entry], layers: range, end: int
) -> Iterator[tuple[nn.Module, Callable[[Tensor], Tensor]]]:
    """Yield the modules in `layers` whose outputs some runs restore or sever, each with the function that does so."""
    for part in run.parts:
        modules, outputs = editable.outputs_of(part), batch.recording.outputs[part]
        for layer in layers:
            changed = []  # the run, the row of the recording that has its new output, and the token
            for i, entry in enumerate(entries):
                restored = part == run.kind and layer in entry.restoration.inside
                token = entry.restoration.token
                # Nothing reads the last layer's outputs left of the token that predicts the answer.
                if (restored or part == run.sever) and (layer < len(modules) - 1 or token == entry.text.answer - 1):
                    changed.append((i, entry.clean if restored else entry.row, token))
            if changed:
                runs, sources, tokens = torch.tensor(changed).unbind(1)
                yield modules[layer], _put(outputs[layer][sources, tokens], runs, tokens - end, len(entries))


def _put(values: Tensor, rows: Tensor, positions: Tensor, count: int) -> Callable[[Tensor], Tensor]:
    """Return a function that writes `values` [n, d_model] into an output at (rows, positions), counted from the end.

    From the start they would differ: a model that cannot be resumed also runs positions left of the group's first.
    """

    def change(output: Tensor) -> Tensor:
        changed = output.reshape(count, -1, output.shape[-1]).clone()
        changed[rows, positions] = values.to(changed.device)
        return changed.reshape(output.shape)

    return change
