"""Find the records in a value of JSON or YAML: itself, the items of lists and objects, or the rows of tables.

Fields beside a list of records belong to each of them: for example the prompt of a relation whose subjects are listed,
or a title, which is then reported as not read.
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
# Roles that records may share; probes belong to one record, and so do the roles that identify it.
SHARED = frozenset({"prompt", "subject", "relation"})
OWN = frozenset({"case_id", "occurrence", "previous"}) | OBJECTS


def records_in(value: Any) -> list[Any]:
    """Return the records that a value holds, or the value alone where it holds none."""
    if isinstance(value, list):
        return _from_rows(value) or [record for item in value for record in _records_inside(item)]
    if not isinstance(value, Mapping):
        return [value]
    if pairs := _questions_with_answers(value):
        return pairs
    if numbered := _by_number(value):
        return numbered
    return _from_rows([value.get("columns"), value.get("data")]) or _from_columns(value) or _records_inside(value)


def _records_inside(value: Any) -> list[Any]:
    """Return the records in the lists and objects of an object, each with the fields beside them."""
    if not isinstance(value, Mapping) or _is_record(value) or "test_queries" in value:  # probes of RippleEdits
        return [value]
    inside = [item for key, item in value.items() if isinstance(item, Mapping) and _may_hold(key)]
    if groups := [records for item in inside if len(records := _by_number(item) or _by_name(item)) > 1]:
        return [record for records in groups for record in records]
    if named := _by_name(value):
        return named
    lists = {key: records_in(item) for key, item in value.items() if _is_list(item)}
    full = {key: records for key, records in lists.items() if _may_hold(key) and any(map(_says_object, records))}
    roles = roles_of({key: item for key, item in value.items() if key not in full})
    if "prompt" in roles and (not full or "subject" in roles or roles & OBJECTS):
        return [value]
    chosen = full or {key: records for key, records in lists.items() if role_of((str(key),)) is None}
    listed = [record for records in chosen.values() for record in records]
    shared = {key: item for key, item in value.items() if key not in chosen and roles_of({key: item}).isdisjoint(OWN)}
    if not chosen:
        groups = [_records_inside(item) for item in value.values() if isinstance(item, Mapping)]
        return [record for records in groups for record in records if records[0] not in value.values()] or [value]
    if len(listed) > 1 and not roles_of(shared) <= SHARED:
        return [value]
    return [{**shared, **record} if isinstance(record, Mapping) else record for record in listed]


def _is_record(value: Record) -> bool:
    return is_case(value) or any(normal(str(key)) in TURNS for key in value)


def _says_object(value: Any) -> bool:
    """Return whether an item of a list is a whole record, and not only part of one."""
    return isinstance(value, Mapping) and (_is_record(value) or not roles_of(value).isdisjoint(OBJECTS))


def _is_list(value: Any) -> bool:
    """Return whether a value is a list of objects, or of rows under a header."""
    return isinstance(value, list) and (any(isinstance(item, Mapping) for item in value) or bool(_from_rows(value)))


def _may_hold(key: Any) -> bool:
    """Return whether a list of this name may hold records: not the probes of one, nor results."""
    role = role_of((str(key),))
    return normal(str(key)) not in CLOSED and (role is None or role[0] == "prompt")


def _questions_with_answers(value: Record) -> list[Any]:
    """Return the records of a mapping from prompts to target objects; none for any other."""
    asks = all(
        isinstance(item, str) and " " in str(key).strip() and not role_of((str(key),)) for key, item in value.items()
    )
    return [{"prompt": key, "target": item} for key, item in value.items()] if asks else []


def _by_number(value: Record) -> list[Any]:
    numbered = all(isinstance(item, Mapping) and str(key).isdecimal() for key, item in value.items())
    return list(value.values()) if numbered else []


def _by_name(value: Record) -> list[Any]:
    """Return the records of an object whose keys are their subjects, or "edit_1", "edit_2"; none for languages."""
    if not value or not all(isinstance(item, Mapping) for item in value.values()):
        return []
    languages = [is_language(str(key)) for key in value]
    if all(languages) or any(role_of((str(key),)) is not None for key in value):
        return []
    if not all("prompt" in (roles := roles_of(item)) and roles & OBJECTS for item in value.values()):
        return []
    records = [_about(str(key), item) for key, item in value.items()]
    if any(languages) and len({_text("subject", record) for record in records}) < len(records):
        return []  # one subject in several languages, and a part of another name
    alike = len({normal(str(key)) for key in value}) == 1 < len(value)
    return records if alike or all("subject" in roles_of(record) for record in records) else []


def _about(name: str, record: Record) -> Record:
    """Return a record with its key `name` as its subject, if it has none and its prompt has a slot or that name."""
    if "subject" in roles_of(record):
        return record
    prompt = with_slot(_text("prompt", record))
    return {"subject": name, **record} if SLOT in prompt or name in prompt else record


def _text(role: str, record: Record) -> str:
    """Return the first text of a role in a record; empty text where it has none."""
    values = [texts_of(value) for path, value in entries(record) if (ranked := role_of(path)) and ranked[0] == role]
    return str(next((text for texts in values for text in texts), ""))


def _from_rows(value: list[Any]) -> list[dict[str, Any]]:
    """Return the rows under a header: of a list of lists that begins with it, or of it and a list of rows."""
    if len(value) == 2 and isinstance(value[1], list) and all(isinstance(row, list) for row in value[1]):
        value = [value[0], *value[1]]
    if len(value) < 2 or not all(isinstance(row, list) for row in value):
        return []
    header, *rows = value
    if not all(isinstance(cell, str) for cell in header) or not any(role_of((cell,)) for cell in header):
        return []
    return [dict(zip(header, row, strict=False)) for row in rows]


def _from_columns(value: Record) -> list[dict[str, Any]]:
    """Return the rows of an object of columns, lists of one length or {"0": …, "1": …}; none for any other."""
    columns = {key: cells for key, item in value.items() if (cells := _column(item)) is not None}
    roles = {key: role[0] for key in columns if (role := role_of((str(key),))) is not None}
    in_columns = {*roles.values()}
    if "target" not in in_columns and "subject" not in roles_of(value) - in_columns:
        roles = {key: role.replace("answer", "target") for key, role in roles.items()}
    lengths = {len(columns[key]) for key, role in roles.items() if role in ("subject", "prompt", "target")}
    if len(lengths) != 1 or not {"prompt", "target"} <= {*roles.values()}:
        return []
    (count,) = lengths
    return [{key: _at(item, i, count) for key, item in value.items()} for i in range(count)]


def _column(value: Any) -> list[Any] | None:
    if isinstance(value, Mapping):
        return list(value.values()) if value and all(str(key).isdecimal() for key in value) else None
    return value if isinstance(value, list) and not is_turns(value) else None


def _at(value: Any, i: int, count: int) -> Any:
    """Return the value in row `i` of `count`: the cell of a column, the cells of an object of columns, else `value`."""
    column = _column(value)
    if column is not None:
        alone = count == 1 and isinstance(value, list)  # kept: a list of one text is read as that text is
        return column[i] if len(column) == count and not alone else value
    return {key: _at(item, i, count) for key, item in value.items()} if isinstance(value, Mapping) else value
