"""Tokens of prompts: the arguments of the delta rule on packed sequences."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from gdn_jax.rule.call import HEADS, Arrays, gates_of
from gdn_jax.rule.ops import delta_chunk_states, delta_rule
from gdn_jax.shapes import ArgumentError, Dims, RuleArrays, check_channels, rule_dims


class Prompts(NamedTuple):
    """Arrays of `delta_rule`, [1, T, ...]."""

    q: Array
    k: Array
    v: Array
    g: Array | None
    beta: Array | None
    erase: Array | None
    write: Array | None
    cu_seqlens: Any

    @property
    def arrays(self) -> tuple:
        """All arrays of tokens."""
        return self[:-1]

    @property
    def of_heads(self) -> RuleArrays | None:
        """Arguments of `gated_delta_rule`; None where gates are of each channel, or erase and write apart."""
        q, k, v, g, beta, erase, write, cu_seqlens = self
        if gates_of(Arrays(q, k, v, g, erase, write, None, cu_seqlens, None), None) != HEADS:
            return None
        return RuleArrays(q, k, v, g, beta, None, cu_seqlens, None)

    def check(self, state_layout: str) -> Dims:
        """Dimensions of the call; raises ValueError for arrays that are not those of its tokens."""
        q, k, v, g, beta, erase, write, cu = self
        offsets = jax.ShapeDtypeStruct(cu.shape, cu.dtype)
        dims = rule_dims(q, k, v, None, beta, None, offsets, None, state_layout)
        for name, x, width, letter in (
            ("g", g, dims.K, "K"),
            ("erase", erase, dims.K, "K"),
            ("write", write, dims.V, "V"),
        ):
            if x is not None:
                check_channels(name, x, (dims.B, dims.T, dims.HO), width, f"B, T, HO, {letter}")
        if beta is not None and (erase is not None or write is not None):
            raise ArgumentError(
                "beta", "None where erase or write is given, since it stands for both", "both"
            )
        return dims

    def writing(self, is_real: Bool[Array, " T"], states: Float[Array, "N HO _ _"]) -> "Prompts":
        """The same with nothing written by the other tokens.

        Args:
          states: an array of the states' dtype and heads.
        """
        ones = (1, is_real.shape[0], states.shape[1])
        if self.erase is None and self.write is None:
            beta = jnp.ones_like(states, shape=ones) if self.beta is None else self.beta
            return self._replace(beta=jnp.where(is_real[:, None], beta, 0))
        write = jnp.ones_like(states, shape=ones) if self.write is None else self.write
        return self._replace(write=jnp.where(is_real.reshape(-1, *(1,) * (write.ndim - 2)), write, 0))

    def rule(self, initial: Float[Array, "N HO _ _"], **options: Any) -> tuple[Array, Array]:
        """Outputs and final states, from initial states."""
        return delta_rule(*self[:5], **self._rest(initial), **options)

    def chunk_states(
        self,
        initial: Float[Array, "N HO _ _"],
        *,
        use_qk_l2norm: bool,
        state_layout: str,
        chunk_size: int,
        **rest: Any,
    ) -> Float[Array, "L HO _ _"]:
        """States at the start of every chunk; takes all options of `rule`."""
        del rest
        _, k, v, g, beta, *_ = self
        if g is None:
            g = jnp.zeros((*k.shape[:2], initial.shape[1]), initial.dtype)
        options: dict[str, Any] = dict(state_layout=state_layout, chunk_size=chunk_size)
        return delta_chunk_states(
            k, v, g, beta, **self._rest(initial), use_k_l2norm=use_qk_l2norm, **options
        )[0]

    def _rest(self, initial: Array) -> dict[str, Any]:
        """Arguments of `rule` and `chunk_states` besides tokens with their decay and beta."""
        of_sequences = dict(initial_state=initial, cu_seqlens=self.cu_seqlens)
        return dict(erase=self.erase, write=self.write) | of_sequences
