"""Corruptions have the stated moments, and metrics the stated definitions."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import zoo
from torch import Tensor

from ffedit.errors import FactError
from ffedit.facts.fact import Fact
from ffedit.locator import Corruption, cases, corruption, locate, locate_all, noise_scale
from ffedit.locator.corruption import Noise

FACT = Fact("Eiffel tower", "the {} is located in", target="Rome", previous="Paris")
FACTS = [Fact(subject, "the {} is located in", previous=place) for subject, place in zoo.KNOWN]
NAMES = ("gaussian", "covariance", "uniform", "replacement")


def draw(name: str, scale: float = 2.0, samples: int = 1000, seed: int = 0) -> Tensor:
    """Noise on one token, [samples, d_model], in σ of the embeddings."""
    editable = zoo.shared("gpt2")
    drawn = Noise(editable, Corruption(name, scale)).draw(samples, 1, zoo.WIDTH, seed)[:, 0]  # type: ignore[arg-type]
    return drawn.double() / noise_scale(editable)


# Noise --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["gpt2", "gemma3", "gemma2"])
@pytest.mark.parametrize("rows", [1, 10, 97])
def test_sigma_is_that_of_all_entries_of_the_embeddings_output_however_the_vocabulary_is_cut(
    rows: int, family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    editable = zoo.build(family)
    with torch.no_grad():  # parts of unlike mean and size
        editable.embedding.weight[:7] += 5
        expected = float(editable.embedding(torch.arange(zoo.VOCAB)).double().std())
    monkeypatch.setattr(corruption, "ROWS", rows)
    assert noise_scale(editable) == pytest.approx(expected, rel=1e-5)


def test_gaussian_noise_has_k_times_sigma() -> None:
    noise = draw("gaussian")
    assert float(noise.std()) == pytest.approx(2, rel=0.02) and float(noise.mean()) == pytest.approx(0, abs=0.05)
    assert float(noise.abs().max()) > 6, "it has tails"
    assert float(noise.T.corrcoef().fill_diagonal_(0).abs().max()) < 0.15


def test_uniform_noise_is_bounded_by_k_times_sigma() -> None:
    noise = draw("uniform")
    assert 1.99 < float(noise.max()) <= 2 and -2 <= float(noise.min()) < -1.99
    assert float(noise.std()) == pytest.approx(2 / 3**0.5, rel=0.02)


def test_covariance_noise_is_shaped_as_the_embeddings_are() -> None:
    editable = zoo.build("gpt2")
    with torch.no_grad():  # a strong correlation, and one direction that the embeddings do not have
        weight = editable.embedding.weight
        weight[:, 1] += 3 * weight[:, 0]
        weight[:, 2] = 0
        expected = 4 * editable.embedding(torch.arange(zoo.VOCAB)).double().T.cov()
    noise = Noise(editable, Corruption("covariance", 2.0)).draw(20_000, 1, zoo.WIDTH, 0)[:, 0].double()
    assert float((noise.T.cov() - expected).norm() / expected.norm()) < 0.05
    assert float(noise[:, 2].abs().max()) < 1e-3 * float(noise.std())


@pytest.mark.parametrize("name", NAMES[:3])
def test_noise_is_drawn_by_seed_and_once_for_all_restorations(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert torch.equal(draw(name, seed=3), draw(name, seed=3)) and not torch.equal(draw(name, seed=3), draw(name))
    calls, draws = [], Noise.draw
    monkeypatch.setattr(Noise, "draw", lambda *words: calls.append(words[1:]) or draws(*words))
    trace = locate(zoo.shared("gpt2"), FACT, corruption=f"{name}:2", samples=3, seed=5)
    assert calls == [(3, 2, zoo.WIDTH, 5)] and np.abs(trace.effects).max() > 1e-4
    assert trace.corruption == str(Corruption(name, 2)) and "2 σ" in trace.corruption  # type: ignore[arg-type]
    if name == "gaussian":
        assert trace.noise == pytest.approx(2 * noise_scale(zoo.shared("gpt2")))


def test_the_clean_run_knows_nothing_of_the_corruption() -> None:
    editable = zoo.shared("llama")
    found = [locate_all(editable, [FACT, *FACTS], corruption=name, samples=2).traces[0] for name in NAMES]
    ids = torch.tensor([editable.tokenizer(FACT.text)["input_ids"]])
    with torch.no_grad():
        said = editable.model(input_ids=ids).logits[0, -1].double().softmax(-1)
    assert {round(trace.clean, 6) for trace in found} == {
        round(float(said[editable.tokenizer("Paris")["input_ids"][0]]), 6)
    }
    assert len({trace.corrupted for trace in found}) == 4


def test_corruptions_are_read_from_a_name_and_a_scale() -> None:
    assert Corruption.parse("uniform:2") == Corruption("uniform", 2.0)
    assert Corruption.parse("gaussian") == Corruption() == Corruption("gaussian", 3.0)
    assert Corruption.parse("covariance:.5").scale == 0.5


@pytest.mark.parametrize(
    ("text", "told"),
    [
        *(("pink", "'pink' is not known; known are gaussian"), ("", "'' is not known"), ("uniform:loud", "'loud'")),
        *(("gaussian:0", "above 0"), ("gaussian:-1", "above 0"), ("gaussian:nan", "above 0"), ("a:b:c", "'b'")),
    ],
)
def test_corruptions_that_make_no_sense_are_refused(text: str, told: str) -> None:
    with pytest.raises(FactError, match=r"^[^\n]*$") as caught:
        locate(zoo.shared("gpt2"), FACT, corruption=text)
    assert told in str(caught.value)


# Replacement --------------------------------------------------------------------------------------


def recorded(monkeypatch: pytest.MonkeyPatch, facts: list[Fact], samples: int, seed: int = 0) -> tuple[Any, Tensor]:
    """Traces with replaced subjects, and the token ids that were run."""
    editable, kept, record = zoo.shared("gpt2", True), [], cases.replay.record
    with monkeypatch.context() as patch:
        patch.setattr(cases.replay, "record", lambda *words: kept.append(words[1]) or record(*words))
        found = locate_all(editable, facts, corruption="replacement", samples=samples, seed=seed)
    return found, torch.cat(kept)


def test_a_replacement_is_another_facts_subject_of_equal_length(monkeypatch: pytest.MonkeyPatch) -> None:
    short = [Fact(city, "old {} stands in", previous="Italy") for city in ("Rome", "Madrid")]
    tokenizer = zoo.words()
    subjects = {tuple(tokenizer(subject)["input_ids"]) for subject, _ in zoo.KNOWN}
    for samples in (3, 7, 50):
        found, ids = recorded(monkeypatch, [*FACTS, *short], samples)
        assert [trace.samples for trace in found.traces] == [min(samples, 7)] * len(FACTS) + [1, 1]
        own = [row for row in ids.tolist() if row[1] == tokenizer("the")["input_ids"][0]]
        assert len(own) == len(FACTS) * (1 + min(samples, 7))
        for i in range(0, len(own), 1 + min(samples, 7)):
            clean, others = own[i], own[i + 1 : i + 1 + min(samples, 7)]
            assert tuple(clean[2:4]) in subjects
            assert {tuple(row[2:4]) for row in others} <= subjects - {tuple(clean[2:4])}
            assert len({tuple(row[2:4]) for row in others}) == len(others), "each at most once"
            assert all(row[:2] + row[4:] == clean[:2] + clean[4:] for row in others)
    assert all(trace.noise is None and "another subject" in trace.corruption for trace in found.traces)


def test_replacements_are_drawn_by_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    first, again, other = (recorded(monkeypatch, FACTS, 2, seed)[1] for seed in (1, 1, 2))
    assert torch.equal(first, again) and not torch.equal(first, other)


def test_no_subject_of_equal_length_is_an_error() -> None:
    for facts in ([FACT], [FACT, Fact("Eiffel tower", "{} stands in")], [FACT, Fact("Rome", "{} is in")]):
        with pytest.raises(
            FactError, match=r"no other fact has a subject of 2 tokens to replace 'Eiffel tower'; add facts"
        ):
            locate_all(zoo.shared("gpt2"), facts, corruption="replacement")


# Metrics ------------------------------------------------------------------------------------------


def test_a_log_probability_is_the_logarithm_of_the_probability() -> None:
    editable = zoo.shared("llama")
    logs, plain = (locate(editable, FACT, samples=1, metric=m) for m in ("log_probability", "probability"))
    assert logs.total == pytest.approx(np.log(plain.clean) - np.log(plain.corrupted), abs=1e-6)
    restored = np.log((plain.corrupted + plain.effects) / plain.corrupted)
    np.testing.assert_allclose(logs.effects, restored, atol=1e-5)


def test_a_logit_difference_is_the_difference_of_logits_of_whole_passes() -> None:
    editable = zoo.shared("gpt2")
    trace = locate(editable, FACT, "state", samples=1, metric="logit_difference", seed=4)
    noise = Noise(editable, Corruption()).draw(1, 2, zoo.WIDTH, 4)
    old, new = (editable.tokenizer(word)["input_ids"][0] for word in ("Paris", "Rome"))
    found = []
    for added in (0 * noise, noise):
        ids = torch.tensor([editable.tokenizer(FACT.text)["input_ids"]])
        there = torch.nn.functional.pad(added, (0, 0, 1, ids.shape[1] - 3))
        handle = editable.embedding.register_forward_hook(lambda _, __, output, there=there: output + there)
        with torch.no_grad():
            logits = editable.model(input_ids=ids).logits[0, -1]
        handle.remove()
        found.append(float(logits[old] - logits[new]))
    assert [trace.clean, trace.corrupted] == pytest.approx(found, abs=1e-4) and abs(found[0] - found[1]) > 0.1
    assert trace.effects[-1, -1] == pytest.approx(trace.total, abs=1e-5)


def test_a_logit_difference_needs_a_target() -> None:
    with pytest.raises(FactError, match="has no new object"):
        locate(zoo.shared("gpt2"), FACTS[0], metric="logit_difference")


def test_errors_are_standard_errors_over_the_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    editable, draws = zoo.shared("gpt2"), torch.randn(3, 2, zoo.WIDTH, generator=torch.Generator().manual_seed(1))
    singles = []
    for chosen in (draws[:1], draws[1:2], draws[2:], draws):
        monkeypatch.setattr(Noise, "draw", lambda *_, chosen=chosen: chosen)
        singles.append(locate(editable, FACT, "state", samples=len(chosen)))
    together = singles.pop()
    alone = np.stack([trace.effects for trace in singles])
    np.testing.assert_allclose(together.effects, alone.mean(0), atol=1e-6)
    np.testing.assert_allclose(together.errors, alone.std(0, ddof=1) / 3**0.5, atol=1e-6)
    assert (together.errors >= 0).all() and (together.errors[-1, :-1] == 0).all(), "nobody reads these states"
    assert all(np.isnan(trace.errors[:, trace.subject[0] :]).all() for trace in singles)


# Whose σ -----------------------------------------------------------------------------------------


def test_sigma_of_the_subjects_is_that_of_their_tokens_alone() -> None:
    editable = zoo.build("gpt2")
    ids = {fact.subject: editable.encode(fact.text, span=fact.span) for fact in FACTS}
    tokens = [i for one in ids.values() for i in one.ids[slice(*one.subject)]]  # type: ignore[misc]
    with torch.no_grad():
        editable.embedding.weight[tokens] *= 0.5
        expected = float(editable.embedding(torch.tensor(tokens)).std())
    wide, narrow = (Noise(editable, Corruption("gaussian", 3, sigma), FACTS) for sigma in ("vocabulary", "subjects"))
    assert wide.sigma == pytest.approx(3 * noise_scale(editable), rel=1e-5)
    assert narrow.sigma == pytest.approx(3 * expected, rel=1e-5) and narrow.sigma < 0.7 * wide.sigma
    found = Corruption.parse("uniform:2:subjects")
    assert found == Corruption("uniform", 2, "subjects") and str(found) == "uniform noise of 2 σ of the subjects"
    traced = locate_all(zoo.shared("gpt2"), FACTS[:2], corruption="gaussian:3:subjects", samples=2, layers=[0])
    assert traced.traces[0].corruption == "Gaussian noise of 3 σ of the subjects"
    for text, expected_text in (
        ("gaussian:3:words", "σ of 'words'"),
        ("covariance:3:subjects", "gaussian and uniform"),
    ):
        with pytest.raises(FactError, match=expected_text):
            Corruption.parse(text)
