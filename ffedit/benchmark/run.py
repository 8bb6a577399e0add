"""`ffedit.bench`: compare editing methods on the same model, facts and prompts."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import NoneType
from typing import Any, Literal

from ffedit.algebra.key_moments import KeyMoments
from ffedit.benchmark import folder, settings
from ffedit.benchmark.editing import edit_in_sequence, edit_single_or_batch
from ffedit.benchmark.folder import Journal, merge
from ffedit.benchmark.hardware import hardware
from ffedit.benchmark.report import BenchReport, report
from ffedit.benchmark.settings import Mode
from ffedit.benchmark.tables import markdown
from ffedit.benchmark.task import Task
from ffedit.editor.checks import in_reach
from ffedit.editor.config import EditConfig
from ffedit.editor.methods import METHODS, config_from_dict
from ffedit.editor.names import MethodName
from ffedit.errors import EditError, FactError
from ffedit.evaluator import GenericText, reference_weights
from ffedit.facts.fact import FactLike, as_facts
from ffedit.files.atomic import finite, write_text
from ffedit.files.placing import claimed
from ffedit.inference.corpus import Corpus
from ffedit.inference.distributed import ProcessGroup
from ffedit.layer_choice.choose import spread_below
from ffedit.layer_choice.published import auto_layer
from ffedit.model.editable import Editable, check_model
from ffedit.model.memory import Address, as_layers
from ffedit.progress import Progress, silent


def bench(
    editable: Editable,
    facts: FactLike | Iterable[FactLike],
    methods: MethodName | str | Iterable[MethodName | str],
    mode: Literal["single", "sequential"] | str,
    out: str | Path,
    *,
    layers: int | Iterable[int] | None = None,
    spread: int = 1,
    config: EditConfig | Mapping[str, EditConfig] | None = None,
    stats: Corpus | Mapping[Address, KeyMoments] | None = None,
    text: str | Path | None = None,
    full: bool = True,
    process_group: ProcessGroup | None = None,
    progress: Progress = silent,
    unusable: Sequence[Mapping[str, Any]] = (),
    force: bool = False,
) -> BenchReport:
    """Edit `facts` by each of `methods`, measure before and after, and save everything in a folder.

    The folder gets `manifest.json`, `results.jsonl`, `report.json`, `report.md` and `edits/`. A run that was
    interrupted continues where it stopped and gives the same figures; methods may be added to a finished run.

    Args:
        editable: the unedited model; left unchanged.
        facts: the facts to write.
        methods: names in `METHODS`.
        mode: "single" (each fact alone), "batch:N" (N at once) or "sequential[:N]" (N on top of all before, 1 by
            default).
        out: the results folder.
        layers: layers to edit; None takes the layer published for the model and the method (of several, that for
            MEMIT), or else a quarter of the depth. Single-layer methods write to the last.
        spread: with `layers` None, number of layers that share the update: the default one and those below it.
        config: hyperparameters of the edits, the same for all methods or by method.
        stats: second moments of the keys, or the text to collect them on; None as for `ffedit.edit`.
        text: a text file for drift and perplexity; None for text that the model samples.
        full: also measure the slowest scores (`Evaluation`).
        process_group: the processes that share the work; all of them call this with the same arguments.
        progress: callback for the progress, by method.
        unusable: records of the data set that could not be made into facts, for the report: `record` and `reason`.
        force: replace the results of another run.

    Raises:
        FactError: there are no facts, or two have the same case_id.
        EditError: an unknown method or mode; a folder of another run, of another version, or in use by another
            process; layers or statistics that do not fit.
        ModelError: the unedited model's output is not finite.
        OSError: the results cannot be written to disk.
    """
    check_model(editable)
    EditError.require(out, (str, Path), "the path of a results folder was expected")
    EditError.require(stats, (Corpus, Mapping, NoneType), "a text or its statistics were expected: ffedit.Corpus(path)")
    EditError.require(text, (str, Path, NoneType), "the path of a text file was expected")
    spread = EditError.whole("spread", spread, 1)
    facts, layers = as_facts(facts), None if layers is None else as_layers(layers)
    group, path, plan = process_group or ProcessGroup(), Path(out), Mode.parse(mode)
    configs = settings.configured(methods, config)
    settings.check_facts(facts)
    configs = {name: settings.held_out(numbers, facts) for name, numbers in configs.items()}
    for name, numbers in configs.items() if layers else ():  # `write` checks every fact
        top = max(layers or ())
        try:
            in_reach(editable, facts[:1], METHODS[name], range(top, top + 1), numbers.key.fact_token)
        except FactError:  # the fact does not fit the model; the report says so
            continue
    generic_text = None if text is None else Path(text)
    with ExitStack() as stack:
        group.by_first(lambda: stack.enter_context(claimed(path)))
        run = settings.identity(editable, facts, plan, generic_text, full)
        run |= {"spread": spread} if layers is None else {"spread": len(layers), "layers": sorted(layers)}
        run |= {"config": settings.numbers_of(configs)}
        there, machines = group.by_first(lambda: folder.earlier(path, run, force))
        machine = group.by_first(lambda: hardware(editable.device, group.size))
        machines += [machine] if machine not in machines else []
        configs = {name: config_from_dict(values) for name, values in there.get("config", {}).items()} | configs
        if layers is None:
            method = next(iter(configs)) if len(configs) == 1 else "memit"  # several are compared at MEMIT's layer
            layers = there.get("layers") or spread_below(auto_layer(editable, method).layer, spread)
        moments = settings.moments_of(editable, facts, plan, configs, sorted(layers), stats, group, progress)
        run |= {"config": settings.numbers_of(configs), "layers": sorted(layers), **settings.statistics_of(moments)}
        generic = GenericText(editable, generic_text, progress=progress)
        if force:
            group.by_first(lambda: folder.delete_results(path))
        group.by_first(lambda: folder.write_manifest(path, there, run, machines, unusable))
        single = plan.name == "single"
        journal = Journal(path, group.rank if single and group.size > 1 else None, writes=single or group.first)
        task = Task(
            editable=editable,
            facts=facts,
            methods=list(configs),
            mode=plan,
            layers=sorted(layers),
            configs=configs,
            stats=moments,
            text=generic,
            full=full,
            weights=reference_weights(facts),
            folder=path,
            journal=journal,
            process_group=group,
            own=group.share(range(len(facts))) if single else range(len(facts)),
            progress=progress,
        )
        (edit_in_sequence if plan.sequential else edit_single_or_batch)(task)
        group.wait()
        group.by_first(lambda: merge(path))
        about_run = {**run, "hardware": machines}
        figures = report(Journal(path, writes=False), facts, list(configs), plan.sequential, about_run, unusable)
        content = json.dumps(finite(figures.to_dict()), indent=1, ensure_ascii=False)
        group.by_first(lambda: write_text(path / folder.REPORT, f"{content}\n"))
        page = "\n".join([markdown(figures), "## Computed on", "", *(f"- {machine}" for machine in machines), ""])
        group.by_first(lambda: write_text(path / folder.TABLES, page))
    return figures
