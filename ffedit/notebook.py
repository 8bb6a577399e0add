"""Results in a notebook: as HTML, as a figure.

The core declares what can be displayed and `ffedit.display.notebook` draws it, so that the core imports neither rich
nor matplotlib, nor any package above it: that module is imported when something is first drawn.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.figure import Figure


DRAWING = "ffedit.display.notebook"


class Displayed:
    """Base of what a notebook shows as HTML."""

    def _repr_html_(self) -> str:
        return str(import_module(DRAWING).html(self))


class Plotted(Displayed):
    """Base of what can also be drawn as a figure."""

    def plot(self, layer: int | None = None) -> Figure:
        """Draw a heat map of the effects by token and layer; of several facts, their average by the role of a token.

        Returned is matplotlib's figure (FFEditError where that is not installed). `layer` is the one to mark; None for
        that of the largest effect at the subject's last token.
        """
        figure: Figure = import_module(DRAWING).figure(self, layer)
        return figure


class Averaged(Displayed):
    """Base of averages over facts, which are drawn as lines over the layers."""

    def plot(self, *beside: Averaged) -> Figure:
        """Draw the averages by layer with their intervals, a line for each role of a token.

        Those of other measurements (`beside`) have panels of their own in the same figure, or, where only the severed
        modules differ, a line in the same panel. Returned is matplotlib's figure (FFEditError where that is not
        installed).
        """
        figure: Figure = import_module(DRAWING).lines([self, *beside])
        return figure
