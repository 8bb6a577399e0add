"""Traces as if they had been measured."""

from __future__ import annotations

from typing import Any

import numpy as np

from ffedit import Trace


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
