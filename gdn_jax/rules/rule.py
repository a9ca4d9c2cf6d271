"""A rule is an object that says what it takes, how it runs over rows, and how it takes one token.

Every rule has a file of its own and an entry in `table.RULES`; a layer takes one without an entry as an object. A
rule whose gates are others (one decay for each channel, or an erase and a write strength) names them in `gates`, and
its mixer hands over gates of these names.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
from jaxtyping import Array, Float

from gdn_jax.gates import l2norm
from gdn_jax.parallel.token_shards import ByTokens
from gdn_jax.parts.kernels import usable
from gdn_jax.shapes import Keys, LogDecay, Offsets, Outputs, Queries, SegmentIds, Strength, Values
from gdn_jax.styles import Style


class RuleInputs(NamedTuple):
    """The arrays that a token mixer feeds a rule, in the order in which `apply` takes it.

    Fields:
      q, k: queries and keys [B, T, H, K], of unit length where the rule wants that.
      v: values [B, T, HV, V].
      g: log decay [B, T, HV], <= 0.
      beta: write strength [B, T, HV].
    """

    q: Float[Array, "B T H K"]
    k: Float[Array, "B T H K"]
    v: Float[Array, "B T HV V"]
    g: Float[Array, "B T HV"]
    beta: Float[Array, "B T HV"]


@dataclasses.dataclass(frozen=True)
class Rule:
    """A rule that a token mixer may have.

    Fields:
      name: its name in `GatedDeltaNet(rule=...)`, where it is in the table, and in messages.
      rows: rows(q, k, v, **gates, **options) -> (o, final states), over whole rows; states is None for
        a rule without a state.
        A `ByTokens` where a mesh may split the tokens of rows.
      gates: names of the gates that it reads.
      options: names of the options of a call that `rows` takes: "initial_state", "cu_seqlens", "segment_ids",
        "implementation" and "layer". A call with one of the first three is refused where it is not named.
      step: step(q, k, v, **gates, state=...) -> (o, state), of one token without the token axis; None where one token
        runs as a row.
      refuses: options that it cannot run with, each with a reason for the error.
      unit_length: whether it reads q and k of unit length.
      erases: whether a write first erases what its key recalls; None: unknown, and so is how fast it forgets.
      style: its name in words and its look where `GatedDeltaNet`s with it are compared; None: they are not.
      doubled: the same of layers whose write strength goes to 2.
      compared_as: name of these layers in comparisons; None: name.
    """

    name: str
    rows: Callable[..., tuple[jax.Array, jax.Array | None]] | ByTokens
    gates: tuple[str, ...]
    options: tuple[str, ...]
    step: Callable[..., tuple[jax.Array, jax.Array]] | None = None
    refuses: Mapping[str, str] = dataclasses.field(default_factory=dict, hash=False)
    unit_length: bool = True
    erases: bool | None = None
    style: Style | None = None
    doubled: Style | None = None
    compared_as: str | None = None

    def __str__(self) -> str:
        return self.name

    @property
    def splits_tokens(self) -> bool:
        """Whether a mesh may split the tokens of rows."""
        return isinstance(self.rows, ByTokens)

    def __call__(
        self,
        q: Queries,
        k: Keys,
        v: Values,
        g: LogDecay | None = None,
        beta: Strength | None = None,
        *,
        normalized: bool = False,
        initial_state: Float[Array, "N HO K V"] | None = None,
        cu_seqlens: Offsets | None = None,
        segment_ids: SegmentIds | None = None,
        implementation: str | None = None,
        layer: int = 0,
        **gates: jax.Array,
    ) -> tuple[Outputs, Float[Array, "N HO K V"] | None]:
        """Runs the rule on what it takes of a mixer's gates and of a call's options.

        Args:
          q, k, v, g, beta: as for `gated_delta_rule`, q and k of any length.
          normalized: q and k have the length that the rule wants; False gives it to them.
          initial_state, cu_seqlens, segment_ids: as for `gated_delta_rule`.
          implementation: of the delta rules. The linear ones have one implementation, in plain JAX; softmax attention
            chooses its own. Both warn where "mosaic_gpu" is named.
          layer: of softmax attention, see there.
          gates: others that the rule's `gates` name.

        Returns:
          o, and the final states (None for softmax_attention).

        Raises:
          NotImplementedError: an option is given that the rule refuses or does not take.
        """
        given = dict(initial_state=initial_state, cu_seqlens=cu_seqlens, segment_ids=segment_ids)
        for name, reason in self.refuses.items():
            if given[name] is not None:
                raise NotImplementedError(f"{name}: {reason}")
        if "implementation" not in self.options:  # a warning where kernels are named
            usable(implementation, part=f"the rule {self.name}", reason="it has no kernels")
        if self.unit_length and not normalized:
            q, k = l2norm(q), l2norm(k)
        known: dict[str, Any] = gates | {"g": g, "beta": beta}
        read = {name: known[name] for name in self.gates}
        if self.step is None or q.shape[1] != 1 or initial_state is None or cu_seqlens is not None:
            for name, value in given.items():
                if value is not None and name not in self.options:
                    raise NotImplementedError(
                        f"{name}: expected None, for the rule {self.name} does not take it"
                    )
            rows = self.rows.here() if isinstance(self.rows, ByTokens) else self.rows
            options = given | dict(implementation=implementation, layer=layer)
            return rows(q, k, v, **read, **{name: options[name] for name in self.options})
        one = {name: gate[:, 0] for name, gate in read.items()}
        o, state = self.step(q[:, 0], k[:, 0], v[:, 0], **one, state=initial_state)
        return o[:, None], state
