"""Cases for prefill by kernels that read and write states in the slots of a pool, and the truth in float64."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from device_arrays import put
from serving_cases import assert_same_bits
from tolerances import assert_close

from gdn_jax import serving
from gdn_jax.checks import oracle
from gdn_jax.checks.accuracy import BOUNDS


@dataclasses.dataclass(frozen=True)
class Case:
    """Prompts, and what is special about some of them."""

    name: str
    lengths: tuple[int, ...]
    behind: int = 7
    """Tokens behind the last prompt, which are not numbers."""
    heads: tuple[int, int] = (1, 1)
    K: int = 64
    V: int = 64
    kv_layout: bool = True
    dtype: str = "bfloat16"
    pool_dtype: str = "float32"
    padding: tuple[int, ...] = ()
    """Prompts without a slot."""
    fresh: tuple[int, ...] | None = None
    """Prompts without an initial state, in whose slots there are no numbers; None: has_initial_state is not given."""
    crossed: bool = False
    """Whether each prompt writes where the next one reads, and the last one where nobody does."""
    dropped: tuple[int, ...] = ()
    """Prompts whose final states have no slot, where others are crossed."""
    null_slot: int | None = None
    gates: bool = True
    seed: int = 0

    @property
    def cu_seqlens(self) -> np.ndarray:
        return np.cumsum((0, *self.lengths)).astype(np.int32)


def draw(case: Case) -> dict:
    """Arguments of `serving.prefill` as NumPy arrays."""
    rng = np.random.default_rng(case.seed)
    N, cu, (Hk, HV) = len(case.lengths), case.cu_seqlens, case.heads
    T = cu[-1] + case.behind

    def normal(*shape):
        x = rng.standard_normal((1, T, *shape)).astype(np.float32)
        x[:, cu[-1] :] = np.nan
        return x

    q, k = normal(Hk, case.K), normal(Hk, case.K)
    v, g, beta = normal(HV, case.V), -np.abs(normal(HV)) / 8, 1 / (1 + np.exp(-normal(HV)))
    slots = 2 * N + 3
    shape = (slots, HV, case.K, case.V) if case.kv_layout else (slots, HV, case.V, case.K)
    pool = rng.standard_normal(shape).astype(np.float32).astype(jnp.dtype(case.pool_dtype))
    order = rng.permutation(np.setdiff1d(np.arange(slots), case.null_slot))
    read = order[:N].astype(np.int32)
    write = np.append(read[1:], order[N]).astype(np.int32)
    for n in case.padding:
        read[n] = -1 if case.null_slot is None else case.null_slot
    starts = np.ones(N, bool)
    for n in case.fresh or ():
        starts[n] = False
        pool[read[n]] = np.nan
    for n in case.dropped:
        write[n] = -1
    return {
        "tokens": (
            *(x.astype(jnp.dtype(case.dtype)) for x in (q, k, v)),
            *((g, beta) if case.gates else (None,) * 2),
        ),
        "pool": pool,
        "read_slots": read,
        "write_slots": write if case.crossed else None,
        "has_initial_state": None if case.fresh is None else starts,
    }


def serve(case: Case, x: dict, **more) -> tuple[jax.Array, jax.Array]:
    """o and the pool, by `serving.prefill`; a pool of NumPy is copied, and of JAX given away."""
    slots = {name: x[name] for name in ("read_slots", "write_slots", "has_initial_state")}
    options = dict(
        use_qk_l2norm=True, state_layout="kv" if case.kv_layout else "vk", null_slot=case.null_slot
    )
    tokens, cu = jax.tree.map(put, x["tokens"]), x.get("cu_seqlens", case.cu_seqlens)
    pool = put(x["pool"]) if isinstance(x["pool"], np.ndarray) else x["pool"]
    return serving.prefill(*tokens, cu, pool, **slots, **options, **more)


def assert_right(case: Case, x: dict, o, pool) -> None:
    """Outputs and written states are near the truth; padding gives zeros; every other slot keeps its bits."""
    cu, before, read = case.cu_seqlens, x["pool"], x["read_slots"]
    write = read if x["write_slots"] is None else x["write_slots"]
    o, pool = np.asarray(o), np.asarray(pool)
    has_slot = np.isin(read, np.setdiff1d(np.arange(len(before)), case.null_slot))
    starts = has_slot if x["has_initial_state"] is None else has_slot & x["has_initial_state"]
    initial = np.where(starts[:, None, None, None], before[np.where(starts, read, 0)].astype(np.float64), 0)
    tokens = [None if y is None else y[:, : cu[-1]] for y in x["tokens"]]
    layout = "kv" if case.kv_layout else "vk"
    want_o, want = oracle.forward(
        *tokens, initial_state=initial, cu_seqlens=cu, use_qk_l2norm=True, state_layout=layout
    )
    real = np.repeat(has_slot, np.diff(cu))
    bound = BOUNDS[case.dtype][0]
    assert o.dtype == case.dtype and pool.dtype == before.dtype
    assert not o[:, cu[-1] :].any() and not o[:, : cu[-1]][:, ~real].any(), f"{case.name}: padding is not 0"
    assert_close(want_o[:, real], o[:, : cu[-1]][:, real], bound["o"], f"{case.name} o", 2)
    written = has_slot & np.isin(write, np.arange(len(before)))
    assert written.any()
    assert_close(want[written], pool[write[written]], bound["final_state"], f"{case.name} states", 1)
    others = np.setdiff1d(np.arange(len(before)), write[written])
    assert_same_bits(before[others], pool[others], f"{case.name}: another slot changed")
