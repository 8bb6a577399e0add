"""Inside a chat template: the prompt is the user's turn, and the answer begins the assistant's."""

from __future__ import annotations

import copy
import functools
import json
from pathlib import Path
from typing import Any

import kinds
import pytest
import torch
import zoo
from learning import learned
from shell import ASKED, shell
from transformers import PreTrainedTokenizerFast
from writing import ALONE, FACT, quick

import ffedit
from ffedit.errors import EditError, FactError, ModelError
from ffedit.evaluator.generations import GenerationRequest, Generations
from ffedit.evaluator.responses import ask
from ffedit.facts.fact import Fact
from ffedit.inference import generation
from ffedit.inference.corpus import Corpus
from ffedit.locator.cases import Run
from ffedit.locator.corruption import Corruption
from ffedit.locator.trace import open_journal
from ffedit.model.editable import Editable
from ffedit.model.fingerprint import fingerprint
from ffedit.model.tokenization import Encoded, decode, encode

TURNS = ("<|system|>", "<|user|>", "<|assistant|>", "<|end|>")
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
SYSTEM = TEMPLATE.replace("{% for", "<|system|>the Eiffel tower is located in<|end|>{% for", 1)
TEXT = "the Eiffel tower is located in"
SPAN = (4, 16)


def spoken_in(tokenizer: PreTrainedTokenizerFast, template: str | None = TEMPLATE) -> PreTrainedTokenizerFast:
    """A tokenizer with a chat template, whose turns end with <|end|>."""
    tokenizer.add_special_tokens({"additional_special_tokens": list(TURNS), "eos_token": "<|end|>"})
    tokenizer.chat_template = template
    return tokenizer


def words(template: str | None = TEMPLATE) -> PreTrainedTokenizerFast:
    return spoken_in(zoo.words(True), template)


def asked(tokenizer: Any, prompt: str = TEXT, answer: str = "Rome", span: tuple[int, int] = SPAN) -> Encoded:
    return encode(tokenizer, prompt, answer, span, chat=True)


# The text -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["words", "pieces", "bytes"])
def test_the_tokens_are_those_of_the_chat(kind: str) -> None:
    """As transformers encodes the conversation, with one BOS."""
    made = {"words": zoo.words, "pieces": kinds.pieces, "bytes": zoo.bytes_bpe}
    tokenizer = spoken_in(made[kind](bos=True))
    user, assistant = {"role": "user", "content": TEXT}, {"role": "assistant", "content": "Rome"}
    prompt = tokenizer.apply_chat_template([user], add_generation_prompt=True)["input_ids"]
    whole = tokenizer.apply_chat_template([user, assistant])["input_ids"]
    found = asked(tokenizer)
    assert list(found.ids[: found.answer]) == prompt == list(asked(tokenizer, answer="").ids)
    assert [*found.ids, tokenizer.eos_token_id] == whole
    assert found.ids.count(tokenizer.bos_token_id) == 1 and found.ids[0] == tokenizer.bos_token_id
    assert decode(tokenizer, found.target_ids) == "Rome"
    assert found.subject is not None and decode(tokenizer, found.ids[slice(*found.subject)]).strip() == "Eiffel tower"


def test_without_offsets_the_same_tokens_are_found() -> None:
    fast = spoken_in(kinds.byte_level(bos=True))
    slow = kinds.Slow(fast)
    slow.add_special_tokens({"additional_special_tokens": list(TURNS)})
    slow.chat_template = TEMPLATE
    assert asked(slow) == asked(fast)


def test_a_subject_that_the_template_names_is_found_in_the_prompt() -> None:
    tokenizer = words(SYSTEM)
    found = asked(tokenizer)
    tokens = tokenizer.convert_ids_to_tokens(found.ids)
    assert tokens.count("tower") == 2 and found.subject is not None
    assert tokens.index("<|user|>") < found.subject[0] and tokens[slice(*found.subject)] == ["Eiffel", "tower"]
    assert asked(tokenizer, answer="").subject == found.subject
    for occurrence in (0, 1):
        fact = Fact("Rome", "Rome is old , Rome is", "big", occurrence=occurrence)
        found = asked(tokenizer, fact.text, "big", fact.span)
        tokens = tokenizer.convert_ids_to_tokens(found.ids)
        places = [i for i, token in enumerate(tokens) if token == "Rome"]
        assert found.subject == (places[occurrence], places[occurrence] + 1)


@pytest.mark.parametrize("prompt", [f"  {TEXT}", f"{TEXT} ", f"\n{TEXT}\n"])
@pytest.mark.parametrize("template", [TEMPLATE, TEMPLATE.replace("m['content']", "m['content'] | trim")])
def test_white_space_around_a_prompt_is_no_part_of_the_turn(prompt: str, template: str) -> None:
    start = prompt.index("Eiffel")
    assert asked(words(template), prompt, " Rome ", (start, start + 12)) == asked(words())


def test_the_space_before_the_answer_is_the_templates() -> None:
    spaced = TEMPLATE.replace("{{ m['content'] }}", "{% if m['role'] == 'assistant' %} {% endif %}{{ m['content'] }}")
    tokenizer = spoken_in(zoo.bytes_bpe(True), spaced)
    assert decode(tokenizer, asked(tokenizer).target_ids) == " Rome"
    assert decode(spoken_in(zoo.bytes_bpe(True)), asked(spoken_in(zoo.bytes_bpe(True))).target_ids) == "Rome"
    lines = spoken_in(zoo.bytes_bpe(True), TEMPLATE.replace("<|assistant|>{% endif", "<|assistant|>\n{% endif"))
    found = asked(lines)
    assert decode(lines, found.target_ids) == "Rome" and decode(lines, found.ids[: found.answer]).endswith("|>\n")


def test_reasoning_is_left_out_where_the_template_can() -> None:
    thinking = TEMPLATE.replace(
        "{% if add", "{% if enable_thinking is not defined or enable_thinking %} old{% endif %}{% if add"
    )
    assert asked(words(thinking)) == asked(words())


# Generation prompts that the visible answer does not follow, and what ffedit puts in between.
OPENED = TEMPLATE.replace("<|assistant|>{% endif", "<|assistant|><think>{{ '\\n' }}{% endif")
CHANNEL = TEMPLATE.replace(
    "{{ m['content'] }}", "{% if m['role'] == 'assistant' %}<|system|>final<|end|>{% endif %}{{ m['content'] }}"
)
CLOSED = OPENED.replace(
    "{{ m['content'] }}", "{% if m['role'] == 'assistant' %}<think>{{ '\\n\\n' }}</think>{% endif %}{{ m['content'] }}"
)


@pytest.mark.parametrize(
    ("template", "lead"),
    [
        (OPENED, "<think>\n\n</think>\n\n"),
        (OPENED.replace("{{ '\\n' }}", ""), "<think>\n\n</think>\n\n"),
        (CHANNEL, "<|system|>final<|end|>"),
        (CLOSED, "<think>\n\n</think>"),
    ],
)
def test_the_answer_begins_where_it_is_visible(template: str, lead: str) -> None:
    """DeepSeek R1 opens a thought in every prompt, gpt-oss writes an answer's channel, Qwen3 closes its thought."""
    tokenizer = spoken_in(zoo.bytes_bpe(True), template)
    found = asked(tokenizer)
    assert decode(tokenizer, found.ids[: found.answer]).endswith(f"<|assistant|>{lead}")
    assert decode(tokenizer, found.target_ids) == "Rome"
    assert asked(tokenizer, answer="").ids == found.ids[: found.answer]


def test_a_template_that_takes_lists_of_parts_is_given_them() -> None:
    """Of SmolVLM and others that see pictures."""
    parts = TEMPLATE.replace(
        "{{ m['content'] }}",
        "{% for part in m['content'] %}{% if part['type'] == 'text' %}{{ part['text'] }}{% endif %}{% endfor %}",
    )
    assert asked(words(parts)) == asked(words())


@pytest.mark.parametrize(
    ("template", "error", "said"),
    [
        (None, ModelError, "has no chat template"),
        ("{{ raise_exception('no\nuser') }}", ModelError, "cannot be used: no user"),
        ("{{ messages[0]['content'] | upper }}", FactError, "changes the prompt"),
        ("{{ bos_token }}<|user|>", FactError, "changes the prompt"),
    ],
)
def test_what_cannot_be_asked_is_refused_in_one_line(template: str | None, error: Any, said: str) -> None:
    with pytest.raises(error, match=said) as caught:
        asked(words(template))
    assert "\n" not in str(caught.value)


# The model ----------------------------------------------------------------------------------------


@functools.cache
def _taught() -> Editable:
    tokenizer = words()
    known = [(template.format(subject), place) for template in zoo.TEMPLATES for subject, place in zoo.KNOWN]
    rows = [(*encode(tokenizer, *one, chat=True).ids, tokenizer.eos_token_id) for one in known]
    return learned("phi3", tokenizer, rows, steps=70, chat=True)


def taught() -> Editable:
    """A model that answers in a chat, a fresh copy each time."""
    return copy.deepcopy(_taught())


def test_a_trace_is_of_the_chat() -> None:
    editable = taught()
    trace = ffedit.locate(editable, FACT, "state", samples=3)
    assert trace.tokens == ("<s>", "<|user|>", *TEXT.split(), "<|end|>", "<|assistant|>")
    assert trace.subject == (3, 5) and trace.known and trace.answer == "Paris"
    assert (trace.effects[:, :3] == 0).all() and trace.clean - trace.corrupted > 0.2
    editable.chat = False
    plain = ffedit.locate(editable, FACT, "state", samples=3)
    assert plain.tokens == ("<s>", *TEXT.split())


def test_everything_that_is_asked_of_a_fact_is_asked_in_the_chat(monkeypatch: pytest.MonkeyPatch) -> None:
    """Paraphrases, neighbors, contexts: each text has a user's turn; text that the model samples has none."""
    editable = taught()
    fact = Fact(
        **{**FACT.to_dict(), "paraphrases": ["{} stands in"], "generation": ["{} is"], "references": ["Rome is old"]},
        neighbors=[{"prompt": "the Nile river is located in", "target": "Egypt"}],
        same_subject=["the city of {} is"],
        portability=[{"prompt": "{} is at", "target": "Italy"}],
    )
    texts: list[str] = []
    inner = Editable.encode

    def heard(self: Editable, *args: Any, **kwargs: Any) -> Encoded:
        texts.append((found := inner(self, *args, **kwargs)).text)
        return found

    monkeypatch.setattr(Editable, "encode", heard)
    ffedit.evaluate(editable, [fact], full=True)
    ffedit.locate(editable, fact, samples=1)
    ffedit.edit(editable, [fact], "rome", layers=[0], config=quick(contexts=2, steps=1), stats=Corpus(tokens=200))
    assert len(texts) > 15 and all(
        text.startswith("<s><|user|>") and text.count("<|assistant|>") == 1 for text in texts
    )
    assert any(text.startswith("<s><|user|>the Eiffel tower is located in Rome. the Nile") for text in texts)


def test_what_the_model_says_ends_with_its_turn() -> None:
    """Also where the next token would stand right behind the object, without a space."""
    tokenizer = spoken_in(zoo.bytes_bpe(True))
    text = asked(tokenizer)
    editable = learned("gpt2", tokenizer, [(*text.ids, tokenizer.eos_token_id, *tokenizer("city")["input_ids"][1:])])
    end = int(tokenizer.eos_token_id)
    with torch.no_grad():
        logits = editable.model(input_ids=torch.tensor([[*text.ids, end]])).logits[0, -1]
    assert decode(tokenizer, [int(logits.argmax())]) == "c", "it would go on behind its turn"
    size = len(text.target_ids)
    assert generation.continuations(editable, [text.ids[: text.answer]], size + 2) == [[*text.target_ids, end]]
    spoken = Generations(editable, [GenerationRequest(text, size, least=size + 2)])
    ask(editable, [text], follower=spoken.follow)
    spoken.finish()
    assert spoken.words(text) == "Rome" and spoken.says(text)


def test_journals_and_comparisons_tell_a_chat_from_running_text() -> None:
    plain, chat = taught(), taught()
    plain.chat = False
    assert fingerprint(plain) == fingerprint(chat)
    run = Run("state", Corruption(), 1, 1, None, "probability", 0)
    journals = [open_journal(editable, run, [FACT]) for editable in (plain, chat)]
    assert journals[0] and journals[1] and journals[0].path != journals[1].path
    with pytest.raises(EditError, match="load both alike"):
        ffedit.evaluate(plain, [FACT], edited=chat)


# The command line ---------------------------------------------------------------------------------

ENOUGH = {**ALONE, "steps": 60, "step_size": 0.1, "target_probability": 0.95, "max_delta_norm": 20.0}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("chat") / "model"
    taught().model.save_pretrained(place)
    words().save_pretrained(place)
    return place


def test_a_chat_from_the_command_line(
    capsys: pytest.CaptureFixture[str], empty: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ffedit.cli.work.solving.preset", lambda *_: quick(**ENOUGH))
    applied = shell(capsys, "apply", *ASKED, "--previous", "Paris", "--model", folder, "--chat", "--layer", "0",
                    "--method", "rome", "--out", "rome.edit", "--json", "applied.json")  # fmt: skip
    assert applied.code == 0, applied.err
    assert "in its chat template" in applied.out and "--chat" in applied.out.split("Next:")[1]
    result = json.loads(Path("applied.json").read_text())
    assert result["chat"] is True and (result["before"]["knew"], result["before"]["generation"]) == (1, 0)
    assert (result["after"]["efficacy"], result["after"]["generation"]) == (1, 1)
    assert json.loads(Path("rome.edit/manifest.json").read_text())["provenance"]["chat"] is True
    asked_again = [*ASKED, "--previous", "Paris", "--edit", "rome.edit"]
    inside = shell(capsys, "evaluate", *asked_again, "--chat", "--json", "inside.json")
    assert inside.code == 0 and "measured without" not in inside.out
    assert json.loads(Path("inside.json").read_text())["after"]["generation"] == 1
    outside = shell(capsys, "evaluate", *asked_again)
    assert outside.code == 0 and outside.out.count("measured without (--chat)") == 1
    said = shell(capsys, "ask", TEXT, "--edit", "rome.edit", "--chat")
    assert "Paris" in said.out and "Rome" in said.out
    located = shell(capsys, "locate", *ASKED, "--model", folder, "--chat", "--samples", "2", "--json", "-")
    assert json.loads(located.out)["facts"][0]["trace"]["tokens"][-1] == "<|assistant|>"


def test_a_benchmark_of_a_chat_is_another_run(capsys: pytest.CaptureFixture[str], empty: Path, folder: Path) -> None:
    Path("facts.json").write_text(json.dumps([FACT.to_dict()]))
    words_of = ["bench", "facts.json", "--model", folder, "--methods", "ft", "--layer", "0", "--out", "b", "--no-full"]
    done = shell(capsys, *words_of, "--set", "ft.steps=1", "--chat", "--quiet")
    assert done.code == 0, done.err
    assert json.loads(Path("b/manifest.json").read_text())["run"]["chat"] is True
    refused = shell(capsys, *words_of, "--set", "ft.steps=1", "--quiet")
    assert refused.code != 0 and "chat True there, False now" in refused.err


def test_a_model_without_a_template_is_refused_in_one_line(
    capsys: pytest.CaptureFixture[str], empty: Path, model: Path
) -> None:
    refused = shell(capsys, "ask", TEXT, "--model", model, "--chat")
    assert refused.code != 0 and refused.err.count("\n") == 1 and "has no chat template" in refused.err
    editable = zoo.build("gpt2")
    with pytest.raises(ModelError, match="no chat template"):
        ffedit.load((editable.model, editable.tokenizer), chat=True)
    assert ffedit.load((editable.model, words()), chat=False).chat is False
