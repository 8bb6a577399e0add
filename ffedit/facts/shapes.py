"""Rewrite records whose shape says more than the names of their fields into records of plain names.

These are cases of MQuAKE, conversations, an instruction with its input, and a prompt in two parts around the subject.
Every other record is left as it is.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ffedit.errors import FactError
from ffedit.facts.fact import MULTI_HOP, SLOT, Probe, fill, show
from ffedit.facts.synonyms import normal, role_of
from ffedit.facts.values import Record, texts_of

TURNS = frozenset({"messages", "conversations", "conversation", "dialogue", "turns"})
ASKS, ANSWERS = frozenset({"user", "human", "prompter"}), frozenset({"assistant", "gpt", "model", "bot"})
# Fields that are read from a case of MQuAKE.
OF_CASE = frozenset(["case_id", "requested_rewrite", "questions", "new_answer", "new_answer_alias", "new_single_hops"])


def is_turns(value: Any) -> bool:
    """Return whether a value is a list of turns of a conversation."""
    turns = value if isinstance(value, list) else []
    return bool(turns) and all(isinstance(turn, Mapping) and _speaker(turn) for turn in turns)


def _speaker(turn: Record) -> str:
    """Return the speaker of a turn, {"role", "content"} or {"from", "value"}; empty text for anything else."""
    return str(turn.get("role", turn.get("from", ""))).casefold() if "content" in turn or "value" in turn else ""


def is_case(record: Record) -> bool:
    """Return whether a record is a case of MQuAKE."""
    return isinstance(record.get("requested_rewrite"), (list, tuple))


def edits_of(record: Record) -> Iterator[Record]:
    """Yield the edits of a case of MQuAKE (arXiv 2305.14795), each with its own question; any other record itself.

    The questions of a case, three phrasings of one (section 3.3), have a new answer that follows from all its edits:
    they are `portability` of the last edit and need the others. Aliases of an edit's object are in its single hop.
    """
    if not is_case(record):
        yield record
        return
    rewrites, case = record["requested_rewrite"], record.get("case_id")
    if not rewrites:
        raise FactError("requested_rewrite is empty; expected at least one edit")
    listed = record.get("new_single_hops")
    hops = [_object("an item of new_single_hops", hop) for hop in listed] if isinstance(listed, list) else []
    needs: list[str] = []
    for number, item in enumerate(rewrites, start=1):
        request = dict(_object("an item of requested_rewrite", item))
        question, new = request.pop("question", None), texts_of(request.get("target_new"))
        own_hops = [hop for hop in hops if (hop.get("question"), hop.get("answer")) == (question, *new[:1])]
        request |= {"paraphrases": question, "target_aliases": [hop.get("answer_alias") for hop in own_hops]}
        if case is not None:
            request["case_id"] = case if len(rewrites) == 1 else f"{case}.{number}"
        if number == len(rewrites):
            request["portability"] = _follows(record, tuple(needs))
        needs.append(fill(str(request.get("prompt")), str(request.get("subject")).strip()))
        yield request


def _follows(case: Record, needs: tuple[str, ...]) -> list[Probe]:
    """Return the questions of a case with its new answer, for which the prompts `needs` must be edited, too."""
    questions, answer = texts_of(case.get("questions")), texts_of(case.get("new_answer"))
    if questions and not answer:
        raise FactError("new_answer is missing")
    aliases = texts_of(case.get("new_answer_alias"))
    return [Probe(question, answer[0], MULTI_HOP, aliases, needs) for question in questions]


def in_one_prompt(record: Record) -> Record:
    """Write the prompt of a record into one field, where it stands in several or in a conversation."""
    if (name := next((key for key in record if normal(str(key)) in TURNS), None)) and isinstance(record[name], list):
        return {**_without(record, name), **_conversation(name, record[name])}
    if any(map(is_turns, record.values())):  # a prompt and its completion, chosen or rejected, as conversations
        return {key: _turns_text(str(key), value) if is_turns(value) else value for key, value in record.items()}
    if texts_of(record.get("instruction")) and texts_of(record.get("input")):
        return {**_without(record, "instruction", "input"), "prompt": f"{record['instruction']}\n{record['input']}"}
    before, after = record.get("relation_prefix"), record.get("relation_suffix")
    if isinstance(before, str) and isinstance(after, str):
        # The hub's `counterfact-tracing`, whose subject includes the space in front of it.
        space = " " if str(record.get("subject")).startswith(" ") else ""
        return {**_without(record, "relation_prefix", "relation_suffix"), "prompt": f"{before}{space}{SLOT}{after}"}
    return record


def _conversation(name: str, turns: Sequence[Any]) -> Record:
    """Return the question and the answer of a conversation."""
    questions, answers = _spoken(name, turns, ASKS), _spoken(name, turns, ANSWERS)
    if len(questions) != 1 or len(answers) != 1:
        counts = f"{len(questions)} questions and {len(answers)} answers"
        raise FactError(f"{name} has {counts}; one question with one answer was expected", kind="no single question")
    return {"prompt": questions[0], "target": answers[0]}


def _turns_text(name: str, turns: Sequence[Any]) -> Any:
    """Return the text of a field that is a conversation: its question if the field is a prompt, else its answer."""
    role = role_of((name,))
    asks = role is not None and role[0] == "prompt"
    spoken = _spoken(name, turns, ASKS if asks else ANSWERS)
    if len(_spoken(name, turns, ASKS)) > 1 or len(spoken) != 1:
        counts = f"{len(spoken)} {'questions' if asks else 'answers'} in {len(turns)} turns"
        raise FactError(f"{name} has {counts}; one question with one answer was expected", kind="no single question")
    return spoken[0]


def _spoken(name: str, turns: Sequence[Any], speakers: frozenset[str]) -> list[Any]:
    listed = [_object(f"a turn of {name}", turn) for turn in turns]
    return [turn.get("content", turn.get("value")) for turn in listed if _speaker(turn) in speakers]


def _without(record: Record, *names: str) -> dict[str, Any]:
    return {key: value for key, value in record.items() if key not in names}


def _object(name: str, value: object) -> Record:
    if not isinstance(value, Mapping):
        raise FactError(f"{name} must be an object, found {show(value)}")
    return value
