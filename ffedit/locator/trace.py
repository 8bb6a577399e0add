"""Causal tracing: measure the effect of restoring single clean states in a corrupted run.

Three kinds of run (ROME, arXiv 2202.05262, section 2.1). *Clean*: the prompt as it is. *Corrupted*: the subject is
corrupted (`corruption`), and the answer is lost. *Restored*: the corrupted run with one clean state restored at token i
and layer l. With P the probability of the answer (or another metric),

    total effect     TE       = P_clean − P_corrupted
    indirect effect  IE(i, l) = P_restored(i, l) − P_corrupted

A state is restored alone; outputs of feed-forward or attention layers are restored in a window of layers around l,
because a single one has little effect. A *severed* kind of module cannot respond: at the restored token, its outputs at
all layers stay those of the corrupted run, so the remaining effect did not pass through it (section 2.2, figure 3).

The corruption is drawn once per fact and shared by every restoration, so that effects differ by the restored state
alone. A restoration changes nothing below its layer and nothing left of its token, so every run resumes there
(`restore`), with many facts and tokens in one batch.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from itertools import chain
from typing import Any

import numpy as np
from torch import Tensor

from ffedit.errors import EditError, FactError, ModelError
from ffedit.facts.fact import Fact, FactLike, as_facts
from ffedit.files import cache
from ffedit.files.resuming import Journal
from ffedit.inference.batching import split_on_oom
from ffedit.inference.corpus import as_seed
from ffedit.locator.cases import Batch, Run, batches, prepare, run_batch
from ffedit.locator.corruption import Corruption, CorruptionName, Noise
from ffedit.locator.restore import Restoration, restore
from ffedit.locator.result import Kind, Metric, Part, Tokens, Trace, TraceSet
from ffedit.model.editable import Editable, check_model
from ffedit.model.fingerprint import fingerprint
from ffedit.model.memory import as_layers
from ffedit.model.tokenization import decode
from ffedit.progress import Progress, silent
from ffedit.version import __version__


def locate(
    editable: Editable,
    fact: FactLike,
    kind: Kind = "feed_forward",
    *,
    corruption: Corruption | CorruptionName | str = "gaussian",
    samples: int = 10,
    window: int | None = None,
    sever: Part | None = None,
    metric: Metric = "probability",
    seed: int = 0,
    layers: int | Iterable[int] | None = None,
    tokens: Tokens = "all",
    resume: bool = False,
    progress: Progress = silent,
) -> Trace:
    """Trace the layers and tokens at which a model recalls one fact; the options are those of `locate_all`.

    Source: causal tracing, Meng et al. 2022, arXiv 2202.05262, section 2.1.

    Raises:
        FactError, ModelError: as `locate_all`.
    """
    FactError.require(fact, (Fact, Mapping), "one fact was expected; locate_all takes several")
    traces = locate_all(
        editable,
        [fact],
        kind,
        corruption=corruption,
        samples=samples,
        window=window,
        sever=sever,
        metric=metric,
        seed=seed,
        layers=layers,
        tokens=tokens,
        resume=resume,
        progress=progress,
    )
    return traces.traces[0]


def locate_all(
    editable: Editable,
    facts: FactLike | Iterable[FactLike],
    kind: Kind = "feed_forward",
    *,
    corruption: Corruption | CorruptionName | str = "gaussian",
    samples: int = 10,
    window: int | None = None,
    sever: Part | None = None,
    metric: Metric = "probability",
    seed: int = 0,
    layers: int | Iterable[int] | None = None,
    tokens: Tokens = "all",
    resume: bool = False,
    progress: Progress = silent,
) -> TraceSet:
    """Trace the layers and tokens at which a model recalls several facts (causal tracing, ROME, section 2.1).

    The traced answer is the fact's `previous` object when given, else the first word that the model generates; never
    the target. If it generates no word (the end of the text or turn, a blank), the word whose beginning is likeliest is
    traced, and `Trace.known` is False.

    Args:
        editable: the model.
        facts: the facts to trace, one or several.
        kind: restore the residual "state", or the "feed_forward" or "attention" output in a window of layers.
        corruption: how the subject is corrupted: a `Corruption`, or "gaussian", "covariance", "uniform" (with
            the scale in σ after a colon, "uniform:2"; default 3), or "replacement" by other subjects. σ is over the
            embeddings of the whole vocabulary; with "gaussian:3:subjects", as in the published code of ROME, over the
            tokens of the subjects of `facts`.
        samples: corrupted runs; with replacement, at most as many as there are other subjects of equal length.
        window: layers restored together; default a third of the depth, between 3 and 10. States have none.
        sever: keep the outputs of this kind of module at their corrupted values, at the restored token and all layers
            that are not restored.
        metric: "probability" of the whole answer, its "log_probability", or the "logit_difference" log P(old) −
            log P(new) (the logits' difference where both are one token; the new object is the fact's target).
        seed: seed of the corruption.
        layers: the layers to restore at (for states, those whose output is restored); None: all. Effects at other
            layers are NaN.
        tokens: the tokens to restore at: "all" from the subject's first on, "subject_and_last" (the subject's, and the
            prompt's last), or "subject_last". Fewer take a fraction of the time. Effects at other tokens are NaN; with
            "all", those left of the subject are 0.
        resume: write the traces of every batch to the cache as soon as it is done, and read cached traces from it.
        progress: called with the progress.

    Raises:
        FactError: a subject has no token, a prompt does not fit the model, a fact lacks what the metric or the
            corruption needs, or a setting is invalid.
        ModelError: a part of the model was not recognised, or its output is not finite.
    """
    check_model(editable)
    facts = as_facts(facts)
    if not facts:
        raise FactError("no facts to trace; give at least one")
    depth = len(editable.layers)
    corruption = Corruption.parse(corruption) if isinstance(corruption, str) else corruption
    FactError.require(corruption, Corruption, "a corruption was expected; give its name, such as 'gaussian:3'")
    run = Run(
        kind=kind,
        corruption=corruption,
        samples=samples,
        window=resolve_window(depth, kind, window),
        sever=sever,
        metric=metric,
        seed=as_seed(seed, FactError),
        layers=None if layers is None else resolve_layers(depth, layers),
        tokens=tokens,
    )
    journal = open_journal(editable, run, facts) if resume else None
    cached = {key: trace for line in journal.lines for key, trace in line["traces"]} if journal else {}
    keys = [json.dumps([fact.text, fact.span, fact.previous, fact.target]) for fact in facts]
    traces = {i: Trace.from_dict(cached[key]) for i, key in enumerate(keys) if key in cached}
    missing = [i for i, key in enumerate(keys) if key not in cached]
    for batch in trace_batches(editable, facts, run, missing, progress):
        traces |= batch
        try:
            if journal:  # one line per batch: the last bit of a number depends on the other facts in its batch
                journal.add({"traces": [[keys[index], trace.to_dict()] for index, trace in batch.items()]})
        except EditError:  # with a full disk this run goes on, and the next traces these facts again
            journal = None
    return TraceSet(tuple(traces[i] for i in range(len(facts))))


def open_journal(editable: Editable, run: Run, facts: Sequence[Fact]) -> Journal | None:
    """Return the cached traces of this model under these settings, by fact; None where the cache cannot be used."""
    # Replacements, and σ over the subjects, depend on the subjects of all facts.
    needs_subjects = run.corruption.name == "replacement" or run.corruption.sigma == "subjects"
    settings = {
        "lines": "batches",
        "run": asdict(run),
        "others": sorted({fact.subject for fact in facts}) if needs_subjects else [],
        "model": [__version__, fingerprint(editable), editable.chat],
    }
    try:
        return Journal(cache.entry("traces", json.dumps(settings), ".jsonl"), settings)
    except EditError:
        return None


def resolve_window(depth: int, kind: Kind, window: int | None) -> int:
    """Return how many layers are restored together: 1 for states, else `window`, by default depth / 3, from 3 to 10."""
    if window is None or kind == "state":
        return 1 if kind == "state" else min(10, max(3, round(depth / 3)), depth)
    window = FactError.whole("window", window, 1)
    if window > depth:
        raise FactError(f"a window of {window} layers was asked for, but the model has {depth}; give 1 to {depth}")
    return window


def resolve_layers(depth: int, layers: int | Iterable[int]) -> tuple[int, ...]:
    """Return the requested layers in ascending order; FactError where there are none, or the model lacks one."""
    chosen = tuple(sorted(set(as_layers(layers))))
    if not chosen or not set(chosen) <= set(range(depth)):
        raise FactError(f"layers {list(chosen)} were asked for, but the model has layers 0 to {depth - 1}")
    return chosen


def decisive(measured: Sequence[TraceSet], only_known: bool) -> TraceSet:
    """Select the traces that choose the layer: those of unsevered feed-forward outputs, else the first measured."""
    by_settings = {(traces.traces[0].kind, traces.traces[0].sever): traces for traces in reversed(measured)}
    choosing = by_settings.get(("feed_forward", None), measured[0])
    return TraceSet(choosing.known) if only_known else choosing


def trace_batches(
    editable: Editable, facts: Sequence[Fact], run: Run, indices: Sequence[int], progress: Progress = silent
) -> Iterator[dict[int, Trace]]:
    """Yield the traces of the facts with these `indices` by index, a batch at a time; similar facts share a batch."""
    noise = None if run.corruption.name == "replacement" else Noise(editable, run.corruption, facts)
    cases, completed = prepare(editable, facts, indices, run), 0
    refusal = ModelError("not enough memory to record the runs of a single fact; trace with fewer samples")

    def recorded(members: Sequence[int]) -> tuple[Sequence[int], Batch]:
        return members, run_batch(editable, [cases[i] for i in members], run, noise)

    recordings = (split_on_oom(recorded, members, refusal) for members in batches(editable, cases))
    for members, batch in chain.from_iterable(recordings):

        def advance(share: float, before: int = completed, count: int = len(members)) -> None:
            progress("tracing", round(100 * (before + share * count)), 100 * len(cases))

        restorations, log_probs = restore(editable, batch, run, advance)
        yield {
            indices[i]: _trace(editable, batch, case, restorations, log_probs, run, noise)
            for case, i in enumerate(members)
        }
        completed += len(members)


def _metric(log_probs: Tensor, metric: Metric) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Compute the metric from the answers' log-probabilities [.., answers]."""
    if metric == "logit_difference":
        return np.asarray((log_probs[..., 0] - log_probs[..., 1]).numpy())
    return np.asarray((log_probs[..., 0].exp() if metric == "probability" else log_probs[..., 0]).numpy())


def _trace(
    editable: Editable,
    batch: Batch,
    index: int,
    restorations: Sequence[Restoration],
    log_probs: Tensor,
    run: Run,
    noise: Noise | None,
) -> Trace:
    """Build the trace of one case from the log-probabilities of its batch, [restorations, samples, answers]."""
    case, restored = batch.cases[index], [r for r in restorations if r.case == index]
    measured = _metric(batch.log_probs_of(index), run.metric)
    clean, corrupted = float(measured[0]), measured[1:]
    changes = _metric(log_probs[[r.row for r in restored], : case.samples], run.metric) - corrupted
    effect = changes.mean(1)
    error = changes.std(1, ddof=1) / np.sqrt(case.samples) if case.samples > 1 else np.full(len(restored), np.nan)
    depth = len(editable.layers)
    alone = np.full(depth, np.nan)
    alone[list(range(depth) if run.layers is None else run.layers)] = 0.0
    effects, errors = (np.repeat(alone[:, None], case.encoded.answer, axis=1) for _ in range(2))
    if run.tokens != "all":
        effects[:], errors[:] = np.nan, np.nan
    for i, r in enumerate(restored):
        if r.alone:
            alone[r.layer] = effect[i]
        else:
            effects[r.layer, r.token], errors[r.layer, r.token] = effect[i], error[i]
    return Trace(
        effects=effects,
        errors=errors,
        alone=alone if run.window > 1 else np.array(effects[:, case.encoded.subject_last]),
        clean=clean,
        corrupted=float(corrupted.mean()),
        tokens=tuple(decode(editable.tokenizer, [i]) for i in case.encoded.ids[: case.encoded.answer]),
        subject=case.subject,
        answer=decode(editable.tokenizer, case.encoded.target_ids).strip(),
        known=batch.known[index],
        **{name: getattr(run, name) for name in ("kind", "window", "sever", "metric", "seed")},
        corruption=str(run.corruption),
        noise=None if noise is None else noise.sigma,
        samples=case.samples,
        prompt=case.fact.text,
    )
