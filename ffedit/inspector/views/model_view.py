"""A whole model: one pass over a text, then every analysis of Geva et al. 2021 (arXiv 2012.14913) on its data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ffedit.files.resuming import claimed
from ffedit.inference.text import Corpus
from ffedit.inspector.analyses import shallow
from ffedit.inspector.analyses.agreement import Surest, Values, read_values, surest
from ffedit.inspector.analyses.composition import CASES, Composed, compose
from ffedit.inspector.analyses.distributions import marked, prefix
from ffedit.inspector.analyses.intervals import CountedInterval, interval
from ffedit.inspector.analyses.removal import REMOVED, removals
from ffedit.inspector.corpus_pass.lookup import resolved
from ffedit.inspector.corpus_pass.memory_pass import Pass, Settings, collect, resumed
from ffedit.inspector.corpus_pass.reading import Context
from ffedit.inspector.corpus_pass.rows import NOTHING, RowStore, rows_of
from ffedit.inspector.views import report
from ffedit.inspector.views.report import Measure, ModelReport, Shift, Sureness
from ffedit.inspector.views.slots import Slot
from ffedit.model.editable import Stack
from ffedit.model.fingerprint import fingerprint
from ffedit.model.tokenization import decode
from ffedit.progress import Progress, silent

# Groups of random positions, in place of keys, on which chance is measured.
CHANCE_KEYS = 200
BINS = 10
EXAMPLES = 20
MOST_PREFIX = 160


@dataclass(frozen=True)
class Removing:
    """Numbers of keys and triggers that tokens are removed from: every trigger costs three passes over its prefix.

    Attributes:
        keys: number of keys of each layer, drawn with the seed.
        triggers: number of triggers of each key, the first ones.
    """

    keys: int = 20
    triggers: int = 10


def inspect_model(
    editable: Stack,
    corpus: Corpus,
    folder: Path | str,
    settings: Settings | None = None,
    removing: Removing | None = None,
    progress: Progress = silent,
) -> ModelReport:
    """Inspect all memories of a model: one pass over a text, which can be interrupted and resumed, and all analyses.

    Args:
        editable: the model, or a stack of one; what cannot be measured on a stack is None.
        corpus: the text; its documents where it has some, else rows of running text.
        folder: where triggers, rows and sample are stored; what is there already is not computed again.
        settings: settings of the pass.
        removing: numbers of keys and triggers that tokens are removed from.
        progress: progress callback.

    Raises:
        EditError: the text cannot be used, or the folder cannot be written, holds another pass, or is in use by
            another process.
        ModelError: the model has no unembedding.
    """
    folder = Path(folder)
    about = {
        "model": editable.name,
        "stack": editable.kind,
        "fingerprint": fingerprint(editable),
        "corpus": str(corpus),
        "tokens": corpus.tokens,
        "settings": asdict(settings or Settings()),
    }
    with claimed(folder):
        state = resumed(editable, folder, about)
        store = collect(editable, rows_of(editable, corpus, progress), corpus.tokens, state, folder, progress)
    return analyse(editable, state, store, removing, progress)


def analyse(
    stack: Stack, state: Pass, store: RowStore, removing: Removing | None = None, progress: Progress = silent
) -> ModelReport:
    """Run every analysis on a finished pass, which may be a merged one.

    Args:
        stack: the layers that the pass ran.
        state: the pass; complete.
        store: the rows that the pass ran.
        removing: numbers of keys and triggers that tokens are removed from.
        progress: progress callback.
    """
    removing, seed = removing or Removing(), state.settings.seed
    triggers = [state.triggers[layer] for layer in range(len(stack.feed_forward))]
    values = [read_values(stack, layer, one, store, seed, progress) for layer, one in enumerate(triggers)]
    composed = compose(stack, state.sample.seen, [one.top for one in values])
    found: dict[str, list[CountedInterval | None]] = {}
    for layer, one in enumerate(triggers):
        numbers = {
            **_shallow(store, one.places.cpu(), state, layer),
            **_removed(stack, layer, state, store, removing, progress),
            **_values(values[layer]),
            **_composed(composed[layer], stack.feed_forward[layer].d_ff),
        }
        for name, number in numbers.items():
            found.setdefault(name, []).append(number)
    best = surest(values, triggers, store)
    found["surest_here"] = [interval((best.layer == layer).double()) for layer in range(len(triggers))]
    last = composed[-1]
    return ModelReport(
        model=state.about["model"],
        corpus=state.about["corpus"],
        tokens=state.tokens,
        rows=state.rows,
        layers=len(triggers),
        memories=tuple(one.d_ff for one in stack.feed_forward),
        vocabulary=stack.vocabulary,
        settings={**state.about["settings"], "removing": asdict(removing)},
        measures=tuple(Measure.of(name, found[name]) for name in report.DEFINITIONS),
        sureness=_sureness(values) if store.reading.follows else (),
        surest=_surest(stack, state, store, best, values),
        shifted=float((last.output != last.residual).double().mean()),
        shifts=_shifts(stack, state, store, last),
        stack=stack.kind,
        note=store.reading.note,
    )


def _shallow(store: RowStore, places: Tensor, state: Pass, layer: int) -> dict[str, CountedInterval | None]:
    """Measure the shallow patterns of a layer's triggers, and those of random positions as chance."""
    found = shallow.endings(store, places, state.text)
    count = found.count
    covered = found.covered
    kinds = {"shallow_last": found.by_last, "shallow_pair": found.by_pair}
    known = ~covered.isnan()
    chance = shallow.endings(store, _random(store, state, places.shape[1], layer), state.text).covered
    return {
        "shallow": interval(covered),
        **{name: interval(covers.sum(-1) / count) for name, covers in kinds.items()},
        "shallow_keys": interval((covered[known] >= shallow.SHALLOW).double()),
        "shallow_chance": interval(chance),
    }


def _random(store: RowStore, state: Pass, top: int, layer: int) -> Tensor:
    """Draw flat indices of the sample in groups of `top` different prefixes, [groups, top]."""
    once = list({store.context(place): place for place in state.sample.places.tolist()}.values())
    rng = np.random.default_rng([state.settings.seed, layer])
    groups = [rng.choice(once, min(top, len(once)), replace=False) for _ in range(CHANCE_KEYS)]
    return torch.from_numpy(np.stack(groups)).long() if once else torch.full((1, top), NOTHING)


def _removed(
    stack: Stack, layer: int, state: Pass, store: RowStore, removing: Removing, progress: Progress
) -> dict[str, CountedInterval | None]:
    """Measure the relative change of coefficients without a token, over some keys of a layer."""
    if not stack.causal:
        return {f"removed_{name}": None for name in REMOVED}
    one = state.triggers[layer]
    fired = (one.places[:, 0] != NOTHING).nonzero()[:, 0].cpu()
    generator = torch.Generator().manual_seed(state.settings.seed + layer)
    rows = fired[torch.randperm(len(fired), generator=generator)[: removing.keys]]
    prefixes = [[t.ids for t in resolved(store, one, row, removing.triggers)] for row in rows.tolist()]
    changes = removals(stack, stack.feed_forward[layer], one.index[rows].tolist(), prefixes, state.settings.seed)
    progress("removing tokens", layer + 1, len(stack.feed_forward))
    return {
        f"removed_{name}": interval([getattr(change, name) for change in changes if change is not None])
        for name in REMOVED
    }


def _values(values: Values) -> dict[str, CountedInterval | None]:
    followed = values.next != NOTHING
    return {
        "agreement": interval(values.agrees[followed].double()),
        "agreement_dealt": interval(values.dealt_agrees[followed].double()),
        "rank": interval(values.rank[followed].double(), np.median),
        "rank_dealt": interval(values.dealt_rank[followed].double(), np.median),
        "sure": interval(values.sure.double()),
    }


def _composed(found: Composed, d_ff: int) -> dict[str, CountedInterval | None]:
    by_sign, by_norm, effective = found.activity.double().unbind(1)
    cases = {f"case_{name.replace('-', '_')}": found.case == number for number, name in enumerate(CASES)}
    return {
        "active_sign": interval(by_sign / d_ff),
        "active_norm": interval(by_norm / d_ff),
        "effective": interval(effective),
        "zero_agreement": interval(found.zero.double()),
        "settled": interval(found.settled.double()),
        "final": interval(found.final.double()),
        **{name: interval(case.double()) for name, case in cases.items()},
    }


def _sureness(values: Sequence[Values]) -> tuple[Sureness, ...]:
    """Return agreement by deciles of the values' max p_i, over all layers."""
    sure = torch.cat([one.sure[one.keys] for one in values])
    agrees = torch.cat([one.agrees for one in values]).double()[sure.argsort()]
    sure = sure.sort().values
    found = []
    for some, those in zip(sure.tensor_split(BINS), agrees.tensor_split(BINS), strict=True):
        if (one := interval(those)) is not None:
            found.append(Sureness(float(some[0]), float(some[-1]), one.mean, one.low, one.high, one.count))
    return tuple(found)


def _surest(stack: Stack, state: Pass, store: RowStore, best: Surest, values: Sequence[Values]) -> report.Surest:
    """Return the agreement of the values of largest max p_i, the first of them as examples."""
    examples: list[dict[str, Any]] = []
    columns = (column[:EXAMPLES].tolist() for column in (best.layer, best.index, best.sure))
    for layer, index, sure in zip(*columns, strict=True):
        one, top = state.triggers[layer], int(values[layer].top[index])
        row = int((one.index == index).nonzero()[0, 0])
        agreeing = next((t for t in resolved(store, one, row) if t.next == top), None)
        examples.append(
            {
                "memory": str(Slot(*stack.feed_forward[layer].at(index))),
                "token": decode(stack.tokenizer, [top]),
                "probability": sure,
                "trigger": None if agreeing is None else _text(stack, Context(agreeing.ids, agreeing.at)),
            }
        )
    first, one_of_them = (int(same.sum()) if store.reading.follows else None for same in (best.agrees, best.any_agrees))
    return report.Surest(len(best.sure), first, one_of_them, tuple(examples))


def _shifts(stack: Stack, state: Pass, store: RowStore, last: Composed) -> tuple[Shift, ...]:
    """Return the first positions of the sample, which is in random order, whose prediction the last layer changes."""
    found = []
    followed = store.next(state.sample.places)
    for i in (last.output != last.residual).nonzero()[:EXAMPLES, 0].tolist():
        residual, added, output = (
            decode(stack.tokenizer, [int(one[i])]) for one in (last.residual, last.added, last.output)
        )
        text = _text(stack, store.context(int(state.sample.places[i])))
        following = None if followed[i] == NOTHING else decode(stack.tokenizer, [int(followed[i])])
        found.append(Shift(text, residual, added, output, following, CASES[int(last.case[i])]))
    return tuple(found)


def _text(stack: Stack, seen: Context) -> str:
    """Decode the end of a prefix or, in a stack that is not causal, the text around the position, which is marked."""
    if stack.causal:
        text = decode(stack.tokenizer, seen.ids)
        return text if len(text) <= MOST_PREFIX else "…" + text[-MOST_PREFIX:]
    one = prefix(stack.tokenizer, *seen)
    half = MOST_PREFIX // 2
    return marked(replace(one, text=one.text[-half:], after=one.after[:half]))
