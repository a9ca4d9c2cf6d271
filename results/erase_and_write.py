"""Sweeps in which what a write erases and how much it stores start, and are learned, apart.

    python -m results.erase_and_write recall --config FILE [OPTIONS OF gdn sweep]

The mixers are DeltaNet with two gates of each head in the place of one:

    S <- S + k (w v - e k^T S)^T        e = sigmoid(x We + c_e)    w = sigmoid(x Ww + c_w)

The start of e is in the mixer's name, the start of w is --write-starts. With e = w it would be DeltaNet. Two other
mixers are DeltaNet with one change each: `more_room`, beta = sigmoid(2 (x Wb + c)), whose gate moves twice as far
with the same weights; and `small_eps`, whose norm after the rule has an epsilon of 1e-12.
"""

import dataclasses
import sys
from collections.abc import Callable
from typing import Any, ClassVar

import jax.numpy as jnp
from flax import nnx
from jax.scipy.special import logit
from jaxtyping import Array

from gdn_jax.layers import blocks
from gdn_jax.layers.gated_delta_net import GatedDeltaNet, GatedDeltaNetMixer
from gdn_jax.layers.recurrent import ALONE, Rows, at_tokens
from gdn_jax.layers.table import TOKEN_MIXERS
from gdn_jax.styles import COLORS, Style

ERASE_STARTS = {"erase_06": 0.06, "erase_50": 0.5}
"""Where erasing starts, by the name of the mixer."""


class EraseAndWrite(GatedDeltaNet):
    """A GatedDeltaNet layer whose rule erases with one gate and writes with another.

    The rule is called with beta = e and the values w v / e.

    Args: as for `GatedDeltaNet`, and
      erase_start: where e starts.

    Parameters: those of `GatedDeltaNet`, b_proj with a bias, and w_proj [hidden_size, num_v_heads], which has a bias
      with a write_start.
    """

    def __init__(self, *args: Any, erase_start: float, **options: Any):
        self.erase_start = erase_start
        super().__init__(*args, **options)

    def _make_gates(self, linear: Callable[[int, int], nnx.Linear]) -> None:
        super()._make_gates(linear)
        self.w_proj = linear(self.hidden_size, self.num_v_heads)
        blocks.add_bias(self.b_proj, jnp.full(self.num_v_heads, logit(self.erase_start), self.param_dtype))

    def strength_projections(self) -> tuple[blocks.Projection, ...]:
        """See `RecurrentMixer.strength_projections`: a write_start is that of w alone."""
        return (self.w_proj,)

    def rule_inputs(self, x: Array, rows: Rows = ALONE) -> Any:
        """See `RecurrentMixer.rule_inputs`."""
        inputs, conv_state = super().rule_inputs(x, rows)
        erase, write = (_sigmoid(linear(x)) for linear in (self.b_proj, self.w_proj))
        (ratio,) = at_tokens(rows.mask, write / erase)
        return inputs._replace(v=(ratio[..., None] * inputs.v).astype(inputs.v.dtype)), conv_state

    def _as_one(self, x: Array) -> None:
        """The layer is no single operation."""


class MoreRoom(GatedDeltaNet):
    """A GatedDeltaNet layer with beta = sigmoid(2 (x Wb + c))."""

    def gates(
        self, a: Array, b: Array, w: Array | None
    ) -> tuple[Array, Array | None, Array | None, Array | None]:
        """See `RecurrentMixer.gates`."""
        return super().gates(a, 2 * b, w)

    def _as_one(self, x: Array) -> None:
        """The layer is no single operation."""


def _sigmoid(x: Array) -> Array:
    return nnx.sigmoid(x.astype(jnp.float32))


@dataclasses.dataclass(frozen=True)
class EraseAndWriteMixer(GatedDeltaNetMixer):
    """`EraseAndWrite`."""

    layer: ClassVar = EraseAndWrite
    erase_start: float = 0.5


@dataclasses.dataclass(frozen=True)
class MoreRoomMixer(GatedDeltaNetMixer):
    """`MoreRoom`."""

    layer: ClassVar = MoreRoom


class SmallEpsMixer(GatedDeltaNetMixer):
    """`GatedDeltaNet` with an epsilon of the norm after the rule that changes nothing."""

    def make(self, config: Any, **options: Any) -> Any:
        """See `MixerConfig.make`."""
        return super().make(config, **options | {"norm_eps": 1e-12})


MIXERS = {
    **{
        name: EraseAndWriteMixer(
            erase_start,
            style=Style(color, marker, "full", "-", f"DeltaNet, erasing from {erase_start:g}", (name,)),
        )
        for (name, erase_start), color, marker in zip(ERASE_STARTS.items(), COLORS, "ov", strict=False)
    },
    "more_room": MoreRoomMixer(
        style=Style(COLORS[2], "s", "full", "-", "DeltaNet, sigmoid(2b)", ("more room",))
    ),
    "small_eps": SmallEpsMixer(
        style=Style(COLORS[3], "P", "full", "-", "DeltaNet, eps 1e-12", ("small eps",))
    ),
}


def register() -> None:
    """Makes the mixers known to sweeps; to be called before these are imported, as their options list all names."""
    TOKEN_MIXERS.update(MIXERS)
    from gdn_jax.training import mixers

    mixers.MIXERS.update(
        {
            name: mixers.Variant(mixer.style, "delta", mixer=name)
            for name, mixer in MIXERS.items()
            if mixer.style
        }
    )


def main() -> int:
    """Runs `gdn sweep` with these mixers; returns its exit status."""
    register()
    from gdn_jax.commands.cli import main as gdn

    return gdn(["sweep", *sys.argv[1:]])


if __name__ == "__main__":
    sys.exit(main())
