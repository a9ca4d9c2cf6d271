"""Problem sizes of the rule with the times of other libraries (rows.csv), inputs, and the floor of the hardware.

Inputs are those of FlashQLA's benchmark: unit q and k and normal v in 16 bits, g = logsigmoid(normal) / 16 in float32
with g = 0 on a quarter of the heads, beta = sigmoid(normal), a random initial state. Never zeros: a GPU that
multiplies zeros runs faster. With per-channel decay g is one of two kinds: "uniform", exp(g) uniform from 1/2
to 1, and "mixed", slow and fast channels as in trained models, half of a head's at some -5 a token and half at -1e-4.
"erase" is "uniform" with unit erase keys and erase strengths of their own, for `erase_then_delta_rule`.
"""

import csv
import functools
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from gdn_jax.commands.errors import fail

PEERS = ("FlashQLA", "fla", "FlashInfer")
"""Columns of `Row.published`: FlashQLA 0.1.3, flash-linear-attention 0.6.0, FlashInfer 0.7.2."""

CHUNK = 64
"""Tokens of a chunk in the count of the floor's products."""

TENSOR_FLOPS = 790e12
MEMORY_BYTES = 4.3e12
"""Reached by one H200 in a second: dense products in 16 bits, and bytes copied (both directions counted)."""


GATES = ("head", "uniform", "mixed", "erase")
"""A decay of each head, the two kinds of decays of each channel, and decays of each channel with an erasure."""


class Row(NamedTuple):
    """One problem size. Several lengths are sequences packed into one row."""

    Hk: int
    HV: int
    lengths: tuple[int, ...]
    published: tuple[float | None, ...] = ()
    """Milliseconds of PEERS on one H200."""
    width: int = 128
    """K = V."""
    decay: bool = True
    """Whether any head decays."""
    gates: str = "head"
    """One of `GATES`."""

    @property
    def name(self) -> str:
        """Heads and lengths."""
        count, total = len(self.lengths), sum(self.lengths)
        if count == 1:
            lengths = f"1x{total}"
        elif len(set(self.lengths)) == 1:
            lengths = f"{self.lengths[0]}x{count}"
        else:
            lengths = "+".join(map(str, self.lengths)) if count < 4 else f"{total} in {count} uneven"
        width = "" if self.width == 128 else f" D={self.width}"
        channels = "" if self.gates == "head" else f" {self.gates} channels"
        channels = " channels, erase" if self.gates == "erase" else channels
        return f"{self.Hk},{self.HV} {lengths}{width}{'' if self.decay else ' no decay'}{channels}"

    @property
    def cu_seqlens(self) -> np.ndarray | None:
        """Borders of the sequences; None for a single one."""
        return np.cumsum((0, *self.lengths)).astype(np.int32) if len(self.lengths) > 1 else None

    @property
    def times(self) -> dict[str, float]:
        """Published milliseconds by library."""
        pairs = zip(PEERS, self.published, strict=False)
        return {name: ms for name, ms in pairs if ms is not None}


def _read() -> dict[str, list[Row]]:
    """The rows of rows.csv by the name of their table."""
    tables: dict[str, list[Row]] = {}
    with Path(__file__).with_name("rows.csv").open(newline="", encoding="utf-8") as file:
        for x in csv.DictReader(file):
            one, _, count = x["lengths"].partition("x")
            lengths = (int(one),) * int(count) if count else tuple(map(int, one.split("+")))
            published = tuple(float(x[name]) if x[name] else None for name in PEERS)
            heads = int(x["key heads"]), int(x["value heads"])
            row = Row(*heads, lengths, published, decay=x["decay"] != "none")
            tables.setdefault(x["pass"], []).append(row)
    return tables


_TABLES = _read()
FORWARD = _TABLES["forward"]
"""The forward. Medians of CUDA-graph replays, 2026-11-20; the last rows have not been timed elsewhere."""
BACKWARD = _TABLES["backward"]
"""The backward. Published by FlashQLA (its uneven lengths are random and not published; these are ours), except the
equal lengths, which were timed like the forward; the smaller where both are known."""
CHANNELS = _TABLES["channels"]
"""Sizes for which others have published times with per-channel decay, on other GPUs."""


def table_rows(
    parts: tuple[str, ...], passes: tuple[str, ...], gates: tuple[str, ...] = ("head",)
) -> list[tuple[Row, str]]:
    """The rows of the tables above whose names contain one of the parts (all, without parts), with each pass.

    Args:
      gates: kinds out of `GATES`.

    Raises:
      RunError: there is no such row.
    """
    found = [
        # Published times of the backward say nothing about forward and backward together.
        (row._replace(published=()) if what == "training" else row, what)
        for what in passes
        for kind in gates
        for row in _rows(what, kind)
        if any(part in row.name for part in parts or ("",))
    ]
    if not found:
        fail("rows", f"parts of names such as {FORWARD[0].name}", " ".join(parts))
    return found


def _rows(what: str, gates: str) -> list[Row]:
    if gates != "head":
        return [row._replace(gates=gates) for row in CHANNELS]
    return FORWARD if what == "forward" else BACKWARD


class Inputs(NamedTuple):
    """Arguments of one call, and the cotangents of its two results."""

    q: jax.Array
    k: jax.Array
    v: jax.Array
    g: jax.Array
    beta: jax.Array
    initial_state: jax.Array
    do: jax.Array
    dh_T: jax.Array
    erase_key: jax.Array | None = None
    erase_strength: jax.Array | None = None

    @property
    def tokens(self) -> tuple[jax.Array, ...]:
        """q, k, v, g, beta and, where there are any, erase_key and erase_strength."""
        return self[:5] + tuple(x for x in (self.erase_key, self.erase_strength) if x is not None)


def inputs(row: Row, dtype: str = "bfloat16", seed: int = 0) -> Inputs:
    """Random arguments for one row, sequences packed [1, sum of lengths, ...]; dtype applies to q, k, v and do."""
    return _inputs(row._replace(published=(), lengths=(sum(row.lengths), len(row.lengths))), dtype, seed)


@functools.partial(jax.jit, static_argnums=(0, 1))
def _inputs(row: Row, dtype: str, seed) -> Inputs:
    (T, N), D = row.lengths, row.width
    keys = jax.random.split(jax.random.key(seed, impl="rbg"), 8)  # compiles in a tenth of the default's time

    def normal(i: int, *shape: int) -> jax.Array:
        return jax.random.normal(keys[i], shape)

    def unit(i: int) -> jax.Array:
        x = normal(i, 1, T, row.Hk, D)
        return (x / jnp.linalg.norm(x, axis=-1, keepdims=True)).astype(dtype)

    channels = 1, T, row.HV, D
    if row.gates in ("uniform", "erase"):
        g = jnp.log(jax.random.uniform(keys[3], channels, minval=0.5, maxval=1.0))
    elif row.gates == "mixed":
        g = jnp.where(jnp.arange(D) % 2 == 0, -5.0, -1e-4) * jnp.exp(0.2 * normal(3, *channels))
    else:
        decays = (jnp.arange(row.HV) % 4 != 3) & row.decay
        g = jnp.where(decays, jax.nn.log_sigmoid(normal(3, 1, T, row.HV)) / 16, 0.0)
    state, erasure = (N, row.HV, D, D), {}
    if row.gates == "erase":
        keys = [*keys, *jax.random.split(jax.random.fold_in(keys[0], 0), 2)]
        erasure = dict(erase_key=unit(8), erase_strength=jax.nn.sigmoid(normal(9, 1, T, row.HV)))
    return Inputs(
        q=unit(0),
        k=unit(1),
        v=normal(2, 1, T, row.HV, D).astype(dtype),
        g=g,
        beta=jax.nn.sigmoid(normal(4, 1, T, row.HV)),
        initial_state=normal(5, *state),
        do=normal(6, 1, T, row.HV, D).astype(dtype),
        dh_T=normal(7, *state),
        **erasure,
    )


def floor_ms(row: Row, what: str) -> float:
    """The larger of the tensor cores' and the memory's time on an H200, for 16-bit q, k, v.

    Products of a chunk of C tokens and a value head: forward 3 of 2 C K V (k S, q S, k^T v') and 2 of 2 C C V (A
    times values, P v'), and q k^T and k k^T, 2 C C K each, once for a key head; backward 8 and 10 such products, the
    fewest that are known. With per-channel decay q k^T and k k^T count for each value head. Bytes: arguments
    and results once each, gates and states in float32. An erasure counts nothing: its floor is that without.

    Args:
      what: "forward", "backward" or "training", which is the sum of both.
    """
    if what == "training":
        return floor_ms(row, "forward") + floor_ms(row, "backward")
    T, N, D = sum(row.lengths), len(row.lengths), row.width
    states, pairs, gates = 4 * N * row.HV * D * D, row.Hk, 2
    if row.gates != "head":
        pairs, gates = row.HV, 1 + D
    if what == "forward":
        flops = T * (row.HV * (6 * D * D + 4 * CHUNK * D) + pairs * 4 * CHUNK * D)
        size = T * (2 * D * (2 * row.Hk + 2 * row.HV) + 4 * gates * row.HV) + 2 * states
    else:
        flops = T * row.HV * (16 * D * D + 20 * CHUNK * D)
        size = T * (2 * D * (4 * row.Hk + 3 * row.HV) + 4 * 2 * gates * row.HV) + 3 * states
    return max(flops / TENSOR_FLOPS, size / MEMORY_BYTES) * 1e3
