"""Serving: prefill, decode and verification of drafts over pools of states.

Every operation takes a pool and returns it. The pool that went in is donated, and only the slots that are named
change. Pools and tokens may lie with their heads over the devices of a mesh: each device then serves its own, and
nothing is sent.
"""

from gdn_jax.serving.batching import QueueFull, Server
from gdn_jax.serving.byte_states import ByteStates, make_byte_states
from gdn_jax.serving.conv import causal_conv1d, causal_conv1d_update, causal_conv1d_verify
from gdn_jax.serving.erasures import (
    erase_then_delta_decode,
    erase_then_delta_prefill,
    erase_then_delta_verify,
)
from gdn_jax.serving.programs import Chain
from gdn_jax.serving.prompts import prefill, prefill_packed
from gdn_jax.serving.ring import accept, flush, snapshot
from gdn_jax.serving.ring_arrays import RingPool, make_ring_pool
from gdn_jax.serving.slots import copy_slots, put_slots, take_slots
from gdn_jax.serving.step import decode, decode_packed, verify

__all__ = [
    "ByteStates",
    "Chain",
    "QueueFull",
    "RingPool",
    "Server",
    "accept",
    "causal_conv1d",
    "causal_conv1d_update",
    "causal_conv1d_verify",
    "copy_slots",
    "decode",
    "decode_packed",
    "erase_then_delta_decode",
    "erase_then_delta_prefill",
    "erase_then_delta_verify",
    "flush",
    "make_byte_states",
    "make_ring_pool",
    "prefill",
    "prefill_packed",
    "put_slots",
    "snapshot",
    "take_slots",
    "verify",
]
