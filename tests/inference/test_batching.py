"""Where memory fails in the middle, a smaller batch gives the same; where nothing can be halved, one line says so."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import zoo
from choosing import FOUR, FULL, choose, same
from torch import Tensor
from writing import CORPUS, FACT, SECOND, quick

import ffedit
from ffedit import EditError, ModelError
from ffedit.algebra.key_moments import RIDGES, second_moment
from ffedit.editor import key as editor_key
from ffedit.editor.key import build_prompts, read_keys
from ffedit.editor.statistics import collect
from ffedit.editor.value import Objective
from ffedit.editor.write import write as write_facts
from ffedit.evaluator import responses
from ffedit.inference import batching, contexts, generation, replay
from ffedit.inference.batching import split_on_oom
from ffedit.model import storage
from ffedit.model.editable import Editable
from ffedit.model.memory import Address

ERRORS = [
    torch.OutOfMemoryError("CUDA out of memory"),
    MemoryError(),
    RuntimeError(
        "[enforce fail at alloc_cpu.cpp:118] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to"
    ),
    RuntimeError("DefaultCPUAllocator: not enough memory: you tried"),
    RuntimeError("CUDA error: out of memory"),
    RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    RuntimeError("cusolver error: CUSOLVER_STATUS_ALLOC_FAILED, when calling `cusolverDnCreate(handle)`"),
    RuntimeError(
        "MPS backend out of memory (MPS allocated: 9.06 GB, other allocations: 1.00 GB, max allowed: 9.07 GB)"
    ),
    RuntimeError("CUDA driver error: out of memory"),
    RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"),
    RuntimeError("magma: malloc failed (MAGMA_ERR_DEVICE_ALLOC)"),
]
Fail = Callable[[int], bool]


def failing(run: Callable[..., Any], rows: Callable[..., int], fail: Fail, error: Exception | None = None) -> Any:
    """`run`, which has done all its work when it fails: nothing of that may count twice."""

    def runs(*given: Any, **named: Any) -> Any:
        done = run(*given, **named)
        if fail(rows(*given)):
            raise error or torch.OutOfMemoryError("CUDA out of memory")
        return done

    return runs


def crowded(monkeypatch: pytest.MonkeyPatch, name: str, fail: Fail, error: Exception | None = None) -> None:
    """Let `replay.name` fail by the number of rows that it is given."""
    monkeypatch.setattr(replay, name, failing(getattr(replay, name), lambda _, ids, *rest: len(ids), fail, error))


# Halving ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("error", ERRORS)
@pytest.mark.parametrize("most", [1, 2, 3, 7])
def test_every_item_is_done_once_and_in_order(error: Exception, most: int) -> None:
    asked: list[int] = []

    def work(some: Sequence[int]) -> list[int]:
        asked.append(len(some))
        if len(some) > most:
            raise error
        return list(some)

    parts = list(split_on_oom(work, range(7), EditError("too large")))
    assert [item for part in parts for item in part] == list(range(7))
    assert max(map(len, parts)) <= most < 8 and asked[0] == 7
    assert len(asked) == 2 * len(parts) - 1, "no half is tried again"


def test_one_item_that_does_not_fit_is_said_and_other_errors_are_not_hidden() -> None:
    def work(error: Exception) -> Callable[[Sequence[int]], None]:
        def fails(_: Sequence[int]) -> None:
            raise error

        return fails

    with pytest.raises(EditError, match="too large"):
        list(split_on_oom(work(MemoryError()), range(4), EditError("too large")))
    for items in (range(4), range(1)):
        with pytest.raises(RuntimeError, match="shapes do not match"):
            list(split_on_oom(work(RuntimeError("shapes do not match")), items, EditError("too large")))


# What a model says --------------------------------------------------------------------------------

PROMPTS = [[3, 4, 5], [14, 15, 9], [7, 3, 3], [2, 21, 5], [9, 9, 4], [1, 2], [6]]


def drawn(editable: Editable, how: str) -> list[list[int]]:
    """What is said after `PROMPTS`: the likeliest, or drawn of all tokens, or of the five likeliest."""
    numbers = torch.rand(len(PROMPTS), 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    top = 5 if how == "drawn of five" else None
    return generation.continuations(editable, PROMPTS, 6, None if how == "greedy" else numbers, top)


@pytest.mark.parametrize("how", ["greedy", "drawn", "drawn of five"])
def test_generations_are_the_same_in_smaller_batches(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    editable, asked = zoo.trained("gpt2", True, torch.float64), []
    expected = drawn(editable, how)

    def fail(rows: int) -> bool:
        asked.append(rows)
        return rows > 2

    monkeypatch.setattr(generation, "_continue", failing(generation._continue, lambda _, rows, *rest: len(rows), fail))
    assert drawn(editable, how) == expected and max(asked) > 2
    assert how == "greedy" or expected != drawn(editable, "greedy"), "something was drawn"


@pytest.mark.parametrize(("module", "name"), [(responses, "logits_at"), (generation, "_continue")])
def test_no_memory_for_a_single_text_is_said(
    module: ModuleType, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory")

    editable = zoo.trained("gpt2", True)
    (prompt_set,) = build_prompts(editable, [[FACT]], FULL)
    monkeypatch.setenv("FFEDIT_CACHE", str(tmp_path))
    monkeypatch.setattr(module, name, fails)
    with pytest.raises(ModelError, match="not enough memory to read a single text"):
        if module is responses:
            responses.ask(editable, prompt_set.prompts)
        else:
            build_prompts(editable, [[FACT]], FULL)


# Scores -------------------------------------------------------------------------------------------

ASKED = [
    replace(FACT, paraphrases=("{} stands in", "the city of {} is"), neighbors=("the Nile river is located in",)),
    replace(SECOND, paraphrases=("{} and",), same_subject=("{} lives in",)),
]


@pytest.mark.parametrize("width", [1, 12], ids=["whole texts", "trees"])
def test_scores_are_the_same_in_smaller_batches(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    editable, model = zoo.trained("gpt2", True, torch.float64), type(zoo.shared("gpt2").model)
    monkeypatch.setattr(contexts, "WIDTH", width)
    monkeypatch.setattr(contexts, "TIMES", 1)
    expected, plainly, rows = ffedit.evaluate(editable, ASKED), model.forward, []

    def forward(self: Any, *given: Any, **named: Any) -> Any:
        done = plainly(self, *given, **named)
        rows.append(len(named["input_ids"]))
        if rows[-1] > 1:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return done

    monkeypatch.setattr(model, "forward", forward)
    found = ffedit.evaluate(editable, ASKED)
    measured = {name: score for name, score in expected.before.to_dict().items() if score is not None}
    again = {name: score for name, score in found.before.to_dict().items() if score is not None}
    assert again == pytest.approx(measured, rel=1e-9, abs=1e-12) and len(again) > 5
    assert max(rows) > 2 and min(rows) == 1


# What is free -------------------------------------------------------------------------------------


def test_batches_are_as_large_as_free_memory_allows_and_what_torch_keeps_is_free(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    editable = zoo.build("gpt2")
    assert batching.batch_budget(editable, 1000, 8) == 1000, "a CPU is not filled"

    class OnGpu:
        is_cuda = True

    memory = {"mem_get_info": (2**30, 2**34), "memory_reserved": 5 * 2**30, "memory_allocated": 3 * 2**30}
    for name, value in memory.items():
        monkeypatch.setattr(torch.cuda, name, lambda device, value=value: value)
    monkeypatch.setattr(torch, "empty", lambda *_, **__: OnGpu())
    free = 2**30 + (5 - 3) * 2**30
    assert batching.batch_budget(editable, 1000, 8) == free // (8 * 4)
    assert batching.batch_budget(editable, 2**40, 8) == 2**40
    device = torch.device("cuda", 0)
    assert storage.solve_device(device, free // 8 - 1) == device, "float64 numbers"
    assert storage.solve_device(device, free // 8) == torch.device("cpu")
    for name, value in {"mem_get_info": (0, 2**34), "memory_reserved": 3 * 2**30}.items():
        monkeypatch.setattr(torch.cuda, name, lambda device, value=value: value)
    assert batching.batch_budget(editable, 1000, 8) == 1000 and storage.solve_device(device, 1).type == "cpu"


# Values -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("step", [0, 2])
def test_values_are_the_same_in_smaller_batches(step: int, monkeypatch: pytest.MonkeyPatch) -> None:
    editable = zoo.trained("gpt2", True, torch.float64)
    expected, plainly, failed = choose(editable, FOUR), Objective.loss_and_gradient, []

    def loss_and_gradient(self: Objective, delta: Tensor, *rest: Any) -> Any:
        if len(delta) > 1 and rest[1] == FULL.value.penalty_decay**step:
            failed.append(len(delta))
            raise torch.OutOfMemoryError("CUDA out of memory")
        return plainly(self, delta, *rest)

    monkeypatch.setattr(Objective, "loss_and_gradient", loss_and_gradient)
    same(choose(editable, FOUR), expected)
    assert failed == [4, 2, 2]


def test_no_memory_for_a_single_value_is_said_and_nothing_is_left_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    editable = zoo.trained("gpt2", True)

    def fails(*_: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(replay, "resume_after", fails)
    with pytest.raises(EditError, match="not enough memory to choose a single value"):
        choose(editable, FOUR)
    assert all(p.requires_grad for p in editable.model.parameters())
    assert not any(m._forward_hooks or "forward" in m.__dict__ for m in editable.model.modules())


# Keys ---------------------------------------------------------------------------------------------


def test_the_keys_of_many_subjects_are_those_of_each_also_in_smaller_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    editable = zoo.trained("gpt2", True, torch.float64)
    ff, subjects = editable.feed_forward[1], (FACT.subject, "Rome", "the Nile")
    prompt_sets = build_prompts(editable, [[replace(FACT, subject=subject)] for subject in subjects], FULL)
    alone = [read_keys(editable, ff, [prompt_set]) for prompt_set in prompt_sets]
    # Texts of all subjects are sorted by length and share batches; at last, memory fails for more than two of them.
    for tokens, rows in ((1, None), (20, None), (4096, None), (4096, 2)):
        monkeypatch.setattr(editor_key, "TOKENS", tokens)
        if rows is not None:
            crowded(monkeypatch, "run_to", lambda count: count > 2)
        together = read_keys(editable, ff, prompt_sets)
        for name in ("K", "streams"):
            single = torch.cat([getattr(keys, name) for keys in alone], -1)
            torch.testing.assert_close(getattr(together, name), single, rtol=1e-12, atol=1e-13)
        for read, keys in zip(together.same, alone, strict=True):
            torch.testing.assert_close(read, keys.same[0], rtol=1e-12, atol=1e-13)
    crowded(monkeypatch, "run_to", lambda rows: True)
    with pytest.raises(EditError, match="not enough memory to read the key of a single text"):
        read_keys(editable, ff, prompt_sets)


# Statistics ---------------------------------------------------------------------------------------


def collected(editable: Editable, cache: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Statistics of two layers, whatever another cache holds."""
    monkeypatch.setenv("FFEDIT_CACHE", str(cache))
    return collect(editable, [editable.memories[layer] for layer in (0, 2)], CORPUS)


@pytest.mark.parametrize("between", [False, True], ids=["behind the last layer", "between two layers"])
def test_statistics_are_the_same_in_smaller_batches(
    between: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    editable = zoo.trained("gpt2", True, torch.float64)
    expected = collected(editable, tmp_path / "a", monkeypatch)
    failed: list[int] = []

    def fail(rows: int) -> bool:
        failed.append(rows)
        return rows > 3

    if between:  # the lower layer's keys have passed by then

        def stop(_: Any, given: Any) -> None:
            if given[0].shape[1] > 1 and fail(len(given[0])):
                raise torch.OutOfMemoryError("CUDA out of memory")

        plainly = replay.run_to

        def run_to(*given: Any) -> None:
            with_stop = editable.layers[1].register_forward_pre_hook(stop)
            try:
                plainly(*given)
            finally:
                with_stop.remove()

        monkeypatch.setattr(replay, "run_to", run_to)
    else:
        crowded(monkeypatch, "run_to", fail)
    found = collected(editable, tmp_path / "b", monkeypatch)
    assert max(failed) > 3 >= min(failed)
    for at in (Address(0), Address(2)):
        torch.testing.assert_close(found[at].sum, expected[at].sum, rtol=1e-5, atol=1e-5)
        assert found[at].count == expected[at].count == CORPUS.tokens
        # The keys that the ridge is measured at are of the rows that pass first: it may be another by one step.
        assert abs(RIDGES.index(found[at].ridge) - RIDGES.index(expected[at].ridge)) <= 1
        C = second_moment(found[at].sum, CORPUS.tokens, expected[at].ridge)
        assert float((C - expected[at].C).norm()) < 1e-6 * float(expected[at].C.norm())


def test_no_memory_for_a_single_row_of_statistics_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    editable = zoo.trained("gpt2", True)
    crowded(monkeypatch, "run_to", lambda rows: True)
    with pytest.raises(EditError, match=r"key statistics of 2 layers.*0\.00026 GB.*fewer layers"):
        collected(editable, tmp_path / "a", monkeypatch)


# Fine-tuning, and what cannot be halved -----------------------------------------------------------


def test_fine_tuning_is_the_same_in_smaller_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    editable, config = zoo.trained("gpt2", True, torch.float64), quick(ft_steps=3)

    def tuned() -> Tensor:
        return write_facts(editable, [FACT, SECOND], "ft", [1], config).updates[Address(1)].dense

    expected = tuned()
    crowded(monkeypatch, "forward", lambda rows: rows > 1)
    torch.testing.assert_close(tuned(), expected, rtol=1e-4, atol=1e-7)
    crowded(monkeypatch, "forward", lambda rows: True)
    with pytest.raises(EditError, match="not enough memory for the gradient of a single text"):
        tuned()


def test_no_memory_for_the_algebra_is_said_and_the_model_is_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    editable = zoo.trained("gpt2", True)
    before, stats = zoo.snapshot(editable), collect(editable, [editable.memories[1]], CORPUS)

    def fails(*_: Any, **__: Any) -> Any:
        raise RuntimeError("DefaultCPUAllocator: not enough memory: you tried to allocate 2147483648 bytes")

    monkeypatch.setattr(torch, "cholesky_solve", fails)
    with pytest.raises(EditError) as caught:
        write_facts(editable, [FACT], "memit", [1], quick(steps=1), stats)
    assert "not enough memory to write 1 fact by memit" in str(caught.value) and "\n" not in str(caught.value)
    assert zoo.unchanged(editable, before)
