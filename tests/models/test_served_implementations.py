"""Which kernels a served model launches, by the implementation that its configuration names."""

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from programs import KERNELS, eqns

from gdn_jax.models import AttentionConfig, ExpertsConfig, LanguageModel, ModelConfig
from gdn_jax.models.served import ServedModel
from pallas_kernels.device import launch

SIZES = dict(vocab_size=64, hidden_size=256, num_layers=2, num_heads=2, head_dim=64, expand_v=1.0)
ATTENTION = AttentionConfig(4, 2, 64, qk_norm="head", rotary_dim=64, output_gate=True)
EXPERTS = ExpertsConfig(8, 2, 64, 64)

CALLS = {
    "prefill": ((1, 32), (3,), (2,), (2,)),
    "decode": ((3,), (3,)),
    "verify": ((2, 2), (2, 2), (2,)),
}
"""Shapes of the arguments between the parameters and the pools. The last one of `prefill` is of booleans."""

KERNELS_OF_RULE = {
    ("gated_delta_net", None): ("gated_inverse", "decode_step", "decode_step"),
    ("gated_delta_net", 16): ("gated_inverse", "decode_deferred", "verify_ring"),
    ("eda", None): ("channel_outputs", "decode_step", "decode_step"),
}
"""Kernels of each call, by mixer and length of the rings."""


@pytest.mark.parametrize(
    ("mixer", "ring"),
    [case if case[1] is None else pytest.param(*case, marks=pytest.mark.slow) for case in KERNELS_OF_RULE],
)
@pytest.mark.parametrize("implementation", [None, "chunked"])
def test_a_served_model_runs_what_its_configuration_names(mixer, ring, implementation, monkeypatch):
    """On a GPU a model named "chunked" launches no kernel for prompts, tokens and drafts. One without a name launches
    the kernels of the rule, the norm and the experts, and for tokens the kernels of convolution and attention too."""
    monkeypatch.setattr(launch, "device_reason", lambda *_: None)
    config = ModelConfig(
        **SIZES,
        mixer=mixer,
        layer_types=(mixer, "attention"),
        attention=ATTENTION,
        experts=EXPERTS,
        dtype="bfloat16",
        implementation=implementation,
    )
    graphdef = None

    def weights():
        nonlocal graphdef
        graphdef, state = nnx.split(LanguageModel(config, rngs=nnx.Rngs(0)))
        return state

    state = jax.eval_shape(weights)
    for (name, shapes), kernel in zip(CALLS.items(), KERNELS_OF_RULE[mixer, ring], strict=True):

        def call(state, *args, name=name):
            served = ServedModel(nnx.merge(graphdef, state))
            return getattr(served, name)(served.params, *args, served.make_pools(4, ring=ring, capacity=64))

        args = [jax.ShapeDtypeStruct(shape, jnp.int32) for shape in shapes]
        if name == "prefill":
            args[-1] = jax.ShapeDtypeStruct(shapes[-1], bool)
        jaxpr = jax.make_jaxpr(call)(state, *args)
        if implementation == "chunked":
            assert not [eqn for eqn in eqns(jaxpr.jaxpr) if eqn.primitive.name in KERNELS], name
            continue
        around = ("conv_update", "attention_rows") if name == "decode" else ()
        text = str(jaxpr)
        assert all(f"name={one}" in text for one in (kernel, "add_norm", "expert_swiglu", *around)), name
