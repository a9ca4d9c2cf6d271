"""Faults of kernels and the seams to them."""

from faults.fault import Fault

FAULTS = (
    Fault(
        "a product of the inverse is not cleared between sequences",
        "quarter = _kept(dev.product(x_l.astype(jnp.float16), x_smem.at[0:HALF]), first, 2)",
        "quarter = dev.product(x_l.astype(jnp.float16), x_smem.at[0:HALF])",
        "tests/test_isolation.py::test_inverse_of_a_shared_chunk",
    ),
    Fault(
        "the kernels' gradient of a write strength is divided by it",
        "(beta * dv_u + weight * k_write) / ((beta * beta + weight) * mantissa)",
        "dv_u / (beta * mantissa)",
        "tests/test_kernels_backward.py",
    ),
    Fault(
        "one known sequence is a packed row in the backward and a row in the forward",
        "    if as_batch:\n        x, do, known",
        "    if as_batch and x.dims.N > 1:\n        x, do, known",
        "tests/test_kernels_backward.py::test_one_known_sequence_is_cut_as_the_forward_cut_it",
    ),
    Fault(
        "gradients do not go through the L2 norm",
        "    if through_norm is not None:\n",
        "    if False:\n",
        "tests/test_mosaic.py",
    ),
    Fault(
        "what is kept of a token does not hold its write strength",
        "jnp.exp2(smem.g2[stage, CHUNK - 1] - g_rows) * beta",
        "jnp.exp2(smem.g2[stage, CHUNK - 1] - g_rows)",
        "tests/test_kernels.py::test_tokens_of_no_strength_leave_the_state_alone",
    ),
    Fault(
        "float16 adjoints lack the factor that P has",
        "g_last = g_last + jnp.where(cta.adjoint, float(FLOAT16_LOG2), 0.0)",
        "g_last = g_last + 0.0",
        "tests/test_kernels_backward.py::test_float16_in_the_interpreter",
    ),
    Fault(
        "tables of traced lengths rise one token late",
        "jnp.where(place >= at[n], rises[n], 0)",
        "jnp.where(place > at[n], rises[n], 0)",
        "tests/test_kernels.py::test_tables_are_the_same_in_numpy_and_traced",
    ),
    Fault(
        "padding is ignored where lengths are known",
        "starts = cu_seqlens[:-1] if cu_seqlens[-1] == T else cu_seqlens",
        "starts = cu_seqlens[:-1]",
        "tests/test_kernels.py::test_padding_where_lengths_are_known",
    ),
    Fault(
        "the last segment of a sequence is taken for an inner one",
        "inner = int(((-(-values // length) - 1) * counts).sum())",
        "inner = int((-(-values // length) * counts).sum())",
        "tests/test_kernels.py::test_segments_of_a_cut",
    ),
    Fault(
        "the convolution forgets borders of segments just before a strip",
        "            past[:n] = _cut(strip.linked(strip.first - (WIDTH - 1) + n), past[:n])",
        "            past[:n] = past[:n]",
        "tests/test_layer_kernels_short_conv.py::test_short_conv",
    ),
    Fault(
        "the convolution's derivative forgets borders of segments just behind a strip",
        "                behind[n:] = _cut(strip.linked(strip.end + n), behind[n:])",
        "                behind[n:] = behind[n:]",
        "tests/test_layer_kernels_short_conv.py::test_short_conv",
    ),
    Fault(
        "tokens outside the vocabulary have a gradient",
        "    ids = jnp.where(ids < 0, V, ids)  # those that name no row come last\n",
        "    ids = jnp.maximum(ids, 0)\n",
        "tests/test_layer_kernels_vocabulary.py::test_seam_of_embed",
    ),
    Fault(
        "a token's derivative forgets negative eigenvalues",
        "return jax.vjp(partial(_plain, allow_neg_eigval), *args)[1](cotangents)",
        "return jax.vjp(partial(_plain, False), *args)[1](cotangents)",
        "tests/test_layer_tokens.py::test_derivative_of_a_token",
    ),
    Fault(
        "the sum before the norm is rounded first",
        "    s = x.astype(wide) if y is None else x.astype(wide) + y.astype(wide)\n",
        "    s = (x if y is None else x + y.astype(x.dtype)).astype(wide)\n",
        "tests/test_fused.py::test_add_norm",
    ),
    Fault(
        "the slope of the norm's sigmoid is the sigmoid",
        '"sigmoid": Activation(lambda z, s: s, lambda z, s: s * (1.0 - s)),',
        '"sigmoid": Activation(lambda z, s: s, lambda z, s: s),',
        "tests/test_layer_kernels_norms.py::test_gated_norm",
    ),
    Fault(
        "the gradient of a channel's rate leaves out the decay's slope",
        "return carry[0] + dx, carry[1] + dg * of_A_log",
        "return carry[0] + dx, carry[1] + dg",
        "tests/test_layer_kernels_gates.py::test_gates",
    ),
    Fault(
        "the gate of the norm is rounded",
        "(n * _ACTIVATIONS[options.activation](gate.astype(wide)))",
        "(n * _ACTIVATIONS[options.activation](gate).astype(wide))",
        "tests/test_fused.py::test_gated_norm",
    ),
    Fault(
        "the product of a SwiGLU's branches is in 16 bits",
        "(jax.nn.silu(gate.astype(wide)) * up.astype(wide)).astype(gate.dtype)",
        "jax.nn.silu(gate) * up",
        "tests/test_fused.py::test_the_product_of_the_branches_is_rounded_once",
    ),
    Fault(
        "a place behind a sequence's last token holds the next one's first",
        "token_of = xp.where(token_of < end, token_of, T)",
        "token_of = xp.where(token_of <= end, token_of, T)",
        "tests/test_kernels_ampere.py::test_tables_of_chunks",
    ),
    Fault(
        "a walk by mma.sync loads into tiles that the other warpgroup still reads",
        "            self.dev.meet(self.smem.met)\n            self._load(i + 1, early)",
        "            self._load(i + 1, early)",
        "tests/test_kernels_ampere.py::test_both_passes_in_the_interpreter",
    ),
    Fault(
        "gradients by mma.sync keep the factor of float16's scores",
        "within = jnp.sum(k * inside, axis=1)\n    gmem",
        "within = jnp.sum(k * inside, axis=1) * (1.0 if raised is None else raised)\n    gmem",
        "tests/test_kernels_ampere.py::test_both_passes_in_the_interpreter",
    ),
    Fault(
        "an RTX 4090 is given kernels of Hopper",
        'capability_reason("these kernels", ("9.0",))',
        'capability_reason("these kernels", ("8.9", "9.0"))',
        "tests/test_other_devices.py",
    ),
    Fault(
        "the kernels by mma.sync get keys that are not normalised",
        "            x = x._replace(q=gates.l2norm(x.q), k=gates.l2norm(x.k))\n",
        "            x = x._replace(q=gates.l2norm(x.q))\n",
        "tests/test_mosaic.py::test_the_norm_comes_before_kernels_without_one",
    ),
    Fault(
        "a segment's cotangents go back by its map, not by its transpose",
        "jnp.flip(m, 1).swapaxes(-1, -2)",
        "jnp.flip(m, 1)",
        "tests/test_kernels_ampere.py::test_states_between_segments",
    ),
)
