"""The layer that is edited unless another is asked for: by the config alone."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import zoo

from ffedit.layer_choice.published import PUBLISHED, Published, auto_layer, published, usual_layer

DEPTHS = (1, 2, 3, 4, 6, 12, 18, 28, 30, 48)


def test_published_layers_are_found_by_type_depth_and_width() -> None:
    xl = SimpleNamespace(model_type="gpt2", num_hidden_layers=48, hidden_size=1600)
    row = published(xl)
    assert row is not None and (row.layer("rome"), row.layer("memit"), row.layer("alphaedit")) == (17, 17, 17)
    assert published(SimpleNamespace(model_type="gpt2", num_hidden_layers=48, hidden_size=768)) is None
    gptj = published(SimpleNamespace(model_type="gptj", num_hidden_layers=28, hidden_size=4096))
    assert gptj is not None and (gptj.layer("rome"), gptj.layer("memit")) == (5, 8)
    for one in PUBLISHED:
        assert one.source and one.rome < one.depth and (one.memit is None or one.memit[0] < one.memit[1] < one.depth)


def test_where_none_is_published_a_quarter_of_the_depth_is_taken() -> None:
    assert [usual_layer(depth) for depth in DEPTHS] == [0, 0, 0, 0, 2, 3, 5, 7, 8, 12]
    assert all(0 <= usual_layer(depth) < max(1, depth - 1) for depth in range(1, 200)), "never the last of several"


def test_auto_takes_the_published_layer_or_the_usual_one_and_says_which(monkeypatch: pytest.MonkeyPatch) -> None:
    editable = zoo.shared("gpt2")
    usual = auto_layer(editable)
    assert (usual.layer, usual.by, usual.why) == (0, "usual", "the usual quarter of 3 layers")
    config = editable.model.config
    row = Published("Tiny", config.model_type, 3, config.hidden_size, 1, (0, 2), "a paper")
    monkeypatch.setattr("ffedit.layer_choice.published.PUBLISHED", (row,))
    rome, memit = auto_layer(editable, "rome"), auto_layer(editable)
    assert (rome.layer, memit.layer) == (1, 2) and memit.by == "published"
    assert memit.why == "published for Tiny (a paper)"
