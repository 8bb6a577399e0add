"""Share the update of a fact among several layers (MEMIT, arXiv 2210.07229, section 4.3).

v* of the last layer moves the residual stream behind it by s. From the lowest layer up, each layer adds an equal share
of what s still lacks, at its own output: V = W K + d with c N(W K + d) − c N(W K) = share (`OutputMap`).
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
    """Shares of several layers in the change s of the stream behind the last layer that the values ask for."""

    def __init__(
        self,
        editable: Editable,
        last: FeedForward,
        prompt_sets: Sequence[PromptSet],
        before: LayerKeys,
        values: Sequence[Value],
    ) -> None:
        """Compute s, kept in `_wanted`; `before` are the keys and streams in the `last` layer before any change."""
        self._editable, self._last, self._prompt_sets = editable, last, prompt_sets
        self._before = before.streams
        chosen, deltas = (torch.stack(columns, 1) for columns in ([v.v for v in values], [v.delta for v in values]))
        mapping = self._output_map(last, chosen - deltas)
        self._wanted = mapping.factor * deltas if mapping.norm is None else mapping(chosen) - mapping(chosen - deltas)

    def _output_map(self, ff: FeedForward, outputs: Tensor) -> OutputMap:
        """Find how the outputs W k* of a layer, [d_model, n], reach the stream; EditError where that is not known."""
        text = self._prompt_sets[0].prompts[0]
        mapping = find_output_map(self._editable, ff, text, outputs[:, 0])
        if not mapping.known:
            raise EditError(
                f"layer {ff.layer} changes its feed-forward output before it reaches the residual stream (by "
                f"{mapping.gap:.0%}), so several layers cannot share a value; name one layer"
            )
        return mapping

    def values(self, ff: FeedForward, keys: LayerKeys, remaining: int) -> Tensor:
        """Return the values V [d_model, n] of a layer's `keys`; `remaining` layers, this one included, still change."""
        outputs, last_keys = ff.matrix @ keys.K, keys
        if ff is not self._last:
            last_keys = read_keys(self._editable, self._last, self._prompt_sets)
        moved = (last_keys.streams - self._before).to(self._wanted)
        share = ((self._wanted - moved) / remaining).to(outputs)
        return outputs + self._output_map(ff, outputs).output_change(outputs, share)
