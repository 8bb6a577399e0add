"""Results in a notebook: as HTML, as a figure.

The core declares what can be displayed and `ffedit.display.notebook` draws it, so that the core imports neither rich
nor matplotlib, nor any package above it. The root package connects the two (`drawing`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def _undrawn() -> Any:
    raise NotImplementedError


# Imports the module that draws, when something is first drawn; set by the root package.
drawing: Callable[[], Any] = _undrawn


class Displayed:
    """Base of what a notebook shows as HTML."""

    def _repr_html_(self) -> str:
        return str(drawing().html(self))


class Plotted(Displayed):
    """Base of what can also be drawn as a figure."""

    def plot(self, layer: int | None = None) -> Figure:
        """Draw a heat map of the effects by token and layer; of several facts, their average by the role of a token.

        Returned is matplotlib's figure (FFEditError where that is not installed). `layer` is the one to mark; None for
        that of the largest effect at the subject's last token.
        """
        figure: Figure = drawing().figure(self, layer)
        return figure


class Averaged(Displayed):
    """Base of averages over facts, which are drawn as lines over the layers."""

    def plot(self, *beside: Averaged) -> Figure:
        """Draw the averages by layer with their intervals, a line for each role of a token.

        Those of other measurements (`beside`) have panels of their own in the same figure, or, where only the severed
        modules differ, a line in the same panel. Returned is matplotlib's figure (FFEditError where that is not
        installed).
        """
        figure: Figure = drawing().lines([self, *beside])
        return figure
