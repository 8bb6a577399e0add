"""Choose the layer to edit by trial edits at several layers."""

from __future__ import annotations

import ffedit
from ffedit.cli.options import ModelOptions, parse_layers
from ffedit.cli.surface import Surface
from ffedit.cli.work.model import load_model
from ffedit.display.terminal.layer_choice import trial_edits
from ffedit.facts.reading import Sifted


def choose_layer(sifted: Sifted | None, layers: str, method: str, model: ModelOptions, surface: Surface) -> None:
    """Try edits at several layers, and show their scores and the best layer."""
    facts = None if sifted is None else list(sifted.facts)
    editable = load_model(model, surface)
    tried = None if layers == "auto" else parse_layers(layers, len(editable.layers), ("auto",))
    with surface.progress() as progress:
        choice = ffedit.choose_layer(editable, method=method, facts=facts, layers=tried, progress=progress)
    surface.show(trial_edits(choice))
    left_out = [] if sifted is None else [records.to_dict() for records in sifted.by_kind]
    surface.write_json({"model": editable.name, **choice.to_dict(), "left_out": left_out})
