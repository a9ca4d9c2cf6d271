"""Other libraries' gated delta rule, and theirs with per-channel decay, on the same inputs.

They are looked for when asked and never needed. PyTorch with FlashQLA (flash_qla), flash-linear-attention (fla) and
FlashInfer (flashinfer) is timed as replays of a CUDA graph; arrays pass without a copy (DLPack), and a first call
compiles and tunes: up to minutes. jax-linear-attention (jla) is timed like this library.
"""

import importlib.util
import os
from collections.abc import Callable
from functools import partial
from importlib import import_module
from typing import Any, NamedTuple

import jax
import numpy as np

from gdn_jax.bench import passes
from gdn_jax.bench.measure import WARM_UP, Timing, compiled, measure
from gdn_jax.bench.passes import Part, Problem, named, steps
from gdn_jax.bench.rows import Row
from gdn_jax.checks.accuracy import NAMES
from gdn_jax.rules import Rule

SLACK = 4.0
"""Other libraries may be this much less accurate; with an argument misunderstood they are off by far more."""


class Arguments(NamedTuple):
    """Arguments of one call of a peer, torch tensors on the GPU."""

    q: Any
    k: Any
    v: Any
    g: Any
    beta: Any
    initial_state: Any
    do: Any
    dh_T: Any
    borders: Any
    """cu_seqlens, int64 [N + 1], also for a single sequence."""
    max_length: int

    @property
    def cu_seqlens(self) -> Any:
        """None for a single sequence."""
        return self.borders if len(self.borders) > 2 else None


def _chunks(module: str, function: str, x: Arguments) -> tuple[Any, Any]:
    """o and the final state by flash-linear-attention's signature, which FlashQLA took."""
    return getattr(import_module(module), function)(
        *x[:5], initial_state=x.initial_state, output_final_state=True, cu_seqlens=x.cu_seqlens
    )


def _fla(x: Arguments) -> tuple[Any, Any]:
    """o and the final state by flash-linear-attention."""
    os.environ["FLA_FLASH_QLA"] = "0"  # else it hands the call to FlashQLA where that is installed
    return _chunks("fla.ops.gated_delta_rule", "chunk_gated_delta_rule", x)


def _flashinfer(x: Arguments) -> tuple[Any, Any]:
    """o and the final state by FlashInfer, which has no batch axis and its states [N, HV, V, K]; g is exp(g)."""
    o, final = import_module("flashinfer.gdn_prefill").chunk_gated_delta_rule(
        *(t[0] for t in x[:5]),
        initial_state=x.initial_state,
        output_final_state=True,
        output_state=x.initial_state.new_empty(x.initial_state.shape),
        cu_seqlens=x.borders,
        max_seqlen=x.max_length,
    )
    return o[None], final


class Peer(NamedTuple):
    """A library: how it is called, which modules it needs, and in what form it wants its arguments."""

    name: str
    modules: tuple[str, ...]
    call: Callable[[Arguments], tuple[Any, Any]]
    has_backward: bool = True
    linear_alpha: bool = False
    """exp(g) instead of g."""
    v_first: bool = False
    """States [N, HV, V, K]."""
    gates: tuple[str, ...] = ("head",)
    """Kinds of gates that it takes, see `Row.gates`."""

    def takes(self, row: Row) -> bool:
        """Whether it can run a row."""
        return row.gates in self.gates

    def measure(self, problem: Problem, repeats: int) -> tuple[Timing, dict[str, np.ndarray]]:
        """Times it on a GPU; returns also its results on the heads that are compared, by the names of `accuracy`."""
        torch: Any = import_module("torch")
        what = problem.what
        arguments = _arguments(self, problem)
        primals = arguments[:6]

        def forward():
            return self.call(arguments)

        def gradients(outputs):
            return torch.autograd.grad(outputs, primals, (arguments.do, arguments.dh_T), retain_graph=True)

        side: Any = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(WARM_UP):  # the first compiles and tunes
                outputs = forward()
                if what != "forward":
                    gradients(outputs)
        torch.cuda.current_stream().wait_stream(side)
        torch.cuda.synchronize()

        grads = ()
        first, second = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
        with torch.cuda.graph(first, stream=side):
            outputs = forward()
            if what == "training":
                grads = gradients(outputs)
        first.replay()
        graph = first
        if what == "backward":
            with torch.cuda.graph(second, pool=first.pool(), stream=side):
                grads = gradients(outputs)
            graph = second
        timing = _replays(graph, repeats)

        results, part = {}, Part.of(problem.row, what)
        for name, tensor in zip(NAMES, (*outputs, *grads), strict=False):
            tensor = tensor.detach()
            if self.v_first and name in ("final_state", "dh_0"):
                tensor = tensor.transpose(-1, -2)
            results[name] = part(name, tensor).float().cpu().numpy()
        return timing, results


class JaxPeer(NamedTuple):
    """A library of JAX: its rule(row, tokens, state) -> (o, final state), and which modules it needs.

    Sequences are rows of a batch: those of a row have one length.
    """

    name: str
    modules: tuple[str, ...]
    rule: Callable[[Row, Any, jax.Array], tuple[jax.Array, jax.Array]]
    has_backward: bool = True
    gates: tuple[str, ...] = ("head",)
    kernels: tuple[str, ...] = ()
    """Beginnings of its kernels' names."""
    layer: Callable[..., jax.Array] | None = None
    """Its rule(q, k, v, *, g, beta) -> o over the rows of a layer, which start from nothing; None where a layer of
    this library cannot have it."""

    def takes(self, row: Row) -> bool:
        """See `Peer.takes`."""
        return row.gates in self.gates and len(set(row.lengths)) == 1

    def in_layers(self) -> Rule:
        """Its rule as layers of this library have one, see `gdn_jax.rules`; it has no state to begin or end with."""
        layer = self.layer
        assert layer is not None
        lacks = dict.fromkeys(("initial_state", "cu_seqlens", "segment_ids"), "a step has whole rows alone")
        return Rule(
            self.name,
            lambda q, k, v, **gates: (layer(q, k, v, **gates), None),
            gates=("g", "beta"),
            options=(),
            refuses=lacks,
        )

    def measure(self, problem: Problem, repeats: int) -> tuple[Timing, dict[str, np.ndarray]]:
        """See `Peer.measure`."""
        step, args = steps(problem.what, partial(self.rule, problem.row), problem.x)
        program = compiled(step, *args)
        part = Part.of(problem.row, problem.what)
        results = named(problem.what, program(*args))
        found = {name: np.asarray(part(name, y), np.float32) for name, y in results.items()}
        return measure(lambda: program(*args), repeats), found


def _jla(kind: str, row: Row, tokens: Any, state: jax.Array) -> tuple[jax.Array, jax.Array]:
    """o and the final state by jax-linear-attention's kernels, which have no packed sequences with states of each."""
    q, k, v, g, beta = (x.reshape(len(row.lengths), row.lengths[0], *x.shape[2:]) for x in tokens)
    o, final = import_module("jla.ops").linear_attention(
        *(kind, q, k, v),
        g=g,
        beta=beta,
        initial_state=state,
        output_final_state=True,
        impl="mosaic_gpu",
    )
    return o.reshape(1, -1, *o.shape[2:]), final


@jax.jit  # in all layers of a model one function, whose kernels are lowered once
def _jla_layer(q: jax.Array, k: jax.Array, v: jax.Array, *, g: jax.Array, beta: jax.Array) -> jax.Array:
    """o by jax-linear-attention's kernels."""
    call = import_module("jla.ops").linear_attention
    return call("gated_deltanet", q, k, v, g=g, beta=beta, impl="mosaic_gpu")[0]


CHANNELS = ("uniform", "mixed")
PEERS = (
    Peer(
        "FlashQLA",
        ("torch", "tilelang", "flash_qla"),
        partial(_chunks, "flash_qla", "chunk_gated_delta_rule"),
    ),
    Peer("fla", ("torch", "triton", "fla"), _fla),
    Peer("FlashInfer", ("torch", "flashinfer"), _flashinfer, False, True, True),
    # Kimi Delta Attention, or FlashKDA if it calls that.
    Peer("fla", ("torch", "triton", "fla"), partial(_chunks, "fla.ops.kda", "chunk_kda"), gates=CHANNELS),
    JaxPeer("jax-linear-attention", ("jla",), partial(_jla, "kda"), gates=CHANNELS),
    JaxPeer(
        "jax-linear-attention",
        ("jla",),
        partial(_jla, "gated_deltanet"),
        kernels=("gdr_", "sg_"),
        layer=_jla_layer,
    ),
)
"""Libraries, those of `rows.PEERS` first."""

IN_LAYERS = {peer.name: peer for peer in PEERS if isinstance(peer, JaxPeer) and peer.layer is not None}
"""Libraries whose rule a layer of this one can have."""


def reason(peer: Peer | JaxPeer) -> str | None:
    """Why a peer cannot be timed here; None if it can."""
    absent = [module for module in peer.modules if importlib.util.find_spec(module) is None]
    if absent:
        return f"not installed ({', '.join(absent)} not found)"
    backend = jax.default_backend()
    return None if backend == "gpu" else f"needs a GPU, JAX's default device is a {backend}"


def miss(problem: Problem, results: dict[str, np.ndarray]) -> str | None:
    """Which of a peer's results are wrong; None if none is."""
    found = passes.errors(problem.expected, results)
    return passes.miss(found, problem.x, problem.dtype, SLACK)


def _arguments(peer: Peer, problem: Problem) -> Arguments:
    torch: Any = import_module("torch")
    inputs = jax.block_until_ready(problem.x)
    q, k, v, g, beta, state, do, dh_T = (torch.from_dlpack(a).clone() for a in inputs[:8])
    if peer.linear_alpha:
        g = g.exp()
    if peer.v_first:
        state, dh_T = (s.transpose(-1, -2).contiguous() for s in (state, dh_T))
    borders = np.cumsum((0, *problem.row.lengths))
    for primal in (q, k, v, g, beta, state):
        primal.requires_grad_(problem.what != "forward")
    cu = torch.tensor(borders, dtype=torch.int64, device=q.device)
    return Arguments(q, k, v, g, beta, state, do, dh_T, cu, int(np.diff(borders).max()))


def _replays(graph: Any, repeats: int) -> Timing:
    """Milliseconds between events around each replay, which the host queues ahead of the device."""
    torch: Any = import_module("torch")
    events = [tuple(torch.cuda.Event(enable_timing=True) for _ in range(2)) for _ in range(WARM_UP + repeats)]
    for start, end in events:
        start.record()
        graph.replay()
        end.record()
    torch.cuda.synchronize()
    return Timing.of([start.elapsed_time(end) for start, end in events[WARM_UP:]])
