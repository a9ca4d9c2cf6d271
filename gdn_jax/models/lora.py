"""Fine-tuning a few numbers instead of all: low-rank changes of chosen projections.

add_lora(model, 8, projections=("q_proj", "v_proj"), rngs=nnx.Rngs(0))
graphdef, changes, rest = nnx.split(model, LoRAParam, ...)     # train `changes`
merge_lora(model)                                              # an ordinary model again
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float

from gdn_jax.models.decoder import LanguageModel
from gdn_jax.parts.products import times


class LoRAParam(nnx.Param):
    """A parameter of a low-rank change."""


class Change(NamedTuple):
    """A low-rank change W + scale A B of a projection [inputs, outputs], with float32 factors."""

    a: Float[Array, "D R"] | np.ndarray
    b: Float[Array, "R E"] | np.ndarray
    scale: float


class LoRALinear(nnx.Linear):
    """x (W + scale A B) + bias: a projection with a low-rank change (LoRA), which starts at 0.

    Args:
      base: the projection, with W and its bias.
      rank: width between A and B.
      scale: factor of the change.
      rngs: source of A.
      change: A and B, float32, where they are known.

    Parameters: the parameters of `base`; a [inputs, rank], LeCun normal, and b [rank, outputs], zeros, both float32.

    Numerics: the changed weight is formed in float32 and rounded once, to W's dtype: layers that read the weights of
      several projections together see it too, and to merge it changes nothing.
    Source: Hu et al. 2021 (arXiv 2106.09685).
    """

    def __init__(
        self,
        base: nnx.Linear,
        rank: int,
        scale: float,
        *,
        rngs: nnx.Rngs | None = None,
        change: tuple[Any, Any] | None = None,
    ):
        # Not that of nnx.Linear, which makes a weight: here it is a property, for those who read it.
        self.base = base
        self.in_features, self.out_features = base.in_features, base.out_features
        self.dot_general = base.dot_general
        self.scale = scale
        if change is None:
            assert rngs is not None
            init = nnx.initializers.lecun_normal()
            a = init(rngs.params(), (base.in_features, rank), jnp.float32)
            change = a, jnp.zeros((rank, base.out_features), jnp.float32)
        self.a, self.b = map(LoRAParam, change)

    @property
    def kernel(self) -> Any:  # pyrefly: ignore[bad-override]
        """The changed weight [inputs, outputs]."""
        kernel = self.base.kernel[...]
        change = self.scale * jnp.matmul(self.a[...], self.b[...], precision="highest")
        return (kernel.astype(jnp.float32) + change).astype(kernel.dtype)

    @property
    def dtype(self) -> Any:  # pyrefly: ignore[bad-override]
        """The compute dtype of `base`."""
        return self.base.dtype

    @property
    def bias(self) -> Any:  # pyrefly: ignore[bad-override]
        """The bias of `base`, or None."""
        return self.base.bias

    def __call__(self, x: Float[Array, "*S D"]) -> Float[Array, "*S E"]:
        """The projection of x."""
        dtype = self.base.dtype or jnp.promote_types(x.dtype, self.base.param_dtype)
        y = times(self.dot_general, x.astype(dtype), self.kernel.astype(dtype))
        return y if self.bias is None else y + self.bias[...].astype(dtype)

    def merged(self) -> nnx.Linear:
        """`base` with the changed weight."""
        self.base.kernel[...] = self.kernel
        return self.base


def add_lora(
    model: LanguageModel,
    rank: int,
    *,
    projections: Sequence[str] = ("q_proj", "k_proj", "v_proj", "o_proj"),
    alpha: float | None = None,
    rngs: nnx.Rngs,
) -> None:
    """Gives projections of all layers a low-rank change; changes the model in place, and not what it computes.

    Args:
      model: the model.
      rank: of the changes.
      projections: names of projections, as "q_proj" of both kinds of layers or "gate_proj" of a SwiGLU. Experts have
        none.
      alpha: the factor of the change is alpha / rank; None: rank.
      rngs: source of the initial weights.

    Raises:
      ValueError: an argument is wrong; names it.
    """
    if rank < 1:
        raise ValueError(f"rank: expected a positive integer, got {rank}")
    if alpha is not None and not 0 < alpha < math.inf:
        raise ValueError(f"alpha: expected a positive number, got {alpha}")
    _check_plain(model)
    places = [*_parts(model).values()]
    names = {name for _, name, _ in places}
    for name in projections:
        if name not in names:
            raise ValueError(f"projections: expected some of {', '.join(sorted(names))}, got {name}")
    for part, name, linear in places:
        if name in projections:
            setattr(part, name, LoRALinear(linear, rank, (alpha or rank) / rank, rngs=rngs))


def set_lora(model: LanguageModel, changes: Mapping[str, Change]) -> None:
    """Gives projections these low-rank changes; changes the model in place.

    Args:
      model: the model.
      changes: by the projections' places, as "blocks.0.mixer.q_proj", "blocks.0.mlp.shared.up_proj".

    Raises:
      ValueError: the model has low-rank changes, or no such projection of these sizes; names it.
    """
    _check_plain(model)
    places = _parts(model)
    for place, change in changes.items():
        if place not in places:
            raise ValueError(f"changes: expected places of projections, got {place}")
        owner, name, linear = places[place]
        rank = change.a.shape[-1]
        sizes, wanted = (
            (change.a.shape, change.b.shape),
            ((linear.in_features, rank), (rank, linear.out_features)),
        )
        if sizes != wanted:
            raise ValueError(f"changes: expected A and B of shapes {wanted} for {place}, got {sizes}")
        setattr(owner, name, LoRALinear(linear, rank, change.scale, change=(change.a, change.b)))


def lora_changes(model: LanguageModel) -> dict[str, Change]:
    """The low-rank changes of a model by the places of their projections, as `set_lora` takes them."""
    return {
        place: Change(linear.a[...], linear.b[...], linear.scale)
        for place, (_, _, linear) in _parts(model).items()
        if isinstance(linear, LoRALinear)
    }


def merge_lora(model: LanguageModel) -> None:
    """Adds the low-rank changes of a model to its weights, in place: it is an ordinary model again."""
    for part, name, linear in _parts(model).values():
        if isinstance(linear, LoRALinear):
            setattr(part, name, linear.merged())


def _check_plain(model: LanguageModel) -> None:
    if model.config.weights != "whole":
        raise ValueError(
            f"model: expected weights = 'whole', got {model.config.weights!r}: those kept in 8 bits are not trained"
        )
    if lora_changes(model):
        raise ValueError("model: expected one without low-rank changes, got one that has them")


def _parts(model: LanguageModel) -> dict[str, tuple[Any, str, nnx.Linear]]:
    """(owner, name, projection) of the projections of mixers and MLPs, those of a shared expert too, by place."""
    found = {}
    for i, block in enumerate(model.blocks):
        owners = {"mixer": block.mixer, "mlp": block.mlp, "mlp.shared": getattr(block.mlp, "shared", None)}
        for place, owner in owners.items():
            for name, part in ({} if owner is None else vars(owner)).items():
                if isinstance(part, nnx.Linear):
                    found[f"blocks.{i}.{place}.{name}"] = owner, name, part
    return found
