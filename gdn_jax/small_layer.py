"""The small layer of the blog post on the method, as a flax.nnx module."""

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from gdn_jax.gates import l2norm, write_strength
from gdn_jax.rule.implementations import IMPLEMENTATIONS
from gdn_jax.rule.ops import gated_delta_rule
from gdn_jax.shapes import MAX_HEAD_DIM, check_choice


class SmallGatedDeltaNet(nnx.Module):
    """The small layer of the blog post on the method: linear maps, gates and the rule, nothing else.

        q, v = x Wq + bq, x Wv + bv          k = unit length per head of x Wk + bk
        alpha = sigmoid(x Wa + ba)           beta = sigmoid(x Wb + bb)
        S <- alpha S;   S <- S + beta k (v - k^T S)^T;   o = q^T S

    No convolution, no output gate, norm or projection; q is neither normalised nor scaled.

    The post's code takes the prediction error v - k^T S from the state BEFORE its decay. This class decays
    first, as the paper's rule and every implementation in use do; after 8 steps of random input the two
    states differ by some 6 %. The post's state is [V, K], ours [K, V].

    Args:
      d_k: width of the input, of all queries and of all keys together.
      d_v: width of all values together, the width of the output.
      num_heads: H, a divisor of d_k and d_v.
      dtype, param_dtype: compute and parameter dtype.
      implementation: of the rule, see `gated_delta_rule`.
      rngs: source of the initial weights.

    Raises:
      ValueError: num_heads does not divide d_k or d_v, a head is wider than 256, or implementation is unknown.
    """

    def __init__(
        self,
        d_k: int,
        d_v: int,
        num_heads: int,
        *,
        dtype: DTypeLike | None = None,
        param_dtype: DTypeLike = jnp.float32,
        implementation: str | None = None,
        rngs: nnx.Rngs,
    ):
        for name, width in (("d_k", d_k), ("d_v", d_v)):
            if num_heads < 1 or width < 1 or width % num_heads:
                raise ValueError(f"{name}: expected a multiple of num_heads = {num_heads}, got {width}")
            if width // num_heads > MAX_HEAD_DIM:
                raise ValueError(
                    f"{name}: expected heads of width up to {MAX_HEAD_DIM}, got {width // num_heads}"
                )
        check_choice("implementation", implementation, (*IMPLEMENTATIONS, None))
        self.num_heads = num_heads
        self.implementation = implementation

        def linear(features):
            return nnx.Linear(d_k, features, dtype=dtype, param_dtype=param_dtype, rngs=rngs)

        self.q_proj = linear(d_k)
        self.k_proj = linear(d_k)
        self.v_proj = linear(d_v)
        self.alpha_proj = linear(num_heads)
        self.beta_proj = linear(num_heads)

    def __call__(
        self, x: Float[Array, "B T D"], *, initial_state: Float[Array, "B H K V"] | None = None
    ) -> tuple[Float[Array, "B T d_v"], Float[Array, "B H K V"]]:
        """Mixes the tokens of every row.

        Args:
          x: inputs [B, T, d_k], floating.
          initial_state: [B, H, d_k / H, d_v / H], zeros by default.

        Returns:
          o [B, T, d_v] in the compute dtype and the final state [B, H, d_k / H, d_v / H], float32.
        """
        B, T, _ = x.shape
        q, k, v = (f(x).reshape(B, T, self.num_heads, -1) for f in (self.q_proj, self.k_proj, self.v_proj))
        alpha = self.alpha_proj(x)
        # log(sigmoid) of the raw gate: taking the logarithm of a rounded alpha would lose the slow heads.
        g = jax.nn.log_sigmoid(alpha.astype(jnp.promote_types(alpha.dtype, jnp.float32)))
        o, state = gated_delta_rule(
            q,
            l2norm(k),
            v,
            g,
            write_strength(self.beta_proj(x)),
            scale=1.0,
            initial_state=initial_state,
            implementation=self.implementation,
        )
        return o.reshape(B, T, -1), state
