"""Token mixers by name: a rule and the range of its write strength."""

from typing import NamedTuple

from gdn_jax.experiments.options import ModelOptions, RuleName


class Mixer(NamedTuple):
    """A token mixer; see `gdn_jax.rules` for the rule."""

    label: str
    rule: RuleName
    allow_neg_eigval: bool = False


MIXERS: dict[str, Mixer] = {
    "linear_attention": Mixer("linear attention", "linear_attention"),
    "mamba2": Mixer("Mamba2's rule", "mamba2"),
    "delta_net": Mixer("DeltaNet", "delta"),
    "gated_delta_net": Mixer("Gated DeltaNet", "gated_delta"),
    "gated_delta_net_neg": Mixer("Gated DeltaNet, beta to 2", "gated_delta", True),
    "softmax_attention": Mixer("softmax attention", "softmax_attention"),
}


def label(model: ModelOptions) -> str:
    """Name of a model's mixer in words."""
    if model.model == "hybrid":
        return f"hybrid with attention in every {model.attention_every}th layer"
    name = next(m.label for m in MIXERS.values() if m.rule == model.rule)
    return f"{name}, beta to 2" if model.allow_neg_eigval and "delta" in model.rule else name
