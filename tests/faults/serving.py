"""Faults of serving."""

from faults.fault import Fault

FAULTS = (
    Fault(
        "padding behind a draft reaches it",
        "return base, jnp.where(is_earlier, seen, 0)",
        "return base, seen",
        "tests/serving/test_serving_family.py::test_drafts_that_are_no_numbers",
    ),
    Fault(
        "a ring of channels is matched with decays until its entries",
        "until = jnp.flip(jnp.cumsum(jnp.flip(g, -2), -2), -2)",
        "until = jnp.cumsum(g, -2)",
        "tests/serving/test_serving_family.py::test_decode",
    ),
    Fault(
        "a prompt without a slot writes where erase and write are apart",
        "return self._replace(write=jnp.where(is_real.reshape(-1, *(1,) * (write.ndim - 2)), write, 0))",
        "return self._replace(write=write)",
        "tests/serving/test_serving_family_prompts.py::test_prefill",
    ),
    Fault(
        "a preempted request goes to the end of the queue",
        "self._waiting.appendleft(request)",
        "self._waiting.append(request)",
        "tests/serving/test_serving_batching.py::test_a_preempted_request_is_the_next",
    ),
    Fault(
        "slots are compared in their own dtype",
        "return x.astype(np.int32) if x.dtype.itemsize < 4 else x",
        "return x",
        "tests/serving/test_serving.py::test_more_slots_than_a_narrow_dtype_counts",
    ),
    Fault(
        "drafts meet one another as they were before they are stored",
        "stored_k, stored_u = (y.astype(ring_dtype).astype(y.dtype) for y in (k, u))",
        "stored_k, stored_u = k, u",
        "tests/serving/test_serving_ring.py::test_drafts_meet_one_another_as_the_ring_stores_them",
    ),
    Fault(
        "accept leaves where the last call began",
        "return self.holding(put_counts(ring, at, count, count - 1))",
        "return self.holding(ring)",
        "tests/serving/test_serving_ring.py::test_drafts_after_what_was_accepted",
    ),
    Fault(
        "drafts of several calls count their tokens from the first call",
        "num_tokens - t\n",
        "num_tokens\n",
        "tests/kernels/test_kernels_ring.py::test_verify_on_a_ring[drafts-many-uneven]",
    ),
    Fault(
        "padding is written where a write slot is named",
        "self.address(at.write_slots, at.layer).only(read.is_slot)",
        "self.address(at.write_slots, at.layer)",
        "tests/serving/test_serving.py::test_decode",
    ),
    Fault(
        "a copy from padding writes zeros",
        "Address.of(to_slots, pool, null_slot).only(source.is_slot)",
        "Address.of(to_slots, pool, null_slot)",
        "tests/serving/test_serving.py::test_slots_are_copied",
    ),
    Fault(
        "a checkpoint is the state a chunk later",
        "- chunks + after // C ",
        "- chunks + after // C + 1 ",
        "tests/serving/test_serving_prompts.py::test_checkpoints",
    ),
    Fault(
        "tokens of a prompt without a slot are answered",
        "tokens = tokens.writing(is_real, initial)",
        "tokens = tokens.writing(is_real | True, initial)",
        "tests/serving/test_serving_prompts.py::test_prefill",
    ),
    Fault(
        "a full ring keeps its count",
        "jnp.where(is_full, 0, entry.count + 1), jnp.where(is_full, -1, entry.count)",
        "entry.count + 1, entry.count",
        "tests/serving/test_serving_ring.py::test_decode",
    ),
    Fault(
        "verify flushes one token late",
        "slots.take(pool.arrays.count, at) + T > pool.arrays.length",
        "slots.take(pool.arrays.count, at) + T > pool.arrays.length + 1",
        "tests/serving/test_serving_ring.py::test_verify",
    ),
    Fault(
        "a fresh request reads the window of the last",
        "jnp.where(at.has_initial_state[:, None, None], windows, 0)",
        "windows",
        "tests/serving/test_serving_conv.py::test_prompts",
    ),
    Fault(
        "pieces of prompts end anywhere",
        "room // GRID * GRID",
        "room",
        "tests/serving/test_serving_batching.py::test_pieces_of_prompts_end_on_multiples_of_64",
    ),
    Fault(
        "one request too many waits",
        "if len(self._waiting) >= self._max_waiting:",
        "if len(self._waiting) > self._max_waiting:",
        "tests/serving/test_serving_batching.py::test_the_queue_is_bounded",
    ),
    Fault(
        "short prompts overtake a long one",
        "if left and not length:\n                break\n",
        "if left and not length:\n                continue\n",
        "tests/serving/test_serving_batching.py::test_pieces_of_prompts_end_on_multiples_of_64",
    ),
    Fault(
        "a request takes a token more than a slot holds",
        "len(tokens) + num_tokens - 1 > self._capacity:",
        "len(tokens) + num_tokens - 1 > self._capacity + 1:",
        "tests/serving/test_serving_batching.py::test_a_request_beyond_the_capacity_is_refused",
    ),
    Fault(
        "rows of another dtype are stored",
        "        if want != got:\n            raise ValueError(f\"{name}: expected the pool's dtype",
        "        if False:\n            raise ValueError(f\"{name}: expected the pool's dtype",
        "tests/serving/test_serving_errors.py::test_copies_and_stored_rows",
    ),
    Fault(
        "chunks of prompts are counted in the dtype of the offsets",
        "tokens = tokens._replace(cu_seqlens=cu_seqlens.astype(np.int32))",
        "tokens = tokens._replace(cu_seqlens=cu_seqlens)",
        "tests/serving/test_serving_prompts.py::test_checkpoints_of_narrow_offsets",
    ),
    Fault(
        "a new request multiplies what is left of the last one by 0",
        "initial = jnp.where(at.has_initial_state[:, None, None, None], initial, 0)",
        "initial = initial * at.has_initial_state[:, None, None, None]",
        "tests/models/test_isolation.py::test_a_slot_of_a_request_with_a_nan_is_used_again",
    ),
    Fault(
        "tokens whose reading was interrupted are lost",
        "            self._read(*self._unread[0])\n            self._unread.popleft()\n",
        "            self._read(*self._unread.popleft())\n",
        "tests/serving/test_serving_batching.py::test_an_interrupted_step_loses_nothing",
    ),
    Fault(
        "an uneven ring forgets its last draft",
        "added = T if num_tokens is None else num_tokens.astype(jnp.int32)",
        "added = T if num_tokens is None else jnp.maximum(num_tokens.astype(jnp.int32) - 1, 0)",
        "tests/serving/test_serving_drafts.py::test_trees_on_a_ring",
    ),
    Fault(
        "the ring's start counts what was rejected",
        "        ring = put_counts(ring, at, entry.count + added, entry.count)\n",
        "        ring = put_counts(ring, at, entry.count + added, entry.count + added - T)\n",
        "tests/serving/test_serving_drafts.py::test_trees_on_a_ring",
    ),
    Fault(
        "a token beyond the vocabulary is submitted",
        "tokens[(tokens < 0) | (tokens >= self._tokens)]",
        "tokens[(tokens < 0) | (tokens > self._tokens)]",
        "tests/serving/test_serving_batching.py::test_errors",
    ),
    Fault(
        "the state of an empty ring of channels is added to nothing",
        "return jnp.where(like(count == 0, new), S0, new).reshape(self.state.shape)\n\n    def respond(  # pyrefly",
        "return new.reshape(self.state.shape)\n\n    def respond(  # pyrefly",
        "tests/serving/test_serving_family.py::test_decode",
    ),
    Fault(
        "prompts that erase alone get a strength of both",
        "if self.erase is None and self.write is None:\n            beta = jnp",
        "if self.write is None:\n            beta = jnp",
        "tests/serving/test_serving_family_prompts.py::test_prompts_that_erase_alone",
    ),
)
