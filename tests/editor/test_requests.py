"""What a method is given and asked for: statistics, layers, numbers, and what is refused of them."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest
import zoo
from shell import shell
from storing import BATCH, FACTS, SOLVING
from writing import CORPUS, FACT, quick, with_numbers

from ffedit import EditConfig, EditError, Fact
from ffedit.editor.key import build_prompts
from ffedit.editor.methods import METHODS, config_from_dict, preset, set_numbers
from ffedit.editor.methods.memit import PAPER_MEMIT
from ffedit.editor.methods.rome import PAPER
from ffedit.editor.statistics import collect
from ffedit.editor.write import write as write_facts
from ffedit.facts.fact import by_subject


def test_statistics_of_another_model_are_refused() -> None:
    editable, other = zoo.trained("llama", True), zoo.build("llama", True, seed=3)
    stats = collect(other, [other.memories[1]], CORPUS)
    with pytest.raises(EditError, match=r"statistics of layer 1 of llama .* \(edited\?"):
        write_facts(editable, FACTS, "memit", [1], quick(), stats)
    wide = zoo.build("gpt2")
    with pytest.raises(EditError, match="layer 1 of llama has float32, d_ff 48"):
        write_facts(editable, FACTS, "memit", [1], quick(), collect(wide, [wide.memories[1]], CORPUS))


def test_texts_stay_within_what_the_model_takes() -> None:
    editable = dataclasses.replace(zoo.trained("gpt2", True), max_tokens=8)
    for prompt_set in build_prompts(editable, by_subject(FACTS), quick(contexts=3, context_tokens=(1, 10))):
        assert max(len(text.ids) for text in (*prompt_set.prompts, *prompt_set.essence)) <= 8
        assert prompt_set.essence and 0 < len(prompt_set.prompts) < 4 * prompt_set.facts, "longer ones are left out"


MEANINGLESS: list[tuple[dict[str, Any], str]] = [
    ({"steps": 0}, "value.steps is 0; at least 1"),
    ({"ft_steps": 0}, "ft.steps is 0; at least 1"),
    *(
        ({name: 0.0}, f"value.{name} is 0.0; a number above 0")
        for name in ("max_delta_norm", "step_size", "penalty_decay")
    ),
    ({"target_probability": float("nan")}, "target_probability is nan; a number above 0"),
    *(({name: -1.0}, f"{name} is -1.0; 0 or more") for name in ("kl_weight", "weight_decay", "context_weight")),
    ({"mention_share": 1.5}, "at most 1"),
    ({"mention_share": -0.1}, "0 or more"),
    ({"memit_ridge": -0.1}, "memit.ridge is -0.1; 0 or more"),
    ({"alphaedit_ridge": -0.1}, "alphaedit.ridge is -0.1; 0 or more"),
    ({"alphaedit_null_share": -0.1}, "alphaedit.null_share is -0.1; 0 or more"),
    ({"contexts": -1}, "prompts.contexts is -1; 0 or more"),
    ({"optimizer": "sgd"}, "value.optimizer is 'sgd'; gradient or adam"),
    ({"essence_prompts": ("it is a",)}, "prompts.essence_prompts: 'it is a' has no {} where the subject"),
]


@pytest.mark.parametrize(("number", "words"), MEANINGLESS)
def test_numbers_without_meaning_are_refused(number: dict[str, Any], words: str) -> None:
    with pytest.raises(EditError, match=words):
        quick(**number)


@pytest.mark.parametrize(
    ("facts", "method", "layers", "words"),
    [
        ([FACT], "magic", [1], "method 'magic' is not known; known are rome, emmet, memit, alphaedit, ft, ft-l"),
        ([], "memit", [1], "no facts to write"),
        ([FACT], "memit", [3], "layers 0 to 2"),
        ([FACT], "memit", [0, -1], "layers 0 to 2"),
        *(([FACT], "memit", layers, "name at least one, and each once") for layers in ([], [1, 1])),
        *(([FACT], "rome", layers, "rome writes to a single layer") for layers in ([], [1, 1])),
        *(([FACT], name, [0, 1], f"{name} writes to a single layer") for name in ("rome", "ft", "ft-l")),
        ([FACT, dataclasses.replace(FACT, target="Berlin")], "memit", [1], "the objects 'Rome' and 'Berlin'"),
        ([FACT, dataclasses.replace(FACT, target="Berlin")], "ft", [1], "keep one"),
    ],
)
def test_what_cannot_be_done_is_refused_in_one_line(
    facts: list[Fact], method: str, layers: list[int], words: str
) -> None:
    editable = zoo.shared("gpt2", True)
    with pytest.raises(EditError) as caught:
        write_facts(editable, facts, method, layers, quick(), CORPUS)
    assert words in str(caught.value) and "\n" not in str(caught.value)


def test_statistics_are_given_or_collected() -> None:
    editable = zoo.trained("gpt2", True)
    stats = collect(editable, [editable.memories[1]], CORPUS)
    given, collected = (write_facts(editable, [FACT], "memit", [1], quick(), some) for some in (stats, CORPUS))
    assert given.fingerprint() == collected.fingerprint()
    with pytest.raises(EditError, match=r"no statistics of layer 0 were given"):
        write_facts(editable, [FACT], "memit", [0, 1], quick(), stats)
    assert write_facts(editable, [FACT], "ft", [1], quick(ft_steps=1), {}).rank == zoo.WIDTH


def test_the_registry_names_every_method_and_the_command_lists_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert list(METHODS) == [method.name for method in METHODS.values()] == [*SOLVING, "ft", "ft-l"]
    done = shell(capsys, "methods")
    assert done.code == 0 and not done.err
    lines = done.out.splitlines()
    for method in METHODS.values():
        assert any(line.startswith(f"{method.name} ") for line in lines), method.name
        assert method.source.split(",")[0] in " ".join(done.out.split()) and "arXiv" in method.source
    assert {name for name, method in METHODS.items() if method.layers} == set(BATCH)
    assert {name for name, method in METHODS.items() if not method.statistics} == {"ft", "ft-l"}


def test_the_presets_of_the_papers_have_the_published_numbers() -> None:
    """ROME, appendix E.5: 20 steps of 0.5, decay 0.5, KL 0.0625, a bound of 4, twenty contexts of 5 and 10 tokens.

    MEMIT for GPT-J: 25 steps, five contexts of 10 tokens, the rest the same.
    """
    value, prompts = PAPER.value, PAPER.prompts
    assert (value.steps, value.step_size, value.optimizer) == (20, 0.5, "adam")
    assert (value.weight_decay, value.kl_weight, prompts.essence_prompts) == (0.5, 0.0625, ("{} is a",))
    assert (value.max_delta_norm, prompts.contexts, prompts.context_tokens) == (4.0, 20, (5, 10))
    assert (value.target_loss, value.penalty_decay, PAPER.key.context_weight) == (0.05, 1.0, 0.0)
    assert value.target_probability > 1, "the loss alone ends it"
    assert with_numbers(PAPER, contexts=5, context_tokens=(10,), steps=25) == PAPER_MEMIT


def test_a_preset_is_that_of_the_method() -> None:
    assert all(preset("default", method) == EditConfig() for method in METHODS)
    assert preset("paper", "rome") == PAPER
    assert {preset("paper", method) for method in BATCH} == {PAPER_MEMIT}
    for name, method, words in (("paper", "ft", "it has default"), ("mine", "memit", "it has default, paper")):
        with pytest.raises(EditError, match=words):
            preset(name, method)


def test_numbers_come_back_from_a_manifest_as_they_were() -> None:
    config = quick(seed=3, context_tokens=(7,), essence_prompts=("{} is",), alphaedit_ridge=0.01)
    assert config_from_dict(json.loads(json.dumps(config.to_dict()))) == config
    of_another_version = {"seed": 3, "of another version": 1, "value": {"gone": 1}, "gone": {"ridge": 0.1}}
    assert config_from_dict(of_another_version) == EditConfig(seed=3)


def test_numbers_are_set_by_their_dotted_names() -> None:
    settings = ["seed=2", "value.steps=20", "memit.ridge=1", "prompts.context_tokens=[7]", "key.fact_token=last"]
    found = set_numbers(EditConfig(), settings)
    numbers = {"seed": 2, "contexts": 2, "steps": 20, "memit_ridge": 1.0, "context_tokens": (7,), "fact_token": "last"}
    expected = with_numbers(EditConfig(), **numbers)
    assert found == expected and type(found.methods["memit"].ridge) is float
    with pytest.raises(
        EditError, match=r"^steps is not a setting; the settings are seed, prompts.contexts, .*ft-l.bound$"
    ):
        set_numbers(EditConfig(), ["steps=3"])
    with pytest.raises(EditError, match=r"value.optimizer is 'sgd'; gradient or adam"):
        set_numbers(EditConfig(), ["value.optimizer=sgd"])


@pytest.mark.parametrize("method", ["rome", "memit", "ft-l"])
def test_an_edit_records_the_numbers_of_its_own_method_alone(method: str) -> None:
    config = quick(ft_steps=1, memit_ridge=0.1, alphaedit_ridge=0.1)
    edit = write_facts(zoo.trained("gpt2", True), [FACT], method, [1], config, CORPUS)
    own = {"rome": {}, "memit": {"memit": {"ridge": 0.1}}, "ft-l": {"ft-l": {"steps": 1, "rate": 0.02, "bound": 0.05}}}
    numbers = edit.provenance["config"]
    assert numbers["key"]["keep_beginning"] is (method != "ft-l"), "fine-tuning keeps no key"
    assert {name: numbers[name] for name in numbers if name not in ("seed", "prompts", "key", "value")} == own[method]
