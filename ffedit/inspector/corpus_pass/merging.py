"""Merge of passes over several texts: triggers and samples are merged, counts added, rows concatenated."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from pathlib import Path

from ffedit.errors import EditError
from ffedit.files.atomic import written
from ffedit.inspector.corpus_pass.memory_pass import Pass
from ffedit.inspector.corpus_pass.reading import Reading
from ffedit.inspector.corpus_pass.rows import RowStore, chunks
from ffedit.model.editable import Stack
from ffedit.model.fingerprint import fingerprint


def merge_passes(folders: Sequence[Path], out: Path, force: bool = False) -> Pass:
    """Write the pass over all texts of `folders`, in order, to the folder `out`.

    The triggers are those of one pass over all the texts.

    Raises:
        EditError: a folder holds no finished pass, the passes differ in model or settings, two are over the same text,
            or `out` cannot be written.
    """
    first, *others = [Pass.load(folder) for folder in folders]
    for folder, one in zip(folders, (first, *others), strict=True):
        if not one.complete:
            raise EditError(f"{folder}: its pass was interrupted; finish it with the same command, then merge")
        for name in ("fingerprint", "stack", "settings"):
            if (own := one.about.get(name)) != (other := first.about.get(name)):
                raise EditError(
                    f"{folder}: {name} {own}, but {folders[0]} has {other}; merge passes of one stack of one model "
                    "with the same settings"
                )
    stores = [RowStore(folder, one.rows) for folder, one in zip(folders, (first, *others), strict=True)]
    texts: dict[str, Path] = {}
    for folder, store in zip(folders, stores, strict=True):
        if (text := store.digest()) in texts:
            raise EditError(
                f"{folder}: holds the text of {texts[text]}, which would count twice; merge passes over different texts"
            )
        texts[text] = folder
    for one in others:
        first.triggers = {layer: own.merged(one.triggers[layer], first.rows) for layer, own in first.triggers.items()}
        first.sample = first.sample.merged(one.sample, first.rows)
        first.unigrams, first.pairs = first.unigrams + one.unigrams, first.pairs + one.pairs
        first.rows, first.tokens = first.rows + one.rows, first.tokens + one.tokens
        first.about = {
            **first.about,
            "corpus": f"{first.about['corpus']} + {one.about['corpus']}",
            "tokens": first.about["tokens"] + one.about["tokens"],
        }
    with written(out, force) as folder:
        store = RowStore(folder)
        for rows in chunks(chain.from_iterable(stores)):
            store.append(rows)
        first.save(folder)
    return first


def load_pass(stack: Stack, folder: Path) -> tuple[Pass, RowStore]:
    """Load a finished pass of this model's stack, and its rows.

    Raises:
        EditError: the folder holds no pass, an unfinished one, or one of another model or stack.
    """
    state = Pass.load(folder)
    if not state.complete:
        raise EditError(f"{folder}: its pass was interrupted; finish it with the same command")
    if state.about["fingerprint"] != (own := fingerprint(stack)):
        raise EditError(
            f"{folder}: a pass of {state.about['model']}, whose weights are not those of {stack.name} ({own})"
        )
    if (half := state.about.get("stack")) != stack.kind:
        raise EditError(f"{folder}: a pass of the {half} of {stack.name}, not of its {stack.kind}")
    return state, RowStore(folder, state.rows, Reading.of(stack))
