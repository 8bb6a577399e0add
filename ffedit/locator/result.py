"""What tracing gives: effects by token and layer, and the layer that they point to."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np

from ffedit.folders import placed

Part: TypeAlias = Literal["feed_forward", "attention"]
Kind: TypeAlias = Literal["state", "feed_forward", "attention"]
Metric: TypeAlias = Literal["probability", "log_probability", "logit_difference"]
Effects: TypeAlias = np.ndarray[tuple[int, int], np.dtype[np.float64]]
LayerEffects: TypeAlias = np.ndarray[tuple[int], np.dtype[np.float64]]

# Share of the total effect below which a token shows no site.
CLEAR = 0.1


class Site(NamedTuple):
    """Where in the subject a fact is recalled.

    Attributes:
        effects: indirect effects there, [layers].
        last: there is the subject's last token.
    """

    effects: LayerEffects
    last: bool


@dataclass(frozen=True, eq=False)
class Trace:
    """What restoring brings back, for one fact.

    Attributes:
        effects: indirect effects, [layers, tokens], in units of `metric`; row l of a state trace is the output of
            block l, and of the others the window around l. Positive where the fact comes back, NaN in layers where
            nothing was restored.
        errors: their standard errors over the samples, [layers, tokens]; NaN for a single sample, 0 where nothing can
            change.
        alone: indirect effect of each layer without a window at the subject's last token, [layers].
        clean: the metric of the clean run.
        corrupted: the metric of the corrupted runs, mean over samples.
        tokens: the prompt's tokens as text, [tokens].
        subject: first token of the subject and the one after its last.
        answer: the answer that was traced, as text.
        known: whether the clean model says the answer by itself (greedily).
        kind: what was restored.
        window: layers restored together; 1 for states.
        sever: which modules could not respond at the restored token, or None.
        metric: "probability" of the whole answer, "log_probability" (nats), or "logit_difference" (nats).
        corruption: what was done to the subject, in words.
        noise: standard deviation of the noise, or half the width of uniform noise, in the units of the embedding; None
            where another subject took the place.
        samples: number of corrupted runs.
        seed: of the corruption.
        exact: False where the effects are first-order estimates.
        prompt: the prompt as text.
    """

    effects: Effects
    errors: Effects
    alone: LayerEffects
    clean: float
    corrupted: float
    tokens: tuple[str, ...]
    subject: tuple[int, int]
    answer: str
    known: bool
    kind: Kind
    window: int
    sever: Part | None
    metric: Metric
    corruption: str
    noise: float | None
    samples: int
    seed: int
    exact: bool = True
    prompt: str = ""

    @property
    def total(self) -> float:
        """Total effect, clean − corrupted."""
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
    def strongest_token(self) -> int:
        """Position of the subject's token that brings back most."""
        first, end = self.subject
        return first + int(np.nanmax(self.effects[:, first:end], axis=0).argmax())

    @property
    def at_strongest(self) -> LayerEffects:
        """Effects there, [layers]."""
        return np.asarray(self.effects[:, self.strongest_token])

    @property
    def site(self) -> Site:
        """See `site_of`."""
        return site_of(self)

    @property
    def layer(self) -> int:
        """The layer to edit: see `best_layer`."""
        return best_layer(self.site, self.alone, self.window)

    def to_dict(self) -> dict[str, Any]:
        """Plain lists and numbers, in full precision."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: v.tolist() if isinstance(v, np.ndarray) else v for name, v in values.items()}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Trace:
        """What `to_dict` gave, read back."""
        arrays = {name: np.asarray(values[name], float) for name in ("effects", "errors", "alone")}
        return cls(**{**values, **arrays, "tokens": tuple(values["tokens"]), "subject": tuple(values["subject"])})

    def save(self, path: str | Path) -> None:
        """Write the numbers as `.npz`; the array `axes` names the axes of `effects` and `errors`."""
        arrays: dict[str, Any] = {n: v for n, v in self.to_dict().items() if v is not None}
        with placed(Path(path)) as file, file.open("wb") as stream:
            np.savez(stream, axes=np.array(["layer", "token"]), **arrays)


@dataclass(frozen=True, eq=False)
class TraceSet:
    """Traces of several facts, all with the same settings."""

    traces: tuple[Trace, ...]

    @property
    def at_subject(self) -> LayerEffects:
        """Average indirect effect (AIE) at the subject's last token, [layers]."""
        return np.asarray(np.mean([trace.at_subject for trace in self.traces], axis=0))

    @property
    def at_strongest(self) -> LayerEffects:
        """Average effect at the token of each subject that brings back most, [layers]."""
        return np.asarray(np.mean([trace.at_strongest for trace in self.traces], axis=0))

    @property
    def site(self) -> Site:
        """See `site_of`."""
        return site_of(self)

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
        return best_layer(self.site, self.alone, self.traces[0].window)

    def best_within(self, allowed: range) -> int:
        """The layer to edit among those `allowed`: `layer` where it is one of them, else the strongest."""
        site = self.site
        return self.layer if self.layer in allowed else strongest(self.alone if site.last else site.effects, allowed)


def span_of(layer: int, window: int, depth: int) -> range:
    """The layers that are restored together around `layer`: max(0, l − w//2) up to min(L, l + ceil(w/2)) − 1."""
    return range(max(0, layer - window // 2), min(depth, layer - window // 2 + window))


def site_of(trace: Trace | TraceSet) -> Site:
    """The subject's last token; where it shows no site and another of the subject's tokens does, that one.

    A name that is known before its last word (Pera Museum) is recalled before it: of such a fact, the last token brings
    nothing back in any layer, and which of them it brings back least in means nothing.
    """
    last, other = np.nanmax(trace.at_subject), np.nanmax(trace.at_strongest)
    if trace.total > 0 and last < CLEAR * trace.total <= other:
        return Site(trace.at_strongest, False)
    return Site(trace.at_subject, True)


def best_layer(site: Site, alone: LayerEffects, window: int) -> int:
    """Which single layer recalls the fact: the strongest alone, within the window that brings back most.

    A window finds the site, for one layer of many moves little; but neighbouring windows share layers and tie, so
    that the window's middle may be a layer that holds nothing. Single layers are measured at the subject's last token
    only; where the site is elsewhere it is the window's middle, the lowest of those that tie.
    """
    peak = int(np.nanargmax(site.effects))
    return strongest(alone, span_of(peak, window, len(alone))) if site.last else peak


def strongest(effects: LayerEffects, layers: range) -> int:
    """The layer of the largest effect among `layers`; where nothing was restored, there is none."""
    return layers[0] + int(np.nan_to_num(effects[layers[0] : layers[-1] + 1], nan=-np.inf).argmax())
