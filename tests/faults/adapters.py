"""Faults of what other libraries call."""

from faults.fault import Fault

FAULTS = (
    Fault(
        "padding decays the state of SkyRL's call",
        "g, beta = (jnp.where(is_token, x, 0) for x in (g, beta))",
        "beta = jnp.where(is_token, beta, 0)",
        "tests/adapters/test_adapters.py::test_skyrl",
    ),
    Fault(
        "tokamax's ids of 8 bits are compared in 8 bits",
        "    segment_ids = widened(segment_ids)\n",
        "",
        "tests/adapters/test_adapters.py::test_tokamax_ids_of_8_bits",
    ),
    Fault(
        "a sequence beyond tokamax's states has the last one",
        "is_token = (segment_ids > 0) & (segment_ids <= N)",
        "is_token = segment_ids > 0\n    segment_ids = jnp.minimum(segment_ids, N)",
        "tests/adapters/test_adapters.py::test_tokamax_sequences",
    ),
    Fault(
        "a new request of tpu-inference reads another's slot",
        "read = write if read is None else jnp.where(is_new, write, jnp.asarray(read, jnp.int32))",
        "read = write if read is None else jnp.asarray(read, jnp.int32)",
        "tests/serving/test_serving_adapter.py::test_tpu_inference_running_alone",
    ),
    Fault(
        "a decay that is another head's is spread over all of fla's",
        "check_array(name, x, (*v.shape[:-1], *width), ",
        "check_array(name, x, (None,) * x.ndim, ",
        "tests/adapters/test_adapters.py::test_refused",
    ),
    Fault(
        "MaxText's call for one token drops the others",
        'tuple(1 if letter == "1" else None for letter in letters.split(", "))',
        'tuple(None for letter in letters.split(", "))',
        "tests/adapters/test_adapters.py::test_refused",
    ),
    Fault(
        "a request of tpu-inference without a token reads the next one's",
        "is_kind & (self.lengths > 0) & (slots != NULL_SLOT)",
        "is_kind & (slots != NULL_SLOT)",
        "tests/serving/test_serving_adapter.py::test_tpu_inference_running_alone",
    ),
    Fault(
        "offsets after tpu-inference's last request are read",
        "    starts = jnp.where(jnp.arange(N + 1) <= end, starts, starts[end])\n",
        "",
        "tests/serving/test_serving_adapter.py::test_tpu_inference_mixed",
    ),
    Fault(
        "MaxText's call for one token rounds a narrow state",
        "state = initial_state.astype(jnp.float32)",
        "state = initial_state",
        "tests/adapters/test_adapters.py::test_maxtext",
    ),
)
