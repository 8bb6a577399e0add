"""Model card of an export, which is the folder's README: the base, the facts, the recipe and the scores.

The base is named as a stranger finds it: by its id on the hub and its license, and by no path of this machine.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from huggingface_hub import ModelCardData, metadata_load

from ffedit.editor.edit import Edit
from ffedit.editor.edit_files import EDITS
from ffedit.facts.text import counted, plain, visible
from ffedit.loading.names import PACKAGES, in_words

# Entries of a model card that hold for the edited model, too.
INHERITED = ("license", "license_name", "license_link", "language")
CACHED = re.compile(r"models--(.+)")  # a folder in the hub's cache
OWNED = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")
LOCAL = "is a local name: give the base's id on the hub"
ROWS = 20


@dataclass(frozen=True)
class Origin:
    """Base model as a card names it."""

    name: str  # its id on the hub; where it is not known to have one, the name of its folder or file, without the path
    on_hub: bool = False  # True for an id
    about: Mapping[str, Any] = field(default_factory=dict)  # its license and language, as its own card has them

    @property
    def shown(self) -> str:
        """Name without backquotes, which would end code in Markdown."""
        return visible(self.name).replace("`", "'")


def origin_of(name: str, folder: Path | None, source: Mapping[str, Any] | None = None) -> Origin:
    """Describe the base that was loaded by `name`.

    `folder` is the folder that was loaded, None for a model that is in memory only; `source` is the GGUF file that it
    was converted from (`loading.gguf.source_of`).
    """
    try:
        card = (metadata_load(folder / "README.md") if folder else None) or {}
    except (OSError, ValueError, yaml.YAMLError):  # no card that can be read
        card = {}
    about = {entry: card[entry] for entry in INHERITED if card.get(entry)}
    if source is not None and source.get("license"):
        about = {"license": source["license"], **about}
    if folder is not None and (folder / EDITS).is_dir() and isinstance(card.get("base_model"), str):
        if LOCAL not in (folder / "README.md").read_text(encoding="utf-8"):
            return Origin(card["base_model"], True, about)
        name, folder = card["base_model"], None  # the base of all edits, which the new card lists
    if (hub_id := _hub_id(name, folder)) is not None:
        return Origin(hub_id, True, about)
    path = Path(name)
    return Origin((path.resolve() if path.exists() else path).name, False, about)


def _hub_id(name: str, folder: Path | None) -> str | None:
    """Return the base's id on the hub; None where it is not known to have one."""
    if name in PACKAGES:
        return PACKAGES[name].hub_id
    if cached := [match for step in (folder or Path()).parts if (match := CACHED.fullmatch(step))]:
        return cached[-1][1].replace("--", "/")
    return name if OWNED.fullmatch(name) and not Path(name).exists() else None


def model_card(base: Origin, edits: Sequence[Edit]) -> str:
    """Write the card of a checkpoint made from `base`, with all edits in its weights and the scores of the last."""
    count = sum(len(edit.facts) for edit in edits)
    text = f"""This is `{base.shown}` with {counted(count, "fact")} written into its feed-forward memories by ffedit.
Everything else is as in the base model.{_source(edits)}"""
    return f"""{_card(base, f"{base.shown}, edited", text, edits)}
`ffedit_edits/` holds the edits themselves, oldest first; `ffedit undo CHECKPOINT --out DIR` takes the last one out.
"""


def undone_card(base: Origin, undone: Edit, left: Sequence[Edit]) -> str:
    """Write the card of a checkpoint made from `base` in which an edit was undone."""
    facts = counted(len(undone.facts), "fact")
    note = f"Edit {undone.fingerprint()} ({facts}) was undone: rebuilt from the original weights, bit for bit."
    if left:
        return f"{model_card(base, left)}\n{note}\n"
    return f"{_front(base)}\n# {plain(base.shown)}\n\nEdited with ffedit, and undone. {note}{_source([undone])}\n"


def adapter_card(base: Origin, edit: Edit, loader: str) -> str:
    """Write the card of a LoRA adapter; `loader` is the transformers class that loads its base."""
    facts = counted(len(edit.facts), "fact")
    text = f"""A LoRA adapter that writes {facts} into the feed-forward memories of `{base.shown}`, made by
ffedit.{_source([edit])}

```python
from peft import PeftModel
from transformers import {loader}

model = PeftModel.from_pretrained({loader}.from_pretrained({json.dumps(base.name)}), "THIS FOLDER")
```"""
    return _card(base, f"An edit of {base.shown}", text, [edit], "peft")


def _card(base: Origin, title: str, text: str, edits: Sequence[Edit], library: str = "transformers") -> str:
    recipes = "\n".join(_recipe(f"`ffedit_edits/{i:03}`", edit) for i, edit in enumerate(edits))
    return f"""{_front(base, library)}
# {plain(title)}

{text}
{_unpublished(base, library)}
{_table(edits)}
{_scores(edits[-1].provenance.get("scores"))}
## Recipe

{recipes}

`ffedit show . --recipe` writes it as YAML, with all numbers and facts; `ffedit run` makes the edit again from that."""


def _front(base: Origin, library: str = "transformers") -> str:
    tags = ["ffedit", "knowledge-editing"]
    data = ModelCardData(
        base_model=base.name, library_name=library, pipeline_tag="text-generation", tags=tags, **base.about
    )
    return f"---\n{data.to_yaml()}\n---\n"


def _unpublished(base: Origin, library: str) -> str:
    """List what to set by hand before the folder is published; an empty string if there is nothing."""
    config = " (and `base_model_name_or_path` in `adapter_config.json`)" if library == "peft" else ""
    steps = [] if base.on_hub else [f"`base_model`{config} {LOCAL}"]
    steps += [] if "license" in base.about else ["`license` is not known: give that of the base"]
    return f"\nBefore this is published: {'; '.join(steps)}.\n" if steps else ""


def _source(edits: Sequence[Edit]) -> str:
    """Name the file that the base was converted from; an empty string if it was not converted."""
    source = next((edit.provenance["source"] for edit in edits if "source" in edit.provenance), None)
    return "" if source is None else f"\n\nThe base was converted from {plain(in_words(source))}."


def _table(edits: Sequence[Edit]) -> str:
    def cell(text: str | None) -> str:
        return "not measured" if text is None else plain(text)

    facts = [(fact, *answers) for edit in edits for fact, answers in zip(edit.facts, edit.says, strict=True)]
    rows = "\n".join(
        f"| {' | '.join(map(cell, (fact.text, fact.previous or '', fact.new_object, *answers)))} |"
        for fact, *answers in facts[:ROWS]
    )
    more = f"\n… and {len(facts) - ROWS} more in `ffedit_edits/`.\n" if len(facts) > ROWS else ""
    return f"""| prompt | old object | new object | said before | said after |
|---|---|---|---|---|
{rows}
{more}
What the model said was measured when each edit was made, without it and with it."""


def _recipe(name: str, edit: Edit) -> str:
    """Describe how one edit was computed, in one line; the embedded edit has all else."""
    notes = edit.provenance
    verdict, method = notes.get("verdict", {}).get("text", "not measured"), notes.get("method", "unknown")
    how = plain(f"method: {method}, layers {', '.join(map(str, edit.layers))}; verdict: {verdict}")
    return f"- {name}: fingerprint {edit.fingerprint()}; {how}"


def _scores(scores: Mapping[str, Any] | None) -> str:
    if scores is None or scores["after"] is None:
        return ""
    before, after = scores["before"], scores["after"]
    rows = "\n".join(
        f"| {plain(name)} | {'' if before[name] is None else f'{before[name]:.3f}'} | {value:.3f} |"
        for name, value in after.items()
        if value is not None
    )
    return f"""## Scores

Measured before and after on the same prompts.

| score | before | after |
|---|---|---|
{rows}
"""
