"""Faults of layers, models and checkpoints of Hugging Face."""

from faults.fault import Fault

FAULTS = (
    Fault(
        "the output gate of a decay by channels is SiLU",
        'activation: ClassVar[str] = "sigmoid"',
        'activation: ClassVar[str] = "silu"',
        "tests/layers/test_family_layers.py::test_against_float64",
    ),
    Fault(
        "padding decays by channels",
        "qkv, gates = self.project_qkv(x), at_tokens(rows.mask, *self.gates(*self.raw_gates(x, first)))",
        "qkv, gates = self.project_qkv(x), self.gates(*self.raw_gates(x, first))",
        "tests/layers/test_family_layers.py::test_one_token_that_is_padding",
    ),
    Fault(
        "every step of a single token decays",
        "o, state = gated_delta_step(q, k[:, i], v[:, i], None, beta[:, i], state)",
        "o, state = gated_delta_step(q, k[:, i], v[:, i], g, beta[:, i], state)",
        "tests/layers/test_family_layers.py::test_against_float64",
    ),
    Fault(
        "the dtype of the state in a cache is lost",
        "state if cache is None else state.astype(cache.state.dtype)",
        "state",
        "tests/layers/test_layers.py::test_a_cache_keeps_its_dtype",
    ),
    Fault(
        "all tokens are drawn with one random key",
        "sampling.draw(jax.random.fold_in(rng, i), logits)",
        "sampling.draw(rng, logits)",
        "tests/models/test_models.py::test_every_token_is_drawn_anew",
    ),
    Fault(
        "every draft is taken",
        "right = jnp.cumprod(new[:, :-1] == guesses, axis=1).sum(axis=1)",
        "right = jnp.full(len(new), new.shape[1] - 1)",
        "tests/models/test_drafts.py::test_rounds_are_those_of_transformers",
    ),
    Fault(
        "a recurrent layer keeps drafts that are wrong",
        "lambda count: keep(jnp.maximum(count, 1))",
        "lambda count: keep(jnp.full(B, T))",
        "tests/models/test_drafts.py::test_the_text_is_that_without_drafts",
    ),
    Fault(
        "drawn tokens of all rows have one random key",
        "return jax.random.fold_in(jax.random.fold_in(rng, number), row)",
        "return jax.random.fold_in(rng, number)",
        "tests/models/test_drafts.py::test_drawn_tokens_have_the_probabilities_of_the_model",
    ),
    Fault(
        "min_p is measured before the temperature",
        "jnp.log(self.min_p)",
        "jnp.log(self.min_p) / self.temperature",
        "tests/models/test_generation.py::test_limits_of_the_draw",
    ),
    Fault(
        "a row whose first token stops it goes on",
        "    ended = ends(token, jnp.zeros(token.shape, bool))\n",
        "    ended = jnp.zeros(token.shape, bool)\n",
        "tests/models/test_generation.py::test_stopping_and_listening",
    ),
    Fault(
        "scores that are NaN name places that there are not",
        "order = _ordered(x)",
        "order = x",
        "tests/layers/test_experts.py::test_the_largest_are_found_by_counting_as_by_sorting",
    ),
    Fault(
        "the router's scores are rounded",
        "self.chosen(self.scores(rows))",
        "self.chosen(self.scores(rows).astype(rows.dtype))",
        "tests/layers/test_experts.py::test_experts_are_chosen_by_scores_in_float32",
    ),
    Fault(
        "verify of a served model forgets negative eigenvalues",
        "_heads(mixer, qkv), a, b, w=w, **self._options(mixer))",
        '_heads(mixer, qkv), a, b, w=w, **self._options(mixer) | {"allow_neg_eigval": False})',
        "tests/serving/test_serving_batching.py::test_speculative_decoding",
    ),
    Fault(
        "a served head makes a pair of a piece's first token with nothing",
        "jnp.where(is_first, take(pools.hidden, at)[piece], hidden[token - 1])",
        "hidden[token - 1]",
        "tests/models/test_served_drafts.py::test_rounds_are_those_of_transformers",
    ),
    Fault(
        "a head keeps the pairs of drafts",
        "pairs = pairs._replace(length=pools.pairs.length)",
        "pairs = counting(pairs, -1)",
        "tests/models/test_served_drafts.py::test_rounds_are_those_of_transformers",
    ),
    Fault(
        "drafts of a served model that are wrong stay in its recurrent layers",
        "return o, lambda count: run(self.arrays, **only(whole, count))[1]",
        "return o, lambda count: run(self.arrays, **only(whole, jnp.full_like(count, T)))[1]",
        "tests/models/test_served_drafts.py::test_every_request_gets_what_generate_gives",
    ),
    Fault(
        "tokens of a step are drawn with one key of their request",
        "numbers = draws.number[:, None] + jnp.arange(T)",
        "numbers = draws.number[:, None] + jnp.zeros(T, jnp.int32)",
        "tests/models/test_served_sampling.py::test_every_request_gets_what_generate_gives",
    ),
    Fault(
        "a server's keys go on by one token after several",
        "draws._replace(number=draws.number + new.count)",
        "draws._replace(number=draws.number + 1)",
        "tests/models/test_served_sampling.py::test_every_request_gets_what_generate_gives",
    ),
    Fault(
        "a request without top_p has one of 0.9",
        "limits = ALL if top_k is None else min(top_k, ALL), math.inf if top_p is None else top_p, min_p or 0.0",
        "limits = ALL if top_k is None else min(top_k, ALL), 0.9 if top_p is None else top_p, min_p or 0.0",
        "tests/models/test_served_sampling.py::test_every_request_gets_what_generate_gives",
    ),
    Fault(
        "a server counts one token of a chain",
        "request.made += right",
        "request.made += 0",
        "tests/models/test_served_drafts.py::test_room_for_the_steps_of_a_server",
    ),
    Fault(
        "a server makes several tokens of each request where most of them are nobody's",
        "and 2 * max(left) > self._most_tokens",
        "",
        "tests/serving/test_serving_reading.py::test_several_tokens_in_a_step",
    ),
    Fault(
        "layers with experts are counted from 0",
        "i in plain or (i + 1) % step",
        "i in plain or i % step",
        "tests/hf/test_hf.py::test_what_a_config_leaves_out",
    ),
    Fault(
        "the default epsilon is another one",
        '    "rms_norm_eps": 1e-6,\n'
        '    "tie_word_embeddings": False,\n'
        '    "attention_bias": False,\n'
        '    "rope_theta": 10000.0,\n'
        '    "partial_rotary_factor": 0.25,\n'
        '    "full_attention_interval": 4,\n'
        '    "linear_conv_kernel_dim": 4,\n'
        '    "decoder_sparse_step": 1,\n',
        '    "rms_norm_eps": 1e-5,\n'
        '    "tie_word_embeddings": False,\n'
        '    "attention_bias": False,\n'
        '    "rope_theta": 10000.0,\n'
        '    "partial_rotary_factor": 0.25,\n'
        '    "full_attention_interval": 4,\n'
        '    "linear_conv_kernel_dim": 4,\n'
        '    "decoder_sparse_step": 1,\n',
        "tests/hf/test_hf.py::test_what_a_config_leaves_out",
    ),
    Fault(
        "the weights of experts are not normalised by default",
        '"mlp_only_layers": [],\n    "norm_topk_prob": True,',
        '"mlp_only_layers": [],\n    "norm_topk_prob": False,',
        "tests/hf/test_hf.py::test_what_a_config_leaves_out",
    ),
    Fault(
        "the index has the size of the last file",
        "        total += sum(entry.size for entry in entries)",
        "        total = sum(entry.size for entry in entries)",
        "tests/hf/test_hf.py::test_a_model_of_our_own",
    ),
    Fault(
        "what is written to the stream counts one part a layer",
        "variance_scaling(1 / (2 * config.num_layers), ",
        "variance_scaling(1 / config.num_layers, ",
        "tests/models/test_models.py::test_what_is_written_to_the_stream_shrinks_with_depth",
    ),
    Fault(
        "an index names a file outside",
        'return Path(place).name == place and place != ".."',
        'return place != ".."',
        "tests/hf/test_hf_hostile.py::test_an_index_names_files_of_its_folder",
    ),
    Fault(
        "a companion may be any link",
        "        if not stays_inside(file, origin.path):\n            raise ValueError(\n"
        '                f"model: expected {file}, which',
        '        if False:\n            raise ValueError(\n                f"model: expected {file}, which',
        "tests/hf/test_hf_hostile.py::test_links_that_leave_the_folder_are_not_copied",
    ),
    Fault(
        "gate and up of experts are swapped",
        "half = i % 2 * size",
        "half = (i + 1) % 2 * size",
        "tests/hf/test_hf.py::test_a_checkpoint_computes_what_transformers_does_and_is_written_as_it_was",
    ),
    Fault(
        "positions have another base",
        "    rope_theta: float = 1e4\n",
        "    rope_theta: float = 1e6\n",
        "tests/rule/test_defaults.py",
    ),
    Fault(
        "positions turn the other way",
        "[a * cos - b * sin, b * cos + a * sin]",
        "[a * cos + b * sin, b * cos - a * sin]",
        "tests/models/test_hybrid.py::test_attention_is_its_definition",
    ),
    Fault(
        "top_p leaves out the token that reaches it",
        "kept = jnp.cumsum(p, axis=-1) - p < self.top_p",
        "kept = jnp.cumsum(p, axis=-1) < self.top_p",
        "tests/models/test_generation.py::test_limits_of_the_draw",
    ),
    Fault(
        "vectors decay",
        'metadata.get("weight_decay", True) and jnp.ndim(a) >= 2',
        'metadata.get("weight_decay", True) and jnp.ndim(a) >= 1',
        "tests/training/test_experiments.py::test_decay_spares_gates_and_norms",
    ),
    Fault(
        "a low-rank change is not divided by its rank",
        "LoRALinear(linear, rank, (alpha or rank) / rank, rngs=rngs)",
        "LoRALinear(linear, rank, float(alpha or 1), rngs=rngs)",
        "tests/models/test_lora.py::test_the_change_is_alpha_over_the_rank",
    ),
    Fault(
        "attention counts a token too few",
        "decode_flops=4 * min(L + 1, a.window or L + 1) * a.num_heads",
        "decode_flops=4 * min(L, a.window or L) * a.num_heads",
        "tests/bench/test_generate_bench.py::test_a_token_more_costs_a_token",
    ),
    Fault(
        "an equal head beside a tied embedding is kept",
        "return head.shape != embedding.shape or not np.array_equal(head.read(), embedding.read())",
        "return True",
        "tests/hf/test_hf.py::test_older_fields_and_a_head_of_its_own",
    ),
    Fault(
        "an attention layer sees the slot behind its tokens",
        "visible = (ages >= 0) & (ages < (self.config.window or cache.k.shape[1]))",
        "visible = (ages >= -1) & (ages < (self.config.window or cache.k.shape[1]))",
        "tests/models/test_hybrid.py::test_prefill_and_decode_equal_one_pass",
    ),
    Fault(
        "a short OLMo-Hybrid has no attention",
        "if attends_at_last and number < every:",
        "if attends_at_last and number < 0:",
        "tests/hf/test_hf.py::test_a_short_olmo_hybrid_attends_at_last",
    ),
    Fault(
        "top_k keeps the likeliest alone",
        "return jax.lax.top_k(logits, k)[0][:, -1:]",
        "return jax.lax.top_k(logits, k)[0][:, :1]",
        "tests/rule/test_pairwise.py::test_limits_of_the_draw",
    ),
    Fault(
        "the cache of latent attention has the parameters' dtype",
        "dtype or self.dtype or self.param_dtype\n        k, v = (jnp.zeros((*shape, width)",
        "dtype or self.param_dtype\n        k, v = (jnp.zeros((*shape, width)",
        "tests/hf/test_hf_latent.py::test_latent_attention_is_its_definition_with_every_part_and_in_any_pieces",
    ),
    Fault(
        "the cache of a window has the parameters' dtype",
        "return WindowCache(*super().init_cache(batch, self._window, dtype))",
        "return WindowCache(*super().init_cache(batch, self._window, dtype or self.param_dtype))",
        "tests/hf/test_hf_window.py::test_a_window_attends_as_its_definition_says_in_any_pieces",
    ),
    Fault(
        "a window's first cache is float32",
        "self.init_cache(k.shape[0], dtype=k.dtype)",
        "self.init_cache(k.shape[0], dtype=jnp.float32)",
        "tests/hf/test_hf_window.py::test_a_window_attends_as_its_definition_says_in_any_pieces",
    ),
    Fault(
        "a decay without A_log starts as fast as with it",
        "(LEAST_RATE + MAX_RATE) / 2 if self.use_A_log else 1.0)",
        "(LEAST_RATE + MAX_RATE) / 2)",
        "tests/models/test_family_models.py::test_analyses",
    ),
    Fault(
        "write strengths of Gated DeltaNet-2 are not among its bytes",
        "return recurrent_costs(config, L, gates=2 * K + value_width(K, config.expand_v))",
        "return recurrent_costs(config, L, gates=2 * K)",
        "tests/models/test_family_models.py::test_costs_and_parameters",
    ),
    Fault(
        "Mamba2's rule is said to erase",
        "erases=False,\n    style=Style(ORANGE, ",
        "erases=True,\n    style=Style(ORANGE, ",
        "tests/models/test_family_models.py::test_analyses",
    ),
    Fault(
        "a gate of latent attention is lost in a checkpoint of Kimi Linear",
        '{"rope_theta": None, "head_gate": False}',
        '{"rope_theta": None}',
        "tests/hf/test_hf_latent.py::test_what_kimi_linear_reads_and_what_it_cannot_write",
    ),
    Fault(
        "named types of layers give way to numbers of layers in Kimi Linear",
        'if fields.values.get("layer_types") is None:\n        kda, full',
        "if True:\n        kda, full",
        "tests/hf/test_hf_latent.py::test_what_kimi_linear_reads_and_what_it_cannot_write",
    ),
    Fault(
        "tokens of latent attention are turned by the position of the first",
        "return cache.length[:, None] + jnp.arange(channels.shape[1])",
        "return cache.length[:, None]",
        "tests/kernels/test_layers_of_a_row.py::test_tokens_of_latents",
    ),
    Fault(
        "one kernel's token has the epsilon of the stream for its output",
        "delta_layer.Options(norm.eps, self.mixer.o_norm.eps, self.mixer.activation)",
        "delta_layer.Options(norm.eps, norm.eps, self.mixer.activation)",
        "tests/kernels/test_layers_of_a_row.py::test_a_layer_in_one_kernel[heads]",
    ),
    Fault(
        "one kernel's token of GLA erases what it writes over",
        "GatedLinearAttention: RecurrentRows.of,",
        "GatedLinearAttention: ChannelRows.of,",
        "tests/kernels/test_layers_of_a_row.py::test_layers_that_no_kernel_of_a_token_takes",
    ),
    Fault(
        "slots of attention layers are read in their own dtype",
        "begins, counts, at = cu_seqlens[:-1], jnp.diff(cu_seqlens), Address.of(slots, pool)",
        "begins, counts = cu_seqlens[:-1], jnp.diff(cu_seqlens)\n"
        "        at = Address(jnp.where(slots < 0, len(pool.length), slots), None, jnp.asarray(slots >= 0))",
        "tests/serving/test_served_attention.py::test_slots_lengths_and_offsets_of_narrow_integers",
    ),
    Fault(
        "a token that has no room is the first one",
        "return jnp.where(is_number, tokens, -1)",
        "return tokens",
        "tests/serving/test_served_attention.py::test_tokens_beyond_the_capacity_are_none",
    ),
    Fault(
        "all experts of a layer begin with the same weights",
        "keys = jax.random.split(rngs.params(), config.num_experts)",
        "keys = jnp.stack([rngs.params()] * config.num_experts)",
        "tests/layers/test_experts.py::test_experts_begin_apart",
    ),
    Fault(
        "a new cache has the dtype of its layer, whatever is asked for",
        "        dtype = dtype or self.dtype or self.param_dtype\n        return RecurrentCache(",
        "        dtype = self.dtype or self.param_dtype\n        return RecurrentCache(",
        "tests/layers/test_layers.py::test_a_cache_keeps_its_dtype",
    ),
    Fault(
        "the bound of a gate is always -5",
        "self.lower_bound = None if GATES[gate] is None else lower_bound",
        "self.lower_bound = None if GATES[gate] is None else -5.0",
        "tests/layers/test_family_layers.py::test_against_float64[kda-bounded]",
    ),
    Fault(
        "Lara's windows are wider where a file does not say them",
        '"sliding_window": 512,',
        '"sliding_window": 1024,',
        "tests/hf/test_hf_window.py::test_fields_that_are_missing_are_what_transformers_takes",
    ),
    Fault(
        "tokenizer.json cuts texts",
        "            self._tokenizer.no_truncation()\n",
        "",
        "tests/hf/test_hf_commands.py::test_a_tokenizer",
    ),
    Fault(
        "tokens of a tokenizer may be beyond the vocabulary",
        "(most := max(tokens)) >= self._vocab_size",
        "(most := max(tokens)) > self._vocab_size",
        "tests/hf/test_hf_commands.py::test_a_tokenizer",
    ),
    Fault(
        "a token that ends a text may be negative",
        'not 0 <= token < vocab_size:\n                    raise ValueError(\n                        f"{file}',
        'not token < vocab_size:\n                    raise ValueError(\n                        f"{file}',
        "tests/hf/test_hf_commands.py::test_stop_tokens",
    ),
    Fault(
        "weights behind a link out of the folder are published",
        "    if origin.outside:\n",
        "    if False:\n",
        "tests/hf/test_hf_hostile.py::test_links_that_leave_the_folder_are_not_copied",
    ),
    Fault(
        "weights of experts whose scores are all 0 are 0 / 0",
        "(jnp.sum(weights, axis=-1, keepdims=True) + 1e-20)",
        "jnp.sum(weights, axis=-1, keepdims=True)",
        "tests/layers/test_experts.py::test_weights_of_experts_whose_scores_are_all_0_are_0",
    ),
    Fault(
        "the first layers without experts are counted over the whole model",
        "[*dense, False].index(False)",
        "sum(dense)",
        "tests/hf/test_hf_latent.py::test_what_kimi_linear_reads_and_what_it_cannot_write",
    ),
    Fault(
        "a norm of the mixers with an epsilon of its own is written without it",
        "if heads not in (None, config.num_heads) or eps not in (None, config.norm_eps):",
        "if heads not in (None, config.num_heads):",
        "tests/hf/test_hf_latent.py::test_what_kimi_linear_reads_and_what_it_cannot_write",
    ),
    Fault(
        "scales of blocks take turns over the columns",
        "return jnp.repeat(scales, BLOCK, axis=-1)[..., :D]",
        "return jnp.tile(scales, BLOCK)[..., :D]",
        "tests/layers/test_block_weights.py::test_products_are_those_of_the_dequantised_weight",
    ),
    Fault(
        "few rows dequantise a whole weight on a GPU",
        "cuda=by_sums, default=by_whole_weight",
        "cuda=by_whole_weight, default=by_whole_weight",
        "tests/layers/test_block_weights.py::test_a_gpu_reads_codes_and_dequantises_no_weight_of_few_rows",
    ),
    Fault(
        "the copy for single tokens dequantises a SwiGLU that is kept in 8 bits",
        "    BlockSwiGLU: BlockDenseRow.of,\n",
        "",
        "tests/hf/test_hf_kept.py::test_no_copy_for_single_tokens_has_whole_weights",
    ),
    Fault(
        "scales that bfloat16 does not hold are written in it",
        "np.dtype(jnp.bfloat16 if narrow else np.float32)",
        "np.dtype(jnp.bfloat16)",
        "tests/hf/test_hf_kept.py::test_scales_of_more_digits_are_written_with_them",
    ),
)
