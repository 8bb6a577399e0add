"""Causal tracing: which state, restored, brings the fact back?

Three kinds of run (ROME, arXiv 2202.05262, section 2.1). *Clean*: the prompt as it is. *Corrupted*: noise of 3σ is
added to the subject's embeddings, and the answer is lost. *Restored*: the corrupted run once more, with one clean state
put back at token i and layer l. With P the probability of the answer,

    total effect     TE       = P_clean − P_corrupted
    indirect effect  IE(i, l) = P_restored(i, l) − P_corrupted

States are restored one at a time; feed-forward outputs in a window of layers around l, since a single one moves little.
The noise is drawn once per fact and shared by every restoration, so that effects differ by the restored state alone.
A restoration changes nothing below its layer and nothing left of the subject, so each run resumes there (`replay`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import overload

import numpy as np
import torch
from torch import Tensor

from ffedit import readout, replay
from ffedit.anatomy import Editable
from ffedit.errors import FactError, ModelError
from ffedit.facts import Fact
from ffedit.hooks import replaced
from ffedit.locator.result import Kind, LayerEffects, Trace, TraceSet, span_of
from ffedit.progress import Progress, silent
from ffedit.tokens import Encoded, decode, encode, pad

TOKENS_PER_BATCH = 8192


@overload
def locate(
    editable: Editable,
    facts: Fact,
    kind: Kind = ...,
    *,
    samples: int = ...,
    noise: float = ...,
    window: int | None = ...,
    seed: int = ...,
    progress: Progress = ...,
) -> Trace: ...
@overload
def locate(
    editable: Editable,
    facts: Sequence[Fact],
    kind: Kind = ...,
    *,
    samples: int = ...,
    noise: float = ...,
    window: int | None = ...,
    seed: int = ...,
    progress: Progress = ...,
) -> TraceSet: ...
def locate(
    editable: Editable,
    facts: Fact | Sequence[Fact],
    kind: Kind = "feed_forward",
    *,
    samples: int = 10,
    noise: float = 3.0,
    window: int | None = None,
    seed: int = 0,
    progress: Progress = silent,
) -> Trace | TraceSet:
    """Trace where a model recalls one fact, or several.

    The traced answer is the fact's `previous` object when given, else what the model says itself; never the target.

    Args:
        editable: the model.
        facts: one fact gives a `Trace`, a sequence a `TraceSet`.
        kind: restore the residual "state", or the "feed_forward" output in a window of layers.
        samples: noise draws.
        noise: standard deviation of the noise in units of σ, that of all entries of the embedding's output.
        window: layers restored together; default a third of the depth, between 3 and 10. States have none.
        seed: of the noise.
        progress: told how far it is.

    Raises:
        FactError: a subject has no token, or a prompt does not fit the model.
    """
    depth = len(editable.layers)
    if kind == "state":
        window = 1
    elif window is None:
        window = min(10, max(3, round(depth / 3)), depth)
    if not 1 <= window <= depth:
        raise FactError(f"a window of {window} layers was asked for, but the model has {depth}; give 1 to {depth}")
    if samples < 1:
        raise FactError(f"at least one noise sample is needed, found {samples}")
    sigma = noise * noise_scale(editable)
    some = [facts] if isinstance(facts, Fact) else list(facts)
    traces = []
    for i, fact in enumerate(some):
        advance = _within(progress, i, len(some))
        traces.append(_trace(editable, fact, kind, samples, sigma, window, seed, advance))
    return traces[0] if isinstance(facts, Fact) else TraceSet(tuple(traces))


def _within(progress: Progress, index: int, count: int) -> Callable[[float], None]:
    """Progress of one fact among `count`, as a share."""
    return lambda share: progress("tracing", round(100 * (index + share)), 100 * count)


def noise_scale(editable: Editable) -> float:
    """σ: the standard deviation of all entries of the input embedding's output, over the whole vocabulary."""
    with torch.no_grad():
        vocabulary = torch.arange(editable.model.config.get_text_config().vocab_size, device=editable.device)
        return float(editable.embedding(vocabulary).float().std())


def traced_answer(editable: Editable, fact: Fact) -> tuple[Encoded, bool]:
    """The prompt with the answer to trace, and whether the model gives this answer greedily."""
    tokenizer, limit = editable.tokenizer, editable.max_tokens
    if fact.previous is None:
        prompt = encode(tokenizer, fact.text, span=fact.span, max_tokens=limit)
        return readout.with_own_answer(editable, prompt), True
    encoded = encode(tokenizer, fact.text, fact.previous, fact.span, limit)
    said = readout.continuations(editable, [encoded.ids[: encoded.answer]], len(encoded.target_ids))[0]
    return encoded, tuple(said) == encoded.target_ids


@torch.no_grad()
def _trace(
    editable: Editable,
    fact: Fact,
    kind: Kind,
    samples: int,
    sigma: float,
    window: int,
    seed: int,
    advance: Callable[[float], None],
) -> Trace:
    encoded, known = traced_answer(editable, fact)
    assert encoded.subject is not None
    start, end = encoded.subject
    read = readout.answer_reads([encoded] * (samples + 1))
    ids = pad([encoded.ids[:-1]]).expand(samples + 1, -1)
    generator = torch.Generator().manual_seed(seed)

    def corrupt(embedded: Tensor) -> Tensor:
        """Row 0 stays clean; each other row carries its own noise on the subject."""
        d_model = embedded.shape[-1]
        noise = sigma * torch.randn(samples, end - start, d_model, generator=generator)
        corrupted = embedded.clone()
        corrupted[1:, start:end] += noise.to(embedded)
        return corrupted

    with replaced(editable.embedding, corrupt):
        recording = replay.record(editable, ids, read)
    probability = _probabilities(recording.logits, encoded)
    clean, corrupted = float(probability[0]), float(probability[1:].mean())
    if not np.isfinite([clean, corrupted]).all():
        layer = next((i for i, s in enumerate(recording.states) if not torch.isfinite(s).all()), "the unembedding")
        raise ModelError(f"the model's output is not finite on {fact.text!r}; the first bad state enters layer {layer}")
    positions, last = torch.arange(start, encoded.answer), torch.tensor([encoded.subject_last])
    alone = np.zeros(len(editable.layers))
    effects = np.zeros((len(editable.layers), encoded.answer))
    for layer in range(len(editable.layers)):
        if kind == "state":
            restored = _restore_states(editable, recording, encoded, layer, positions, samples)
        else:
            inside = span_of(layer, window, len(editable.layers))
            restored = _restore_outputs(editable, recording, encoded, inside, positions, samples)
            at_last = _restore_outputs(editable, recording, encoded, range(layer, layer + 1), last, samples)
            alone[layer] = at_last[0] - corrupted
        effects[layer, start:] = restored - corrupted
        advance((layer + 1) / len(editable.layers))
    return Trace(
        effects=effects,
        alone=effects[:, encoded.subject_last] if kind == "state" else alone,
        clean=clean,
        corrupted=corrupted,
        tokens=tuple(decode(editable.tokenizer, [i]) for i in encoded.ids[: encoded.answer]),
        subject=encoded.subject,
        answer=decode(editable.tokenizer, encoded.target_ids).strip(),
        known=known,
        kind=kind,
        window=window,
        noise=sigma,
        samples=samples,
        seed=seed,
    )


def _probabilities(logits: Tensor, encoded: Encoded) -> Tensor:
    """Probability of the whole answer in each rerun, [n], from logits [n · answer tokens, vocabulary]."""
    rows = len(logits) // len(encoded.target_ids)
    return readout.answer_sums(logits, [encoded] * rows).double().exp().cpu()


def _rerun(
    editable: Editable,
    recording: replay.Recording,
    encoded: Encoded,
    positions: Tensor,
    samples: int,
    layer: int,
    prepare: Callable[[ExitStack, Tensor, Tensor], Tensor],
) -> LayerEffects:
    """P_restored at each position, mean over samples: reruns from `layer` of what `prepare` sets up for each batch."""
    start = int(positions[0])
    pairs = torch.cartesian_prod(positions, torch.arange(1, samples + 1))
    size = max(1, TOKENS_PER_BATCH // (recording.ids.shape[1] - start))
    found = []
    for some in pairs.split(size):
        at, rows = some[:, 0] - start, some[:, 1]
        with ExitStack() as stack:
            states = prepare(stack, at, rows)
            read = readout.answer_reads([encoded] * len(rows))
            logits = replay.resume(editable, recording, layer, states, rows, start, read)
        found.append(_probabilities(logits, encoded))
    return np.asarray(torch.cat(found).reshape(len(positions), samples).mean(1).numpy())


def _restore_states(
    editable: Editable, recording: replay.Recording, encoded: Encoded, layer: int, positions: Tensor, samples: int
) -> LayerEffects:
    """The output of block `layer` is clean at one position."""
    start, state = int(positions[0]), recording.states[layer + 1]

    def prepare(stack: ExitStack, at: Tensor, rows: Tensor) -> Tensor:
        states = state[rows, start:]
        states[torch.arange(len(rows)), at] = state[0, start + at]
        return states

    return _rerun(editable, recording, encoded, positions, samples, layer + 1, prepare)


def _restore_outputs(
    editable: Editable,
    recording: replay.Recording,
    encoded: Encoded,
    inside: range,
    positions: Tensor,
    samples: int,
) -> LayerEffects:
    """The feed-forward outputs of the layers `inside` are clean at one position."""
    start = int(positions[0])

    def prepare(stack: ExitStack, at: Tensor, rows: Tensor) -> Tensor:
        for layer in inside:
            clean = recording.outputs[layer][0, start + at]

            def restore(output: Tensor, clean: Tensor = clean) -> Tensor:
                changed = output.reshape(len(rows), -1, output.shape[-1]).clone()
                # Counted from the end: a model that cannot be resumed runs the positions before `start` too.
                changed[torch.arange(len(rows)), start + at - recording.ids.shape[1]] = clean
                return changed.reshape(output.shape)

            stack.enter_context(replaced(editable.memories[layer].module, restore))
        return recording.states[inside[0]][rows, start:]

    return _rerun(editable, recording, encoded, positions, samples, inside[0], prepare)
