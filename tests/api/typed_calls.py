"""Call the API as a user's own code does, for mypy: the gate checks this file as strictly as the package.

Nothing here runs. A line with `type: ignore` is a mistake that mypy has to find: it refuses a comment without one.
"""

from __future__ import annotations

from pathlib import Path

import torch

import ffedit
from ffedit import (
    Address,
    Corpus,
    Edit,
    Editable,
    EditConfig,
    Fact,
    KeyMoments,
    LayerChoice,
    LowRank,
    MemoryIndex,
    Method,
    Problem,
    Questions,
    Report,
    Responses,
    Trace,
    TraceSet,
    formulas,
    metric,
)


def steps(folder: Path) -> None:
    editable: Editable = ffedit.load("gpt2", device=torch.device("cpu"), dtype=torch.bfloat16, revision="main")
    editable = ffedit.load(folder, device="cuda:1", dtype="float16")
    editable = ffedit.load(folder, device_map="balanced", max_memory={0: "20GB", "cpu": "64GB"})
    fact = Fact("Eiffel Tower", "{} is located in the city of", target="Rome", previous="Paris")
    trace: Trace = ffedit.locate(editable, fact, "attention", samples=5, metric="log_probability", layers=[1, 2])
    traces: TraceSet = ffedit.locate_all(editable, [fact], corruption="uniform:2", tokens="subject_last")
    choice: LayerChoice = ffedit.choose_layer(editable, method="rome", facts=[fact])
    stats: dict[Address, KeyMoments] = ffedit.collect_stats(editable, [choice.layer], corpus=Corpus(tokens=1000))
    edit: Edit = ffedit.edit(editable, [fact], "memit", layers=trace.site, config=EditConfig(seed=1), stats=stats)
    later = ffedit.edit(editable, fact, "a method of another package", preserve=[edit], protect=["Berlin"])
    report: Report = ffedit.evaluate(editable, ffedit.read_facts(folder / "facts.json"), later, full=True)
    rate: float | None = report.before.efficacy
    with edit.applied(editable):
        view = ffedit.inspect_prompt(editable, fact.text, scaled={MemoryIndex(Address(1), 2): 0.0})
    memory = ffedit.inspect_memory(editable, "1.2", top=3)
    assert rate and traces.site and view.prediction and memory.triggers
    edit.save(folder / "edit", force=True)
    ffedit.export(editable, Edit.load(folder / "edit"), folder / "out", format="adapter")
    ffedit.undo(folder / "out", folder / "before", edit=0)
    ffedit.bench(editable, [fact], ["rome", "memit"], "sequential", folder / "bench", full=False)
    identical: bool = ffedit.diff("gpt2", folder / "out").identical
    assert not identical
    ffedit.EditError.require(edit, Edit, "an edit was expected")


def mistakes(editable: Editable, fact: Fact, edit: Edit, folder: Path) -> None:
    ffedit.load("gpt2", "cpu")  # type: ignore[call-arg]
    ffedit.load("gpt2", dtype="fp16")  # type: ignore[arg-type]
    ffedit.load("gpt2", device_map="everywhere")  # type: ignore[arg-type]
    ffedit.locate(editable, fact, "neuron")  # type: ignore[arg-type]
    ffedit.locate(editable, fact, sample=5)  # type: ignore[call-arg]
    ffedit.edit(editable, fact, after=[edit])  # type: ignore[call-arg]
    ffedit.edit(editable, fact, config={"seed": 1})  # type: ignore[arg-type]
    ffedit.export(editable, edit, folder, format="lora")  # type: ignore[arg-type]


def solve(problem: Problem) -> LowRank:
    """Write the residual along the keys."""
    residual = problem.V - problem.W @ problem.K
    return LowRank(residual, torch.linalg.pinv(problem.K))


PINV = Method("pinv", solves="(W + Δ) K = V", choose="never", source="this file", solve=solve, layers=True)


@metric("probability", "up", "in the fact's own prompt", "this file", generates=["own"])
def margin(q: Questions, now: Responses, before: Responses) -> float | None:
    """Probability of the new object minus that of the old one."""
    return formulas.magnitude(now.answers[q.own.new].log_probs, now.answers[q.own.true].log_probs)
