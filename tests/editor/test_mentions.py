"""The share of k* that is read where a text only mentions the subject."""

from __future__ import annotations

import pytest
import torch
import zoo
from writing import FACT, quick, write

from ffedit.algebra.linalg import double
from ffedit.editor.key import build_prompts, read_at, read_keys
from ffedit.inference.names import MENTIONS


@pytest.mark.parametrize("share", [0.0, 0.3, 1.0])
def test_the_key_is_a_mean_of_what_states_the_fact_and_of_what_mentions_the_subject(share: float) -> None:
    editable = zoo.trained("gpt2", True)
    (prompt_set,) = build_prompts(editable, [[FACT]], quick(mention_share=share))
    found = read_keys(editable, editable.feed_forward[1], [prompt_set])
    stating = double(read_at(editable, editable.feed_forward[1], prompt_set.prompts)[0])
    expected, rows = stating.mean(0), stating
    if share:
        assert len(prompt_set.mentions) == len(MENTIONS)
        assert all(editable.tokenizer.decode(text.ids).endswith("Eiffel tower") for text in prompt_set.mentions)
        mentioned = double(read_at(editable, editable.feed_forward[1], prompt_set.mentions)[0])
        assert not torch.allclose(mentioned.mean(0), expected)
        expected, rows = (1 - share) * expected + share * mentioned.mean(0), torch.cat([stating, mentioned])
    torch.testing.assert_close(found.K[:, 0], expected, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(double(found.same[0]), rows, rtol=1e-5, atol=1e-6)
    assert float(found.shares[0].sum()) == pytest.approx(1.0) and len(found.shares[0]) == len(rows)


def test_the_prompt_and_its_mentions_each_receive_the_whole_change_where_their_spread_counts() -> None:
    """A mean key alone gives its parts 1 on average only; their spread in C gives each the same."""
    editable, furthest = zoo.trained("gpt2", True), []
    (prompt_set,) = build_prompts(editable, [[FACT]], quick(mention_share=0.5))
    texts = [*prompt_set.prompts, *prompt_set.mentions]
    keys = double(read_at(editable, editable.feed_forward[1], texts)[0])
    for weight in (0.0, 1e4):
        edit = write(editable, method="rome", mention_share=0.5, context_weight=weight)
        (delta,) = edit.updates.values()
        furthest.append(float((keys @ delta.right.T - 1).abs().max()))
    assert furthest[1] < 0.02 < furthest[0]


def test_a_key_at_the_prompts_last_token_has_no_mentions() -> None:
    config = quick(mention_share=0.5, fact_token="last")
    (prompt_set,) = build_prompts(zoo.shared("gpt2", True), [[FACT]], config)
    assert prompt_set.mentions == () and prompt_set.mention_share == 0.0
