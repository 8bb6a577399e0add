"""Record how an edit was computed: all that is needed to repeat, judge and undo it, as plain JSON."""

from __future__ import annotations

import platform
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import Any

import torch
import transformers
from torch import Tensor

from ffedit.algebra.key_moments import KeyMoments
from ffedit.algebra.linalg import double
from ffedit.algebra.low_rank import Dense, LowRank, Update
from ffedit.editor.edit import Edit
from ffedit.editor.job import Job, Problem
from ffedit.editor.key import PromptSet
from ffedit.editor.protect import beginning_keys, unstored_keys
from ffedit.editor.value import Value
from ffedit.facts.fact import Fact
from ffedit.inference.distributed import ProcessGroup
from ffedit.model.editable import Editable
from ffedit.model.feed_forward import FeedForward
from ffedit.model.fingerprint import fingerprint
from ffedit.model.memory import Address, KeyValueMemory, identity
from ffedit.version import __version__


@dataclass(frozen=True)
class ValueSearch:
    """Progress of the optimisation of one fact's value."""

    tokens: int  # length of the new object
    steps: int  # number of steps taken
    most_steps: int  # number of steps allowed
    probability: float  # of the new object in the bare prompt, with the value in place of the layer's output
    wanted: float | None  # the probability at which the optimisation ends; None where only its loss ends it


class Record:
    """Record of one run of a method, from which the `Edit` is built.

    `kept` holds, per layer, the keys [Σ d_ff, p] that keep their values: those where a text begins, those of the facts
    of edits in `job.preserve`, except of subjects that are edited now, and protected ones.
    """

    def __init__(self, method: str, job: Job) -> None:
        self.job, memories = job, job.memories
        # By layer, the change, the keys and the values of each solution.
        self._solutions: dict[int, list[tuple[LowRank, Tensor, Tensor]]] = {}
        self._updates: dict[Address, Update] = {}
        edited, token = {fact.subject for fact in job.facts}, job.config.key.fact_token
        self.kept = {ff.layer: _kept(ff, edited, job.preserve) for ff in job.ff_layers}
        extra_keys = [unstored_keys(job.editable, job.ff_layers, job.preserve, edited, token)] if job.stats else []
        extra_keys += [beginning_keys(job.editable, job.ff_layers)] if job.config.key.keep_beginning else []
        extra_keys += [] if job.protected is None else [job.protected.keys(job.editable, job.ff_layers)]
        for keys in extra_keys:
            self.kept = {layer: torch.cat([kept, keys[layer].to(kept)], 1) for layer, kept in self.kept.items()}
        averaging, of_model = job.editable.averaging, (None, job.editable.model.dtype)
        names = {str(at): {"count": moment.count, "left_out": [*moment.left_out]} for at, moment in job.names.items()}
        self._provenance: dict[str, Any] = {
            "method": method,
            "model": job.editable.name,
            **({"source": job.editable.source} if job.editable.source else {}),
            "base": fingerprint(job.editable),
            "chat": job.editable.chat,
            **dtypes(memories[0]),
            **({"averaged_in": str(averaging).removeprefix("torch.")} if averaging not in of_model else {}),
            "layers": [ff.layer for ff in job.ff_layers],
            "after": [edit.fingerprint() for edit in job.preserve],
            "matrices": {str(memory.address): identity(memory) for memory in memories},
            "norms": {str(memory.address): float(double(memory.value).norm()) for memory in memories},
            "subjects": {},
            "division": {},
            "config": job.config.to_dict(),
            "statistics": {str(m.address): _statistics(job.stats[m.address]) for m in memories if job.stats},
            **({"names": names} if names else {}),
            **({"protected": job.protected.to_dict()} if job.protected is not None else {}),
            "versions": versions(),
        }

    def add(self, ff: FeedForward, subjects: Sequence[str], problem: Problem, delta: LowRank) -> None:
        """Record a solution of one layer, on top of those before.

        Its `division` is 1 / (u C uᵀ) for each row u of the right factor: for one fact written by equality, kᵀC⁻¹k;
        with several facts, the part of it that no other key shares. Tiny numbers make huge updates.
        """
        C = problem.metric if "metric" in vars(problem) else problem.C  # a product alone is not worth a factor
        division = (1.0 / (delta.right.T * (C @ delta.right.T)).sum(0)).tolist()
        self._solutions.setdefault(ff.layer, []).append((delta.cpu(), problem.K.cpu(), problem.V.cpu()))
        for memory in ff.memories:
            at = str(memory.address)
            self._provenance["subjects"].setdefault(at, []).extend(subjects)
            self._provenance["division"].setdefault(at, []).extend(division)

    def forget(self) -> None:
        """Forget all solutions: the values are chosen again."""
        self._solutions.clear()
        self._provenance |= {"subjects": {}, "division": {}}

    def add_dense(self, ff: FeedForward, delta: Tensor) -> None:
        """Record a change of one layer, [d_model, Σ d_ff], that was not solved for."""
        self._updates |= {at: Dense(double(change.contiguous()).cpu()) for at, change in ff.split(delta, 1).items()}

    def edit(self, solved: Sequence[Mapping[str, Any]]) -> Edit:
        """Build the edit, once the weights are restored; `solved` describes how each value was chosen."""
        all_keys: dict[Address, Tensor] = {}
        all_values: dict[Address, Tensor] = {}
        for ff in self.job.ff_layers:
            if solutions := self._solutions.get(ff.layer):
                deltas, keys, values = zip(*solutions, strict=True)
                left, right = torch.cat([d.left for d in deltas], 1), torch.cat([d.right for d in deltas])
                K = torch.cat(keys, 1)
                self._updates |= {at: LowRank(left, factor) for at, factor in ff.split(right, 1).items()}
                all_keys |= ff.split(K, 0)
                all_values |= self._values_by_memory(ff, ff.split(K, 0), torch.cat(values, 1))
        ratio = max(delta.norm() / self._provenance["norms"][str(at)] for at, delta in self._updates.items())
        provenance = {**self._provenance, "norm_ratio": ratio, "solved": list(solved)}
        return Edit(self._updates, all_keys, all_values, tuple(self.job.facts), provenance)

    def _values_by_memory(
        self, ff: FeedForward, keys: Mapping[Address, Tensor], values: Tensor
    ) -> dict[Address, Tensor]:
        """Return the output of each memory for its keys after the change, corrected so that their sum is `values`."""
        if len(ff.memories) == 1:
            return {ff.memories[0].address: values}
        W = {memory.address: double(memory.value).cpu() for memory in ff.memories}
        outputs = {at: W[at] @ keys[at] + self._updates[at] @ keys[at] for at in W}
        missing = (values - sum(outputs.values())) / len(outputs)
        return {at: output + missing for at, output in outputs.items()}


def how_solved(
    groups: Sequence[Sequence[Fact]], prompt_sets: Sequence[PromptSet], values: Sequence[Value]
) -> list[dict[str, Any]]:
    """Describe how each subject's value was chosen."""
    return [
        {
            "subject": facts[0].subject,
            "facts": len(facts),
            "tokens": [len(prompt_set.prompts[prompt_set.fact_of.index(i)].target_ids) for i in range(len(facts))],
            "probabilities": list(value.probabilities),
            "loss": list(value.losses),
            "delta_norm": float(value.delta.norm()),
            "contexts": list(prompt_set.prefixes),
            "sinks": prompt_set.sinks,
            "behind": prompt_set.behind,
        }
        for facts, prompt_set, value in zip(groups, prompt_sets, values, strict=True)
    ]


def value_searches(edit: Edit) -> list[ValueSearch | None]:
    """Return by fact how far the search for its value came; None where the edit does not record it."""
    provenance = edit.provenance
    searches: dict[str, Iterator[ValueSearch]] = {}
    for solved in provenance.get("solved", ()):
        config = provenance.get("configs", {}).get(solved.get("from"), provenance.get("config", {}))
        numbers = config.get("value", {})
        if "tokens" in solved and {"steps", "target_probability"} <= set(numbers):
            target = numbers["target_probability"] if numbers["target_probability"] <= 1 else None
            steps = len(solved["loss"]) - 1, numbers["steps"]
            outcomes = zip(solved["tokens"], solved["probabilities"], strict=True)
            searches[solved["subject"]] = iter([ValueSearch(tokens, *steps, p, target) for tokens, p in outcomes])
    return [next(searches.get(fact.subject, iter(())), None) for fact in edit.facts]


def _kept(ff: FeedForward, rewritten: Collection[str], preserve: Sequence[Edit]) -> Tensor:
    """Collect the keys that earlier edits stored in a layer, except those of `rewritten` subjects, [Σ d_ff, p]."""
    columns: dict[tuple[int, str, int], dict[Address, Tensor]] = {}
    for number, edit in enumerate(preserve):
        for memory in ff.memories:
            occurrence: Counter[str] = Counter()
            for i, subject in enumerate(edit.subjects(memory.address)):
                if subject not in rewritten:
                    name = number, subject, occurrence[subject]
                    columns.setdefault(name, {})[memory.address] = double(edit.keys[memory.address][:, i])
                occurrence[subject] += 1
    if not columns:
        return torch.empty(ff.shape[1], 0, dtype=torch.float64)
    # A key that was not routed to one of the memories is 0 there.
    silent = {memory.address: torch.zeros(memory.d_ff, dtype=torch.float64) for memory in ff.memories}
    return torch.stack([torch.cat(list((silent | column).values())) for column in columns.values()], 1)


def _statistics(moments: KeyMoments) -> dict[str, Any]:
    description = {"corpus": moments.source, "tokens": moments.count}
    names = ("keys", "ridge", "convergence", "sinks", "fingerprint")
    return description | {name: getattr(moments, name) for name in names}


def dtypes(memory: KeyValueMemory) -> dict[str, str]:
    """Return the dtype of the base's checkpoint, and the dtype of computations."""
    both = {"dtype": memory.saved_dtype, "computed_in": memory.dtype}
    return {name: str(dtype).removeprefix("torch.") for name, dtype in both.items()}


def agree(group: ProcessGroup, editable: Editable, arguments: Callable[[], Mapping[str, object]]) -> None:
    """Raise an EditError where a process differs from the first.

    Compared are versions, model, device, dtype and the `repr` of each of the `arguments`, which are computed only where
    there are several processes.
    """
    group.agree(
        lambda: {
            "versions": versions(),
            "model": fingerprint(editable),
            "numbers on": f"{editable.device.type}, {editable.feed_forward[0].dtype}",
            **{name: sha256(repr(value).encode()).hexdigest()[:8] for name, value in arguments().items()},
        }
    )


def versions() -> dict[str, str]:
    """Return the versions of ffedit, Python, torch and transformers."""
    libraries = {library.__name__: library.__version__ for library in (torch, transformers)}
    return {"ffedit": __version__, "python": platform.python_version(), **libraries}
