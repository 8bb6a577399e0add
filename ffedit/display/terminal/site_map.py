"""The sites of a fact in a terminal: reach and leak as heat maps with the trace's axes, and the names that are hit."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from rich.console import Group, RenderableType
from rich.table import Column
from rich.text import Text

from ffedit.display.picture import site_pictures
from ffedit.display.terminal.heat_map import with_most
from ffedit.display.terminal.tables import plain_table, ranges
from ffedit.facts.text import counted, number, token, visible
from ffedit.layer_choice.site_map import SiteMap
from ffedit.locator import Trace

# Names in a row of the table, of those that are kept.
SHOWN_NAMES = 3
COLUMNS = ("effect", "reach", "least", "look-alikes", "others", "95th")


def site_map_view(mapped: SiteMap, trace: Trace | None = None, layer: int | None = None) -> RenderableType:
    """Render reach, leak, and the sites of one layer as a table.

    That is `layer`, or the measured one next to it; by default the one that leaks least to look-alikes. Beside a
    `trace` of the same prompt the maps have its rows, and the table its effects.
    """
    layer = mapped.least[0] if layer is None else layer
    shown = min(mapped.layers, key=lambda measured: abs(measured - layer))
    maps = [part for picture in site_pictures(mapped, trace, layer) for part in (with_most(picture), Text(""))]
    return Group(*maps, _table(mapped, trace, shown), Text(""), *_notes(mapped, shown))


def _table(mapped: SiteMap, trace: Trace | None, layer: int) -> RenderableType:
    columns = COLUMNS if trace is not None else COLUMNS[1:]
    heading = Column(f"layer {layer}", no_wrap=True)
    table = plain_table(heading, *(Column(name, justify="right", no_wrap=True) for name in columns), "most hit")
    for position in range(*mapped.subject):
        measured = (mapped.reach, mapped.reach_least, mapped.leak_look_alikes, mapped.leak, mapped.leak_high)
        values = [float(of[layer, position]) for of in ((*(() if trace is None else (trace.effects,)), *measured))]
        cells = ["–" if np.isnan(value) else number(value) for value in values]
        hits = ", ".join(f"{name} {number(share)}" for name, share in mapped.hits(layer, position)[:SHOWN_NAMES])
        table.add_row(Text(token(mapped.tokens[position])), *cells, Text(visible(hits)))
    return table


def _notes(mapped: SiteMap, layer: int) -> Iterator[Text]:
    alike = counted(len(mapped.look_alikes[mapped.layers.index(layer)]), "look-alike")
    yield Text(
        "All shares are of the change at the token. Reach, least: mean and minimum over other sentences with the "
        f"subject; look-alikes, others, 95th: {alike} and {counted(mapped.names, 'other name')}. Layers measured: "
        f"{ranges(mapped.layers)}.",
        style="dim",
    )
    if np.isnan(mapped.reach[layer, slice(*mapped.subject)]).any():
        yield Text("–: other texts cut the subject otherwise, so that no edit can name this token.", style="dim")
