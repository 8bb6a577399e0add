"""Split records in several languages: the part in the language to write, and the parts in the others.

A part is an object under a language's code or English name, {"en": {...}, "de": {...}}, or the fields whose names begin
or end in that, prompt_en and prompt_de.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from ffedit.errors import FactError
from ffedit.facts.synonyms import CLOSED, normal, role_of
from ffedit.facts.values import Record, roles_of

# ISO 639-1 codes, and English names.
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


def is_language(name: str) -> bool:
    """Return whether a field's name is that of a language: "en", "zh-CN", "German"."""
    language, *region = re.split("[-_]", name.casefold())
    return language in LANGUAGES and all(len(text) <= 4 for text in region)


def in_language(record: Record, language: str | None) -> tuple[Record, Record]:
    """Return the part of a record in `language`, and the parts in other languages by their keys.

    Without a language, the first is the fields beside the parts, if they have a prompt and an object, or the whole
    record of at most one part. Raises FactError for several parts without a language, and for one that is missing.
    """
    record = _by_language(record)
    keys = {str(key).casefold(): key for key, value in record.items() if _is_part(str(key), value)}
    wanted = None if language is None else language.casefold()
    keys = {name: key for name, key in keys.items() if is_language(name) or name == wanted}
    if language is None:
        beside = {key: value for key, value in record.items() if key not in keys.values()}
        if keys and _has_both(beside):
            return beside, {key: record[key] for key in keys.values()}
        if len(keys) < 2:
            return record, {}
    if wanted is None or wanted not in keys:
        listed = ", ".join(map(str, keys.values()))
        several = f"the record is in {listed}; choose one: --language {next(iter(keys.values()), '')}"
        absent = f"the record has no text in {language}, {f'only in {listed}' if listed else 'nor in any language'}"
        raise FactError(several if language is None else absent, kind="no text in the language")
    chosen = record[keys.pop(wanted)]
    common = {key: value for key, value in record.items() if value is not chosen and key not in keys.values()}
    return {**common, **chosen}, {key: record[key] for key in keys.values()}


def _by_language(record: Record) -> Record:
    """Move fields with a language in their names into its part, if that has an object and a prompt or paraphrase."""
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
        # "prompt_id" beside "prompt" is an identifier, not Indonesian.
        if not _has_both(part) or (language == "id" and _has_both(record)):
            del parts[language]
    moved = {key for language in parts for key in keys[language]}
    return {**{key: value for key, value in record.items() if key not in moved}, **parts} if parts else record


def _is_part(key: str, value: Any) -> bool:
    return isinstance(value, Mapping) and role_of((key,)) is None and normal(key) not in CLOSED and _has_both(value)


def _has_both(value: Record) -> bool:
    """Return whether a mapping has the prompt and the object of a fact."""
    return "prompt" in (roles := roles_of(value)) and not roles.isdisjoint({"target", "answer"})
