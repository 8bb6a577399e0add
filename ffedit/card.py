"""The model card of an edited checkpoint: what was changed, how, and what it did."""

from __future__ import annotations

import json
from typing import Any

from ffedit.anatomy import Editable
from ffedit.editor import Edit

ROWS = 20


def model_card(editable: Editable, edit: Edit) -> str:
    """Markdown with the hub's front matter."""
    about = edit.provenance
    facts = "\n".join(
        f"| {fact.text} | {fact.previous or ''} | {fact.new_object} |".replace("\n", " ") for fact in edit.facts[:ROWS]
    )
    more = f"\n… and {len(edit.facts) - ROWS} more in `ffedit_edit/manifest.json`.\n" if len(edit.facts) > ROWS else ""
    return f"""---
base_model: {json.dumps(editable.name)}
library_name: transformers
pipeline_tag: text-generation
tags:
- ffedit
- knowledge-editing
---

# {editable.name}, edited

This is `{editable.name}` with {len(edit.facts)} fact{"s" if len(edit.facts) != 1 else ""} rewritten in its feed-forward
memories by [ffedit](https://pypi.org/project/ffedit/) {about["versions"]["ffedit"]}. Everything else is as in the
base model.

| prompt | before | now |
|---|---|---|
{facts}
{more}
{_scores(about.get("scores"))}
## Recipe

- method: {about["method"]}, layers {", ".join(map(str, edit.layers))}, rank {edit.rank}
- size of the change: ‖Δ‖ / ‖W‖ = {about["norm_ratio"]:.4f}
- key statistics: {about["statistics"]["tokens"]:,} tokens of {about["statistics"]["corpus"]}
- base weights: fingerprint {edit.base}, {about["dtype"]}; edit: fingerprint {edit.fingerprint()}
- seed: {about["config"]["seed"]}

`ffedit_edit/` holds the edit itself; `ffedit export ffedit_edit --model BASE --out DIR` makes this checkpoint again.
"""


def _scores(scores: dict[str, Any] | None) -> str:
    if scores is None or scores["after"] is None:
        return ""
    before, after = scores["before"], scores["after"]
    rows = "\n".join(
        f"| {name} | {_number(before[name])} | {_number(after[name])} |" for name in before if after[name] is not None
    )
    return f"""## Scores

Measured before and after on the same prompts.

| score | before | after |
|---|---|---|
{rows}
"""


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.3f}"
