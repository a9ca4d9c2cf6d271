"""Faults of what other libraries call."""

from faults.fault import Fault

FAULTS = (
    Fault(
        "padding decays the state of SkyRL's call",
        "g, beta = (jnp.where(is_token, x, 0) for x in (g, beta))",
        "beta = jnp.where(is_token, beta, 0)",
        "tests/test_adapters.py::test_skyrl",
    ),
    Fault(
        "a sequence beyond tokamax's states has the last one",
        "is_token = (segment_ids > 0) & (segment_ids <= N)",
        "is_token = segment_ids > 0\n    segment_ids = jnp.minimum(segment_ids, N)",
        "tests/test_adapters.py::test_tokamax_sequences",
    ),
    Fault(
        "a new request of tpu-inference reads another's slot",
        "read = write if read is None else jnp.where(is_new, write, jnp.asarray(read, jnp.int32))",
        "read = write if read is None else jnp.asarray(read, jnp.int32)",
        "tests/test_serving_adapter.py::test_tpu_inference_running_alone",
    ),
)
