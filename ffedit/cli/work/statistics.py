"""Second moments of keys, collected once for many edits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import ffedit
from ffedit.cli.options import ModelOptions, parse_layers
from ffedit.cli.surface import Surface
from ffedit.cli.work.model import load_model
from ffedit.display.terminal.statistics import moments_table, shortage
from ffedit.inference.corpus import Corpus
from ffedit.inference.distributed import process_group
from ffedit.layer_choice.published import auto_layer


def stats(
    folders: Sequence[Path],
    merge: bool,
    layers: str,
    tolerance: float | None,
    out: Path | None,
    force: bool,
    model: ModelOptions,
    surface: Surface,
    **text: Any,
) -> None:
    """Collect the statistics of a `text`, or add up those in `folders`."""
    group = process_group()
    if merge:
        collected, why, short = ffedit.merge_stats(folders), "", None
    else:
        corpus = Corpus(text.pop("corpus"), **text)
        corpus.check()
        editable = load_model(model, surface)
        if layers == "auto":
            auto = auto_layer(editable)
            chosen, why = [auto.layer], f"Layer {auto.layer}: {auto.why}"
        else:
            chosen = [*parse_layers(layers, len(editable.layers), ("auto",))]
            why = f"Layers {layers}, as asked"
        with surface.progress() as progress:
            collected = ffedit.collect_stats(
                editable, chosen, corpus=corpus, tolerance=tolerance, progress=progress, process_group=group
            )
        short = shortage(collected, corpus, tolerance)
    group.disband()
    if not group.first:
        return
    if out is not None:
        ffedit.save_stats(collected, out, force=force)
    surface.show(moments_table(collected, why, out), short)
    names = [field.name for field in fields(ffedit.KeyMoments) if field.init and field.name not in ("sum", "probes")]
    rows = [{name: getattr(moments, name) for name in names} for moments in collected.values()]
    surface.write_json({"layers": rows})
