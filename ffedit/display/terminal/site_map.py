"""Show the sites of a fact in a terminal: reach and leak as heat maps on the trace's axes, and names that are hit."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from rich.console import Group, RenderableType
from rich.text import Text

from ffedit.display.picture import site_pictures
from ffedit.display.terminal.heat_map import with_most
from ffedit.display.terminal.tables import left, plain_table, ranges, right
from ffedit.facts.text import counted, number, token, visible
from ffedit.layer_choice.site_map import SiteMap
from ffedit.locator import Trace

# Largest number of names in a row of the table.
SHOWN_NAMES = 3


def site_map_view(mapped: SiteMap, trace: Trace | None = None, layer: int | None = None) -> RenderableType:
    """Render maps of reach and leak, and a table of the sites in the measured layer nearest to `layer`.

    `layer` is by default that of least leak. With a `trace` of the prompt, maps have its rows, the table its effects.
    """
    layer = mapped.least[0] if layer is None else layer
    shown = min(mapped.layers, key=lambda measured: abs(measured - layer))
    maps = [part for picture in site_pictures(mapped, trace, layer) for part in (with_most(picture), Text(""))]
    return Group(*maps, _table(mapped, trace, shown), Text(""), *_notes(mapped, shown))


def _table(mapped: SiteMap, trace: Trace | None, layer: int) -> RenderableType:
    measured = {
        **({} if trace is None else {"effect": trace.effects}),
        "reach": mapped.reach,
        "least": mapped.reach_least,
        "look-alikes": mapped.leak_look_alikes,
        "others": mapped.leak,
        "95th": mapped.leak_high,
    }
    table = plain_table(*left(f"layer {layer}"), *right(*measured), "most hit")
    for position in range(*mapped.subject):
        values = [float(shares[layer, position]) for shares in measured.values()]
        cells = ["–" if np.isnan(value) else number(value) for value in values]
        hits = ", ".join(f"{name} {number(share)}" for name, share in mapped.hits(layer, position)[:SHOWN_NAMES])
        table.add_row(Text(token(mapped.tokens[position])), *cells, Text(visible(hits)))
    return table


def _notes(mapped: SiteMap, layer: int) -> Iterator[Text]:
    alike = counted(len(mapped.look_alikes[mapped.layers.index(layer)]), "look-alike")
    yield Text(
        "All numbers are shares of the change at the token. Reach, least: mean and minimum over other sentences with "
        f"the subject; look-alikes, others, 95th: {alike} and {counted(mapped.names, 'other name')}. Layers measured: "
        f"{ranges(mapped.layers)}.",
        style="dim",
    )
    if np.isnan(mapped.reach[layer, slice(*mapped.subject)]).any():
        yield Text("–: other texts cut the subject into other tokens, so no edit can name this token.", style="dim")
