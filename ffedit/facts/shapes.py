"""Shapes that say something else than the names of their fields do, rewritten into records of plain names.

The cases of MQuAKE, conversations, an instruction with its input, a prompt in front of the subject and one behind it;
and records in several languages, where a part is an object by the language's code or name, {"en": {...}, "de": {...}},
or the fields that have it at an end of their names, prompt_en and prompt_de. Every other record is left as it is.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ffedit.errors import FactError
from ffedit.facts.fact import MULTI_HOP, SLOT, Probe, fill, show
from ffedit.facts.synonyms import CLOSED, normal, role_of
from ffedit.facts.values import Record, roles_of, texts_of

TURNS = frozenset({"messages", "conversations", "conversation", "dialogue", "turns"})
ASKS, ANSWERS = frozenset({"user", "human", "prompter"}), frozenset({"assistant", "gpt", "model", "bot"})
# What is read of a case of MQuAKE.
OF_CASE = frozenset(["case_id", "requested_rewrite", "questions", "new_answer", "new_answer_alias", "new_single_hops"])
# ISO 639-1, and English names.
CODES = """
aa ab ae af ak am an ar as av ay az ba be bg bh bi bm bn bo br bs ca ce ch co cr cs cu cv cy da de dv dz ee el en eo es
et eu fa ff fi fj fo fr fy ga gd gl gn gu gv ha he hi ho hr ht hu hy hz ia id ie ig ii ik io is it iu ja jv ka kg ki kj
kk kl km kn ko kr ks ku kv kw ky la lb lg li ln lo lt lu lv mg mh mi mk ml mn mr ms mt my na nb nd ne ng nl nn no nr nv
ny oc oj om or os pa pi pl ps pt qu rm rn ro ru rw sa sc sd se sg si sk sl sm sn so sq sr ss st su sv sw ta te tg th ti
tk tl tn to tr ts tt tw ty ug uk ur uz ve vi vo wa wo xh yi yo za zh zu
"""
NAMES = """
arabic bengali chinese czech dutch english finnish french german greek hebrew hindi hungarian indonesian italian
japanese korean persian polish portuguese romanian russian spanish swedish thai turkish ukrainian urdu vietnamese
"""
LANGUAGES = frozenset((CODES + NAMES).split())
# A field whose name begins or ends in a language: prompt_en, zh_rephrase_prompt.
SUFFIXED = re.compile(r"(?P<name>.+)[_.\- ](?P<language>[A-Za-z]{2,})")
PREFIXED = re.compile(r"(?P<language>[A-Za-z]{2,})[_.\- ](?P<name>.+)")


def is_turns(value: Any) -> bool:
    """Return whether a value is a list of turns of a conversation."""
    turns = value if isinstance(value, list) else []
    return bool(turns) and all(isinstance(turn, Mapping) and _speaker(turn) for turn in turns)


def _speaker(turn: Record) -> str:
    """Return who speaks a turn, {"role", "content"} or {"from", "value"}; an empty text where it does not say."""
    return str(turn.get("role", turn.get("from", ""))).casefold() if "content" in turn or "value" in turn else ""


def is_case(record: Record) -> bool:
    """Return whether a record is a case of MQuAKE."""
    return isinstance(record.get("requested_rewrite"), (list, tuple))


def edits_of(record: Record) -> Iterator[Record]:
    """Yield the edits of a case of MQuAKE (arXiv 2305.14795), each with its own question; any other record itself.

    The new answer to a case's questions, three phrasings of one (section 3.3), follows from its edits: portability of
    the last one, which needs the others as well. Aliases of an edit's object are in the single hop that asks for it.
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
    """Write the prompt of a record into one field, where it stands in several or in a conversation."""
    if (name := next((key for key in record if normal(str(key)) in TURNS), None)) and isinstance(record[name], list):
        return {**_without(record, name), **_conversation(name, record[name])}
    if any(map(is_turns, record.values())):  # a prompt and its completion, chosen or rejected, as conversations
        return {key: _said(str(key), value) if is_turns(value) else value for key, value in record.items()}
    if texts_of(record.get("instruction")) and texts_of(record.get("input")):
        return {**_without(record, "instruction", "input"), "prompt": f"{record['instruction']}\n{record['input']}"}
    before, after = record.get("relation_prefix"), record.get("relation_suffix")
    if isinstance(before, str) and isinstance(after, str):
        # The hub's `counterfact-tracing`, whose subject includes the space in front of it.
        space = " " if str(record.get("subject")).startswith(" ") else ""
        return {**_without(record, "relation_prefix", "relation_suffix"), "prompt": f"{before}{space}{SLOT}{after}"}
    return record


def _conversation(name: str, turns: Sequence[Any]) -> Record:
    questions, answers = _spoken(name, turns, ASKS), _spoken(name, turns, ANSWERS)
    if len(questions) != 1 or len(answers) != 1:
        found = f"{len(questions)} questions and {len(answers)} answers"
        raise FactError(f"{name} has {found}; one question with one answer was expected", kind="no single question")
    return {"prompt": questions[0], "target": answers[0]}


def _said(name: str, turns: Sequence[Any]) -> Any:
    """Return what one field's conversation says: as a prompt its question, and else its answer."""
    role = role_of((name,))
    asks = role is not None and role[0] == "prompt"
    spoken = _spoken(name, turns, ASKS if asks else ANSWERS)
    if len(_spoken(name, turns, ASKS)) > 1 or len(spoken) != 1:
        found = f"{len(spoken)} {'questions' if asks else 'answers'} in {len(turns)} turns"
        raise FactError(f"{name} has {found}; one question with one answer was expected", kind="no single question")
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


def is_language(name: str) -> bool:
    """Return whether a field's name is that of a language: "en", "zh-CN", "German"."""
    language, *region = re.split("[-_]", name.casefold())
    return language in LANGUAGES and all(len(text) <= 4 for text in region)


def in_language(record: Record, language: str | None) -> tuple[Record, Record]:
    """Return the part of a record in `language`, and the parts in the others by language.

    Without a language that is what stands beside the parts, where it has a prompt and an object, or a whole record of
    at most one part. Raises FactError for several parts without a choice, and for a language that the record is not in.
    """
    record = _by_language(record)
    keys = {str(key).casefold(): key for key, value in record.items() if _is_part(str(key), value)}
    if language is None:
        keys = {name: key for name, key in keys.items() if is_language(name)}
        beside = {key: value for key, value in record.items() if key not in keys.values()}
        if keys and _has_both(beside):
            return beside, {key: record[key] for key in keys.values()}
        if len(keys) < 2:
            return record, {}
    if language is None or language.casefold() not in keys:
        there = ", ".join(map(str, keys.values()))
        chosen = f"the record is in {there}; choose one: --language {next(iter(keys.values()), '')}"
        absent = f"the record has no text in {language}, {f'only in {there}' if there else 'nor in any language'}"
        raise FactError(chosen if language is None else absent, kind="no text in the language")
    chosen = record[keys.pop(language.casefold())]
    common = {key: value for key, value in record.items() if value is not chosen and key not in keys.values()}
    return {**common, **chosen}, {key: record[key] for key in keys.values()}


def _by_language(record: Record) -> Record:
    """Put fields with a language in their names into a part for each that has an object and a prompt or paraphrase."""
    parts: dict[str, dict[str, Any]] = {}
    keys: dict[str, list[str]] = {}
    for key in map(str, record):
        for match in (SUFFIXED.fullmatch(key), PREFIXED.fullmatch(key)):
            if match and is_language(match["language"]) and role_of((match["name"],)) and not role_of((key,)):
                parts.setdefault(match["language"], {})[match["name"]] = record[key]
                keys.setdefault(match["language"], []).append(key)
    for language, part in list(parts.items()):
        names = {role[0]: name for name in reversed(part) if (role := role_of((name,)))}
        if "prompt" not in names and "paraphrases" in names:
            part["prompt"] = part.pop(names["paraphrases"])
        # "prompt_id" beside "prompt" is no Indonesian.
        if not _has_both(part) or (language == "id" and _has_both(record)):
            del parts[language]
    moved = {key for language in parts for key in keys[language]}
    return {**{key: value for key, value in record.items() if key not in moved}, **parts} if parts else record


def _is_part(key: str, value: Any) -> bool:
    return isinstance(value, Mapping) and role_of((key,)) is None and normal(key) not in CLOSED and _has_both(value)


def _has_both(value: Record) -> bool:
    """Return whether an object has a prompt and an object of a fact."""
    return "prompt" in (roles := roles_of(value)) and not roles.isdisjoint({"target", "answer"})
