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
from dataclasses import dataclass
from typing import Literal, TypeAlias, overload

import numpy as np
import torch
from torch import Tensor

from ffedit import readout, replay
from ffedit.anatomy import Editable
from ffedit.errors import FactError, ModelError
from ffedit.facts import Fact
from ffedit.hooks import replaced
from ffedit.progress import Progress, silent
from ffedit.tokens import Encoded, decode, encode, pad

Kind: TypeAlias = Literal["state", "feed_forward"]
TOKENS_PER_BATCH = 8192


@dataclass(frozen=True, eq=False)
class Trace:
    """What restoring brings back, for one fact.

    Attributes:
        effects: indirect effects, [layers, tokens], probability; row l of a state trace is the output of block l,
            and of a feed-forward trace the window around l.
        alone: indirect effect of each layer without a window at the subject's last token, [layers], probability.
        clean: P_clean, probability of the whole answer.
        corrupted: P_corrupted, mean over the noise samples.
        tokens: the prompt's tokens as text, [tokens].
        subject: first token of the subject and the one after its last.
        answer: the answer that was traced, as text.
        known: whether the clean model says the answer by itself (greedily).
        kind: what was restored.
        window: layers restored together.
        noise: standard deviation of the noise, in the units of the embedding.
        samples: number of noise draws.
        seed: of the noise.
    """

    effects: np.ndarray[tuple[int, int], np.dtype[np.float64]]
    alone: np.ndarray[tuple[int], np.dtype[np.float64]]
    clean: float
    corrupted: float
    tokens: tuple[str, ...]
    subject: tuple[int, int]
    answer: str
    known: bool
    kind: Kind
    window: int
    noise: float
    samples: int
    seed: int

    @property
    def total(self) -> float:
        """Total effect, P_clean − P_corrupted."""
        return self.clean - self.corrupted

    @property
    def subject_last(self) -> int:
        """Position of the subject's last token."""
        return self.subject[1] - 1

    @property
    def at_subject(self) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
        """Effects at the subject's last token, [layers]: where ROME reads its key."""
        return np.asarray(self.effects[:, self.subject_last])

    @property
    def layer(self) -> int:
        """The layer to edit: see `best_layer`."""
        return best_layer(self.at_subject, self.alone, self.window)


@dataclass(frozen=True, eq=False)
class TraceSet:
    """Traces of several facts, all of one kind."""

    traces: tuple[Trace, ...]

    @property
    def at_subject(self) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
        """Average indirect effect (AIE) at the subject's last token, [layers]."""
        return np.asarray(np.mean([trace.at_subject for trace in self.traces], axis=0))

    @property
    def alone(self) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
        """Average effect of each layer without a window at the subject's last token, [layers]."""
        return np.asarray(np.mean([trace.alone for trace in self.traces], axis=0))

    @property
    def total(self) -> float:
        """Average total effect (ATE)."""
        return float(np.mean([trace.total for trace in self.traces]))

    @property
    def layer(self) -> int:
        """The layer to edit: see `best_layer`."""
        return best_layer(self.at_subject, self.alone, self.traces[0].window)

    def best_within(self, allowed: range) -> int:
        """The layer to edit among those `allowed`: `layer` where it is one of them, else the strongest alone."""
        return self.layer if self.layer in allowed else max(allowed, key=lambda layer: float(self.alone[layer]))


def span_of(layer: int, window: int, depth: int) -> range:
    """The layers that are restored together around `layer`: max(0, l − w//2) up to min(L, l + ceil(w/2)) − 1."""
    return range(max(0, layer - window // 2), min(depth, layer - window // 2 + window))


def best_layer(
    at_subject: np.ndarray[tuple[int], np.dtype[np.float64]],
    alone: np.ndarray[tuple[int], np.dtype[np.float64]],
    window: int,
) -> int:
    """Which single layer recalls the fact: the strongest alone, within the window that brings back most.

    A window finds the site, for one layer of many moves little; but neighbouring windows share layers and tie, so
    that the window's middle may be a layer that holds nothing.
    """
    inside = span_of(int(at_subject.argmax()), window, len(at_subject))
    return max(inside, key=lambda layer: float(alone[layer]))


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
) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
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
) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
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
) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
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
