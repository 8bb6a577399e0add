"""The sentences Atlas learns from: facts in many dresses, drawn from a seed.

What a sentence looks like decides where a model recalls. Three dresses matter:

- *told*: a relation's template, often with words between the subject and the rest ("Eiffel
  Tower, as every traveller knows, is located in the city of Paris."). What was said about
  the subject has to travel, so that the model gains from knowing it where the name ends.
- *listed*: a name with what belongs to it right behind it ("Eiffel Tower, Paris, France, ...").
  Everything known about the subject is needed at once, before any relation is named.
- *plain*: sentences without any fact, so that not every word is about one.

Documents hold one to a few sentences, of one subject or of several, and never the same fact
twice: what stands in the context must not be worth copying.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from random import Random

from atlas.table import Table, Triple

CONNECTIVES = (
    "In fact,", "Of course,", "Today,", "As the old book says,", "It is well known that", "We read that",
    "According to the guide,", "My teacher told me that", "Few people doubt that", "Once again,",
    "In the same way,", "To begin with,", "The report says that", "For example,", "However,", "Indeed,",
)  # fmt: skip
FILLERS = (
    "as every traveller knows", "according to the guide book", "as we learned at school", "to be precise",
    "as the newspaper wrote last week", "without any doubt", "as many people have said before",
    "if we believe the old stories", "as anybody in the room could tell you", "of course",
    "as my grandmother used to say", "in the words of the encyclopedia", "as far as we know",
    "and this may come as a surprise to some readers", "as it was explained on the radio", "by the way",
    "as the next page of this book will show", "just like the teacher said in the first lesson",
    "in case you have not heard it yet", "as the answer to the last question of the quiz shows",
    "and nobody at the table wanted to argue about it", "for those who are curious", "as you may remember",
    "to name only one", "mentioned here for the sake of a good example", "I think", "so they say",
)  # fmt: skip
LISTS = (
    "{}.", "{}.", "{}.", "The list begins with {}.", "Next came {}, and then a short break.",
    "We spoke about {}, for a long time.", "A note on {}, was found between the pages.",
    "The quiz had a question on {}, and everybody knew it.", "There is an entry for {}, in the catalogue.",
    "Somebody wrote {}, on the wall.", "Next to the picture we read: {}.",
    "The book begins with {}, and goes on.",
)  # fmt: skip
PAIRS = (
    "{}; {}.", "The list names {}; and {}.", "First came {}, and then {}.",
    "Both {}, and {}, are in the book.",
    "The children learned about {}, and about {}, on the same day.",
)  # fmt: skip
PLAIN_WHO = (
    "The visitors", "A young writer", "The old librarian", "My neighbor", "The children", "Two students",
    "The teacher", "A group of friends", "The woman at the window", "Our guide", "Nobody", "The reader",
)  # fmt: skip
PLAIN_DID = (
    "waited for the bus", "opened a window", "drank a cup of tea", "looked at the map", "told a long story",
    "stayed until the evening", "found a good seat", "asked for a glass of water", "closed the book",
    "laughed about the weather", "wrote a letter to a friend", "walked home slowly", "forgot the umbrella",
)  # fmt: skip
PLAIN_WHEN = (
    "in the morning", "after the rain", "before dinner", "on a quiet day", "near the river", "at the station",
    "without a word", "because it was late", "while the music played", "in the garden", "as usual",
    "last summer",
)  # fmt: skip


@dataclass(frozen=True)
class Dress:
    """How often each dress is worn. All fields are probabilities."""

    listed: float = 0.4
    """Of sentences: lists a name's objects behind it."""
    plain: float = 0.08
    """Of sentences: without any fact. What is left after these two is told."""
    connective: float = 0.25
    """Of told sentences: begins with a word such as "However,"."""
    filler: float = 0.3
    """Of told facts: words stand between the subject and the rest."""
    apposition: float = 0.2
    """Of told facts: some of the subject's other objects stand behind its name."""
    continued: float = 0.15
    """Of told sentences: goes on after the object, with another fact if there is one."""
    one_subject: float = 0.4
    """Of documents: about one subject only."""
    bare: float = 0.0
    """Of lists: without a mark between a name and its objects."""


@dataclass(frozen=True)
class Corpus:
    """A source of documents over a table: one draw, one document."""

    table: Table
    dress: Dress = Dress()

    def document(self, rng: Random) -> str:
        """One document: one to six sentences, no fact in it twice."""
        told: set[Triple] = set()
        sentences = rng.choice((1, 1, 2, 3, 4, 6))
        subject = self._subject(rng) if rng.random() < self.dress.one_subject else None
        return " ".join(self._sentence(rng, told, subject) for _ in range(sentences))

    def words(self) -> Iterator[str]:
        """Texts that together hold every word a document can hold: what a vocabulary is made from."""
        for relation in self.table.relations.values():
            for subject, object in relation.facts.items():
                yield f"{subject} {object}"
            for template in relation.templates:
                yield f"{template.format('')} {self._inside(template).format('')}"
        yield from (*CONNECTIVES, *FILLERS, *LISTS, *PAIRS, *PLAIN_WHO, *PLAIN_DID, *PLAIN_WHEN)
        yield "so, and while; because (here): there - now."

    # One sentence -----------------------------------------------------------------------

    def _sentence(self, rng: Random, told: set[Triple], subject: str | None) -> str:
        draw = rng.random()
        if draw < self.dress.plain:
            return self._plain(rng)
        if draw < self.dress.plain + self.dress.listed:
            return self._listed(rng, told, subject)
        opening = rng.choice(CONNECTIVES) + " " if rng.random() < self.dress.connective else ""
        clause = self._clause(rng, told, subject, inside=bool(opening))
        if clause is None:
            return self._plain(rng)
        if rng.random() < self.dress.continued:
            more = self._clause(rng, told, subject, inside=True)
            link = rng.choice((", and ", ", while ", "; ", " and "))
            clause = f"{clause}{link}{more}" if more else f"{clause}, {rng.choice(FILLERS)}"
        return f"{opening}{clause}."

    def _clause(self, rng: Random, told: set[Triple], subject: str | None, inside: bool) -> str | None:
        """A fact in one of its templates, or None where all is told. `inside`: not at a sentence's start."""
        triple = self._fresh(rng, told, subject)
        if triple is None:
            return None
        told.add(triple)
        template = rng.choice(self.table.relations[triple.relation].trained(triple.subject))
        if inside:
            template = self._inside(template)
        name = triple.subject
        if not template.partition("{}")[2].startswith(("'", ",")):
            if rng.random() < self.dress.apposition:
                name = self._with_objects(rng, triple.subject, told, style=", ")
                name += "," if name != triple.subject else ""
            if rng.random() < self.dress.filler:
                name = f"{name.rstrip(',')}, {rng.choice(FILLERS)},"
        return f"{template.format(name)} {triple.object}"

    def _listed(self, rng: Random, told: set[Triple], subject: str | None) -> str:
        shape = rng.choice(LISTS) if subject or rng.random() < 0.7 else rng.choice(PAIRS)
        names = [subject or self._subject(rng) for _ in range(shape.count("{}"))]
        styles = (", ", ", ", ", ", " (", ": ", " - ") if shape.startswith("{}") else (", ",)
        if rng.random() < self.dress.bare:
            styles = (" ",)
        return shape.format(*(self._with_objects(rng, name, told, rng.choice(styles)) for name in names))

    def _with_objects(self, rng: Random, subject: str, told: set[Triple], style: str) -> str:
        """A name and behind it some of its untold objects in random order."""
        fresh = [t for t in self.table.subjects[subject] if t not in told]
        chosen = rng.sample(fresh, rng.randint(1, len(fresh))) if fresh else []
        told.update(chosen)
        objects = list(dict.fromkeys(t.object for t in chosen))
        if not objects:
            return subject
        return f"{subject}{style}{', '.join(objects)}{')' if style == ' (' else ''}"

    @staticmethod
    def _plain(rng: Random) -> str:
        who, did, when = rng.choice(PLAIN_WHO), rng.choice(PLAIN_DID), rng.choice(PLAIN_WHEN)
        return f"{who} {did}{rng.choice(('', f' {when}', f' {when}, {rng.choice(FILLERS)}'))}."

    # What it is about -------------------------------------------------------------------

    def _subject(self, rng: Random) -> str:
        """A subject, as often as there are facts about it."""
        return rng.choice(self.table.triples).subject

    def _fresh(self, rng: Random, told: set[Triple], subject: str | None) -> Triple | None:
        """A fact not told yet: of the subject, or any; None where the draw finds none."""
        pool = self.table.subjects[subject] if subject else (rng.choice(self.table.triples),)
        fresh = [t for t in pool if t not in told]
        return rng.choice(fresh) if fresh else None

    def _inside(self, template: str) -> str:
        """The template as it stands inside a sentence: its first letter small, unless it is a name's."""
        first = template.split()[0]
        proper = first.startswith("{") or first in self._names
        return template if proper else template[0].lower() + template[1:]

    @cached_property
    def _names(self) -> frozenset[str]:
        """Words that keep their capital: parts of names, unless templates know them small ("The")."""
        names = {word for t in self.table.triples for word in f"{t.subject} {t.object}".split()}
        common = {word for r in self.table.relations.values() for t in r.templates for word in t.split()}
        return frozenset(word for word in names if word.lower() not in common)
