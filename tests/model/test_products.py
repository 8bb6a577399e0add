"""oneDNN multiplies where it is faster: with the results and gradients of torch's own call, and nowhere else."""

from collections.abc import Callable
from functools import partial
from math import inf

import pytest
import torch
from accelerate import cpu_offload
from torch import nn
from torch.utils.flop_counter import FlopCounterMode
from transformers.pytorch_utils import Conv1D

from ffedit.model import products as module
from ffedit.model.products import fast_products, limits

pytestmark = pytest.mark.skipif(not module.AVAILABLE, reason="oneDNN is used on x86 processors only")


def layer(d_in: int = 768, d_out: int = 384, bias: bool = True) -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(d_in, d_out, bias).requires_grad_(False)


def conv(d_in: int = 768, d_out: int = 384) -> Conv1D:
    torch.manual_seed(0)
    return Conv1D(d_out, d_in).requires_grad_(False)


@pytest.mark.parametrize(
    ("about", "unit", "most"),
    [
        ("vendor_id: GenuineIntel", "AVX512", (256, 0)),
        ("vendor_id: AuthenticAMD", "AVX2", (inf, 32)),
        ("vendor_id: AuthenticAMD", "AVX512", (inf, inf)),
    ],
)
def test_the_most_rows_depend_on_the_processor(about: str, unit: str, most: tuple[float, float]) -> None:
    assert limits(about, unit) == most


@pytest.mark.parametrize("make", [layer, partial(layer, bias=False), conv])
@pytest.mark.parametrize("shape", [(1,), (3, 5), (1, 300)])
@pytest.mark.parametrize("most", [(256, 0), (inf, 32), (inf, inf)])
def test_a_product_and_its_gradient_are_those_of_torch(
    monkeypatch: pytest.MonkeyPatch, shape: tuple[int, ...], make: Callable[[], nn.Module], most: tuple[float, float]
) -> None:
    monkeypatch.setattr(module, "ROWS", most[0])
    monkeypatch.setattr(module, "ROWS_BACK", most[1])
    linear, states = make(), torch.randn(*shape, 768, requires_grad=True)
    weights = torch.randn(*shape, 384)
    expected = linear(states)
    (gradient,) = torch.autograd.grad((expected * weights).sum(), states)
    with fast_products(linear):
        found = linear(states)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(torch.autograd.grad((found * weights).sum(), states)[0], gradient, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("make", "name"), [(layer, "input"), (conv, "x")])
def test_states_are_given_by_name_as_to_the_layer_itself(make: Callable[[], nn.Module], name: str) -> None:
    linear, states = make(), torch.randn(3, 768)
    with fast_products(linear):
        assert torch.equal(linear(**{name: states}), linear(states))


def calls(monkeypatch: pytest.MonkeyPatch, linear: nn.Module, states: torch.Tensor) -> int:
    """Return how many products of `linear` are made by oneDNN."""
    made = []

    def counted(*args: torch.Tensor) -> torch.Tensor:
        made.append(args)
        return product(*args)

    product = module.product
    monkeypatch.setattr(module, "product", counted)
    with fast_products(linear):
        linear(states)
    return len(made)


@pytest.mark.parametrize("case", ["few", "transposed", "many", "none", "small", "learned", "other dtype", "autocast"])
def test_only_a_large_fixed_float32_weight_is_multiplied_by_it_with_few_rows(
    monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    monkeypatch.setattr(module, "ROWS", 256)
    linear, rows = conv() if case == "transposed" else layer(), {"many": 257, "none": 0}.get(case, 2)
    if case == "small":
        linear = layer(64, 64)
    if case == "learned":
        linear.requires_grad_(True)
    if case == "other dtype":
        linear = linear.double()
    states = torch.randn(rows, 64 if case == "small" else 768, dtype=linear.weight.dtype)
    with torch.autocast("cpu", torch.bfloat16, enabled=case == "autocast"):
        assert calls(monkeypatch, linear, states) == (case in ("few", "transposed"))


def test_states_of_no_token_give_no_output_in_bfloat16() -> None:
    with fast_products(linear := layer().bfloat16()):
        assert linear(torch.zeros(1, 0, 768, dtype=torch.bfloat16)).shape == (1, 0, 384)


@pytest.mark.parametrize("autocast", [False, True])
def test_a_slice_of_states_is_multiplied_as_a_matrix_in_bfloat16(
    monkeypatch: pytest.MonkeyPatch, autocast: bool
) -> None:
    linear, shapes, torchs = layer(), list[torch.Size](), module.linear
    if not autocast:
        linear.bfloat16()
    monkeypatch.setattr(module, "BFLOAT16", True)
    last = torch.randn(3, 5, 768, dtype=linear.weight.dtype)[:, -1:]
    monkeypatch.setattr(
        module, "linear", lambda states, *others: (shapes.append(states.shape), torchs(states, *others))[1]
    )
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        expected = linear(last.contiguous())
        with fast_products(linear):
            found = linear(last)
    assert shapes == [(3, 768)] and found.shape == expected.shape == (3, 1, 384)
    torch.testing.assert_close(found, expected)


def conversions(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list that receives the number of rows of each product that is made by way of float32."""
    made, converted = list[int](), module.converted

    def noted(states: torch.Tensor, *others: torch.Tensor) -> torch.Tensor:
        made.append(states.numel() // states.shape[-1])
        return converted(states, *others)

    monkeypatch.setattr(module, "converted", noted)
    return made


@pytest.mark.parametrize("make", [layer, partial(layer, bias=False), conv])
@pytest.mark.parametrize("shape", [(768,), (3, 768), (2, 150, 768)])
def test_without_instructions_for_bfloat16_a_product_and_its_gradient_are_those_of_float32_rounded_once(
    monkeypatch: pytest.MonkeyPatch, shape: tuple[int, ...], make: Callable[[], nn.Module]
) -> None:
    monkeypatch.setattr(module, "BFLOAT16", False)
    monkeypatch.setattr(module, "BLOCK", 100 * 768)  # four blocks
    rounded = make().bfloat16()
    exact = make().bfloat16().float()
    states, weights = torch.randn(*shape).bfloat16().requires_grad_(), torch.randn(*shape[:-1], 384).bfloat16()
    expected = exact(states.float())
    (gradient,) = torch.autograd.grad((expected * weights).sum(), states)
    made = conversions(monkeypatch)
    with fast_products(rounded):
        found = rounded(states)
    assert found.dtype == torch.bfloat16 and made == [states.numel() // 768]
    torch.testing.assert_close(found, expected.bfloat16(), rtol=2**-7, atol=1e-5)
    computed = torch.autograd.grad((found.float() * weights).sum(), states)[0]
    torch.testing.assert_close(computed, gradient, rtol=2**-7, atol=1e-3)


@pytest.mark.parametrize("case", ["converted", "instructions", "learned"])
def test_rows_are_multiplied_by_their_experts_weights_by_way_of_float32(
    monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    monkeypatch.setattr(module, "BFLOAT16", case == "instructions")
    made = conversions(monkeypatch)
    experts = nn.Module()
    experts.weight = nn.Parameter(torch.randn(4, 32, 48).bfloat16(), requires_grad=case == "learned")
    states, ends = torch.randn(9, 48).bfloat16().requires_grad_(), torch.tensor([2, 2, 7, 9], dtype=torch.int32)
    weight = experts.weight.transpose(1, 2)
    with fast_products(experts):
        found = torch._grouped_mm(states, weight, offs=ends)
    assert made == ([2, 5, 2] if case == "converted" else [])
    expert_of = torch.tensor([0] * 2 + [2] * 5 + [3] * 2)
    expected = torch.einsum("nd,ndo->no", states.float(), weight.detach().float()[expert_of])
    torch.testing.assert_close(found, expected.bfloat16(), rtol=2**-7, atol=2**-7)
    given, expected_given = (torch.autograd.grad(out.float().sum(), states)[0] for out in (found, expected))
    torch.testing.assert_close(given, expected_given, rtol=2**-7, atol=2**-7)


@pytest.mark.parametrize("case", ["converted", "offloaded", "instructions", "weight", "bias", "float32"])
def test_products_are_converted_without_instructions_unless_something_learns(
    monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    monkeypatch.setattr(module, "BFLOAT16", case == "instructions")
    linear, made = layer().to(torch.float32 if case == "float32" else torch.bfloat16), conversions(monkeypatch)
    linear.weight.requires_grad_(case == "weight")
    linear.bias.requires_grad_(case == "bias")
    if case == "offloaded":
        cpu_offload(linear)
    with fast_products(linear):
        linear(torch.randn(2, 768, dtype=torch.float32 if case == "float32" else torch.bfloat16))
    assert made == ([2] if case in ("converted", "offloaded") else [])


def test_a_layer_is_left_as_it_was_and_its_operations_are_counted() -> None:
    linear = layer()
    with fast_products(linear), FlopCounterMode(display=False) as counter:
        linear(torch.randn(2, 768))
    assert "forward" not in vars(linear)
    assert counter.get_total_flops() == 2 * 2 * 768 * 384
