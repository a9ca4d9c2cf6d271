"""Token mixers by name: a rule, the range of its write strength, and the form of the model around it."""

import dataclasses
from typing import NamedTuple

from gdn_jax.training.options import MIXER_LABELS, Form, MixerName, ModelOptions, RuleName, SizeOptions


class Mixer(NamedTuple):
    """A token mixer; see `gdn_jax.rules` for the rule.

    Fields:
      label: its name in words, which says where it is not that of the papers.
      rule, allow_neg_eigval, mixer: as in `ModelOptions`.
      form: the `model` of `ModelOptions`. In a "hybrid" every fourth layer (of a shallower model the last one) is
        attention with rotary positions. All but "gated_delta_net" have about, not exactly, as many parameters; the
        embedding of a hybrid and of its control starts at unit size instead of being scaled to it.
    """

    label: str
    rule: RuleName = "gated_delta"
    allow_neg_eigval: bool = False
    form: Form = "gated_delta_net"
    mixer: MixerName = "gated_delta_net"

    def model(self, size: SizeOptions) -> ModelOptions:
        """Returns a model of that size with this mixer."""
        options = ModelOptions(
            **dataclasses.asdict(size),
            rule=self.rule,
            allow_neg_eigval=self.allow_neg_eigval,
            mixer=self.mixer,
            model=self.form,
        )
        return dataclasses.replace(options, attention_every=min(options.attention_every, size.num_layers))


# Unit keys, a write strength, the short convolution and its SiLU, also on queries and keys of softmax attention, are
# those of DeltaNet's layer in every mixer of the form "gated_delta_net": only the rule differs.
MIXERS: dict[str, Mixer] = {
    "linear_attention": Mixer("linear attention with unit keys", "linear_attention"),
    "mamba2": Mixer("Mamba2's decay with unit keys", "mamba2"),
    "delta_net": Mixer("DeltaNet", "delta"),
    "gated_delta_net": Mixer("Gated DeltaNet", "gated_delta"),
    "gated_delta_net_neg": Mixer("Gated DeltaNet, beta to 2", "gated_delta", True),
    "softmax_attention": Mixer("softmax attention without positions", "softmax_attention"),
    "transformer": Mixer("Transformer", "gated_delta", form="transformer"),
    "hybrid": Mixer("Gated DeltaNet and attention", "gated_delta", form="hybrid"),
    "hybrid_control": Mixer("the hybrid without attention", "gated_delta", form="hybrid_control"),
}
REFLECTING = ("gated_delta_product", "gated_delta_product_3", "gated_delta_product_4")
"""Mixers whose published form has strengths to 2."""
MIXERS |= {
    name: Mixer(label, allow_neg_eigval=name in REFLECTING, mixer=name)
    for name, label in MIXER_LABELS.items()
    if name not in MIXERS
}


def label(model: ModelOptions) -> str:
    """Returns the name of a model's mixer in words."""
    if model.model == "hybrid":
        of = "" if model.mixer == "gated_delta_net" else f" of {MIXER_LABELS[model.mixer]}"
        return f"hybrid{of} with attention in every {model.attention_every}th layer"
    if model.model != "gated_delta_net":
        return next(m.label for m in MIXERS.values() if m.form == model.model)
    found = next(m for m in MIXERS.values() if (m.mixer, m.rule) == (model.mixer, model.rule))
    doubled = model.allow_neg_eigval and not found.allow_neg_eigval and "delta" in model.rule
    return f"{found.label}, beta to 2" if doubled else found.label
