"""Faults that the tests must notice: each was put in once, went unnoticed, and has had a test of its own since.

A fault is a text that stands at exactly one place of the two packages, what takes its place, and the test that must
then fail: a file, or one test of it where the file takes long.
"""

from typing import NamedTuple


class Fault(NamedTuple):
    """A fault: `find`, found exactly once, is replaced by `put`, and `test` must fail."""

    name: str
    find: str
    put: str
    test: str


FAULTS = (
    # The plain forms.
    Fault(
        "the chunk table is one chunk short",
        "return max(1, min(T, (T + N * (C - 1)) // C))",
        "return max(1, min(T, (T + N * (C - 1)) // C) - 1)",
        "tests/test_packing.py::test_the_fullest_chunk_table",
    ),
    Fault(
        "lanes of packed rows are not swapped back",
        "return jnp.swapaxes(x, 0, 1).reshape(-1, *x.shape[3:])[table.last_chunk]",
        "return x.reshape(-1, *x.shape[3:])[table.last_chunk]",
        "tests/test_packing.py::test_lanes_of_packed_rows",
    ),
    Fault(
        "the inverse is not kept for the backward",
        "A = checkpoint_name(solve_tril(kkt), INVERSE_NAME)",
        "A = solve_tril(kkt)",
        "tests/test_gradients.py::test_what_the_backward_keeps",
    ),
    Fault(
        "the states are not kept for the backward",
        "h = checkpoint_name(solution.h, STATES_NAME)",
        "h = solution.h",
        "tests/test_gradients.py::test_what_the_backward_keeps",
    ),
    Fault(
        "chunk_states ignores segment_ids",
        """
    g, beta = _full_gates(HO, k, x.g, x.beta, x.initial_state)
    if x.segment_ids is not None:
""",
        """
    g, beta = _full_gates(HO, k, x.g, x.beta, x.initial_state)
    if False:
""",
        "tests/test_stages.py::test_chunk_states",
    ),
    Fault(
        "chunk_states ignores the norm",
        "k = gates.l2norm(x.k) if call.use_qk_l2norm else x.k",
        "k = x.k",
        "tests/test_stages.py::test_chunk_states",
    ),
    Fault(
        "chunk_states ignores debug checks",
        "x = _checked_values(x._replace(q=None), dims)",
        "x = vary_alike(x._replace(q=None))",
        "tests/test_api.py::test_run_time_checks_of_chunk_states",
    ),
    Fault(
        "a scale of 0 is taken for none",
        'without dimensions."""\n    if scale is None:\n',
        'without dimensions."""\n    if scale is None or (isinstance(scale, float) and not scale):\n',
        "tests/test_reference.py::test_steps_equal_oracle",
    ),
    Fault(
        "a float32 state of the convolution is rounded to its input's dtype",
        "dtype = jnp.promote_types(x.dtype, initial_state.dtype)",
        "dtype = x.dtype",
        "tests/test_conv.py",
    ),
    Fault(
        "the logarithm of a bfloat16 alpha is computed in bfloat16",
        "return jnp.log(alpha.astype(jnp.promote_types(alpha.dtype, jnp.float32)))",
        "return jnp.log(alpha)",
        "tests/test_gates.py",
    ),
    # The kernels and the seam to them.
    Fault(
        "the kernels' gradient of a write strength is divided by it",
        "(beta * dv_u + JOIN * k_write) / ((beta * beta + JOIN) * mantissa)",
        "dv_u / (beta * mantissa)",
        "tests/test_kernels_backward.py",
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
    # The kernels around the rule.
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
    # Layers, models and experiments.
    Fault(
        "the dtype of the state in a cache is lost",
        "state if cache is None else state.astype(cache.state.dtype)",
        "state",
        "tests/test_layers.py::test_a_cache_keeps_its_dtype",
    ),
    Fault(
        "shared value heads are tiled, not repeated",
        "repeated = jnp.repeat(v, beta.shape[2] // v.shape[2], axis=2)",
        "repeated = jnp.tile(v, (1, 1, beta.shape[2] // v.shape[2], 1))",
        "tests/test_rules.py::test_value_heads_shared_by_query_heads",
    ),
    Fault(
        "all tokens are drawn with one random key",
        "sampling.draw(jax.random.fold_in(rng, i), logits)",
        "sampling.draw(rng, logits)",
        "tests/test_models.py::test_every_token_is_drawn_anew",
    ),
    Fault(
        "training batches reach into the held-out text",
        "tokens, targets = text.windows(self.corpus.train, starts, self.length)",
        "both = np.concatenate([self.corpus.val, self.corpus.train])\n"
        "        tokens, targets = text.windows(both, starts, self.length)",
        "tests/test_text_tasks.py::test_training_windows_lie_in_the_training_part",
    ),
    Fault(
        "validation draws with the keys of training",
        "enumerate(self._keys(1, size))",
        "enumerate(self._keys(0, size))",
        "tests/test_tasks.py::test_batches_are_given_by_seed_and_step",
    ),
    Fault(
        "gradients are not clipped",
        "        clip_by_global_norm(options.clip),\n",
        "",
        "tests/test_experiments.py::test_gradients_are_clipped",
    ),
    Fault(
        "files are written in place",
        "    with replacing(path) as file:\n        file.write(content.encode())\n",
        "    path.write_text(content)\n",
        "tests/test_files.py::test_a_file_is_old_or_new",
    ),
)
