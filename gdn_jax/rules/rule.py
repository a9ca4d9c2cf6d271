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
from gdn_jax.parts.kernels import usable


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


_MAY_IGNORE = ("implementation", "layer")
"""Options of a call that change no result, so that a rule need not take them."""


@dataclasses.dataclass(frozen=True)
class Rule:
    """A rule that a token mixer may have.

    Fields:
      name: its name in `GatedDeltaNet(rule=...)` and in sweeps, where it is in the table, and in messages.
      rows: rows(q, k, v, **gates, **options) -> (o, final states), over whole rows; None as states where it has none.
      gates: names of the gates that it reads.
      options: names of the options of a call that `rows` takes: "initial_state", "cu_seqlens", "segment_ids",
        "implementation" and "layer". A call with one of the first three is refused where it is not named.
      step: step(q, k, v, **gates, state=...) -> (o, state), of one token without the token axis; None where one token
        runs as a row.
      refuses: options that it cannot run with, each with a reason for the error.
      unit_length: whether it reads q and k of unit length.
    """

    name: str
    rows: Callable[..., tuple[jax.Array, jax.Array | None]]
    gates: tuple[str, ...]
    options: tuple[str, ...]
    step: Callable[..., tuple[jax.Array, jax.Array]] | None = None
    refuses: Mapping[str, str] = dataclasses.field(default_factory=dict, hash=False)
    unit_length: bool = True

    def __str__(self) -> str:
        return self.name

    def __call__(
        self,
        q: jax.Array,
        k: jax.Array,
        v: jax.Array,
        gates: Mapping[str, jax.Array],
        *,
        normalized: bool,
        **options: Any,
    ) -> tuple[jax.Array, jax.Array | None]:
        """Runs the rule on what it takes of a mixer's gates and of a call's options.

        Raises:
          NotImplementedError: an option is given that the rule refuses or does not take.
        """
        for name, reason in self.refuses.items():
            if options[name] is not None:
                raise NotImplementedError(f"{name}: {reason}")
        if "implementation" not in self.options:  # a warning where kernels are named
            usable(f"the rule {self.name}", options["implementation"], "it has no kernels")
        if self.unit_length and not normalized:
            q, k = l2norm(q), l2norm(k)
        read = {name: gates[name] for name in self.gates}
        state = options["initial_state"]
        if self.step is None or q.shape[1] != 1 or state is None or options["cu_seqlens"] is not None:
            for name, value in options.items():
                if value is not None and name not in (*self.options, *_MAY_IGNORE):
                    raise NotImplementedError(
                        f"{name}: expected None, for the rule {self.name} does not take it"
                    )
            return self.rows(q, k, v, **read, **{name: options[name] for name in self.options})
        one = {name: gate[:, 0] for name, gate in read.items()}
        o, state = self.step(q[:, 0], k[:, 0], v[:, 0], **one, state=state)
        return o[:, None], state
