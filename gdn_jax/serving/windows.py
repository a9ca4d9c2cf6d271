"""The pool of the short convolution: a slot holds the last W - 1 inputs of a request, oldest first."""

from typing import Any, ClassVar, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float

from gdn_jax.parts import conv
from gdn_jax.serving import kernels, slots
from gdn_jax.serving.call import At, Spans, interpreter
from gdn_jax.serving.pools import Pool
from gdn_jax.serving.tokens import walk


class Channels(NamedTuple):
    """Inputs [..., D] of the convolution, and its filters."""

    x: Array
    weight: Float[Array, "D W"]
    bias: Float[Array, " D"] | None
    cu_seqlens: Any = None


class WindowPool(Pool):
    """An array of windows [slots, D, W - 1]. The one option of its operations is the activation."""

    names: ClassVar[Any] = "d ."

    def advance(self, call: Any, raw: Any, states: Array, spans: Spans | None) -> tuple[Array, Array]:
        """Outputs of a token of every request and the windows after it, or with spans those of each token."""
        x, weight, bias, _ = raw

        def one(window, x):
            y, window = conv.causal_conv1d_update(x, window, weight, bias, activation=call)
            return window, y

        if spans is None or spans.parents is not None:
            windows, y = one(states, x) if spans is None else walk(one, states, x, spans.parents)
            return y, windows
        # All tokens of a chain at once: each has the window that begins at its place.
        (N, T, D), W = x.shape, weight.shape[1]
        inputs = jnp.concatenate([states, jnp.swapaxes(x, 1, 2).astype(states.dtype)], axis=2)
        windows = jnp.stack([inputs[:, :, t : t + W - 1] for t in range(T + 1)], axis=1)
        _, y = one(windows[:, :-1].reshape(N * T, D, W - 1), x.reshape(N * T, D))
        return y.reshape(N, T, D), windows[:, 1:]

    def prefill(self, call: Any, tokens: Channels, at: At) -> tuple[Float[Array, "1 T D"], Any]:
        """`serving.causal_conv1d`."""
        read, write = self.addresses(at)
        x, weight, bias, cu_seqlens = tokens
        windows = self.take(read)
        if at.has_initial_state is not None:
            windows = jnp.where(at.has_initial_state[:, None, None], windows, 0)
        options = dict(activation=call, initial_state=windows, cu_seqlens=cu_seqlens)
        y, windows = conv.causal_conv1d(x, weight, bias, **options)
        y = jnp.where(slots.is_real(cu_seqlens, read, x.shape[1])[:, None], y, 0)
        return y, self.put(write, windows)

    def by_kernels(self) -> "WindowKernels":
        """The same pool by the kernel of a token."""
        return WindowKernels(self.arrays, self.layout, self.null_slot)


class WindowKernels(WindowPool):
    """A `WindowPool` by the kernel of a token."""

    is_opaque: ClassVar[bool] = True

    def reason(self, tokens: Channels, where: Any) -> str | None:
        """Why the kernel, of `causal_conv1d_update`, cannot run a call on JAX's default device; None if it can."""
        from pallas_kernels.decode import conv_update

        x, weight, bias, _ = tokens
        if x.ndim == 3:
            return "there is no kernel for prompts and drafts"
        return conv_update.check_supported(x, self.arrays, weight, bias) or kernels.reason(self, conv_update)

    def decode(self, call: Any, raw: Channels, at: At) -> tuple[Float[Array, "B D"], Any]:
        """`serving.causal_conv1d_update`."""
        from pallas_kernels.decode.conv_update import conv_update

        x, weight, bias, _ = raw

        def run(pool: Pool, read: Array | None, write: Array | None, layer: Any) -> tuple[Array, Any]:
            slots = {"read_slots": read, "write_slots": write, "null_slot": pool.null_slot}
            options: dict[str, Any] = {"silu": call == "silu", "interpret": interpreter.get()}
            y, arrays = conv_update(x, pool.arrays, weight, bias, **slots, **options, layer=layer)
            return y, pool.holding(arrays)

        return kernels.in_slots(self, at, run)
