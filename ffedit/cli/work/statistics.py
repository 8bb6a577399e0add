"""Second moments of keys, collected once for many edits."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

import ffedit
from ffedit.cli.options import ModelOptions, parse_layers
from ffedit.cli.surface import Surface
from ffedit.cli.work.model import load_model
from ffedit.display.terminal.statistics import moments_table, shortage
from ffedit.errors import EditError
from ffedit.inference.corpus import Corpus
from ffedit.inference.distributed import launched
from ffedit.layer_choice.published import auto_layer


def stats(
    layers: str,
    out: Path | None,
    force: bool,
    model: ModelOptions,
    surface: Surface,
    corpus: Corpus,
) -> None:
    """Collect the key statistics of a text, in one process."""
    if launched():
        raise EditError("stats runs in one process; start it without `accelerate launch`")
    editable = load_model(model, surface)
    if layers == "auto":
        auto = auto_layer(editable)
        chosen, why = [auto.layer], f"Layer {auto.layer}: {auto.why}"
    else:
        chosen = [*parse_layers(layers, len(editable.layers), ("auto",))]
        why = f"Layers {layers}, as asked"
    with surface.progress() as progress:
        collected = ffedit.collect_stats(editable, chosen, corpus=corpus, progress=progress)
    if out is not None:
        ffedit.save_stats(collected, out, force=force)
    surface.show(moments_table(collected, why, out), shortage(collected, corpus))
    names = [field.name for field in fields(ffedit.KeyMoments) if field.init and field.name != "sum"]
    rows = [{name: getattr(moments, name) for name in names} for moments in collected.values()]
    surface.write_json({"layers": rows})
