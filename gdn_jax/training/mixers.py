"""Models that sweeps compare, by name: a rule or a mixer, the range of its write strength, the model around it."""

import dataclasses
from collections.abc import Iterator
from typing import NamedTuple

from gdn_jax.layers.table import TOKEN_MIXERS
from gdn_jax.rules import RULES
from gdn_jax.styles import BROWN, PURPLE, SKY, Style
from gdn_jax.training.options import Form, MixerName, ModelOptions, RuleName, SizeOptions


class Variant(NamedTuple):
    """A model that is compared; see `gdn_jax.rules` for the rule.

    Fields:
      style: its name in words, which says where it is not that of the papers, and its look.
      rule, allow_neg_eigval, mixer: as in `ModelOptions`.
      form: the `model` of `ModelOptions`. In a "hybrid" every fourth layer (of a shallower model the last one) is
        attention with rotary positions. All but "gated_delta_net" have about, not exactly, as many parameters; the
        embedding of a hybrid and of its control starts at unit size instead of being scaled to it.
    """

    style: Style
    rule: RuleName = "gated_delta"
    allow_neg_eigval: bool = False
    form: Form = "gated_delta_net"
    mixer: MixerName = "gated_delta_net"

    @property
    def label(self) -> str:
        """Its name in words."""
        return self.style.label

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


def _of_rules() -> Iterator[tuple[str, Variant]]:
    """Gated DeltaNets with each rule.

    Unit keys, a write strength, the short convolution and its SiLU, also on queries and keys of softmax attention,
    are those of DeltaNet's layer in all of them: only the rule differs.
    """
    for rule in RULES.values():
        name = rule.compared_as or rule.name
        for of_it, style, doubled in ((name, rule.style, False), (f"{name}_neg", rule.doubled, True)):
            if style is not None:
                yield of_it, Variant(style, rule.name, doubled)


def _of_mixers() -> Iterator[tuple[str, Variant]]:
    """Models of each other recurrent layer, with strengths to 2 where its published form has them."""
    for name, mixer in TOKEN_MIXERS.items():
        if mixer.style is not None and name not in MIXERS:
            yield name, Variant(mixer.style, allow_neg_eigval=mixer.reflects, mixer=name)


_HYBRID = Style(PURPLE, "P", "full", (0, (6, 2)), "Gated DeltaNet and attention", ("hybrid",))
_CONTROL_WORDS = ("hybrid without attention", "hybrid's control")
_CONTROL = Style(SKY, "h", "none", (0, (1, 1)), "the hybrid without attention", _CONTROL_WORDS)
MIXERS: dict[str, Variant] = {
    **dict(_of_rules()),
    "transformer": Variant(Style(BROWN, "*", "none", (0, (3, 1)), "Transformer"), form="transformer"),
    "hybrid": Variant(_HYBRID, form="hybrid"),
    "hybrid_control": Variant(_CONTROL, form="hybrid_control"),
}
MIXERS |= dict(_of_mixers())


def label(model: ModelOptions) -> str:
    """Returns the name of a model's mixer in words."""
    if model.model == "hybrid":
        of = "" if model.mixer == "gated_delta_net" else f" of {TOKEN_MIXERS[model.mixer].label}"
        return f"hybrid{of} with attention in every {model.attention_every}th layer"
    if model.model != "gated_delta_net":
        return next(m.label for m in MIXERS.values() if m.form == model.model)
    found = next(m for m in MIXERS.values() if (m.mixer, m.rule) == (model.mixer, model.rule))
    doubled = model.allow_neg_eigval and not found.allow_neg_eigval and RULES[model.rule].erases
    return f"{found.label}, beta to 2" if doubled else found.label
