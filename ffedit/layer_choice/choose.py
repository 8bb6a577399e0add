"""Choose the layer to edit: by calibration, by tracing, by a sweep over all layers, or by request.

`auto` takes the model's layer, found once by editing facts that it knows (`calibrate`). A fact's own trace is shown
beside it, and decides if it is requested or if the model knows too few of the calibration facts; it never does where it
shows no site at the token where the key is read (`locator.site_of`). A sweep edits at every layer and measures;
compared with the trace it shows how far to trust the trace for this model (Hase et al. 2023, arXiv 2301.04213).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeAlias

from ffedit.algebra.key_moments import KeyMoments
from ffedit.editor import EditConfig, check_method, in_reach, preset
from ffedit.errors import EditError
from ffedit.facts.fact import Fact
from ffedit.files import cache
from ffedit.files.seal import unsealed
from ffedit.inference.corpus import Corpus
from ffedit.layer_choice.calibrate import (
    Choice,
    LayerScore,
    best,
    choose_layer,
    edit_at,
    remembered,
    write_json,
)
from ffedit.layer_choice.published import nearest, usual_layer
from ffedit.locator import TraceSet, locate_all, site_of
from ffedit.locator.cost import layers_within
from ffedit.locator.result import Tokens, rank_correlation
from ffedit.model.editable import Editable
from ffedit.model.fingerprint import fingerprint
from ffedit.model.memory import Address
from ffedit.progress import Progress, silent

By: TypeAlias = Literal["model", "trace", "sweep", "request", "only", "depth"]
# A sweep of fewer facts is evidence about these facts, not about the model, and is not cached.
MANY = 10
# Tokens and corrupted runs of a trace that is only shown.
SHOWN_TOKENS: Tokens = "subject_and_last"
SHOWN_SAMPLES = 2
# Multiply-accumulates of such a trace: about 40 seconds on two cores at 0.15 TFLOP/s. Of a larger one, layers are left
# out.
SHOWN_PRODUCTS = 3 * 10**12


@dataclass(frozen=True)
class Sweep:
    """Scores of edits at each layer whose output reaches the answer."""

    rows: tuple[LayerScore, ...]
    traced: int | None  # the layer that tracing chooses, or None if it shows no site
    # Spearman's rank correlation of effect and score over the layers; None if one is constant
    correlation: float | None
    method: str = "memit"  # that all edits were made with
    facts: int = 0  # number of facts written

    @property
    def layer(self) -> int:
        """The layer of the best score: see `calibrate.best`."""
        return best(self.rows)

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON."""
        return {**json.loads(json.dumps(asdict(self))), "layer": self.layer}


@dataclass(frozen=True)
class Found:
    """Layer to edit, and the reason for it."""

    traces: TraceSet  # of feed-forward outputs; of all facts if they decide, else of the first
    layer: int
    # what decided: calibration on the "model", the facts' "trace", a "sweep", the user's "request"; that it is the
    # "only" one whose output reaches the answer; or, if neither trace nor calibration gives a layer, the usual relative
    # "depth" of published layers
    by: By
    choice: Choice | None = None
    sweep: Sweep | None = None
    kept: bool = False  # whether the sweep was read from the cache

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON: the layer, what decided, the model's choice and the sweep."""
        choice, sweep = (evidence and evidence.to_dict() for evidence in (self.choice, self.sweep))
        return {"layer": self.layer, "by": self.by, "choice": choice, "sweep": sweep}


def find_layer(
    editable: Editable,
    facts: Sequence[Fact],
    asked: str,
    allowed: range,
    method: str = "memit",
    config: EditConfig | None = None,
    stats: Corpus | Mapping[Address, KeyMoments] | None = None,
    progress: Progress = silent,
) -> Found:
    """Find the layer to edit by calibration, by a trace, or by a sweep, among those whose output reaches the answer.

    `asked` is "auto", "trace" or "sweep"; anything else traces among the layers `allowed`. `config` and `stats` are
    those of a sweep's edits; the config's seed is also the trace's, its `key.fact_token` the calibration's.
    """
    config = config or EditConfig()
    allowed = in_reach(editable, facts, check_method(method), allowed, config.key.fact_token)
    first_fact = partial(shown, editable, facts, config.seed, progress)
    if asked == "sweep":
        if (cached := remembered_sweep(editable, method, config)) is not None and cached.layer in allowed:
            return Found(first_fact(), cached.layer, "sweep", sweep=cached, kept=True)
        traces = locate_all(editable, facts, seed=config.seed, progress=progress)
        sweep = by_sweep(editable, facts, traces, method, config, stats, progress)
        return Found(traces, sweep.layer, "sweep", sweep=sweep)
    if len(allowed) == 1:
        return Found(first_fact(), allowed[0], "only" if asked in ("auto", "trace") else "request")
    choice = _calibrated(editable, method, config, progress) if asked == "auto" else None
    if choice is not None and (layer := choice.within(allowed)) is not None:
        return Found(first_fact(), layer, "model", choice)
    traces = locate_all(editable, facts, seed=config.seed, progress=progress)
    if (site := site_of(traces, allowed=allowed)) is not None:
        return Found(traces, site, "trace", choice)
    choice = choice or _calibrated(editable, method, config, progress)
    if (layer := choice.within(allowed)) is not None:
        return Found(traces, layer, "model", choice)
    return Found(traces, nearest(allowed, usual_layer(len(editable.layers))), "depth", choice)


def known_layer(
    editable: Editable, facts: Sequence[Fact], asked: str, allowed: range, method: str, config: EditConfig
) -> int | None:
    """Return the layer that `find_layer` takes without computing anything; None if it has yet to be chosen."""
    allowed = in_reach(editable, facts, check_method(method), allowed, config.key.fact_token)
    if len(allowed) == 1:
        return allowed[0]
    choice = remembered(editable, method) if asked == "auto" else None
    return None if choice is None else choice.layer


def layer_for(
    editable: Editable,
    facts: Sequence[Fact],
    method: str = "memit",
    config: EditConfig | None = None,
    progress: Progress = silent,
) -> int:
    """Return the layer that `auto` takes, without computing a trace for display."""
    config, depth = config or EditConfig(), len(editable.layers)
    allowed = range(max(1, depth - 1))  # what the last one writes reaches the answer of few prompts
    if len(allowed) == 1:
        return allowed[0]
    if (layer := _calibrated(editable, method, config, progress).within(allowed)) is not None:
        return layer
    site = site_of(locate_all(editable, facts, seed=config.seed, progress=progress), allowed=allowed)
    return usual_layer(depth) if site is None else site


def _calibrated(editable: Editable, method: str, config: EditConfig, progress: Progress) -> Choice:
    """Choose the model's layer with the method's default config, with `key.fact_token` of `config`."""
    usual = preset("default", method)
    usual = replace(usual, key=replace(usual.key, fact_token=config.key.fact_token))
    return choose_layer(editable, method, config=usual, progress=progress)


def shown(editable: Editable, facts: Sequence[Fact], seed: int = 0, progress: Progress = silent) -> TraceSet:
    """Trace the first fact for display only, at its subject and at the prompt's end, in few runs."""
    layers = layers_within(editable, facts[0], SHOWN_TOKENS, SHOWN_SAMPLES, SHOWN_PRODUCTS)
    runs: dict[str, Any] = {"tokens": SHOWN_TOKENS, "samples": SHOWN_SAMPLES, "layers": layers}
    return locate_all(editable, facts[:1], seed=seed, progress=progress, **runs)


def spread_below(layer: int, count: int) -> range:
    """Return the `count` consecutive layers that share an edit, the highest of which is `layer`."""
    if count > layer + 1:
        raise EditError(f"--spread {count} was asked for, but layer {layer} has only {layer} below it; spread less")
    return range(layer + 1 - count, layer + 1)


def by_sweep(
    editable: Editable,
    facts: Sequence[Fact],
    traces: TraceSet,
    method: str = "memit",
    config: EditConfig | None = None,
    stats: Corpus | Mapping[Address, KeyMoments] | None = None,
    progress: Progress = silent,
) -> Sweep:
    """Write all `facts` into each layer in reach (`editor.in_reach`) and measure.

    A sweep of at least `MANY` facts is cached for the model, the method and the numbers of `config`.
    """
    config = config or EditConfig()
    layers = in_reach(editable, facts, check_method(method), range(len(editable.layers)), config.key.fact_token)
    rows = edit_at(editable, facts, layers, method, config, stats, traces, progress)
    correlation = rank_correlation([row.effect or 0.0 for row in rows], [row.score or 0.0 for row in rows])
    sweep = Sweep(rows, traces.site, correlation, method, len(facts))
    if len(facts) >= MANY:
        write_json(_path(editable, method, config), sweep.to_dict())
    return sweep


def remembered_sweep(editable: Editable, method: str = "memit", config: EditConfig | None = None) -> Sweep | None:
    """Read the cached sweep over many facts for this model, method and numbers; None if there is none."""
    try:
        values = unsealed(json.loads(_path(editable, method, config or EditConfig()).read_text(encoding="utf-8")))
        del values["layer"]
        sweep = Sweep(**{**values, "rows": tuple(LayerScore(**row) for row in values["rows"])})
        return sweep if sweep.layer in range(len(editable.layers)) else None
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return None


def _path(editable: Editable, method: str, config: EditConfig) -> Path:
    numbers = check_method(method).complete(config).to_dict()
    asked = hashlib.sha256(json.dumps([editable.chat, method, numbers]).encode()).hexdigest()[:8]
    return cache.path("layers", f"{fingerprint(editable)}-{asked}-sweep", ".json")
