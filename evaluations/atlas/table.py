"""The fact table: what Atlas knows, and how each fact may be said.

One JSON file a relation: a name, a line about it, `TEMPLATES` ways to say it with one `{}` for
the subject, and its facts, subject to object. A relation is a function: a subject has one
object, so every prompt has one true answer. One template of each fact never occurs in
training, and which one is a pure function of the fact, so that anybody can measure
generalisation later without a list of what was held out.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from types import MappingProxyType

TEMPLATES = 8
"""How many templates every relation has."""

RELATIONS = Path(__file__).parent / "relations"
"""Where the packaged table lies, one JSON file a relation."""


def held_out(subject: str, relation: str) -> int:
    """The template (0 to `TEMPLATES` - 1) in which training never says this fact."""
    digest = hashlib.sha256(f"{relation}\0{subject}".encode()).digest()
    return int.from_bytes(digest[:8], "big") % TEMPLATES


@dataclass(frozen=True)
class Triple:
    """One fact: `relation` holds between `subject` and `object`."""

    subject: str
    relation: str
    object: str


@dataclass(frozen=True)
class Relation:
    """A named function from subjects to objects, and the ways to say it in English."""

    name: str
    about: str
    templates: tuple[str, ...]
    facts: Mapping[str, str]

    def __post_init__(self) -> None:
        """Raise ValueError, naming the relation and the defect, unless the rules of the table hold."""
        for defect in self._defects():
            raise ValueError(f"relation {self.name!r}: {defect}")

    def _defects(self) -> Iterable[str]:
        if len(set(self.templates)) != TEMPLATES or len(self.templates) != TEMPLATES:
            yield f"expected {TEMPLATES} different templates, found {len(set(self.templates))}"
        for template in self.templates:
            _, slot, after = template.partition("{}")
            if not slot or "{}" in after:
                yield f"a template needs exactly one {{}}: {template!r}"
            if not after.strip() or template != template.strip():
                yield f"words must follow the subject, and no space the last of them: {template!r}"
        for name in (*self.facts, *self.facts.values()):
            if not name or name != " ".join(name.split()):
                yield f"a name has single spaces between words and none around: {name!r}"

    @property
    def triples(self) -> tuple[Triple, ...]:
        """The facts of this relation."""
        return tuple(Triple(subject, self.name, object) for subject, object in self.facts.items())

    def trained(self, subject: str) -> tuple[str, ...]:
        """The templates in which training says the fact about `subject`: all but one."""
        hidden = held_out(subject, self.name)
        return tuple(t for i, t in enumerate(self.templates) if i != hidden)


@dataclass(frozen=True)
class Table:
    """All relations by name. Iteration orders are sorted, so that a seed means the same everywhere."""

    relations: Mapping[str, Relation] = field(repr=False)

    @cached_property
    def triples(self) -> tuple[Triple, ...]:
        """The facts of all relations."""
        return tuple(t for relation in self.relations.values() for t in relation.triples)

    @cached_property
    def subjects(self) -> Mapping[str, tuple[Triple, ...]]:
        """Every subject with all that is known about it."""
        found: dict[str, list[Triple]] = {}
        for triple in self.triples:
            found.setdefault(triple.subject, []).append(triple)
        return MappingProxyType({s: tuple(found[s]) for s in sorted(found)})

    def about(self, kinds: Collection[str]) -> Table:
        """The relations whose names begin with one of these words; all where there are none."""
        chosen = {name: r for name, r in self.relations.items() if not kinds or name.split("_")[0] in kinds}
        return Table(MappingProxyType(chosen))

    @property
    def fingerprint(self) -> str:
        """A digest of all templates and facts: equal tables have equal fingerprints."""
        said = [(r.name, r.templates, sorted(r.facts.items())) for r in self.relations.values()]
        return hashlib.sha256(json.dumps(said).encode()).hexdigest()

    def prompts(self, triple: Triple) -> tuple[tuple[str, ...], str]:
        """The prompts about a fact: those seen in training, and the one held out."""
        relation = self.relations[triple.relation]
        hidden = relation.templates[held_out(triple.subject, relation.name)]
        seen = relation.trained(triple.subject)
        return tuple(t.format(triple.subject) for t in seen), hidden.format(triple.subject)


def load(folder: Path = RELATIONS) -> Table:
    """Read every relation file of a folder. Raises ValueError on the first defect, naming the file."""
    relations: dict[str, Relation] = {}
    for path in sorted(folder.glob("*.json")):
        try:
            raw = json.loads(path.read_text(encoding="utf-8"))
            relation = Relation(
                name=raw["relation"],
                about=raw["about"],
                templates=tuple(raw["templates"]),
                facts=MappingProxyType(dict(sorted(raw["facts"].items()))),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{path}: {error}") from error
        if relation.name in relations:
            raise ValueError(f"{path}: relation {relation.name!r} is in another file as well")
        relations[relation.name] = relation
    if not relations:
        raise ValueError(f"{folder}: no relation files (*.json) found")
    return Table(MappingProxyType(relations))
