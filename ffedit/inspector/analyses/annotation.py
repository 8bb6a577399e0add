"""Human annotation of patterns in a key's triggers: sheets to fill in, and statistics of filled ones.

Geva et al. 2021 (arXiv 2012.14913, section 3.1 and figure 2) let people look at the top 25 triggers of sampled keys,
name each pattern that at least three of them share, mark the prefixes it covers, and call it shallow (a last word, an
n-gram) or semantic (a topic). A sheet is a file of JSON lines, one key a line, or a page with the same fields that
saves such a file. People fill in `patterns`:

    {"memory": "3.17", "triggers": ["…", …], "patterns": [{"name": "ends in of", "kind": "shallow", "covers": [1, 2]}]}

A trigger counts as *shallow*, *semantic*, or *both* by the patterns that cover it.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ffedit.errors import EditError
from ffedit.files.atomic import write_text
from ffedit.inspector.analyses.annotation_sheet import page
from ffedit.inspector.analyses.distributions import marked, prefix
from ffedit.inspector.analyses.intervals import CountedInterval, interval
from ffedit.inspector.corpus_pass.lookup import resolved
from ffedit.inspector.corpus_pass.memory_pass import Pass
from ffedit.inspector.corpus_pass.rows import NOTHING, RowStore
from ffedit.inspector.views.slots import Slot
from ffedit.inspector.views.view import View
from ffedit.model.stacks import Stack
from ffedit.model.tokenization import decode

KINDS = ("shallow", "semantic")
TRIGGERS, KEYS, FEWEST = 25, 10, 3
COVERS = ("shallow", "semantic", "both", "uncovered")


@dataclass(frozen=True)
class Annotated(View):
    """Statistics of the annotated keys of a layer, or of all layers.

    Attributes:
        layer: index of the layer; None for all layers.
        keys: number of annotated keys.
        recognised: number of keys with a pattern.
        patterns: patterns per key: mean and interval.
        covered: share of triggers that a pattern covers: mean over keys, and interval.
        shares: shares of the triggers by `COVERS`, mean over keys.
    """

    layer: int | None
    keys: int
    recognised: int
    patterns: tuple[float, float, float]
    covered: tuple[float, float, float]
    shares: dict[str, float]


def write_sheets(stack: Stack, state: Pass, store: RowStore, target: Path, keys: int = KEYS) -> int:
    """Write sheets of some keys of each layer, drawn with the pass's seed, as `.jsonl` or as a page `.html`.

    Returns:
        The number of keys.

    Raises:
        EditError: the suffix is neither, or the file cannot be written.
    """
    check_sheet(target)
    sheets = []
    for layer, triggers in state.triggers.items():
        fired = (triggers.places[:, 0] != NOTHING).nonzero()[:, 0].cpu()
        generator = torch.Generator().manual_seed(state.settings.seed + layer)
        for row in fired[torch.randperm(len(fired), generator=generator)[:keys]].sort().values.tolist():
            texts = [
                decode(stack.tokenizer, t.ids) if stack.causal else marked(prefix(stack.tokenizer, t.ids, t.at))
                for t in resolved(store, triggers, row, TRIGGERS)
            ]
            slot = Slot(*stack.feed_forward[layer].at(int(triggers.index[row])))
            sheets.append({"memory": str(slot), "triggers": texts, "patterns": []})
    lines = "".join(json.dumps(sheet, ensure_ascii=False) + "\n" for sheet in sheets)
    title = f"{state.about['model']}, {state.about['corpus']}"
    write_text(target, page(sheets, title, last=stack.causal) if _html(target) else lines)
    return len(sheets)


def check_sheet(target: Path) -> None:
    """Check that a file name has the suffix of a sheet.

    Raises:
        EditError: its suffix is neither .html nor .jsonl.
    """
    if target.suffix.lower() not in (".html", ".jsonl"):
        raise EditError(f"{target}: sheets are .html or .jsonl; rename it")


def _html(target: Path) -> bool:
    return target.suffix.lower() == ".html"


def read_annotations(path: Path) -> tuple[Annotated, ...]:
    """Read filled sheets and return the statistics of all keys, then of each layer's.

    Raises:
        EditError: the file cannot be read, a line is no sheet, or a pattern is invalid.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise EditError(f"{path}: cannot be read ({error}); a file of JSON lines was expected") from error
    sheets = [_checked(f"{path}: line {number}", line) for number, line in enumerate(lines, 1) if line.strip()]
    if not any(sheet["patterns"] for sheet in sheets):
        raise EditError(f"{path}: no sheet names a pattern; fill in `patterns` first")
    layers = sorted({_layer(sheet) for sheet in sheets})
    return _numbers(None, sheets), *(_numbers(n, [s for s in sheets if _layer(s) == n]) for n in layers)


def _layer(sheet: dict[str, Any]) -> int:
    return int(sheet["memory"].partition(".")[0])


def _checked(where: str, line: str) -> dict[str, Any]:
    """Parse and check one line, a sheet.

    Raises:
        EditError: the line is no sheet, or a pattern has no valid kind, or does not cover three triggers of the sheet.
    """
    try:
        sheet = json.loads(line)
        count = len(sheet["triggers"])
        int(sheet["memory"].partition(".")[0])
        patterns = [(one["kind"], {int(i) for i in one["covers"]}) for one in sheet["patterns"]]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise EditError(f"{where} is no sheet ({error!r}); memory, triggers, patterns were expected") from error
    for kind, covers in patterns:
        if kind not in KINDS:
            raise EditError(f"{where}: a pattern is of kind {kind!r}; {' or '.join(KINDS)} was expected")
        if len(covers) < FEWEST or not covers <= set(range(1, count + 1)):
            raise EditError(
                f"{where}: a pattern covers {sorted(covers)}; {FEWEST} of the triggers 1 to {count}, or more"
            )
    return {"memory": sheet["memory"], "count": count, "patterns": patterns}


def _numbers(layer: int | None, sheets: Sequence[dict[str, Any]]) -> Annotated:
    """Compute the paper's statistics of a set of sheets."""
    shares: dict[str, list[float]] = {name: [] for name in COVERS}
    for sheet in sheets:
        by_kind = {kind: set[int]().union(*(c for k, c in sheet["patterns"] if k == kind)) for kind in KINDS}
        shallow, semantic = by_kind["shallow"], by_kind["semantic"]
        sets = (shallow - semantic, semantic - shallow, shallow & semantic)
        parts = [len(some) / sheet["count"] for some in sets]
        for name, share in zip(COVERS, (*parts, 1 - sum(parts)), strict=True):
            shares[name].append(share)
    counts = [len(sheet["patterns"]) for sheet in sheets]
    return Annotated(
        layer,
        len(sheets),
        sum(count > 0 for count in counts),
        _ends(interval(counts)),
        _ends(interval([1 - share for share in shares["uncovered"]])),
        {name: sum(some) / len(some) for name, some in shares.items()},
    )


def _ends(found: CountedInterval | None) -> tuple[float, float, float]:
    assert found is not None
    return found.mean, found.low, found.high
