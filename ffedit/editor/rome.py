"""Rank-one model editing: one fact, one key, one value, the smallest change that joins them.

Meng et al. 2022, arXiv 2202.05262. Several facts are written one after another, each on top of those before it,
always with the same k* in numerator and denominator (arXiv 2403.07175 shows what happens otherwise).
"""

from __future__ import annotations

import platform
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from types import MappingProxyType

import torch
import transformers

from ffedit.algebra import condition, double, rank_one
from ffedit.anatomy import Editable
from ffedit.editor.config import EditConfig
from ffedit.editor.edit import Edit
from ffedit.editor.statistics import Corpus, collect_moments
from ffedit.editor.target import choose_value, read
from ffedit.editor.wording import word
from ffedit.facts import Fact
from ffedit.fingerprint import fingerprint
from ffedit.lowrank import LowRank
from ffedit.progress import Progress, silent
from ffedit.version import __version__


def rome(
    editable: Editable,
    facts: Sequence[Fact],
    layer: int,
    config: EditConfig | None = None,
    corpus: Corpus | None = None,
    progress: Progress = silent,
) -> Edit:
    """Store `facts` in the value matrix of `layer`, in sequence.

    Args:
        editable: the model; it is as before when this returns or fails.
        facts: what to write.
        layer: where, counted from 0.
        config: all numbers of the optimisation.
        corpus: text for the second moment C of the keys.
        progress: told how far it is.

    Returns:
        Edit of rank at most the number of facts.
    """
    config, corpus = config or EditConfig(), corpus or Corpus()
    memory = editable.memories[layer]
    base = fingerprint(editable)
    moments = collect_moments(editable, memory, corpus, progress)
    C = moments.C.to(double(memory.value).device)
    original = memory.value.clone()
    deltas, keys, values, solved = [], [], [], []
    try:
        for i, fact in enumerate(facts):
            wording = word(editable, fact, config)
            reading = read(editable, memory, wording)
            value = choose_value(editable, memory, wording, reading, config, _part(progress, i, len(facts)))
            k, around = reading.k, reading.steadied(C, config.steady)
            delta = rank_one(memory.value, k, value.v.to(k.device), around)
            if i + 1 < len(facts):
                memory.write_(delta)
            deltas.append(delta)
            keys.append(k)
            values.append(value.v)
            solved.append(
                {
                    "probability": value.probability,
                    "loss": value.losses,
                    "delta_norm": float(value.delta.norm()),
                    "division": 1.0 / float(delta.right @ around @ delta.right.T),
                    "contexts": wording.prefixes,
                    "own_phrasings": len(wording.stated) - len(wording.prompts),
                }
            )
    finally:
        memory.value.copy_(original)
    update = LowRank(torch.cat([d.left for d in deltas], 1).cpu(), torch.cat([d.right for d in deltas]).cpu())
    provenance = {
        "method": "rome",
        "model": editable.name,
        "base": base,
        "dtype": str(memory.weight.dtype).removeprefix("torch."),
        "layers": [layer],
        "norm_ratio": update.norm() / float(double(original).norm()),
        "config": asdict(config),
        "statistics": {
            "corpus": moments.source,
            "tokens": moments.count,
            "ridge": moments.ridge,
            "condition": condition(C),
            "fingerprint": moments.fingerprint,
        },
        "solved": solved,
        "versions": versions(),
    }
    return Edit(
        {memory.address: update},
        {memory.address: torch.stack(keys, 1).cpu()},
        {memory.address: torch.stack(values, 1).cpu()},
        tuple(facts),
        provenance,
    )


def _part(progress: Progress, index: int, count: int) -> Progress:
    """Progress of one fact among `count`."""
    return lambda stage, done, total: progress(stage, index * total + done, count * total)


def versions() -> dict[str, str]:
    """What computed this."""
    return {
        "ffedit": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }


METHODS: Mapping[str, Callable[..., Edit]] = MappingProxyType({"rome": rome})
