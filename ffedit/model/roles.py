"""Tables of the names by which a model's parts are recognised, whatever its type.

A module is recognised by its *role*: a name that modules of its kind have in many models. A model family that uses
other names needs a row here and nothing else (docs/add-a-model-family.md); a forward pass verifies what was recognised.
Users may change these tables before they load a model.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor
from torch.nn.functional import silu

# The value matrix of a feed-forward layer.
VALUE_ROLES = (
    *("down_proj", "c_proj", "dense_4h_to_h", "fc2", "fc_out", "w2", "wo", "output_linear"),
    "output.dense",  # BERT, where it is a decoder
)
# Words in the names of modules that are attention; the roles of feed-forward layers do not count inside.
ATTENTION_WORDS = ("attn", "attention")
# The last linear map inside attention: its output is the attention's, whatever the block does with it.
ATTENTION_ROLES = ("o_proj", "out_proj", "c_proj", "dense", "wo")
# The module that gives the logit of the shared experts' weight.
SHARED_GATES = ("shared_expert_gate",)


class Role(NamedTuple):
    """Name of the first matrix of a feed-forward layer, which holds its keys."""

    first: str  # path of the module that holds K, or the gate G, in the module that holds the value matrix
    up: str | None = None  # path of the module that holds U, where the gate is a matrix of its own
    fused: bool = False  # `first` holds G and, below it, U


# The first row whose modules all exist is taken: pairs precede the single names that they contain.
KEY_ROLES = [
    Role("gate_proj", "up_proj"),
    Role("wi_0", "wi_1"),
    Role("w1", "w3"),
    Role("c_fc_0", "c_fc_1"),
    Role("gate_up_proj", fused=True),
    Role("input_linear", fused=True),
    Role("Wi", fused=True),
    *map(Role, ("c_fc", "fc1", "fc_in", "dense_h_to_4h", "wi", "lin1", "intermediate.dense", "up_proj", "w1")),
]
# Attributes in which feed-forward layers keep their activation: a module, a function, or the name of one.
ACTIVATION_ROLES = (
    *("act", "act_fn", "act_func", "activation", "activation_fn", "activation_func", "activation_function"),
    *("gelu_impl", "intermediate_act_fn", "intermediate.intermediate_act_fn"),
)
# Activations of feed-forward modules that have no such attribute, by class; and those that users register.
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {"Lfm2MLP": silu}


def register_activation(name: str, function: Callable[[Tensor], Tensor]) -> None:
    """Register the function of an activation; it takes precedence over the model's own function of this name.

    `name` is the string in the layer's activation attribute, or the name of the class or function in it, or, for a
    feed-forward module without such an attribute, the name of its class. `function` maps the outputs of the keys,
    [.., d_ff], to f of them.
    """
    ACTIVATIONS[name] = function


class Layout(NamedTuple):
    """Layout of the matrices of fused experts."""

    gate: bool  # the first matrices hold gate and up
    bias: bool  # the maps have biases
    transposed: bool  # matrices are [inputs, outputs]
    # the router scales an expert's input, not its output, and the module receives all tokens once for each expert, as
    # zeros where a token is not the expert's
    scales_input: bool = False


# Layouts that transformers does not declare, by the class of the experts.
LAYOUTS: dict[str, Layout] = {"Llama4TextExperts": Layout(True, False, True, scales_input=True)}
