"""What a person sees says the same at 80 columns, without colour and through a pipe."""

from __future__ import annotations

import io
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from rich.cells import cell_len
from rich.console import Console, RenderableType
from shown import shown

from ffedit import Address, Fact, Report, Scores, Trace, TraceSet, render
from ffedit.evaluator.scores import FactScores
from ffedit.memory import KeyValueMemory, Memories
from ffedit.picture import RAMP, colour, number, pictures, token
from ffedit.progress import silent
from ffedit.progressbar import progress_bars

FACT = Fact("Eiffel Tower", "The {} is in", "Rome", "Paris")
BEFORE = Scores(0.0, 0.0, 1.0, 1.0, 0.0, 0.0, None, -0.86, -0.7, 0.8, 0.9)
AFTER = Scores(1.0, 0.9972, 0.98, 1.0, 0.99, 1.0, 0.0003, 0.97, 0.9, 0.7, 0.8)


def trace(effects: np.ndarray, subject: tuple[int, int] = (1, 3), **kwargs: Any) -> Trace:
    """A trace whose only telling parts are given."""
    count = effects.shape[1]
    words = ("The", " Eiffel", " Tower", " is", " in")
    given: dict[str, Any] = {
        "errors": np.zeros_like(effects),
        "alone": effects[:, subject[1] - 1] / 2,
        "clean": 0.93,
        "corrupted": 0.06,
        "tokens": tuple(words[i % len(words)] for i in range(count)),
        "subject": subject,
        "answer": "Paris",
        "known": True,
        "kind": "feed_forward",
        "window": 3,
        "sever": None,
        "metric": "probability",
        "corruption": "Gaussian noise of 3 σ",
        "noise": 0.1,
        "samples": 10,
        "seed": 0,
    }
    return Trace(effects=effects, **(given | kwargs))


def peaked(layers: int = 6, count: int = 5, subject: tuple[int, int] = (1, 3)) -> Trace:
    """0.41 at layer 2 of the subject's last token, 0.8 in the last layer of the prompt's last token."""
    effects = np.zeros((layers, count))
    effects[2, subject[1] - 1] = 0.41
    effects[-1, -1] = 0.8
    return trace(effects, subject)


def report(
    after: Scores | None = AFTER, says: str = "Rome, the capital", before: Scores = BEFORE, count: int = 1
) -> Report:
    """A report of one fact `count` times."""
    old = (FactScores(FACT, before, "Paris, the capital"),) * count
    return Report(before, after, old, None if after is None else (FactScores(FACT, after, says),) * count)


# The heat map --------------------------------------------------------------------------------------


def test_the_heat_map_says_everything_without_colour() -> None:
    text = shown(render.heat_map(peaked()))
    lines = text.splitlines()
    assert "feed-forward outputs, windows of 3 layers" in lines[0]
    assert "P(“Paris”) 0.93 clean → 0.06 corrupted: total effect 0.87" in lines[1]
    rows = {line.split()[0]: line for line in lines[3:8]}
    assert set(rows) == {"The", "Eiffel*", "Tower*", "is", "in"}
    assert rows["Tower*"].index("▒▒▒▒") == rows["in"].index("████") - 3 * 4
    assert rows["Tower*"].endswith("0.41") and rows["in"].endswith("0.80")
    assert "0.80 of probability" in text and "* subject" in text
    mark, axis = (
        next(line for line in lines if "▲" in line),
        next(line for line in lines if "layer  " in line),
    )
    assert mark.endswith("▲ layer 2") and mark.index("▲") == axis.index("2")


def test_the_mark_stands_under_the_layer_that_is_edited() -> None:
    assert "▲ layer 4" in shown(render.heat_map(peaked(), 4))
    assert "layer 59 ▲" in shown(render.heat_map(peaked(60), 59))


def test_colour_is_solid_and_repeats_the_shade() -> None:
    text = shown(render.heat_map(peaked()), force_terminal=True, color_system="truecolor", no_color=False)
    r, g, b = (int(RAMP[-1][i : i + 2], 16) for i in (1, 3, 5))
    assert f"\x1b[38;2;{r};{g};{b};48;2;{r};{g};{b}m████" in text
    few = shown(render.heat_map(peaked()), force_terminal=True, color_system="standard", no_color=False)
    assert "████" in few and "48;" not in few


def test_the_ramp_gets_lighter_all_the_way() -> None:
    lightness = [sum(int(colour(i / 50)[j : j + 2], 16) for j in (1, 3, 5)) for i in range(51)]
    assert lightness == sorted(lightness)
    assert (colour(-1), colour(2)) == (RAMP[0], RAMP[-1])


@pytest.mark.parametrize("layers", [1, 6, 12, 24, 48, 60, 80, 126])
@pytest.mark.parametrize("width", [80, 40, 120])
def test_any_depth_fits(layers: int, width: int) -> None:
    effects = np.zeros((layers, 5))
    effects[-1, 2] = 0.5
    text = shown(render.heat_map(trace(effects)), width)
    assert "█" in text and "0" in text
    assert ("a column is" in text) == (layers > width - 16)


def test_a_long_prompt_keeps_the_rows_that_matter() -> None:
    effects = np.zeros((6, 90))
    effects[2, 41], effects[3, 60], effects[5, 89] = 0.4, 0.2, 0.8
    text = shown(render.heat_map(trace(effects, (40, 42))))
    rows = text.splitlines()[3:-5]
    assert len(rows) <= 22
    assert "… 38 tokens" in text and text.count("*") == 3
    assert [float(row.split()[-1]) for row in rows if not row.endswith(" 0.00")][:3] == [0.4, 0.2, 0.8]
    longest = shown(render.heat_map(trace(np.ones((6, 90)), (0, 90))))
    assert len(longest.splitlines()) < 50


def test_odd_tokens_stay_on_their_line() -> None:
    tokens = (" 東京タワー東京タワー", "\n", "  ", "[bold]x[/bold]", "a" * 40)
    effects = np.full((3, 5), 0.1)
    lines = shown(render.heat_map(trace(effects, tokens=tokens))).splitlines()[3:8]
    assert lines[0].strip().startswith("東京タワー") and "…" in lines[0]
    assert "\\n*" in lines[1] and "␣*" in lines[2] and "[bold]x[/bold]" in lines[3] and "aaa…" in lines[4]
    assert len({cell_len(line[: line.index("█")]) for line in lines}) == 1


def test_no_effect_negative_effects_and_a_single_token() -> None:
    assert "No restoration brings anything back" in shown(render.heat_map(trace(np.zeros((6, 5)))))
    effects = np.zeros((6, 5))
    effects[3, 4], effects[1, 2] = -0.3, 0.5
    text = shown(render.heat_map(trace(effects)))
    assert "----" in text and "takes away, up to 0.30" in text
    single = shown(render.heat_map(trace(np.full((6, 1), 0.2), (0, 1), tokens=("Paris",), window=1)))
    assert "Paris*" in single and "one layer at a time" in single
    assert "----" in shown(render.heat_map(trace(-np.ones((6, 5)))))
    assert "hidden states" in shown(render.heat_map(trace(np.ones((6, 5)), kind="state", window=1)))


def test_several_facts_are_averaged_by_role() -> None:
    traces = TraceSet((peaked(), peaked(count=8, subject=(0, 4)), peaked(count=3, subject=(0, 3))))
    text = shown(render.heat_map(traces))
    assert "average of 3 facts" in text
    row = next(line for line in text.splitlines() if "last subject*" in line)
    # The third subject ends its prompt: 0.41 in all three, and the 0.8 of one.
    assert "▲ layer 2" in text and row.split()[-1] == "0.41"
    assert all(role in text for role in ("first subject*", "mid subject*", "next token", "further tokens"))
    assert shown(render.heat_map(TraceSet((peaked(),)))) == shown(render.heat_map(peaked()))


def test_the_title_says_what_was_measured_and_how() -> None:
    effects = np.full((6, 5), 0.5)
    attention = trace(effects, kind="attention", sever="feed_forward", exact=False, metric="log_probability")
    text = shown(render.heat_map(attention), 120)
    said = "attention outputs, windows of 3 layers, feed-forward layers severed, first-order estimate"
    assert text.splitlines()[0] == f"Causal trace of {said}"
    assert "log P(“Paris”) 0.93 clean → 0.06 corrupted: total effect 0.87 nats" in text
    assert "0.50 nats brought back" in text and "probability" not in text
    state = trace(effects, kind="state", window=1, sever="attention", metric="logit_difference")
    text = shown(render.heat_map(TraceSet((state, state))), 120)
    assert text.splitlines()[0] == "Causal trace of hidden states, attention layers severed, average of 2 facts"
    assert "log P(old) − log P(new) 0.93 clean → 0.06 corrupted: total effect 0.87 nats" in text


def test_measurements_of_the_same_tokens_keep_the_same_rows() -> None:
    early, late = np.zeros((6, 90)), np.zeros((6, 90))
    early[2, 20], late[5, 60], late[5, 70] = 0.8, 0.01, 0.0001
    both = pictures([trace(early, (40, 42)), trace(late, (40, 42), kind="attention")])
    labels = [[row.label for row in shown.rows] for shown in both]
    assert labels[0] == labels[1]
    # The small effects of the second are telling for it, and keep their rows in both; what is small for it does not.
    found = {float(row.effects.max()) for shown in both for row in shown.rows if not row.run}
    assert {0.8, 0.01} <= found and 0.0001 not in found


# The choice of the layer ---------------------------------------------------------------------------


def words(renderable: RenderableType) -> str:
    return " ".join(shown(renderable).split())


def test_the_layer_is_explained() -> None:
    text = words(render.layer_choice(peaked(), 2))
    assert text.startswith(
        "Layer 2: restoring the feed-forward outputs of layers 1–3 at the subject's last token (“Tower”)"
    )
    assert "brings back 0.41 of the 0.87 that the noise destroys; of these, layer 2 alone brings" in text
    asked = words(render.layer_choice(peaked(), 4, "4"))
    assert asked.startswith("Layer 4: you asked for it; tracing would have chosen 2: restoring")
    assert "you asked for it, and tracing agrees: restoring" in words(render.layer_choice(peaked(), 2, "2"))
    several = words(render.layer_choice(TraceSet((peaked(), peaked())), 2))
    assert "on average over 2 facts" in several and "Tower" not in several
    state = words(render.layer_choice(trace(peaked().effects, kind="state", window=1), 2))
    assert "the hidden state after layer 2" in state


def test_the_layer_is_explained_for_every_kind_of_measurement() -> None:
    effects = peaked().effects
    attention = trace(effects, kind="attention", sever="feed_forward", exact=False, metric="log_probability")
    text = words(render.layer_choice(attention, 2))
    assert text.startswith(
        "Layer 2: by a first-order estimate, with the feed-forward layers severed, restoring the attention outputs of "
        "layers 1–3"
    )
    assert "0.41 of the 0.87 nats that the noise destroys; of these, layer 2 alone" in text
    swapped = words(render.layer_choice(trace(effects, noise=None, corrupted=0.92), 2))
    assert "that another subject destroys" in swapped and "Another subject hardly changes the answer" in swapped


def test_a_weak_trace_says_so() -> None:
    effects = np.zeros((6, 5))
    effects[5, 4] = 0.8
    weak = words(render.layer_choice(trace(effects), 0))
    assert "no clear site at the subject: at most 0.00" in weak and "--layers N, N from 0 to 5" in weak
    deaf = words(render.layer_choice(trace(effects, corrupted=0.92), 0))
    assert "hardly changes the answer (total effect 0.01)" in deaf and "no clear site" not in deaf
    assert "no clear site" not in words(render.layer_choice(peaked(), 2))


def test_a_name_that_is_known_before_its_last_word_is_recalled_there() -> None:
    """At its last token no layer brings anything back, and which one harms least means nothing."""
    effects = np.zeros((6, 5))
    effects[:, 2] = [-0.03, -0.03, -0.03, -0.02, 0.01, 0.04]
    effects[1, 1], effects[0, 4] = 0.5, 0.6
    early = trace(effects)
    assert not early.site.last and early.layer == 1
    text = words(render.layer_choice(early, 1))
    assert text.startswith(
        "Layer 1: restoring the feed-forward outputs of layers 0–2 at the token of the subject that brings back most "
        "(“Eiffel”)"
    )
    assert "brings back 0.50 of the 0.87" in text and "its last token, where the key is read, brings back 0.04" in text
    assert "no clear site" not in text and "alone" not in text
    several = TraceSet((early, early))
    assert several.layer == 1 and several.best_within(range(2, 4)) == 2
    assert TraceSet((early, peaked(), peaked())).layer == 2, "what shows at the last tokens on average decides"
    assert trace(effects * 0.1).site.last, "nothing shows anywhere in the subject"


def test_an_answer_that_the_model_does_not_give_is_named() -> None:
    unknown = trace(peaked().effects, known=False)
    assert "does not answer “Paris” by itself" in words(render.layer_choice(unknown, 2))
    assert "For 1 of 2 facts" in words(render.layer_choice(TraceSet((unknown, peaked())), 2))


# Scores and sayings --------------------------------------------------------------------------------


def test_scores_before_and_after() -> None:
    lines = shown(render.before_after(report())).splitlines()
    rows = {line.split()[0]: line.split() for line in lines[2:]}
    assert rows["efficacy"][:7] == ["efficacy", "up", "0.00", "(−0.86)", "1.00", "(+0.97)", "+1.00"]
    assert rows["paraphrase"][4] == "0.997", "never rounded to 1"
    assert rows["specificity"][:2] == ["specificity", "keep"] and "−0.02" in rows["specificity"]
    assert rows["drift"][2:] == ["0.0003", "nats", "per", "token"]
    assert len(lines) == 2 + 7 + 1, "one line each at 80 columns"


def test_a_fall_is_marked_without_colour() -> None:
    text = shown(render.before_after(report(Scores(1.0, None, 0.94, 0.5, drift=0.2))))
    assert "−0.06 !" in text and "−0.50 !" in text
    assert "!" in next(line for line in text.splitlines() if line.startswith("drift"))
    assert "!" not in shown(render.before_after(report(Scores(1.0, 1.0, 0.95, 1.0)))), "0.05 itself is no fall"


def test_what_was_not_measured_is_a_footnote() -> None:
    scores = Scores(efficacy=1.0, generation=1.0)
    text = words(render.before_after(report(scores, before=scores)))
    assert "specificity (give neighbors)" in text and "paraphrase (give paraphrases)" in text
    assert "in brackets" not in text
    assert "nothing" in shown(render.before_after(Report(Scores(), Scores(), (), ())))


def test_scores_without_an_edit() -> None:
    text = shown(render.before_after(report(None)))
    assert "now" in text and "after" not in text and "change" not in text


def test_sayings() -> None:
    text = shown(render.what_it_says(report()))
    assert "The Eiffel Tower is in" in text and "Paris, the capital" in text and "Rome, the capital" in text
    assert "after" not in shown(render.what_it_says(report(None)))
    assert "… and 4 more" in shown(render.what_it_says(report(count=12)))
    odd = shown(render.sayings(["[red]x " + "東" * 100], [""]))
    assert "[red]x" in odd and "(nothing)" in odd and odd.count("東") == 100


# The verdict ---------------------------------------------------------------------------------------


def test_done() -> None:
    text = words(render.verdict(report()))
    assert text.startswith("Done: the model now says “Rome” instead of “Paris”")
    assert "specificity 1.00 → 0.98" in text and "drift 0.0003" in text and "Try" not in text
    unmeasured = words(render.verdict(report(Scores(efficacy=1.0, generation=1.0), before=Scores(efficacy=0.0))))
    assert "specificity and same_subject could not be measured" in unmeasured and "held" not in unmeasured


def test_done_but_something_broke() -> None:
    text = words(render.verdict(report(Scores(1.0, 1.0, 0.9, 0.5, 1.0, 1.0, 0.2))))
    assert text.startswith("Done, but something else broke")
    assert "specificity fell from 1.00 to 0.90" in text and "same_subject fell from 1.00 to 0.50" in text
    assert "drift on generic text is 0.20 nats per token" in text and "--layers N" in text
    narrow = words(render.verdict(report(Scores(1.0, 0.2, 1.0, 1.0, 1.0, 1.0, 0.0))))
    assert narrow.startswith("Done, but narrowly") and "paraphrase 0.20" in narrow


def test_an_edit_that_did_not_take_is_loud() -> None:
    edit: Any = SimpleNamespace(layers=[2], provenance={"config": {"steps": 25}})
    text = words(render.verdict(report(Scores(efficacy=0.0, generation=0.0), "Paris [b]"), edit))
    assert text.startswith("THE EDIT DID NOT TAKE: “Rome” is not more likely than the old object")
    assert "“Paris [b]”" in text and "another layer than 2" in text and "more than 25 steps" in text
    unsaid = words(render.verdict(report(Scores(efficacy=1.0, generation=0.0), "Paris")))
    assert unsaid.startswith("THE EDIT DID NOT TAKE") and "by itself the model says “Paris”" in unsaid


def test_a_batch_that_took_in_part() -> None:
    whole, failed = report(count=9), report(Scores(efficacy=0.0, generation=0.0))
    assert failed.facts_after is not None and whole.facts_after is not None
    mixed = Report(BEFORE, AFTER, whole.facts_before + failed.facts_before, whole.facts_after + failed.facts_after)
    text = words(render.verdict(mixed))
    assert text.startswith("The edit took in part, for 9 of 10 facts: for 1 of 10 facts the new object")
    assert "all 9 new objects" in words(render.verdict(whole))
    none = words(render.verdict(report(Scores(efficacy=0.0, generation=0.0), count=4)))
    assert none.startswith("THE EDIT DID NOT TAKE: for 4 of 4 facts")


def test_success_that_was_there_before_is_named() -> None:
    before = Scores(efficacy=1.0, generation=1.0, knew=0.0)
    (new,) = report().facts_after or ()
    text = words(render.verdict(Report(before, AFTER, (FactScores(FACT, before, "London"),), (new,))))
    assert "Even before the edit the model found “Rome” more likely" in text
    assert "did not know the old object “Paris”: before the edit it said “London”" in text
    assert "instead of" not in text
    assert "already gives 0 of 1 new objects" in words(render.verdict(report(None)))


# The model, errors and commands --------------------------------------------------------------------


def fake_editable(layers: int = 6, transposed: bool = False, name: str = "atlas") -> Any:
    """As much of a model as is shown."""
    modules = [torch.nn.Linear(32, 8) for _ in range(layers)]
    memories = [
        KeyValueMemory(Address(i), f"h.{i}.mlp.c_proj", module, transposed, torch.float16)
        for i, module in enumerate(modules)
    ]
    model = torch.nn.ModuleList(modules)
    return SimpleNamespace(
        name=name,
        model=model,
        layers=modules,
        memories=Memories(memories),
        embedding=modules[0],
        unembedding=modules[-1],
        norm="ln_f",
        resumable=True,
        probe_error=0.0,
        device=torch.device("cpu"),
    )


def test_the_model_in_one_line() -> None:
    text = shown(render.model_line(fake_editable(name="/a/very/long/path/to/a/folder/of/models/mine")), 120)
    assert text.startswith("mine  1.58K parameters · 6 layers · d_model 8 · d_ff 32 · cpu · float16")


def test_anatomy_collapses_equal_layers() -> None:
    text = shown(render.anatomy_table(fake_editable()))
    row = next(line for line in text.splitlines() if line.startswith("0-5"))
    assert "h.*.mlp.c_proj" in row and "[8, 32]" in row and "as is" in row and row.endswith("yes   yes")
    assert "ln_f" in text and "resumable" in text and "8 KiB more to edit" in text and "to the last bit" in text
    assert "transposed  " in shown(render.anatomy_table(fake_editable(transposed=True)))
    assert render.ranges([0, 1, 2, 5, 7, 8]) == "0-2, 5, 7-8"


def test_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FFEDIT_CACHE", str(tmp_path))
    (tmp_path / "moments").mkdir()
    (tmp_path / "moments" / "a").write_bytes(b"x" * 2048)
    text = words(render.environment())
    assert torch.__version__ in text and "cpu" in text and "cache 1 file, 2 KiB, in" in text


def test_errors_and_commands() -> None:
    assert shown(render.error_line("no such [file]\n  here")) == "error: no such [file] here"
    prompt = '"The Eiffel Tower, an iron lattice tower, is in the city of"'
    command = f"ffedit ask {prompt} --edit rome.edit --model atlas"
    lines = shown(render.next_steps([command])).splitlines()
    assert lines[0] == "Next:" and lines[1].endswith("\\") and prompt in lines[1]
    assert " ".join(" ".join(lines[1:]).replace("\\", "").split()) == command


def test_numbers_and_tokens() -> None:
    found = [number(x) for x in (0.0, -0.0, 1e-5, 0.004, 0.005, -0.25, -0.003)]
    assert found == ["0.00", "0.00", "1e-05", "0.004", "0.01", "−0.25", "−0.003"]
    assert [token(t) for t in (" Tower", "\n", " ", "\x1b[31m")] == ["Tower", "\\n", "␣", "\\x1b[31m"]


# Progress ------------------------------------------------------------------------------------------


def test_progress_shows_on_a_terminal_only() -> None:
    for quiet, terminal in ((False, True), (True, True), (False, False)):
        file = io.StringIO()
        console = Console(file=file, force_terminal=terminal, width=80)
        with progress_bars(quiet, console) as progress:
            assert (progress is silent) == (quiet or not terminal)
            for stage in ("tracing", "measuring"):
                for done in range(3):
                    progress(stage, done, 2)
        assert ("tracing" in file.getvalue()) == (not quiet and terminal)
