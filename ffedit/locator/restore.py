"""Effects of restoring clean states in the corrupted runs of a batch of facts: measured, or estimated to first order.

Measured (`restore`): a restoration at token i and layer l changes nothing below l and nothing left of i. All
restorations of a batch that begin at the same layer are sorted by their token and split into groups; a group resumes
(`replay`) above that layer, at its first token, with attention keys and values of the earlier tokens from the corrupted
runs, and applies the unembedding at the answers' positions only.

Estimated (`estimate`), by attribution patching: restoring an output a at token i and layer l changes the metric m, to
first order around the corrupted run, by

    IE(i, l) ≈ (a_clean − a_corrupted) · ∂m/∂a |corrupted

so that one forward and one backward pass estimate what exact tracing measures with a run for each token and layer
(Nanda 2023, "Attribution patching: activation patching at industrial scale"; Syed et al. 2023, arXiv 2310.10348). The
estimate is good where the model is nearly linear between the two runs, and poor where it saturates. A window is
estimated by the sum over its layers, which is more than its first-order effect: an exact restoration also blocks the
effect of its earlier layers on its later ones. Compare with exact effects on a few facts before trusting the estimate.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from ffedit.algebra.linalg import double
from ffedit.errors import ModelError
from ffedit.inference import generation, replay
from ffedit.inference.batching import refuse_out_of_memory, split_on_oom
from ffedit.locator.cases import Batch, Run, numbers_at_once
from ffedit.locator.result import position_of, span_of
from ffedit.model.editable import Editable
from ffedit.model.hooks import frozen, replace_output
from ffedit.model.tokenization import Encoded

# Tokens at which a group of runs is complete: fewer do not fill a matrix product, more recompute needless positions.
LEAST = 128
# Lower bound on the memory limit of a group, in tokens.
FEWEST = 512
# Logits computed at once: the unembedding is the largest matrix, and needs more rows than one group has.
UNEMBEDDED = 2**21


class Site(NamedTuple):
    """Index of one effect: the case in its batch, the layer, the token, and whether the layer is restored `alone`."""

    case: int
    layer: int
    token: int
    alone: bool


class Restoration(NamedTuple):
    """Restoration of one clean state, or of the outputs of one window."""

    case: int  # index of the fact in the batch
    token: int  # position of the restored token
    inside: range  # layers whose outputs are restored; empty for a state
    row: int  # index of its result


class Final(NamedTuple):
    """Final states of some runs, to be unembedded."""

    states: Tensor  # of the last layer, at the positions whose next token is an answer's, [reads, d_model]
    texts: list[Encoded]  # of each run
    indices: Tensor  # (row of the results, sample, answer) of each run, [runs, 3]


def sites_of(batch: Batch, run: Run, depth: int) -> list[Site]:
    """List the sites of all effects; besides the window, the layer alone is restored at the subject's last token."""
    sites = []
    for index, case in enumerate(batch.cases):
        tokens = range(case.subject[0], case.encoded.answer)
        for layer in range(depth) if run.layers is None else run.layers:
            for token in tokens if run.token is None else [position_of(run.token, case.subject, tokens.stop)]:
                sites.append(Site(index, layer, token, False))
            if run.window > 1:
                sites.append(Site(index, layer, case.encoded.subject_last, True))
    return sites


def _span(site: Site, run: Run, depth: int) -> range:
    """Return the layers restored together at a site."""
    return span_of(site.layer, 1 if site.alone else run.window, depth)


@torch.no_grad()
def restore(editable: Editable, batch: Batch, run: Run, advance: Callable[[float], None]) -> tuple[list[Site], Tensor]:
    """Run every restoration of `batch`; ModelError where memory does not suffice for a single one.

    Returns:
        the sites and the log-probabilities of the answers there, [sites, samples, answers], nats; NaN beyond a case's
        own number of samples.
    """
    depth = len(editable.layers)
    sites, by_layer = sites_of(batch, run, depth), defaultdict[int, list[Restoration]](list)
    for row, site in enumerate(sites):  # by the layer that the run begins at; for a state, the one that it enters
        inside = range(0) if run.kind == "state" else _span(site, run, depth)
        first = site.layer + 1 if run.kind == "state" else inside[0]
        # A state that no later attention layer reads changes the logits at its own token only.
        if site.token == batch.cases[site.case].encoded.answer - 1 or first < depth - (run.kind != "state"):
            by_layer[first].append(Restoration(site.case, site.token, inside, row))
    samples, answers = max(case.samples for case in batch.cases), len(batch.cases[0].answers)
    # A restoration that is not run has no effect, so the corrupted run's log-probability stands for it.
    corrupted = torch.full((len(batch.cases), samples, answers), torch.nan, dtype=torch.float64)
    for index, case in enumerate(batch.cases):
        rows = [[batch.row(index, answer, sample) for answer in range(answers)] for sample in range(case.samples)]
        corrupted[index, : case.samples] = batch.log_probs[torch.tensor(rows)]
    log_probs = corrupted[[site.case for site in sites]]
    vocabulary = int(editable.model.config.get_text_config().vocab_size)
    refusal = ModelError("not enough memory for a single restoration; trace with fewer samples")
    waiting: list[Final] = []
    done, total = 0, sum(map(len, by_layer.values()))
    most = max(FEWEST, numbers_at_once(editable) // editable.feed_forward[0].memories[0].d_ff)
    for first in sorted(by_layer):
        for group in _groups(batch, by_layer[first], most):
            for final in split_on_oom(partial(_run, editable, batch, run, first), group, refusal):
                waiting.append(final)
                if sum(len(runs.states) for runs in waiting) * vocabulary >= UNEMBEDDED:
                    _unembed(editable, waiting, log_probs)
                    waiting = []
            done += len(group)
            advance(done / total)
    _unembed(editable, waiting, log_probs)
    return sites, log_probs


def _unembed(editable: Editable, waiting: list[Final], log_probs: Tensor) -> None:
    """Write the answers' log-probabilities of the runs in `waiting` into `log_probs`."""
    if waiting:
        texts = [text for final in waiting for text in final.texts]
        logits = replay.logits_of(editable, torch.cat([final.states for final in waiting]))
        indices = torch.cat([final.indices for final in waiting])
        log_probs[indices.unbind(-1)] = double(generation.answer_sums(logits, texts)).cpu()


def _groups(batch: Batch, restorations: list[Restoration], most: int) -> Iterator[list[Restoration]]:
    """Group restorations at neighbouring tokens: enough to fill a batch, and at most `most` tokens."""
    group: list[Restoration] = []
    tokens = longest = 0
    for restoration in sorted(restorations, key=lambda r: (r.token, r.case)):
        case = batch.cases[restoration.case]
        size = max(len(e.ids) for e in case.answers) - 1
        start = group[0].token if group else restoration.token
        added = case.samples * len(case.answers) * (max(longest, size) - start)
        full = tokens + added > most
        if group and (full or (tokens >= LEAST and restoration.token > group[-1].token)):
            yield group
            group, tokens, longest = [], 0, 0
            added = case.samples * len(case.answers) * (size - restoration.token)
        group.append(restoration)
        tokens, longest = tokens + added, max(longest, size)
    if group:
        yield group


def _run(editable: Editable, batch: Batch, run: Run, first: int, group: Sequence[Restoration]) -> Final:
    entries = [
        (restoration, answer, sample)
        for restoration in group
        for answer in range(len(batch.cases[restoration.case].answers))
        for sample in range(batch.cases[restoration.case].samples)
    ]
    texts = [batch.cases[r.case].answers[answer] for r, answer, _ in entries]
    rows = torch.tensor([batch.row(r.case, answer, sample) for r, answer, sample in entries])
    clean = torch.tensor([batch.row(r.case, answer, -1) for r, answer, _ in entries])
    positions = torch.tensor([r.token for r, _, _ in entries])
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
                restored = torch.tensor([part == run.kind and layer in r.inside for r, _, _ in entries])
                held = each if part == run.sever else each[restored]
                if len(held):
                    source = torch.where(restored, clean, rows)[held]
                    change = _put(outputs[layer][source, positions[held]], held, positions[held] - end, len(entries))
                    stack.enter_context(replace_output(modules[layer], change))
                    narrow = narrow and not (part == "feed_forward" and layer == len(modules) - 1)
        reads = generation.answer_reads(texts)
        final = replay.final_states(editable, batch.recording, first, states, rows, start, reads, narrow)
    return Final(final, texts, torch.tensor([(r.row, sample, answer) for r, answer, sample in entries]))


def _put(values: Tensor, rows: Tensor, positions: Tensor, count: int) -> Callable[[Tensor], Tensor]:
    """Return a function that writes `values` [n, d_model] into an output at (rows, positions), counted from the end.

    From the end, since a model that cannot be resumed also runs the positions left of the group's first token.
    """

    def change(output: Tensor) -> Tensor:
        changed = output.reshape(count, -1, output.shape[-1]).clone()
        changed[rows, positions] = values.to(changed.device)
        return changed.reshape(output.shape)

    return change


def estimate(editable: Editable, batch: Batch, run: Run, advance: Callable[[float], None]) -> tuple[list[Site], Tensor]:
    """Estimate every restoration of `batch`: as `restore`, but with changes of the log-probabilities, nats."""
    depth, samples, answers = len(editable.layers), max(c.samples for c in batch.cases), len(batch.cases[0].answers)
    singles = []
    for number, case in enumerate(batch.cases):
        single = torch.full((depth, case.encoded.answer, samples, answers), torch.nan, dtype=torch.float64)
        for answer in range(answers):
            with refuse_out_of_memory(ModelError("not enough memory for a single estimate; trace with fewer samples")):
                single[:, :, : case.samples, answer] = _estimate_layers(editable, batch, run, number, answer)
        singles.append(single)
    sites = sites_of(batch, run, depth)
    spans = [(site, _span(site, run, depth)) for site in sites]
    sums = [singles[site.case][span.start : span.stop, site.token].sum(0) for site, span in spans]
    advance(1.0)
    return sites, torch.stack(sums)


def _estimate_layers(editable: Editable, batch: Batch, run: Run, number: int, answer: int) -> Tensor:
    """Estimate single layers for one case and answer, [layers, prompt tokens, samples], nats."""
    case = batch.cases[number]
    text = case.answers[answer]
    clean, first = (batch.row(number, answer, sample) for sample in (-1, 0))
    rows, length = torch.arange(first, first + case.samples), len(text.ids) - 1
    if run.kind == "state":
        modules, outputs = list(editable.layers), batch.recording.states[1:]
    else:
        modules, outputs = editable.outputs_of(run.kind), batch.recording.outputs[run.kind]
    # δ = 0 is added to every output, so the gradient for δ is the gradient for the output.
    deltas = [torch.zeros_like(output[rows, :length], requires_grad=True) for output in outputs]
    with ExitStack() as stack, torch.enable_grad():
        stack.enter_context(frozen(editable.model))
        for module, delta in zip(modules, deltas, strict=True):
            stack.enter_context(replace_output(module, lambda out, delta=delta: out + delta.reshape(out.shape)))  # type: ignore[misc]
        texts = [text] * case.samples
        states = batch.recording.states[0][rows, :length]
        logits = replay.resume(editable, batch.recording, 0, states, rows, 0, generation.answer_reads(texts))
        gradients = torch.autograd.grad(generation.answer_sums(logits, texts).sum(), deltas)
    changes = [
        double((output[clean, :length] - output[rows, :length]) * gradient).sum(-1)
        for output, gradient in zip(outputs, gradients, strict=True)
    ]
    return torch.stack(changes)[:, :, : case.encoded.answer].transpose(1, 2).cpu()
