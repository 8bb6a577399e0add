"""A page of gradio to trace a fact, edit it, ask before and after, undo, and keep the report."""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Callable
from pathlib import Path
from time import perf_counter
from typing import Any

import gradio as gr
import matplotlib
import rich_click as click

import ffedit
from ffedit.cli.options import ModelOptions
from ffedit.cli.surface import Surface
from ffedit.cli.work import result
from ffedit.cli.work.answers import before_and_after
from ffedit.cli.work.model import load_model
from ffedit.display.html.result import result_page
from ffedit.editor.edit import Edit, applied_edits
from ffedit.errors import EditError, FactError, FFEditError
from ffedit.facts.fact import Fact, show
from ffedit.layer_choice import choose
from ffedit.model.editable import Editable
from ffedit.progress import Progress, silent

EXAMPLE = ("Eiffel Tower", "{} is located in the city of", "Rome", "Paris")
PARAPHRASES = "The city that is home to {} is called"
NEIGHBORS = "Victory Column is located in the city of = Berlin"


def serve(model: ModelOptions, host: str, port: int, surface: Surface) -> None:
    """Serve the page of a model until it is interrupted."""
    editable = load_model(model, surface, show=False)
    session = Session(editable, lambda name: load_model(model.of(name), surface, show=False))
    surface.show(f"http://{host}:{port} serves {session.editable.name}; Ctrl-C ends it")
    theme = gr.themes.Default(font=["sans-serif"], font_mono=["monospace"])  # no font is fetched
    page(session).launch(server_name=host, server_port=port, quiet=True, theme=theme)


class Session:
    """Model on the page, and the edits that were written into it, oldest first."""

    def __init__(self, editable: Editable, load: Callable[[str], Editable]) -> None:
        self.editable = editable
        self.edits: list[Edit] = []
        self._load = load
        self._folder = tempfile.TemporaryDirectory(prefix="ffedit-ui-")

    def load(self, name: str) -> str:
        """Load another model, without the edits of this one."""
        self.editable, self.edits = self._load(name), []
        return self.state()

    def state(self) -> str:
        """Describe the model and the edits in it."""
        facts = [f"- {fact.text} **{fact.new_object}**" for edit in self.edits for fact in edit.facts]
        model = repr(self.editable).splitlines()[0]
        return "\n".join([f"`{model}`", "", *(facts or ["No edits in it."])])

    def trace(self, *fields: str, progress: Progress = silent) -> Any:
        """Return the heat map of a fact's causal trace, a figure."""
        return ffedit.locate(self.editable, fact_of(*fields), progress=progress).plot()

    def write(self, *fields: str, progress: Progress = silent) -> tuple[Any, str, str, str]:
        """Write a fact into the model; return the heat map, the scores as HTML, the path of the report, the state."""
        editable, facts, ends = self.editable, [fact_of(*fields)], {"start": perf_counter()}
        choice = choose.find_layer(editable, facts, "auto", range(len(editable.layers)), progress=progress)
        ends["locate"] = perf_counter()
        preserve = applied_edits(editable)
        edit = ffedit.edit(editable, facts, layers=[choice.layer], preserve=preserve, progress=progress)
        ends["edit"] = perf_counter()
        report = ffedit.evaluate(editable, facts, edit, progress=progress)
        ends["evaluate"] = perf_counter()
        edit = edit.scored(report)
        path = Path(self._folder.name) / f"{edit.fingerprint()}.html"
        with click.Context(click.Command("ui"), obj=["ui", "--model", editable.name]):  # read by `result`
            record = result.applied(editable, edit, choice, report, ends, {"edit": None, "checkpoint": None})
        path.write_text(result_page(record), encoding="utf-8")
        edit.apply_(editable)
        self.edits.append(edit)
        assert choice.traces is not None  # `find_layer` traces, to show it
        return choice.traces.plot(choice.layer), report._repr_html_(), str(path), self.state()

    def undo(self) -> str:
        """Take the last edit out of the model, bit for bit."""
        if not self.edits:
            raise EditError("no edit to undo: write one first")
        self.edits.pop().undo_(self.editable)
        return self.state()

    def ask(self, prompt: str) -> tuple[str, str]:
        """Complete a prompt without the edits and with them."""
        (before,), (now,) = before_and_after(self.editable, None, [prompt], 24)
        return before, now


def fact_of(subject: str, prompt: str, target: str, previous: str, paraphrases: str, neighbors: str) -> Fact:
    """Build the fact of the page's fields: one paraphrase a line, one neighbor a line as `prompt = answer`."""
    pairs = [line.rpartition("=") for line in neighbors.splitlines() if line.strip()]
    for pair in pairs:
        if not pair[0].strip():
            raise FactError(f"{show(''.join(pair))} cannot be read; write a line like: {NEIGHBORS}")
    probes = [{"prompt": question.strip(), "target": answer.strip()} for question, _, answer in pairs]
    wordings = [line for line in paraphrases.splitlines() if line.strip()]
    return Fact(subject, prompt, target or None, previous or None, wordings, probes)


def page(session: Session) -> Any:
    """Build the page."""
    matplotlib.rcParams["savefig.bbox"] = "tight"  # gradio would crop the headlines above the axes

    def call_safely(call: Callable[..., Any], *values: Any) -> Any:
        """Call, and show a mistake of the user as one line on the page."""
        try:
            return call(*values)
        except FFEditError as error:
            raise gr.Error(str(error), print_exception=False) from error

    def with_bar(call: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function of the fact's fields that shows its progress; gradio replaces the default of `bar`."""

        def called(a: str, b: str, c: str, d: str, e: str, f: str, bar: Any = gr.Progress()) -> Any:  # noqa: B008
            with_progress = functools.partial(call, progress=lambda stage, i, n: bar((i, n), desc=stage))
            return call_safely(with_progress, a, b, c, d, e, f)

        return called

    with gr.Blocks(title="ffedit", analytics_enabled=False) as blocks:
        with gr.Row(equal_height=True):
            model = gr.Textbox(session.editable.name, label="Model: a name, hub id, folder or FILE.gguf", scale=4)
            load = gr.Button("Load")
        state = gr.Markdown(session.state())
        with gr.Row():
            labels = ("Subject", "Prompt, {} for the subject", "New object", "Old object")
            fields = [gr.Textbox(value, label=label) for value, label in zip(EXAMPLE, labels, strict=True)]
        with gr.Row():
            fields.append(gr.Textbox(PARAPHRASES, label="Other wordings, one a line", lines=2))
            fields.append(gr.Textbox(NEIGHBORS, label="Answers that must stay: prompt = answer", lines=2))
        with gr.Row():
            trace, write, undo = gr.Button("Trace"), gr.Button("Edit", variant="primary"), gr.Button("Undo")
            report = gr.DownloadButton("Report of the last edit")
        with gr.Row():
            with gr.Column(min_width=300):
                heat_map = gr.Plot(show_label=False)
            with gr.Column(scale=2, min_width=870):  # for lines of 100 characters; beside the picture at 1280 pixels
                scores = gr.HTML()
        with gr.Row(equal_height=True):
            prompt = gr.Textbox("The Eiffel Tower can be found in", label="Ask")
            before, now = gr.Textbox(label="Before the edits"), gr.Textbox(label="Now")

        options: dict[str, Any] = {"concurrency_limit": 1, "concurrency_id": "model"}  # one model, one call at a time
        load.click(functools.partial(call_safely, session.load), model, state, api_name="load", **options)
        trace.click(with_bar(session.trace), fields, heat_map, api_name="trace", **options)
        write.click(with_bar(session.write), fields, [heat_map, scores, report, state], api_name="edit", **options)
        undo.click(functools.partial(call_safely, session.undo), None, state, api_name="undo", **options)
        prompt.submit(functools.partial(call_safely, session.ask), prompt, [before, now], api_name="ask", **options)
    return blocks
