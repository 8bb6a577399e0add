"""The records that a value of JSON or YAML holds: itself, the items of lists and objects, or the rows of tables.

What stands beside a list of records belongs to each of them: the prompt of a relation whose subjects are listed, say,
or a title, which is named as not read.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ffedit.facts.fact import SLOT
from ffedit.facts.languages import is_language
from ffedit.facts.shapes import TURNS, is_case, is_turns
from ffedit.facts.synonyms import CLOSED, normal, role_of
from ffedit.facts.values import Record, entries, roles_of, texts_of, with_slot

OBJECTS = frozenset({"target", "answer"})
# What records may have in common; their probes are of one record, and so is what names it.
SHARED = frozenset({"prompt", "subject", "relation"})
OWN = frozenset({"case_id", "occurrence", "previous"}) | OBJECTS


def records_in(value: Any) -> list[Any]:
    """Return the records that a value holds, or the value alone where it holds none."""
    if isinstance(value, list):
        return _from_rows(value) or [record for item in value for record in _held(item)]
    if not isinstance(value, Mapping):
        return [value]
    if pairs := _questions_with_answers(value):
        return pairs
    if numbered := _by_number(value):
        return numbered
    return _from_rows([value.get("columns"), value.get("data")]) or _from_columns(value) or _held(value)


def _held(value: Any) -> list[Any]:
    """Return the records in the lists and objects of an object, each with what stands beside them."""
    if not isinstance(value, Mapping) or _is_one(value):
        return [value]
    inside = [held for key, held in value.items() if isinstance(held, Mapping) and _may_hold(key)]
    if many := [records for held in inside if len(records := _by_number(held) or _by_name(held)) > 1]:
        return [record for records in many for record in records]
    if named := _by_name(value):
        return named
    lists = {key: records_in(held) for key, held in value.items() if _is_list(held)}
    full = {key: held for key, held in lists.items() if _may_hold(key) and any(map(_says_object, held))}
    roles = roles_of({key: held for key, held in value.items() if key not in full})
    if "prompt" in roles and (not full or "subject" in roles or roles & OBJECTS):
        return [value]
    chosen = full or {key: held for key, held in lists.items() if role_of((str(key),)) is None}
    items = [item for held in chosen.values() for item in held]
    rest = {key: held for key, held in value.items() if key not in chosen and roles_of({key: held}).isdisjoint(OWN)}
    if not chosen:
        within = [_held(held) for held in value.values() if isinstance(held, Mapping)]
        return [record for records in within for record in records if records[0] not in value.values()] or [value]
    if len(items) > 1 and not roles_of(rest) <= SHARED:
        return [value]
    return [{**rest, **item} if isinstance(item, Mapping) else item for item in items]


def _is_one(value: Record) -> bool:
    return is_case(value) or any(normal(str(key)) in TURNS for key in value)


def _says_object(value: Any) -> bool:
    """Return whether an item of a list is a record of its own, and not only part of one."""
    return isinstance(value, Mapping) and (_is_one(value) or not roles_of(value).isdisjoint(OBJECTS))


def _is_list(value: Any) -> bool:
    """Return whether a value is a list of objects, or of rows under a header."""
    return isinstance(value, list) and (any(isinstance(item, Mapping) for item in value) or bool(_from_rows(value)))


def _may_hold(key: Any) -> bool:
    """Return whether a list of this name may hold records: not the probes of one, nor results."""
    role = role_of((str(key),))
    return normal(str(key)) not in CLOSED and (role is None or role[0] == "prompt")


def _questions_with_answers(value: Record) -> list[Any]:
    """Return the records of an object whose names are the prompts, and whose values the objects."""
    whole = all(
        isinstance(held, str) and " " in str(key).strip() and not role_of((str(key),)) for key, held in value.items()
    )
    return [{"prompt": key, "target": held} for key, held in value.items()] if whole else []


def _by_number(value: Record) -> list[Any]:
    held = list(value.values())
    return held if all(isinstance(held, Mapping) and str(key).isdecimal() for key, held in value.items()) else []


def _by_name(value: Record) -> list[Any]:
    """Return the records of an object that has each by its subject, or as "edit_1", "edit_2"; not by language."""
    if not value or not all(isinstance(held, Mapping) for held in value.values()):
        return []
    if any(is_language(str(key)) or role_of((str(key),)) is not None for key in value):
        return []
    if not all("prompt" in (roles := roles_of(held)) and roles & OBJECTS for held in value.values()):
        return []
    records = [_about(str(key), held) for key, held in value.items()]
    alike = len({normal(str(key)) for key in value}) == 1 < len(value)
    return records if alike or all("subject" in roles_of(record) for record in records) else []


def _about(name: str, record: Record) -> Record:
    """Return a record with its name as its subject, where it has none and its prompt is about that name."""
    if "subject" in roles_of(record):
        return record
    prompts = [texts_of(held) for path, held in entries(record) if (role := role_of(path)) and role[0] == "prompt"]
    prompt = str(with_slot(next((text for texts in prompts for text in texts), "")))
    return {"subject": name, **record} if SLOT in prompt or name in prompt else record


def _from_rows(value: list[Any]) -> list[dict[str, Any]]:
    """Return the rows of a list of lists whose first names the columns, or of that one and a list of the others."""
    if len(value) == 2 and isinstance(value[1], list) and all(isinstance(row, list) for row in value[1]):
        value = [value[0], *value[1]]
    if len(value) < 2 or not all(isinstance(row, list) for row in value):
        return []
    header, *rows = value
    if not all(isinstance(cell, str) for cell in header) or not any(role_of((cell,)) for cell in header):
        return []
    return [dict(zip(header, row, strict=False)) for row in rows]


def _from_columns(value: Record) -> list[dict[str, Any]]:
    """Return the rows of an object of columns, lists of one length or {"0": …, "1": …}; none where it is no such."""
    columns = {key: rows for key, held in value.items() if (rows := _column(held)) is not None}
    roles = {key: role[0] for key in columns if (role := role_of((str(key),))) is not None}
    read = {*roles.values()}
    if "target" not in read and "subject" not in roles_of(value) - read:
        roles = {key: role.replace("answer", "target") for key, role in roles.items()}
    lengths = {len(columns[key]) for key, role in roles.items() if role in ("subject", "prompt", "target")}
    if len(lengths) != 1 or not {"prompt", "target"} <= {*roles.values()}:
        return []
    (count,) = lengths
    return [{key: _at(held, i, count) for key, held in value.items()} for i in range(count)]


def _column(value: Any) -> list[Any] | None:
    if isinstance(value, Mapping):
        return list(value.values()) if value and all(str(key).isdecimal() for key in value) else None
    return value if isinstance(value, list) and not is_turns(value) else None


def _at(value: Any, i: int, count: int) -> Any:
    """Return what belongs to row `i` of `count`: of a column its cell, of an object of columns that of each."""
    column = _column(value)
    if column is not None:
        alone = count == 1 and isinstance(value, list)  # of one row, a list is read as its only text is
        return column[i] if len(column) == count and not alone else value
    return {key: _at(held, i, count) for key, held in value.items()} if isinstance(value, Mapping) else value
