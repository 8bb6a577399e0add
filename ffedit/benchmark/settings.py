"""Settings that results of one run share: model, facts, mode, hyperparameters, layers, key statistics, text, seeds.

They are written into the manifest; a run that differs in one of them cannot continue in the same folder. A mode divides
the facts into chunks that are edited together:

    single            each fact alone, on the unedited model
    batch:N           N facts at once, on the unedited model
    sequential[:N]    N facts at once (1 by default), on top of all before

A subject has one key, so its facts are never split: a chunk ends with the first subject that fills it.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path
from typing import Any

from ffedit.algebra.key_moments import KeyMoments
from ffedit.editor.config import EditConfig
from ffedit.editor.methods import METHODS, check_method, preset
from ffedit.editor.statistics import moments_for
from ffedit.errors import EditError, FactError
from ffedit.evaluator import drift, generations, intervals
from ffedit.facts.fact import Fact
from ffedit.inference.corpus import Corpus
from ffedit.inference.distributed import ProcessGroup
from ffedit.inference.names import names, stands_in
from ffedit.inference.precision import agree_on_dtype
from ffedit.inference.text import digest
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
# Number of checkpoints in a sequence.
CHECKPOINTS = 10
# The fields that identify key statistics.
IDENTITY = ("source", "count", "ridge", "texts")


@dataclass(frozen=True)
class Mode:
    """Mode of a benchmark."""

    name: str  # "single", "batch" or "sequential"
    size: int = 1  # the least number of facts per chunk; the last chunk may have fewer

    @classmethod
    def parse(cls, text: str) -> Mode:
        """Read `single`, `batch:N`, `sequential` or `sequential:N`. Raises EditError for anything else."""
        EditError.require(text, str, "a mode was expected: single, batch:N or sequential[:N]")
        name, colon, size = text.partition(":")
        sized = bool(re.fullmatch(r"0*[1-9]\d{,8}", size, re.ASCII))
        if not (text in ("single", "sequential") or (name in ("batch", "sequential") and sized)):
            raise EditError(f"mode {text!r} is not known; give single, batch:N or sequential[:N], N at least 1")
        return cls(name, int(size) if colon else 1)

    def __str__(self) -> str:
        return self.name if self.name == "single" else f"{self.name}:{self.size}"

    @property
    def sequential(self) -> bool:
        """True if every edit stays in the model."""
        return self.name == "sequential"

    def chunks(self, facts: Sequence[Fact]) -> list[tuple[int, ...]]:
        """Divide the indices of `facts` into chunks that are written together; each index is in exactly one."""
        if self.name == "single":
            return [(i,) for i in range(len(facts))]
        groups: dict[str, list[int]] = {}
        for i, fact in enumerate(facts):
            groups.setdefault(fact.subject, []).append(i)
        chunks: list[list[int]] = []
        for group in groups.values():
            if not chunks or len(chunks[-1]) >= self.size:
                chunks.append([])
            chunks[-1] += group
        return [tuple(chunk) for chunk in chunks]


def checkpoints(chunks: Sequence[Sequence[int]]) -> list[int]:
    """Choose the chunks after which all facts so far are scored: about ten, evenly spaced; the last is the end."""
    ends = list(accumulate(map(len, chunks)))
    counts = [ends[-1] * tenth / CHECKPOINTS for tenth in range(1, CHECKPOINTS + 1)]
    return sorted({next(i for i, end in enumerate(ends) if end >= count) for count in counts})


def configured(
    methods: str | Iterable[str], config: EditConfig | Mapping[str, EditConfig] | None
) -> dict[str, EditConfig]:
    """Return the hyperparameters of each method. Raises EditError for no methods, or an unknown one."""
    EditError.require(methods, Iterable, "names of methods were expected (`ffedit methods` lists them)")
    names = [check_method(method).name for method in ([methods] if isinstance(methods, str) else methods)]
    if not names:
        raise EditError("no methods to measure; give at least one (`ffedit methods` lists them)")
    if config is None:
        return {name: preset("default", name) for name in names}
    configs = config if isinstance(config, Mapping) else dict.fromkeys(names, config)
    for name in names:
        EditError.require(configs.get(name), EditConfig, f"an EditConfig for {name} was expected, for all or by method")
    return {name: configs[name] for name in names}


def held_out(config: EditConfig, facts: Sequence[Fact]) -> EditConfig:
    """Exclude from C the built-in names in prompts about other subjects (`Fact.neighbors`).

    Scores should hold for names that no edit has seen.
    """
    if not config.key.names_weight:
        return config
    asked = "\n".join(probe.prompt for fact in facts for probe in fact.neighbors)
    excluded = dict.fromkeys([*config.key.without_names, *(name for name in names() if stands_in(name, asked))])
    return replace(config, key=replace(config.key, without_names=tuple(excluded)))


def check_facts(facts: Sequence[Fact]) -> None:
    """Check that there are facts, and that no two of them have the same case_id."""
    if not facts:
        raise FactError("no facts to edit; give at least one")
    for case_id, count in Counter(fact.case_id for fact in facts if fact.case_id is not None).items():
        if count > 1:
            raise FactError(f"{count} facts have the case_id {case_id!r}; give each its own, or none")


def identity(editable: Editable, facts: Sequence[Fact], mode: Mode, text: Path | None, full: bool) -> dict[str, Any]:
    """Return the settings known before any computation, as plain JSON."""
    try:
        generic = None if text is None else digest(text.read_bytes())
    except OSError as error:
        raise EditError(f"{text}: cannot be read ({error.strerror})") from error
    content = json.dumps([fact.to_dict() for fact in facts], sort_keys=True)
    return {
        "model": {"name": editable.name, "fingerprint": fingerprint(editable)},
        "facts": {"count": len(facts), "fingerprint": digest(content.encode())},
        "mode": str(mode),
        "chat": editable.chat,
        "full": full,
        "text": {"name": None if text is None else text.name, "fingerprint": generic},
        "seeds": SEEDS,
    }


def numbers_of(configs: Mapping[str, EditConfig]) -> dict[str, Any]:
    """Return the hyperparameters by method as plain JSON."""
    numbers = {name: METHODS[name].complete(config).to_dict() for name, config in configs.items()}
    return dict(json.loads(json.dumps(numbers)))


def most_subjects(facts: Sequence[Fact], mode: Mode) -> int:
    """Count the subjects of the largest edit, or of a whole sequence."""
    together = [range(len(facts))] if mode.sequential else mode.chunks(facts)
    return max((len({facts[i].subject for i in chunk}) for chunk in together), default=0)


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

    Raises EditError for layers that do not exist, and statistics that do not fit or cannot be collected.
    """
    depth = len(editable.layers)
    needed = [METHODS[method].complete(config) for method, config in configs.items() if METHODS[method].statistics]
    if not layers or not set(layers) <= set(range(depth)):
        raise EditError(f"layers {list(layers)} were asked for, but {editable.name} has layers 0 to {depth - 1}")
    if not needed:
        return {}
    memories = [memory for layer in layers for memory in editable.feed_forward[layer].memories]
    subjects, named = most_subjects(facts, mode), all(config.key.names_weight > 0 for config in needed)
    agree_on_dtype(editable, process_group)
    return process_group.in_all(
        lambda: moments_for(editable, memories, stats, subjects, needed[0].seed, progress, named)
    )


def statistics_of(moments: Mapping[Address, KeyMoments]) -> dict[str, Any]:
    """Return what identifies the key statistics, as plain JSON; an empty dict where no method needs any."""
    identities = {str(at): {name: getattr(c, name) for name in IDENTITY} for at, c in moments.items()}
    return json.loads(json.dumps({"statistics": identities})) if identities else {}
