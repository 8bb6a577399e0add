"""Results of tracing: effects by token and layer, the layer to edit that follows from them, and averages over facts.

Averages are those of ROME's figure 2 (average indirect effects, AIE; arXiv 2202.05262), by the role of a token: prompts
differ in length and wording; what they share is the roles of their tokens. Each fact counts once in every role that it
has, with the mean over its tokens in that role. Intervals are percentiles of a bootstrap over facts. Facts whose answer
the model does not generate cannot be traced: they are counted and named, and excluded from every average.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeAlias, get_args

import numpy as np

from ffedit.algebra.bootstrap import LEVELS, Interval, mean_draws, percentile_interval
from ffedit.errors import FactError
from ffedit.facts.text import counted, number
from ffedit.files.atomic import write_file
from ffedit.notebook import Averaged, Plotted

Part: TypeAlias = Literal["feed_forward", "attention"]
Kind: TypeAlias = Literal["state", "feed_forward", "attention"]
Metric: TypeAlias = Literal["probability", "log_probability", "logit_difference"]
# Tokens that are restored: all from the subject's first on (nothing left of it can have an effect), those of the
# subject and the prompt's last, or the subject's last, which every trace has.
Tokens: TypeAlias = Literal["all", "subject_and_last", "subject_last"]
Effects: TypeAlias = np.ndarray[tuple[int, int], np.dtype[np.float64]]
LayerEffects: TypeAlias = np.ndarray[tuple[int], np.dtype[np.float64]]

TOKENS: tuple[Tokens, ...] = get_args(Tokens)
# Share of the total effect that restoring a token must reach at some layer for that token to show a site.
CLEAR = 0.1
# Seed and number of the draws of facts from which intervals of averages come.
SEED, DRAWS = 0, 1000
SETTINGS = ("kind", "window", "sever", "metric", "corruption")
ROLES = ("first subject", "mid subject", "last subject", "next token", "further tokens", "last token")


@dataclass(frozen=True, eq=False)
class Trace(Plotted):
    """Effects of restoring states or outputs, by layer and token, for one fact.

    Attributes:
        effects: indirect effects, [layers, tokens], in units of `metric`; row l restores the output of block l in a
            state trace, else the window around layer l. Positive where the answer is recovered, NaN where nothing was
            restored.
        errors: their standard errors over the samples, [layers, tokens]; NaN for a single sample, 0 where nothing can
            change.
        alone: indirect effect of each layer without a window at the subject's last token, [layers].
        clean: the metric of the clean run.
        corrupted: the metric of the corrupted runs, mean over samples.
        tokens: the prompt's tokens as text, [tokens].
        subject: position of the subject's first token, and the one after its last.
        answer: the answer that was traced, as text.
        known: whether the clean model generates the answer (greedily).
        kind: the kind of output that was restored.
        window: layers restored together; 1 for states.
        sever: the kind of modules that could not respond at the restored token, or None.
        metric: "probability" of the whole answer, "log_probability" (nats), or "logit_difference" (nats).
        corruption: corruption of the subject, in words.
        noise: standard deviation of the noise, or half the width of uniform noise, in the units of the embedding; None
            where the subject was replaced by another.
        samples: number of corrupted runs.
        seed: seed of the corruption.
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
    prompt: str = ""

    def __repr__(self) -> str:
        runs = f"{number(self.clean)} clean, {number(self.corrupted)} corrupted"
        unknown = "" if self.known else ", which the model does not generate"
        return (
            f"Trace of {self.prompt!r}: {self.kind}, layers restored together: {self.window}\n"
            f"  {self.metric} of {self.answer!r}{unknown}: {runs}\n  {_strongest(self)}"
        )

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
    def layer(self) -> int:
        """Return the layer of the largest effect at the subject's last token: see `best_layer`."""
        return best_layer(self)

    @property
    def site(self) -> int | None:
        """Return the layer that recalls the fact at the subject's last token, or None: see `site_of`."""
        return site_of(self)

    def to_dict(self) -> dict[str, Any]:
        """Return plain lists and numbers, in full precision."""
        return {name: v.tolist() if isinstance(v, np.ndarray) else v for name, v in vars(self).items()}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Trace:
        """Build a trace from what `to_dict` returned; FactError where an earlier version estimated its effects."""
        values = dict(values)
        if not values.pop("exact", True):
            raise FactError("the effects of this trace were estimated, not measured; trace the fact again")
        arrays = {name: np.asarray(values[name], float) for name in ("effects", "errors", "alone")}
        return cls(**{**values, **arrays, "tokens": tuple(values["tokens"]), "subject": tuple(values["subject"])})

    def save(self, path: str | Path) -> None:
        """Write the numbers as `.npz`; the array `axes` names the axes of `effects` and `errors`."""
        save_arrays(Path(path), ("layer", "token"), self.to_dict())


def save_arrays(path: Path, axes: tuple[str, str], arrays: Mapping[str, Any]) -> None:
    """Write those of `arrays` that are not None as `.npz`, with the names of their `axes`."""

    def write(temporary: Path) -> None:
        with temporary.open("wb") as stream:  # numpy would append .npz to another path
            np.savez(stream, axes=np.array(axes), **{name: v for name, v in arrays.items() if v is not None})

    write_file(path, write)


@dataclass(frozen=True, eq=False)
class TraceSet(Plotted):
    """Traces of several facts, all with the same settings.

    All averages are over the facts that the model knows, since an answer that it does not generate is recalled nowhere.
    If it knows none, they are over all facts, and `site` is None.
    """

    traces: tuple[Trace, ...]

    def __repr__(self) -> str:
        return (
            f"TraceSet of {counted(len(self.traces), 'fact')}, {len(self.known)} known: {self.traces[0].kind}, "
            f"average total effect {number(self.total)}\n  {_strongest(self)}"
        )

    @property
    def known(self) -> tuple[Trace, ...]:
        """Traces of the facts that the model knows."""
        return tuple(trace for trace in self.traces if trace.known)

    @property
    def averaged(self) -> TraceSet:
        """Traces that are averaged."""
        return TraceSet(self.known or self.traces)

    @property
    def at_subject(self) -> LayerEffects:
        """Average indirect effect (AIE) at the subject's last token, [layers]."""
        return np.asarray(np.mean([trace.at_subject for trace in self.averaged.traces], axis=0))

    @property
    def alone(self) -> LayerEffects:
        """Average effect of each layer without a window at the subject's last token, [layers]."""
        return np.asarray(np.mean([trace.alone for trace in self.averaged.traces], axis=0))

    @property
    def total(self) -> float:
        """Average total effect (ATE)."""
        return float(np.mean([trace.total for trace in self.averaged.traces]))

    @property
    def window(self) -> int:
        """Layers restored together."""
        return self.traces[0].window

    def aggregate(self) -> Aggregate:
        """Average by the role of a token, with intervals over facts: see `aggregate`."""
        return aggregate(self)

    @property
    def layer(self) -> int:
        """Return the layer of the largest effect at the subject's last token: see `best_layer`."""
        return best_layer(self)

    @property
    def site(self) -> int | None:
        """Return the layer that recalls the facts at the subject's last token, or None: see `site_of`."""
        return site_of(self)


class Peak(NamedTuple):
    """Largest effect at a subject."""

    token: str  # text of its token; for several facts, the token's role
    last: bool  # whether it is at the subject's last token
    layer: int
    effect: float


def subject_peak(trace: Trace | TraceSet) -> Peak:
    """Return the largest effect at a token of the subject; for several facts, the largest average by role."""
    traces = trace.averaged.traces if isinstance(trace, TraceSet) else (trace,)
    if len(traces) > 1:
        names: tuple[str, ...] = ROLES[:3]
        values = np.stack([by_role(single)[:3] for single in traces])
        measured = (~np.isnan(values)).sum(0)
        effects = np.where(measured, np.nansum(values, 0) / np.maximum(measured, 1), np.nan)
    else:
        subject = slice(*traces[0].subject)
        effects, names = traces[0].effects[:, subject].T, traces[0].tokens[subject]
    token, layer = divmod(int(np.nanargmax(effects)), effects.shape[1])
    return Peak(names[token], token == len(names) - 1, layer, float(effects[token, layer]))


def _strongest(trace: Trace | TraceSet) -> str:
    """Say where the effect is largest."""
    peak = subject_peak(trace)
    return f"recalled most at {peak.token!r}, layer {peak.layer}: {number(peak.effect)} of {number(trace.total)}"


def positions_of(tokens: Tokens, subject: tuple[int, int], length: int) -> list[int]:
    """Return the positions that are restored in a prompt of `length` tokens with this `subject`, in ascending order."""
    if tokens == "all":
        return list(range(subject[0], length))
    if tokens == "subject_and_last":
        return sorted({*range(*subject), length - 1})
    return [subject[1] - 1]


def span_of(layer: int, window: int, depth: int) -> range:
    """Return the layers restored together around `layer`: max(0, l − w//2) up to min(L, l + ceil(w/2)) − 1."""
    return range(max(0, layer - window // 2), min(depth, layer - window // 2 + window))


def site_of(trace: Trace | TraceSet, allowed: range | None = None) -> int | None:
    """Return the layer that recalls the fact at the subject's last token, or None if that token shows no site.

    It shows one if the model knows the fact, the corruption lowers the metric (TE > 0), and restoring some layer there
    recovers at least a tenth of it (`CLEAR`). `allowed` are the layers to choose among, None for all.
    """
    known = trace.known if isinstance(trace, Trace) else bool(trace.known)
    effects = trace.at_subject
    inside = effects if allowed is None else effects[allowed.start : allowed.stop]
    if not known or not trace.total > 0 or not np.nanmax(inside) >= CLEAR * trace.total:
        return None
    best = best_layer(trace)
    return best if allowed is None or best in allowed else strongest(effects, allowed)


def best_layer(trace: Trace | TraceSet) -> int:
    """Return the strongest single layer within the strongest window at the subject's last token.

    Neighbouring windows share layers and tie, so that the window's middle may be a layer without effect.
    """
    effects = trace.at_subject
    return strongest(trace.alone, span_of(int(np.nanargmax(effects)), trace.window, len(effects)))


def strongest(effects: LayerEffects, layers: range) -> int:
    """Return the layer of the largest effect among `layers`; layers where nothing was restored (NaN) do not count."""
    return layers[0] + int(np.nan_to_num(effects[layers[0] : layers[-1] + 1], nan=-np.inf).argmax())


# Averages by the role of a token -------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Aggregate(Averaged):
    """Average effects over the facts that the model knows."""

    roles: tuple[str, ...]  # names of the rows, those of `ROLES` that occur
    effects: Effects  # AIE, [roles, layers], in units of `metric`
    low: Effects  # lower ends of the 95 % intervals, [roles, layers]
    high: Effects  # upper ends, [roles, layers]
    counts: tuple[int, ...]  # number of facts that have a token in the role, [roles]
    total: Interval  # average total effect (ATE)
    clean: float  # mean of the clean runs
    corrupted: float  # mean of the corrupted runs
    facts: int  # number of known facts that were averaged
    unknown: tuple[str, ...]  # prompts of the facts that the model does not know, excluded from every average
    layer: int  # the layer to edit
    kind: Kind  # what was restored
    window: int  # layers restored together
    sever: Part | None  # the kind of modules that could not respond, or None
    metric: Metric  # what was measured
    corruption: str  # corruption of the subject, in words

    def __repr__(self) -> str:
        lines = [
            f"Aggregate of {counted(self.facts, 'fact')}: {self.kind}, average total effect {_with_ends(self.total)}"
        ]
        for i, (role, layer) in enumerate(zip(self.roles, self.effects.argmax(1), strict=True)):
            peak = Interval(*(float(values[i, layer]) for values in (self.effects, self.low, self.high)))
            lines.append(f"{role}: most at layer {layer}, {_with_ends(peak)}")
        return "\n  ".join(lines)

    def to_dict(self) -> dict[str, Any]:
        """Return plain lists and numbers; `effects`, `low` and `high` have the axes (role, layer)."""
        return {name: v.tolist() if isinstance(v, np.ndarray) else v for name, v in asdict(self).items()}

    def save(self, path: str | Path) -> None:
        """Write the numbers as `.npz`; the array `axes` names the axes of `effects`, `low` and `high`."""
        values = {**self.to_dict(), "total": [self.total.mean, self.total.low, self.total.high]}
        save_arrays(Path(path), ("role", "layer"), values)


def _with_ends(interval: Interval) -> str:
    return f"{number(interval.mean)} {interval.ends(number)}".rstrip()


def by_role(trace: Trace) -> Effects:
    """Average the effects of a fact's tokens in each role, [roles, layers]; NaN for a role that it lacks."""
    start, end = trace.subject
    count = trace.effects.shape[1]
    spans = (  # in the order of `ROLES`
        slice(start, min(start + 1, end - 1)),
        slice(start + 1, end - 1),
        slice(end - 1, end),
        slice(end, min(end + 1, count - 1)),
        slice(end + 1, count - 1),
        slice(max(end, count - 1), count),
    )
    empty = np.full(len(trace.effects), np.nan)
    return np.stack([trace.effects[:, span].mean(1) if span.start < span.stop else empty for span in spans])


def aggregate(traces: TraceSet) -> Aggregate:
    """Average traces over the facts that the model knows, with 95 % intervals from `DRAWS` of these facts.

    Raises:
        FactError: the model knows none of the facts, or only some layers or tokens were traced.
    """
    if any(np.isnan(trace.effects).any() for trace in traces.traces):
        raise FactError(
            "only some layers or tokens were traced, and an average needs all of them; trace without layers and tokens"
        )
    known = traces.known
    unknown = tuple(trace.prompt for trace in traces.traces if not trace.known)
    if not known:
        raise FactError(
            f"the model generates the traced answer for none of {len(unknown)} facts, so there is nothing to average; "
            "check prompts and previous objects"
        )
    totals = np.array([trace.total for trace in known])
    values = np.stack([by_role(trace) for trace in known])  # [facts, roles, layers]
    counts = (~np.isnan(values[:, :, 0])).sum(0)
    rows = [int(i) for i in np.flatnonzero(counts)]
    values = values[:, rows]
    drawn = mean_draws(np.column_stack([values.reshape(len(known), -1), totals]), SEED, DRAWS)
    low, high = np.nanpercentile(drawn[:, :-1], LEVELS, axis=0).reshape(2, *values.shape[1:])
    return Aggregate(
        roles=tuple(ROLES[i] for i in rows),
        effects=np.nanmean(values, 0),
        low=low,
        high=high,
        counts=tuple(int(counts[i]) for i in rows),
        total=percentile_interval(float(totals.mean()), drawn[:, -1]),
        clean=float(np.mean([trace.clean for trace in known])),
        corrupted=float(np.mean([trace.corrupted for trace in known])),
        facts=len(known),
        unknown=unknown,
        layer=TraceSet(known).layer,
        **{name: getattr(known[0], name) for name in SETTINGS},
    )
