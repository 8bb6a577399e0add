"""Keys of several layers from one pass are those that each layer's own pass reads."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import zoo
from writing import FACT, SECOND, quick

from ffedit.editor.key import build_prompts, read_at, read_layers
from ffedit.inference import replay


@pytest.mark.parametrize("family", ["gpt2", "llama", "opt", "gemma3", "mixtral", "llama4"])
def test_one_pass_reads_what_each_layers_own_does(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    editable, passes = zoo.shared(family), []
    prompt_sets = build_prompts(editable, [[FACT], [SECOND]], quick())
    texts = [text for prompt_set in prompt_sets for text in prompt_set.texts]
    texts += [replace(text, fact_token="subject_first") for text in texts]
    alone = [read_at(editable, ff, texts) for ff in editable.feed_forward]
    run_to = replay.run_to
    monkeypatch.setattr(
        replay, "run_to", lambda e, ids, layer, **more: passes.append(layer) or run_to(e, ids, layer, **more)
    )
    ff_layers = [editable.feed_forward[layer] for layer in (2, 0, 1)]
    together = read_layers(editable, ff_layers, texts)
    assert set(passes) == {2}, "every pass goes through the highest layer"
    for ff, found in zip(ff_layers, together, strict=True):
        for one, other in zip(found, alone[ff.layer], strict=True):
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)
    assert len(passes) <= len(texts)
    assert [tuple(part.shape) for part in read_layers(editable, ff_layers, [])[0]] == [(0, ff_layers[0].d_ff), (0, 32)]
