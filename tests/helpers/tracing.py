"""Traces as if they had been measured."""

from __future__ import annotations

from typing import Any

import numpy as np

from ffedit import SiteMap, Trace
from ffedit.layer_choice.site_map import MOST_HIT


def made(effects: Any, subject: tuple[int, int] = (1, 3), **others: Any) -> Trace:
    """A trace of these effects, [layers, tokens]; what else it holds may be given, too."""
    array = np.asarray(effects, float)
    given: dict[str, Any] = {
        "errors": np.zeros_like(array),
        "alone": array[:, subject[1] - 1],
        "clean": 0.9,
        "corrupted": 0.1,
        "tokens": tuple(f" t{i}" for i in range(array.shape[1])),
        "answer": "Paris",
        "known": True,
        "kind": "feed_forward",
        "window": 3,
        "sever": None,
        "metric": "probability",
        "corruption": "Gaussian noise of 3 σ of the vocabulary",
        "noise": 0.1,
        "samples": 10,
        "seed": 0,
    }
    return Trace(effects=array, subject=subject, **(given | others))


def made_map(trace: Trace, layers: tuple[int, ...], leak: float = 0.25) -> SiteMap:
    """A map of the sites of a traced fact, with a leak that grows from token to token."""
    shape, (start, end) = trace.effects.shape, trace.subject
    reach, leaks = np.full(shape, np.nan), np.full(shape, np.nan)
    for position in range(start, end):
        reach[list(layers), position], leaks[list(layers), position] = 0.9, leak * (1 + position - start)
    hit, hit_by = np.full((*shape, MOST_HIT), "", object), np.full((*shape, MOST_HIT), np.nan)
    hit[list(layers), start:end, :2], hit_by[list(layers), start:end, :2] = ["Tokyo Tower", "[b]Rome\n"], [0.75, -0.5]
    return SiteMap(
        reach=reach,
        reach_least=reach - 0.2,
        leak=leaks / 2,
        leak_high=leaks,
        leak_look_alikes=leaks,
        hit=hit.astype(str),
        hit_by=hit_by,
        layers=layers,
        tokens=trace.tokens,
        subject=trace.subject,
        names=300,
        look_alikes=(("Tokyo Tower", "Rome"),) * len(layers),
        prompt="The Eiffel Tower is in",
    )
