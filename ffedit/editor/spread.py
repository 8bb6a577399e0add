"""Share the update of a fact among several layers (MEMIT, arXiv 2210.07229, section 4.3).

v* of the last layer moves the residual stream behind it by s. From the lowest layer up, each takes an equal share of
what is still missing of s, at its own output: V = W K + d with c N(W K + d) − c N(W K) = share (`OutputMap`).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ffedit.editor.key import LayerKeys, PromptSet, read_keys
from ffedit.editor.output_map import OutputMap, find_output_map
from ffedit.editor.value import Value
from ffedit.errors import EditError
from ffedit.model.editable import Editable
from ffedit.model.feed_forward import FeedForward


class Spread:
    """Shares of several layers in an update: what the values are to move in the stream behind the last layer."""

    def __init__(
        self,
        editable: Editable,
        last: FeedForward,
        prompt_sets: Sequence[PromptSet],
        before: LayerKeys,
        values: Sequence[Value],
    ) -> None:
        """Find s; `before` are the keys and streams in the `last` layer before any change."""
        self._editable, self._last, self._prompt_sets = editable, last, prompt_sets
        self._before = before.streams
        chosen, deltas = (torch.stack(own, 1) for own in ([v.v for v in values], [v.delta for v in values]))
        way = self._way(last, chosen - deltas)
        self._wanted = way.factor * deltas if way.norm is None else way(chosen) - way(chosen - deltas)  # s

    def _way(self, ff: FeedForward, outputs: Tensor) -> OutputMap:
        """Find how the outputs W k* of a layer, [d_model, n], reach the stream; EditError where that is not known."""
        text = self._prompt_sets[0].prompts[0]
        way = find_output_map(self._editable, ff, text, outputs[:, 0])
        if not way.known:
            raise EditError(
                f"layer {ff.layer} changes its feed-forward output before it reaches the residual stream (by "
                f"{way.gap:.0%}), so several layers cannot share a value; name one layer"
            )
        return way

    def values(self, ff: FeedForward, keys: LayerKeys, remaining: int) -> Tensor:
        """Return the values V [d_model, n] of a layer's `keys`, of `remaining` layers that are still to be changed."""
        kept, now = ff.matrix @ keys.K, keys
        if ff is not self._last:
            now = read_keys(self._editable, self._last, self._prompt_sets)
        moved = (now.streams - self._before).to(self._wanted)
        share = ((self._wanted - moved) / remaining).to(kept)
        return kept + self._way(ff, kept).output_change(kept, share)
