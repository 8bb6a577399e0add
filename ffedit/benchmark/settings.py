"""The settings that results of one run share: model, facts, mode, hyperparameters, layers, key statistics, text, seeds.

They are written into the manifest; a run that differs in one of them cannot continue in the same folder.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ffedit.algebra.key_moments import KeyMoments
from ffedit.benchmark.plan import Mode
from ffedit.benchmark.task import by_first
from ffedit.editor import METHODS, Corpus, EditConfig, check_method, preset
from ffedit.editor.statistics import moments_for
from ffedit.errors import EditError, FactError
from ffedit.evaluator import drift, generations, intervals
from ffedit.facts.fact import Fact
from ffedit.layer_choice.choose import layer_for, spread_below
from ffedit.loading.distributed import ProcessGroup
from ffedit.model.editable import Editable
from ffedit.model.fingerprint import fingerprint
from ffedit.model.memory import Address
from ffedit.progress import Progress

# Seeds of the random draws in measurements; the seeds of the edits are among their hyperparameters.
SEEDS = {
    "drift": drift.DRIFT_SEED,
    "sampled_text": generations.SAMPLE_SEED,
    "bootstrap": intervals.SEED,
    "bootstrap_draws": intervals.DRAWS,
}
# Number of facts that are traced to choose the layer.
TRACED = 30
# The fields that identify key statistics.
TOLD = ("source", "count", "ridge", "weighting", "texts")


def configured(methods: Sequence[str], config: EditConfig | Mapping[str, EditConfig] | None) -> dict[str, EditConfig]:
    """Return the hyperparameters of each method.

    Raises:
        EditError: no method, or an unknown one.
    """
    if not methods:
        raise EditError("no methods to measure; give at least one (`ffedit methods` lists them)")
    names = [check_method(method).name for method in methods]
    if isinstance(config, Mapping):
        return {name: config[name] for name in names}
    return {name: config or preset("default", name) for name in names}


def check_facts(facts: Sequence[Fact]) -> None:
    """Check that there are facts and that a report can tell them apart.

    Raises:
        FactError: there are none, or two have the same case_id.
    """
    if not facts:
        raise FactError("no facts to edit; give at least one")
    for number, count in Counter(fact.case_id for fact in facts if fact.case_id is not None).items():
        if count > 1:
            raise FactError(f"{count} facts have the case_id {number!r}; give each its own, or none")


def identity(editable: Editable, facts: Sequence[Fact], mode: Mode, text: Path | None, full: bool) -> dict[str, Any]:
    """Return the settings known before any computation, as plain JSON.

    Raises:
        EditError: the text cannot be read.
    """
    try:
        generic = None if text is None else _digest(text.read_bytes())
    except OSError as error:
        raise EditError(f"{text}: cannot be read ({error.strerror})") from error
    told = json.dumps([fact.to_dict() for fact in facts], sort_keys=True)
    return {
        "model": {"name": editable.name, "fingerprint": fingerprint(editable)},
        "facts": {"count": len(facts), "fingerprint": _digest(told.encode())},
        "mode": str(mode),
        "chat": editable.chat,
        "full": full,
        "text": {"name": None if text is None else text.name, "fingerprint": generic},
        "seeds": SEEDS,
    }


def numbers_of(configs: Mapping[str, EditConfig]) -> dict[str, Any]:
    """Return the hyperparameters by method as plain JSON."""
    found: dict[str, Any] = json.loads(
        json.dumps({name: METHODS[name].complete(config).to_dict() for name, config in configs.items()})
    )
    return found


def most_subjects(facts: Sequence[Fact], mode: Mode) -> int:
    """Count the subjects of the largest edit, or of a whole sequence."""
    together = [range(len(facts))] if mode.sequential else mode.chunks(facts)
    return max((len({facts[i].subject for i in chunk}) for chunk in together), default=0)


def layers_for(
    editable: Editable, facts: Sequence[Fact], spread: int, seed: int, process_group: ProcessGroup, progress: Progress
) -> list[int]:
    """Choose the layers to edit: the model's layer, or the one that tracing the first facts finds, and those below it.

    Raises:
        EditError: there are fewer than `spread` − 1 layers below it.
    """
    last = int(
        by_first(
            process_group, lambda: layer_for(editable, facts[:TRACED], config=EditConfig(seed=seed), progress=progress)
        )
    )
    return list(spread_below(last, spread))


def moments_of(
    editable: Editable,
    facts: Sequence[Fact],
    mode: Mode,
    configs: Mapping[str, EditConfig],
    layers: Sequence[int],
    stats: Corpus | Mapping[Address, KeyMoments] | None,
    process_group: ProcessGroup,
    progress: Progress,
) -> Mapping[Address, KeyMoments]:
    """Return second moments of the unedited model's keys, enough for the largest edit or a whole sequence.

    Only the first process collects them; the others read them from the cache.

    Raises:
        EditError: layers that do not exist, or statistics that do not fit or cannot be collected.
    """
    depth, seeds = len(editable.layers), [c.seed for method, c in configs.items() if METHODS[method].statistics]
    if not layers or not set(layers) <= set(range(depth)):
        raise EditError(f"layers {list(layers)} were asked for, but {editable.name} has layers 0 to {depth - 1}")
    if not seeds:
        return {}
    memories = [part for layer in layers for part in editable.feed_forward[layer].parts]
    found: list[Mapping[Address, KeyMoments]] = []
    most = most_subjects(facts, mode)

    def collect() -> None:
        found.append(moments_for(editable, memories, stats, most, seeds[0], progress))

    by_first(process_group, collect)
    if not found:
        collect()
    return found[0]


def statistics_of(moments: Mapping[Address, KeyMoments]) -> dict[str, Any]:
    """Return what identifies the key statistics, as plain JSON; an empty dict where no method needs any."""
    told = {str(at): {name: getattr(one, name) for name in TOLD} for at, one in moments.items()}
    return json.loads(json.dumps({"statistics": told})) if told else {}


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:16]
