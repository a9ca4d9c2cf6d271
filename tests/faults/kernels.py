"""Faults of kernels and the seams to them."""

from faults.fault import Fault

FAULTS = (
    Fault(
        "a product of the inverse is not cleared between sequences",
        "quarter = _kept(dev.product(x_l.astype(jnp.float16), x_smem.at[0:HALF]), first, 2)",
        "quarter = dev.product(x_l.astype(jnp.float16), x_smem.at[0:HALF])",
        "tests/models/test_isolation.py::test_inverse_of_a_shared_chunk",
    ),
    Fault(
        "the kernels' gradient of a write strength is divided by it",
        "(beta * dv_u + weight * k_write) / ((beta * beta + weight) * mantissa)",
        "dv_u / (beta * mantissa)",
        "tests/kernels/test_kernels_backward.py",
    ),
    Fault(
        "one known sequence is a packed row in the backward and a row in the forward",
        "    if as_batch:\n        x, do, known",
        "    if as_batch and x.dims.N > 1:\n        x, do, known",
        "tests/kernels/test_kernels_backward.py::test_one_known_sequence_is_cut_as_the_forward_cut_it",
    ),
    Fault(
        "gradients do not go through the L2 norm",
        "    if through_norm is not None:\n",
        "    if False:\n",
        "tests/kernels/test_mosaic.py",
    ),
    Fault(
        "what is kept of a token does not hold its write strength",
        "jnp.exp2(smem.g2[stage, CHUNK - 1] - g_rows) * beta",
        "jnp.exp2(smem.g2[stage, CHUNK - 1] - g_rows)",
        "tests/kernels/test_kernels.py::test_tokens_of_no_strength_leave_the_state_alone",
    ),
    Fault(
        "float16 adjoints lack the factor that P has",
        "g_last = g_last + jnp.where(cta.adjoint, float(FLOAT16_LOG2), 0.0)",
        "g_last = g_last + 0.0",
        "tests/kernels/test_kernels_backward.py::test_float16_in_the_interpreter",
    ),
    Fault(
        "tables of traced lengths rise one token late",
        "jnp.where(place >= at[n], rises[n], 0)",
        "jnp.where(place > at[n], rises[n], 0)",
        "tests/kernels/test_kernels.py::test_tables_are_the_same_in_numpy_and_traced",
    ),
    Fault(
        "padding is ignored where lengths are known",
        "starts = cu_seqlens[:-1] if cu_seqlens[-1] == T else cu_seqlens",
        "starts = cu_seqlens[:-1]",
        "tests/kernels/test_kernels.py::test_padding_where_lengths_are_known",
    ),
    Fault(
        "the last segment of a sequence is taken for an inner one",
        "inner = int(((-(-values // length) - 1) * counts).sum())",
        "inner = int((-(-values // length) * counts).sum())",
        "tests/kernels/test_kernels.py::test_segments_of_a_cut",
    ),
    Fault(
        "the convolution forgets borders of segments just before a strip",
        "            past[:n] = _cut(strip.linked(strip.first - (WIDTH - 1) + n), past[:n])",
        "            past[:n] = past[:n]",
        "tests/kernels/test_layer_kernels_short_conv.py::test_short_conv",
    ),
    Fault(
        "the convolution's derivative forgets borders of segments just behind a strip",
        "                behind[n:] = _cut(strip.linked(strip.end + n), behind[n:])",
        "                behind[n:] = behind[n:]",
        "tests/kernels/test_layer_kernels_short_conv.py::test_short_conv",
    ),
    Fault(
        "tokens outside the vocabulary have a gradient",
        "    ids = jnp.where(ids < 0, V, ids)  # those that name no row come last\n",
        "    ids = jnp.maximum(ids, 0)\n",
        "tests/kernels/test_layer_kernels_vocabulary.py::test_seam_of_embed",
    ),
    Fault(
        "a token's derivative forgets negative eigenvalues",
        "return jax.vjp(partial(_plain, allow_neg_eigval), *args)[1](cotangents)",
        "return jax.vjp(partial(_plain, False), *args)[1](cotangents)",
        "tests/layers/test_layer_tokens.py::test_derivative_of_a_token",
    ),
    Fault(
        "the sum before the norm is rounded first",
        "    s = x.astype(wide) if y is None else x.astype(wide) + y.astype(wide)\n",
        "    s = (x if y is None else x + y.astype(x.dtype)).astype(wide)\n",
        "tests/layers/test_fused.py::test_add_norm",
    ),
    Fault(
        "the slope of the norm's sigmoid is the sigmoid",
        '"sigmoid": Activation(lambda z, s: s, lambda z, s: s * (1.0 - s)),',
        '"sigmoid": Activation(lambda z, s: s, lambda z, s: s),',
        "tests/kernels/test_layer_kernels_norms.py::test_gated_norm",
    ),
    Fault(
        "the gradient of a channel's rate leaves out the decay's slope",
        "return carry[0] + dx, carry[1] + dg * of_A_log",
        "return carry[0] + dx, carry[1] + dg",
        "tests/kernels/test_layer_kernels_gates.py::test_gates",
    ),
    Fault(
        "the gate of the norm is rounded",
        "(n * _ACTIVATIONS[options.activation](gate.astype(wide)))",
        "(n * _ACTIVATIONS[options.activation](gate).astype(wide))",
        "tests/layers/test_fused.py::test_gated_norm",
    ),
    Fault(
        "the product of a SwiGLU's branches is in 16 bits",
        "(jax.nn.silu(gate.astype(wide)) * up.astype(wide)).astype(gate.dtype)",
        "jax.nn.silu(gate) * up",
        "tests/layers/test_fused.py::test_the_product_of_the_branches_is_rounded_once",
    ),
    Fault(
        "a place behind a sequence's last token holds the next one's first",
        "token_of = xp.where(token_of < end, token_of, T)",
        "token_of = xp.where(token_of <= end, token_of, T)",
        "tests/kernels/test_kernels_ampere.py::test_tables_of_chunks",
    ),
    Fault(
        "a walk by mma.sync loads into tiles that the other warpgroup still reads",
        "            self.dev.meet(self.smem.met)\n            self._load(i + 1, early)",
        "            self._load(i + 1, early)",
        "tests/kernels/test_kernels_ampere.py::test_both_passes_in_the_interpreter",
    ),
    Fault(
        "gradients by mma.sync keep the factor of float16's scores",
        "within = jnp.sum(k * inside, axis=1)\n    gmem",
        "within = jnp.sum(k * inside, axis=1) * (1.0 if raised is None else raised)\n    gmem",
        "tests/kernels/test_kernels_ampere.py::test_both_passes_in_the_interpreter",
    ),
    Fault(
        "an RTX 4090 is given kernels of Hopper",
        '"8.9": Needs.MMA,',
        '"8.9": Needs.MMA | Needs.TMA | Needs.WGMMA,',
        "tests/kernels/test_other_devices.py",
    ),
    Fault(
        "the kernels by mma.sync get keys that are not normalised",
        "            x = x._replace(q=gates.l2norm(x.q), k=gates.l2norm(x.k))\n",
        "            x = x._replace(q=gates.l2norm(x.q))\n",
        "tests/kernels/test_mosaic.py::test_the_norm_comes_before_kernels_without_one",
    ),
    Fault(
        "a segment's cotangents go back by its map, not by its transpose",
        "jnp.flip(m, 1).swapaxes(-1, -2)",
        "jnp.flip(m, 1)",
        "tests/kernels/test_kernels_ampere.py::test_states_between_segments",
    ),
    Fault(
        "the kernel that chooses experts compares NaN, so that those of a row do not differ",
        "nan_first(score + _rows(cta, gmem.bias, first))",
        "score + _rows(cta, gmem.bias, first)",
        "tests/kernels/test_layer_kernels_rows.py::test_experts_are_chosen_as_by_sorting[64-choice0]",
    ),
    Fault(
        "empty columns come before groups of experts whose sums are below 0",
        "cta.before(sums, 0, smem.groups, groups, below=choice.groups)",
        "cta.before(sums, 0, smem.groups, groups)",
        "tests/kernels/test_layer_kernels_rows.py::test_experts_are_chosen_as_by_sorting[64-choice0]",
    ),
    Fault(
        "the last tile of an expert with several counts too many rows",
        "rest = jnp.minimum(smem.count[expert] - own, size)",
        "rest = jnp.minimum(smem.count[expert], size)",
        "tests/kernels/test_layer_kernels_experts.py::test_few_rows_in_tiles",
    ),
    Fault(
        "an expert that a row names twice has a row more than lie in its tiles",
        "count = jnp.where(spread(c, shape, 1) == expert, 1.0, count)",
        "count = jnp.where(spread(c, shape, 1) == expert, 1.0, 0.0) + count",
        "tests/kernels/test_layer_kernels_experts.py::test_few_rows_in_tiles",
    ),
    Fault(
        "rows that fill a tile of an expert up are copies, whose NaN reaches gradients of all experts",
        "x, weight, dy = (jnp.where(is_pair[:, None], y, 0) for y in arrays)",
        "x, weight, dy = *arrays[:2], jnp.where(is_pair[:, None], arrays[2], 0)",
        "tests/kernels/test_layer_kernels_experts.py::test_a_row_of_nan_leaves_other_rows_and_experts_alone",
    ),
    Fault(
        "the derivative of a stream and its experts forgets the weight of the norm",
        "n = n * jax.lax.rsqrt(jnp.mean(n * n) + static.eps) * norm\n    scores",
        "n = n * jax.lax.rsqrt(jnp.mean(n * n) + static.eps)\n    scores",
        "tests/kernels/test_layer_kernels_rows.py::test_derivatives_are_those_of_plain_forms",
    ),
    Fault(
        "values in slots after a row's tokens are multiplied by 0, which leaves NaN",
        "store_any(v, jnp.where(is_token, x, jnp.zeros_like(x)))",
        "store_any(v, x)",
        "tests/kernels/test_layer_kernels_attention.py::test_rows_meet_their_caches",
    ),
    Fault(
        "kernels whose CTAs wait for each other share the constant that they meet at",
        "words[:, -1] = next(_calls) % 2**31",
        "words[:, -1] = 1",
        "tests/kernels/test_layer_kernels_rows.py::test_no_two_kernels_share_a_barrier",
    ),
    Fault(
        "CTAs that wait for each other are as many as the first GPU has room for",
        "for device in (default_device(), *jax.local_devices()) if",
        "for device in (default_device(),) if",
        "tests/kernels/test_other_devices.py::test_kernels_ask_for_the_device_that_runs_them",
    ),
    Fault(
        "gradients with a decay of each channel cross borders of segments",
        "    if x.segment_ids is not None:\n"
        "        g = jnp.where(changes_segment(x.segment_ids)[..., None, None], -jnp.inf, g)\n"
        "    q, k, e, g = (None if y is None else pad(y, (B, T8",
        "    q, k, e, g = (None if y is None else pad(y, (B, T8",
        "tests/kernels/test_kernels_channels_backward.py::test_gradients[segment ids]",
    ),
    Fault(
        "the cotangent of a state [V, K] is cut as one of [K, V]",
        "if x.initial_state is not None and walked.dh_0 is not None:\n"
        "        shape = (K, V) if static.kv_layout else (V, K)",
        "if x.initial_state is not None and walked.dh_0 is not None:\n        shape = (K, V)",
        "tests/kernels/test_kernels_channels_backward.py::test_gradients[segments]",
    ),
    Fault(
        "cotangents that saturate are not counted",
        "    count = None if saturated is None else saturated + dy8.saturated\n    return dx",
        "    count = saturated\n    return dx",
        "tests/kernels/test_kernels_eight_bits.py::test_outliers_outside_the_sample_are_counted[False]",
    ),
    Fault(
        "states at borders of segments are read in the caller's layout",
        "h_0_kv_layout=static.kv_layout and segments is None,\n        config=config.outputs,\n        **options",
        "h_0_kv_layout=static.kv_layout,\n        config=config.outputs,\n        **options",
        "tests/kernels/test_kernels_lower.py::test_states_are_not_square",
    ),
    Fault(
        "cotangents of initial states are stored as [K, V]",
        "store_state(cta.gmem.dh_0.at[cta.sequence, cta.head], cta.rows, dh, cta.sizes.kv_layout)",
        "store_state(cta.gmem.dh_0.at[cta.sequence, cta.head], cta.rows, dh, True)",
        "tests/kernels/test_kernels_lower.py::test_states_are_not_square",
    ),
    Fault(
        "drafts of channels are followed without the norm of their keys",
        "        u = self.written(v - rk * y, beta)\n        return S * self.over_v(alpha)",
        "        u = self.written(v - y, beta)\n        return S * self.over_v(alpha)",
        "tests/kernels/test_kernels_channel_step.py::test_drafts",
    ),
    Fault(
        "threads of the convolution of a token write channels that others still read",
        "            if more:\n                plgpu.commit_smem()",
        "            if False:\n                plgpu.commit_smem()",
        "tests/kernels/test_kernels_conv_update.py::"
        "test_channels_that_are_taken_twice_are_read_before_any_is_written",
    ),
    Fault(
        "the largest logit of a tile may be one of words that there are not",
        "return jnp.where(word < V - column - first, logits, -jnp.inf) if V % COLUMNS else logits",
        "return logits",
        "tests/kernels/test_layer_kernels_vocabulary.py::test_cross_entropy[ends in tiles]",
    ),
    Fault(
        "drafts of channels meet one another in the kernel as they were before they are stored",
        "            us.append(stored_u.astype(jnp.float32))\n            since.append(None)",
        "            us.append(u)\n            since.append(None)",
        "tests/kernels/test_kernels_channel_ring.py::test_drafts[float32-kv-False-3]",
    ),
    Fault(
        "keys of drafts of channels are met in the kernel as they were before they are stored",
        "jnp.exp(passed) * earlier.stored_k.astype(jnp.float32)",
        "jnp.exp(passed) * earlier.k",
        "tests/kernels/test_kernels_channel_ring.py::test_drafts[float32-kv-False-3]",
    ),
    Fault(
        "numbers of h that two slices have count twice",
        "            h = jnp.where(at < own.start - own.first, 0.0, h)\n",
        "            pass\n",
        "tests/kernels/test_layer_kernels_rows.py::test_a_stream_and_its_swiglu",
    ),
)
