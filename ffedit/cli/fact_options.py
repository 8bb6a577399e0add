"""Options for facts: files of facts and how to read them, or one fact in words."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import rich_click as click
from click import get_current_context

from ffedit.cli.options import Command
from ffedit.cli.surface import Surface
from ffedit.errors import EditError
from ffedit.facts.fact import Fact
from ffedit.facts.formats import Shape
from ffedit.facts.reading import Sifted, sift_facts

IN_RECIPE = "ffedit.facts"  # in click's `Context.meta`: the facts that stand in a recipe, instead of FACTS


@dataclass(frozen=True)
class Reading:
    """Options of reading facts: the records' fields by name, the language to edit, whether bad records are skipped."""

    fields: Mapping[str, str]
    language: str | None
    skip_bad: bool

    def sift(self, sources: str | Sequence[str], surface: Surface, **use: Any) -> Sifted:
        """Read the sources, and note what was left out. Raises FactError for a bad record unless these are skipped."""
        sifted = sift_facts(sources, fields=self.fields, language=self.language, **use)
        if not self.skip_bad:
            sifted.whole()
        for note in (*sifted.refused(), *sifted.noted()):
            surface.note(note)
        return sifted


def _fields(context: click.Context, option: click.Parameter, texts: Sequence[str]) -> dict[str, str]:
    """Parse `--map` into the names of the records' fields by the fields of a fact."""
    pairs = [pair.partition("=") for text in texts for pair in text.split(",")]
    for name, equals, path in pairs:
        if not (name.strip() and equals and path.strip()):
            raise EditError(f"--map {','.join(texts)!r} is not known; write it like target=object,prompt=question")
    fields = {name.strip(): path.strip() for name, _, path in pairs}
    Shape(fields)
    return fields


def reading_options(command: Command) -> Command:
    """Add `--map`, `--language` and `--skip-bad`; the command receives `reading`."""

    @click.option(
        "--map",
        "fields",
        multiple=True,
        callback=_fields,
        metavar="NAME=FIELD,…",
        help="Fields that ffedit does not recognise: target=object,prompt=question; dots lead into nested records.",
    )
    @click.option("--language", help="Language to edit, such as en, if records have several; others are only measured.")
    @click.option("--skip-bad", is_flag=True, help="Leave out the records that cannot be used, and list them.")
    @functools.wraps(command)
    def wrapped(
        sources: tuple[str, ...], fields: dict[str, str], language: str | None, skip_bad: bool, **kwargs: Any
    ) -> Any:
        if not sources and (fields or language is not None or skip_bad):
            raise click.UsageError("--map, --language and --skip-bad apply to FACTS; name a file")
        return command(sources=sources, reading=Reading(fields, language, skip_bad), **kwargs)

    return wrapped  # type: ignore[return-value]


def fact_options(command: Command) -> Command:
    """Add FACTS or a fact in words; the command receives `facts`, and the skipped records by kind as `left_out`."""
    needs_target = command.__name__ != "locate"

    @click.argument("sources", nargs=-1, metavar="[FACTS]...")
    @click.option("--subject", help="The subject of a fact, instead of FACTS.")
    @click.option("--prompt", help="Its prompt, which contains {} or the subject.")
    @click.option("--target", help="The new object.")
    @click.option("--previous", help="The old object, which the model says now.")
    @reading_options
    @functools.wraps(command)
    def wrapped(
        sources: tuple[str, ...],
        subject: str,
        prompt: str,
        target: str,
        previous: str,
        reading: Reading,
        surface: Surface,
        **kwargs: Any,
    ) -> Any:
        in_recipe: list[Fact] = get_current_context().meta.get(IN_RECIPE, [])
        in_words = subject is not None or prompt is not None
        if bool(sources or in_recipe) == in_words:
            raise click.UsageError(
                "give either FACTS (files, a data set, or - for standard input) or --subject and --prompt"
            )
        if in_words:
            if subject is None or prompt is None or (target is None and needs_target):
                raise click.UsageError("--subject, --prompt and --target belong together")
            return command(facts=[Fact(subject, prompt, target, previous)], surface=surface, **kwargs)
        if target is not None or previous is not None:
            raise click.UsageError("FACTS names its own objects; --target and --previous belong to --subject")
        if in_recipe:
            return command(facts=in_recipe, surface=surface, **kwargs)
        sifted = reading.sift(sources, surface, need_targets=needs_target)
        skipped = {"left_out": sifted.by_kind} if sifted.left_out else {}
        return command(facts=list(sifted.facts), surface=surface, **skipped, **kwargs)

    return wrapped  # type: ignore[return-value]
