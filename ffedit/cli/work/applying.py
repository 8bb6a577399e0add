"""Stages of `ffedit apply`: locate, write, measure, judge, save."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from time import perf_counter
from typing import Any

from rich.console import Group
from rich.text import Text

import ffedit
from ffedit.cli.destinations import Destinations
from ffedit.cli.options import ModelOptions, Solving, parse_layers
from ffedit.cli.surface import Surface
from ffedit.cli.work import result
from ffedit.cli.work.model import load_model
from ffedit.cli.work.solving import config_of, stats_of
from ffedit.display.figures.plots import heat_maps
from ffedit.display.figures.saving import figure_ready
from ffedit.display.html.result import result_page
from ffedit.display.terminal.heat_map import heat_map
from ffedit.display.terminal.model_table import model_line, short_name
from ffedit.display.terminal.outcome import outcome, worse
from ffedit.display.terminal.plan import plan
from ffedit.display.terminal.recall import reasons
from ffedit.display.terminal.scores import MOST_TOKENS, before_after, verdict_view, what_it_says
from ffedit.display.terminal.shipped import packing
from ffedit.display.terminal.tables import duration, ranges
from ffedit.editor.edit import Edit, applied_edits
from ffedit.editor.methods import METHODS
from ffedit.editor.protect import protected_texts
from ffedit.editor.recipe import recipe_of, to_yaml
from ffedit.editor.statistics import in_cache
from ffedit.evaluator import METRICS, Report, questions
from ffedit.exporter import packed_edit
from ffedit.exporter.gguf import source_file
from ffedit.facts.fact import Fact, by_subject
from ffedit.facts.fact_token import FactToken, check_word
from ffedit.facts.reading import LeftOutRecords
from ffedit.facts.text import counted, quoted
from ffedit.files.atomic import text_ready, write_text
from ffedit.inference.corpus import Corpus
from ffedit.inference.distributed import process_group
from ffedit.layer_choice.choose import ChosenLayer, find_layer, known_layer, spread_below
from ffedit.model.editable import Editable
from ffedit.model.tokenization import decode
from ffedit.progress import Progress
from ffedit.safety.guardrails import Breach, breaches, refusal, warnings
from ffedit.safety.require import Requirement, not_taken, unmet


def apply(dry_run: bool, **options: Any) -> None:
    """Write facts into a model, or with `dry_run` show the facts as they are read, and the steps."""
    application = Application(**options)
    application.plan() if dry_run else application.run()


@dataclass
class Application:
    """Facts to write into a model, and the other options of `apply`.

    Making an instance loads the model, and refuses prompts that the model cannot take, before the long computation.
    """

    surface: Surface
    destinations: Destinations
    solving: Solving
    method: str
    facts: list[Fact]
    model: ModelOptions
    layers: str
    fact_token: FactToken
    spread: int
    require: Sequence[Requirement]
    strict: bool
    left_out: Sequence[LeftOutRecords] = ()

    def __post_init__(self) -> None:
        facts, config = self.facts, config_of(self.solving, self.method)
        self.config = replace(config, key=replace(config.key, fact_token=self.fact_token))
        for fact in facts:
            check_word(self.fact_token, fact.subject)
        self.ends = {"start": perf_counter()}  # times of the start and of the end of each stage, in s
        self.group = process_group()
        self.editable: Editable = load_model(self.model, self.surface, show=self.surface.verbose)
        if self.destinations.is_gguf:
            source_file(self.editable.name, self.editable)  # raises EditError without a GGUF file
        self.allowed = parse_layers(self.layers, len(self.editable.layers), ("auto", "trace"))
        questions(self.editable, facts, facts)
        _note_long_objects(self.surface, self.editable, facts)
        protected = protected_texts(self.editable, facts, self.config.key)
        for name in () if protected is None else protected.left_out:
            self.surface.note(f"{name!r} is not protected, because a fact is about it")
        subjects = len(by_subject(facts)) + len(applied_edits(self.editable))
        self.stats = stats_of(self.solving, subjects, self.editable, [self.config])
        self.ends["load"] = perf_counter()

    def plan(self) -> None:
        """Show the facts as they were read, and what would be done with them."""
        self.group.disband()
        choice = known_layer(self.editable, self.facts, self.layers, self.allowed, self.method, self.config)
        why = [Text("By the trace of all facts.")] if choice is None else reasons(choice, self.layers)
        solves, values = METHODS[self.method].statistics, counted(len(by_subject(self.facts)), "value")
        steps = {
            "layer": " ".join(line.plain for line in why),
            "method": f"{self.method}, {values}" if solves else self.method,
            "statistics": self._statistics(choice) if solves else "none: the method does not use any",
            "written": self.destinations.words() or "nothing: there is neither --out nor --export",
        }
        self.surface.show(model_line(self.editable), plan(self.facts, steps))
        facts = [fact.to_dict() for fact in self.facts]
        self.surface.write_json({"model": self.editable.name, "facts": facts, "plan": steps})

    def _statistics(self, choice: ChosenLayer | None) -> str:
        """Say whether the key statistics would come from files, the cache, or text to read."""
        if not isinstance(self.stats, Corpus):
            return "from --stats"
        if choice is None:
            return f"from the cache, or {self.stats.tokens:,} tokens to read"
        layers = spread_below(choice.layer, self.spread)
        memories = [memory for layer in layers for memory in self.editable.feed_forward[layer].memories]
        cached = len(in_cache(self.editable, memories, self.stats)) == len(memories)
        return "from the cache" if cached else f"{self.stats.tokens:,} tokens to read"

    def run(self) -> None:
        """Locate, write, measure; then show and save, in the first process."""
        with self.surface.progress() as progress:
            choice, layer = self._locate(progress)
            edit = self._write(layer, progress)
            measured, report = self._measure(edit, progress)
        self.group.disband()
        if choice is not None:
            self._finish(choice, edit, measured, report)

    def _locate(self, progress: Progress) -> tuple[ChosenLayer | None, int]:
        """Find the layer to edit and show why; the choice is None in all processes but the first."""
        choice: ChosenLayer | None = None
        results = (self.destinations.plot, self.destinations.html, self.destinations.json_to)

        def find() -> int:
            nonlocal choice
            choice = find_layer(
                self.editable,
                self.facts,
                self.layers,
                self.allowed,
                self.method,
                self.config,
                progress,
                self.surface.verbose or any(results),  # whether to trace for these: minutes on a large model
            )
            if self.surface.verbose or choice.by == "trace":
                drawn = [] if choice.traces is None else [heat_map(choice.traces, choice.layer)]
                self.surface.show(*drawn, Group(*reasons(choice, self.layers)))
            return choice.layer

        layer = self.group.by_first(find)
        self.ends["locate"] = perf_counter()
        return choice, layer

    def _write(self, layer: int, progress: Progress) -> Edit:
        preserve, layers = applied_edits(self.editable), spread_below(layer, self.spread)
        edit = ffedit.edit(
            self.editable,
            self.facts,
            self.method,
            layers=layers,
            config=self.config,
            stats=self.stats,
            preserve=preserve,
            progress=progress,
            process_group=self.group,
        )
        self.ends["edit"] = perf_counter()
        return edit

    def _measure(self, edit: Edit, progress: Progress) -> tuple[Edit, Report]:
        """Score the edit as it is exported."""
        measured = edit
        if self.destinations.is_gguf:  # the file may pack its matrices in few bits
            measured = packed_edit(self.editable, edit)
        full = any(METRICS[requirement.name].full for requirement in self.require)
        report = ffedit.evaluate(
            self.editable, self.facts, measured, progress=progress, full=full, process_group=self.group
        )
        self.ends["evaluate"] = perf_counter()
        return measured, report

    def _finish(self, choice: ChosenLayer, edit: Edit, measured: Edit, report: Report) -> None:
        """Show the report, and save; if the edit failed, or misses a condition, raise that instead of saving."""
        surface, destinations, broken = self.surface, self.destinations, breaches(self.editable, edit, report)
        edit = replace(measured, updates=edit.updates).scored(report)
        edit = edit.noted(warnings=[breach.words for breach in broken], inputs=self.solving.inputs)
        failure = unmet(self.require, report.after or report.before) or (refusal(broken) if self.strict else None)
        failure = failure or (None if destinations.force else not_taken(report.verdict))
        saved = {"edit": destinations.out, "checkpoint": destinations.export_to} if failure is None else {}
        applied = result.applied(self.editable, edit, choice, report, self.ends, saved, self.layers, self.left_out)
        written: list[Path] = []
        try:
            with surface.json_ready(applied), pictures_ready(destinations, applied, choice):
                if failure is None:
                    save(destinations, self.editable, edit, written)
        finally:  # the result is shown even if it cannot be saved
            self._show(edit, report, broken, written)
        if failure is not None:
            raise failure
        surface.show(destinations.next_step(self.facts[0], self.editable.chat))

    def _show(self, edit: Edit, report: Report, broken: Sequence[Breach], written: Sequence[Path]) -> None:
        """Show the outcome, the answers that became worse, and the scores; more with `--verbose`."""
        surface, seconds = self.surface, perf_counter() - self.ends["start"]
        token = self.config.key.fact_token
        if token == "subject_last":
            token = "the last token of each subject" if len(self.facts) > 1 else quoted(self._subject_last())
        layers = f"layer{'s' if len(edit.layers) > 1 else ''} {ranges(edit.layers)}"
        model = f"{short_name(self.editable)}{' in its chat template' if self.editable.chat else ''}"
        details = [f"{layers} of {model}{f' at {token}' if edit.keys else ''}", duration(seconds)]
        surface.show(outcome(report, [*details, *self.destinations.saved(written)]), packing(edit))
        surface.show(verdict_view(report, edit, self.editable, surface.verbose), warnings(broken, surface.verbose))
        surface.show(worse(report), before_after(report), what_it_says(report) if surface.verbose else None)

    def _subject_last(self) -> str:
        """Return the last token of the only fact's subject, as text."""
        fact = self.facts[0]
        prompt = self.editable.encode(fact.text, span=fact.span, max_tokens=self.editable.max_tokens)
        return decode(self.editable.tokenizer, [prompt.ids[prompt.subject_last]])


def _note_long_objects(surface: Surface, editable: Editable, facts: Sequence[Fact]) -> None:
    """Note how many new objects are longer than one value usually holds."""
    sizes = [len(editable.encode(fact.text, fact.new_object, fact.span).target_ids) for fact in facts]
    if long := [size for size in sizes if size > MOST_TOKENS]:
        objects = f"{counted(len(long), 'new object')} of more than {MOST_TOKENS} tokens (up to {max(long)})"
        surface.note(f"{objects}: one value seldom makes a model say so many; use shorter objects")


# What is written -----------------------------------------------------------------------------------


@contextmanager
def pictures_ready(destinations: Destinations, applied: Mapping[str, Any], choice: ChosenLayer) -> Iterator[None]:
    """Draw the page of a result and the figure of its trace; write them if the block ends without an error."""
    with ExitStack() as stack:
        if destinations.html is not None:
            stack.enter_context(text_ready(destinations.html, result_page(applied)))
        if destinations.plot is not None:
            traces = choice.traces
            assert traces is not None  # `Application._locate` traces for a plot
            stack.enter_context(figure_ready(destinations.plot, lambda: heat_maps([traces], choice.layer)))
        yield


def save(destinations: Destinations, editable: Editable, edit: Edit, written: list[Path]) -> None:
    """Write the folders, each then added to `written`, and the recipe; the checkpoint first: it may be refused."""
    if destinations.export_to is not None:
        ffedit.export(editable, edit, destinations.export_to, force=destinations.force)
        written.append(destinations.export_to)
    if destinations.out is not None:
        edit.save(destinations.out, force=destinations.force)
        written.append(destinations.out)
    if destinations.save_recipe is not None:
        folders = {"out": destinations.out, "export": destinations.export_to}
        goes_to = {name: str(path) for name, path in folders.items() if path is not None}
        write_text(destinations.save_recipe, to_yaml(recipe_of(edit) | goes_to, edit))
