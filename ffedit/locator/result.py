"""What tracing gives: effects by token and layer, and the layer that they point to."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

import numpy as np

Kind: TypeAlias = Literal["state", "feed_forward"]
Effects: TypeAlias = np.ndarray[tuple[int, int], np.dtype[np.float64]]
LayerEffects: TypeAlias = np.ndarray[tuple[int], np.dtype[np.float64]]


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

    effects: Effects
    alone: LayerEffects
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
    def at_subject(self) -> LayerEffects:
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
    def at_subject(self) -> LayerEffects:
        """Average indirect effect (AIE) at the subject's last token, [layers]."""
        return np.asarray(np.mean([trace.at_subject for trace in self.traces], axis=0))

    @property
    def alone(self) -> LayerEffects:
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
    at_subject: LayerEffects,
    alone: LayerEffects,
    window: int,
) -> int:
    """Which single layer recalls the fact: the strongest alone, within the window that brings back most.

    A window finds the site, for one layer of many moves little; but neighbouring windows share layers and tie, so
    that the window's middle may be a layer that holds nothing.
    """
    inside = span_of(int(at_subject.argmax()), window, len(at_subject))
    return max(inside, key=lambda layer: float(alone[layer]))
