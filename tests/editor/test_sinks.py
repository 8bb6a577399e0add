"""The token that begins a text is an attention sink: it keeps its value, and a subject there is written behind it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import log

import pytest
import torch
import zoo
from storing import EXACT, SOLVING
from torch import Tensor
from writing import CORPUS, quick, write, write_facts

import ffedit
from ffedit import Fact
from ffedit.editor import key
from ffedit.editor.key import build_prompts
from ffedit.evaluator.responses import ask
from ffedit.inference import replay
from ffedit.inference.names import MENTIONS
from ffedit.loading.verify import find_and_verify
from ffedit.model.editable import Editable
from ffedit.model.feed_forward import FeedForward
from ffedit.model.tokenization import Encoded, plain_ids


def received(editable: Editable, edit: ffedit.Edit, layer: int, ids: Sequence[int]) -> float:
    """‖Δ k‖ of the last of `ids`, relative to that of the subject."""
    text = Encoded("", tuple(ids), len(ids), fact_token="last")
    (delta,), (keys,) = edit.updates.values(), edit.keys.values()
    at_token = key.read_at(editable, editable.feed_forward[layer], [text])[0].double().T
    return float((delta @ at_token).norm() / (delta @ keys[:, :1]).norm())


@pytest.mark.parametrize("method", SOLVING)
@pytest.mark.parametrize("start", ["<s>", "<s> </s>", None])
def test_what_begins_every_text_keeps_its_value(start: str | None, method: str) -> None:
    """Exactly in an exact edit; C says nothing of it, so that without this it receives as much as it happens to."""
    tokenizer = zoo.words() if start is None else zoo.begun(start)
    editable = find_and_verify(zoo.model("gpt2"), tokenizer, "gpt2")
    numbers = {"context_weight": 3.0, "alphaedit_null_share": 0.3}
    plain, held = (write(editable, method=method, **numbers, keep_beginning=keep) for keep in (False, True))
    begins = [editable.start_tokens[: i + 1] for i in range(len(editable.start_tokens))]
    begins = begins or [plain_ids(editable.tokenizer, text)[:1] for text in MENTIONS]
    assert len(begins) == {"<s>": 1, "<s> </s>": 2, None: len(MENTIONS)}[start]
    for ids in begins:
        before, after = (received(editable, edit, 1, ids) for edit in (plain, held))
        assert before > 0.01 and after < (1e-5 if method in EXACT else 0.5 * before)
    assert held.provenance["config"]["key"]["keep_beginning"], "so that it can be repeated"


@pytest.fixture
def llama() -> Editable:
    """A model whose tokenizer puts nothing in front."""
    return zoo.shared("llama")


FACT = ffedit.Fact("Paris", "{} is located in", "Rome", "London")


@pytest.mark.parametrize("sinks", [True, False])
def test_the_key_at_the_first_token_is_read_behind_it_if_it_is_unlike_the_others(
    sinks: bool, llama: Editable, monkeypatch: pytest.MonkeyPatch
) -> None:
    ordinary, sink = torch.eye(2).repeat_interleave(4, 1)

    def run(editable: Editable, place: FeedForward, texts: Sequence[Encoded]) -> tuple[Tensor, Tensor]:
        found = [sink if sinks and text.subject_last == 0 else ordinary for text in texts]
        return torch.stack(found), torch.ones(len(texts), 3)

    monkeypatch.setattr(key, "read_at", run)
    (prompt_set,) = build_prompts(llama, [[FACT]], quick())
    assert prompt_set.prompts[0].subject_last == 0
    (kept,) = key.without_sinks(llama, llama.feed_forward[1], [prompt_set])
    assert (kept.behind > 0) == sinks
    assert len(kept.prompts) == len(kept.fact_of)
    assert len(kept.prompts) + len(kept.essence) + kept.sinks == len(prompt_set.prompts) + len(prompt_set.essence)
    assert all(text.subject_last > 0 for text in (*kept.prompts, *kept.essence)) or not sinks
    assert [text.site for text in kept.prompts[: kept.behind]] == [1] * kept.behind
    assert kept.prompts[0].ids == prompt_set.prompts[0].ids


@pytest.mark.parametrize(("start", "behind"), [("<s>", 1), ("<s> </s>", 2)])
def test_behind_a_start_token_a_subject_is_no_sink(start: str, behind: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The start token is the sink, so that a subject of one token at the beginning is read there."""
    editable = find_and_verify(zoo.model("llama"), zoo.begun(start), "llama")
    (prompt_set,) = build_prompts(editable, [[FACT]], quick())
    assert prompt_set.prompts[0].subject_last == prompt_set.prompts[0].site == behind
    monkeypatch.setattr(key, "read_at", lambda editable, ff, texts: (torch.zeros(len(texts), 8),) * 2)
    assert key.without_sinks(editable, editable.feed_forward[1], [prompt_set]) == [prompt_set]
    ran: list[Tensor] = []
    monkeypatch.undo()
    watched = replay.run_to
    monkeypatch.setattr(
        replay, "run_to", lambda e, ids, *rest, **more: ran.append(ids) or watched(e, ids, *rest, **more)
    )
    key.read_keys(editable, editable.feed_forward[1], [prompt_set])
    assert all(row[:behind] == list(range(behind)) for ids in ran for row in ids.tolist())


def test_a_fact_is_said_where_its_subject_is_a_sink(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every key at the first position counts as a sink's here, so that δ is received at the token behind it."""
    editable = zoo.trained("llama", False)
    monkeypatch.setattr(key, "SINK", 2.0)
    edit = write_facts(editable, [FACT], "memit", [0], quick(steps=40, context_weight=3.0, mention_share=0.5), CORPUS)
    (solved,) = edit.provenance["solved"]
    assert (solved["behind"], solved["sinks"]) == (1, 0)
    ff, (delta,) = editable.feed_forward[0], edit.updates.values()
    end = replace(editable.encode(FACT.text, span=FACT.span), answer=2, fact_token="last")
    change = (delta @ key.read_at(editable, ff, [end])[0].double().T).norm()
    assert change > 0.5 * solved["delta_norm"]
    said = editable.encode(FACT.text, FACT.new_object, FACT.span)
    before = sum(ask(editable, [said])[said].log_probs)
    with edit.applied(editable):
        assert sum(ask(editable, [said])[said].log_probs) > before + log(5)


def test_nothing_is_read_behind_where_the_answer_stands_there(llama: Editable) -> None:
    fact = ffedit.Fact("Paris", "{}", "Rome", "London")
    (prompt_set,) = build_prompts(llama, [[fact]], quick())
    kept = prompt_set.without([0])
    assert (kept.behind, kept.sinks) == (0, 1)
    (tower,) = build_prompts(llama, [[replace(FACT, subject="Eiffel tower")]], quick())
    assert key.read_behind(replace(tower.prompts[0], fact_token="subject_first")) is None


@pytest.mark.parametrize("token", ["subject_last", "subject_first", "0", "-1", "Paris"])
def test_a_single_token_is_read_behind_by_whatever_name_it_is_asked_for(llama: Editable, token: str) -> None:
    (prompt_set,) = build_prompts(llama, [[FACT]], quick(fact_token=token))
    kept = prompt_set.without([0])
    assert (kept.behind, kept.sinks) == (1, 0) and kept.prompts[0].site == 1


def test_without_contexts_a_sink_is_told_from_the_mentions(llama: Editable, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(key, "SINK", 2.0)
    sets = [build_prompts(llama, [[FACT]], quick(contexts=0, mention_share=share))[0] for share in (0.5, 0.0)]
    assert all(text.site == 0 for prompt_set in sets for text in prompt_set.texts)
    assert [kept.behind for kept in key.without_sinks(llama, llama.feed_forward[1], sets)] == [1, 0]


def test_a_fact_keeps_its_only_prompts(llama: Editable) -> None:
    """Without contexts, a fact may be stated by a prompt that is the subject alone, and by no other."""
    alone, later = (
        ffedit.Fact("Paris", "{}", "Rome", "London"),
        ffedit.Fact("Paris", "the mayor of {} is", "Rome", "London"),
    )
    (prompt_set,) = build_prompts(llama, [[alone, later]], quick(contexts=0))
    kept = prompt_set.without([0])
    assert kept.prompts == prompt_set.prompts and kept.facts == 2 and kept.sinks == 0
    assert prompt_set.without([0, 1]).facts == 2


def test_the_kl_term_is_not_lost_where_a_subject_of_one_token_begins_a_text() -> None:
    """Without a BOS its key there is a sink's, so that the essence prompt would be left out, and the term with it."""
    editable, fact = zoo.trained("llama", False), Fact("Germany", "the city of {} is", "Rome", "Berlin")
    config = quick(contexts=2, essence_prompts=("{} is a",))
    (prompt_set,) = build_prompts(editable, [[fact]], config)
    assert [text.site > 0 for text in prompt_set.essence] == [True]
    (kept,) = key.without_sinks(editable, editable.feed_forward[1], [prompt_set])
    assert len(kept.essence) == 1
    (bare,) = build_prompts(editable, [[fact]], quick(contexts=0, essence_prompts=("{} is a",)))
    assert bare.essence[0].site == 0, "without contexts there is nothing to put before it"
