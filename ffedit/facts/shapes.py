"""Shapes that say something else than the names of their fields do, rewritten into records of plain names.

Records in several languages, the cases of MQuAKE, conversations, an instruction with its input, a prompt in front of
the subject and one behind it. Every other record is left as it is.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ffedit.errors import FactError
from ffedit.facts.fact import MULTI_HOP, SLOT, Probe, fill, show
from ffedit.facts.synonyms import CLOSED, normal, role_of
from ffedit.facts.values import Record, entries, texts_of

TURNS = frozenset({"messages", "conversations", "conversation", "dialogue", "turns"})
ASKS, ANSWERS = frozenset({"user", "human", "prompter"}), frozenset({"assistant", "gpt", "model", "bot"})
# What is read of a case of MQuAKE.
OF_CASE = frozenset(["case_id", "requested_rewrite", "questions", "new_answer", "new_answer_alias", "new_single_hops"])


def in_language(record: Record, language: str | None) -> tuple[Record, Record]:
    """Return the part of a record in `language`, and the parts in the others by language.

    Without a language a record of one part, or of none, is returned whole. Raises FactError for several without a
    choice, and for a language that the record is not in.
    """
    keys = {str(key).casefold(): key for key, value in record.items() if _is_part(str(key), value)}
    if language is None and len(keys) < 2:
        return record, {}
    if language is None or language.casefold() not in keys:
        there = ", ".join(map(str, keys.values()))
        chosen = f"the record is in {there}; choose one: --language {next(iter(keys.values()), '')}"
        absent = f"the record has no part in {language}, {f'only in {there}' if there else 'nor in any language'}"
        raise FactError(chosen if language is None else absent, kind="no part in the language")
    chosen = record[keys.pop(language.casefold())]
    common = {key: value for key, value in record.items() if value is not chosen and key not in keys.values()}
    return {**common, **chosen}, {key: record[key] for key in keys.values()}


def _is_part(key: str, value: Any) -> bool:
    """Return whether a value of a record has a prompt and an object of its own."""
    if not isinstance(value, Mapping) or role_of((key,)) is not None or normal(key) in CLOSED:
        return False
    roles = {role[0] for path, _ in entries(value) if (role := role_of(path)) is not None}
    return "prompt" in roles and not roles.isdisjoint({"target", "answer"})


def is_record(value: Record) -> bool:
    """Return whether an object is a record, and does not only hold some."""
    roles = {role[0] for path, _ in entries(value) if (role := role_of(path)) is not None}
    return "prompt" in roles or is_case(value) or any(normal(str(key)) in TURNS for key in value)


def is_case(record: Record) -> bool:
    """Return whether a record is a case of MQuAKE."""
    return isinstance(record.get("requested_rewrite"), (list, tuple))


def edits_of(record: Record) -> Iterator[Record]:
    """Yield the edits of a case of MQuAKE (arXiv 2305.14795), each with its own question; any other record itself.

    The new answer to a case's questions follows from its edits: portability of the last one, which needs the others
    to be edited as well. The questions are three phrasings of one, and a case counts once, as answered if any phrasing
    is (section 3.3). Aliases of the new answer are `new_answer_alias`; those of an edit's object are in the single
    hop that asks for it.
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
        asking = [hop for hop in hops if (hop.get("question"), hop.get("answer")) == (question, *new[:1])]
        request |= {"paraphrases": question, "target_aliases": [hop.get("answer_alias") for hop in asking]}
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
    """Write the prompt of a record into one field, where it stands in several."""
    if (name := next((key for key in record if normal(str(key)) in TURNS), None)) and isinstance(record[name], list):
        return {**_without(record, name), **_conversation(name, record[name])}
    if texts_of(record.get("instruction")) and texts_of(record.get("input")):
        return {**_without(record, "instruction", "input"), "prompt": f"{record['instruction']}\n{record['input']}"}
    before, after = record.get("relation_prefix"), record.get("relation_suffix")
    if isinstance(before, str) and isinstance(after, str):
        # The hub's `counterfact-tracing`, whose subject includes the space in front of it.
        space = " " if str(record.get("subject")).startswith(" ") else ""
        return {**_without(record, "relation_prefix", "relation_suffix"), "prompt": f"{before}{space}{SLOT}{after}"}
    return record


def _conversation(name: str, turns: Sequence[Any]) -> Record:
    """Return question and answer of a conversation, as {"role", "content"} or {"from", "value"}."""
    said: dict[str, list[Any]] = {"prompt": [], "target": []}
    for item in turns:
        turn = _object(f"a turn of {name}", item)
        speaker = str(turn.get("role", turn.get("from"))).casefold()
        if speaker in ASKS | ANSWERS:
            said["prompt" if speaker in ASKS else "target"].append(turn.get("content", turn.get("value")))
    questions, answers = said.values()
    if len(questions) != 1 or len(answers) != 1:
        found = f"{len(questions)} questions and {len(answers)} answers"
        raise FactError(f"{name} has {found}; one question with one answer was expected", kind="no single question")
    return {"prompt": questions[0], "target": answers[0]}


def _without(record: Record, *names: str) -> dict[str, Any]:
    return {key: value for key, value in record.items() if key not in names}


def _object(name: str, value: object) -> Record:
    if not isinstance(value, Mapping):
        raise FactError(f"{name} must be an object, found {show(value)}")
    return value
