"""The start of a kernel, with its inputs, outputs and shared memory by name."""

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType, SimpleNamespace
from typing import Any, cast

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.device import first_call, generations
from pallas_kernels.device.memory import CLUSTER, SMEM_LIMIT, Memory, smem_bytes
from pallas_kernels.device.needs import Needs, capabilities

NUM_SMS = 132
"""Streaming multiprocessors of an H100 SXM or H200, for which kernels are compiled where there is no GPU."""

Shaped = jax.ShapeDtypeStruct | jax.Array
"""An array, or its shape and dtype."""

LOADER_REGISTERS = 24
"""Registers of a thread of a warpgroup that only loads, the fewest that it can have."""


def registers_at_entry(warpgroups: int) -> int:
    """Registers of a thread at first: a CTA that gets all 65,536 has as many in each, a multiple of 8."""
    return 65536 // (128 * warpgroups) // 8 * 8


def check_registers(*counts: int) -> None:
    """Raises an AssertionError where warpgroups ask by set_max_registers for more than their CTA has at entry.

    A warpgroup that asks for one more than is left waits for ever.

    Args:
      counts: registers of a thread, for each warpgroup.
    """
    at_entry = registers_at_entry(len(counts)) * len(counts)
    assert sum(counts) <= at_entry, f"{counts} registers of {at_entry}"


def release_registers(count: int, warpgroups: int) -> None:
    """Leaves a thread of this warpgroup so many registers, at most those that it has at entry.

    More would be an illegal instruction on the device, of which the interpreter knows nothing.
    """
    assert count <= registers_at_entry(warpgroups), f"{count} registers of {registers_at_entry(warpgroups)}"
    plgpu.set_max_registers(count, action="decrease")


def launch(
    name: str,
    body: Callable[..., None],
    *,
    inputs: Mapping[str, Any],
    outputs: Mapping[str, jax.ShapeDtypeStruct | None],
    ctas: int,
    memory: Memory = MappingProxyType({}),
    cluster: int = 1,
    warpgroups: int | None = None,
    auto_barriers: bool = False,
    reduction_bytes: int | None = None,
    updated: Mapping[str, jax.Array | None] | None = None,
    kept: Mapping[str, Any] | None = None,
    ahead: Sequence[jax.Array] = (),
    interpret: Any = None,
) -> dict[str, jax.Array]:
    """Runs body(gmem, smem) in every warpgroup of every CTA.

    gmem has a reference for each input, output, updated and kept array, smem one for each buffer and barrier, by
    name. The reference to what is None is None. No two have one name.

    Args:
      name: what a profile calls the kernel.
      body: traced with 32-bit constants also where jax_enable_x64 is set.
      inputs: arrays; None for one that this configuration does without.
      outputs: shapes and dtypes, likewise.
      ctas: CTAs, along the grid axis "cta"; with clusters, these along it.
      memory: shared memory, likewise.
      cluster: CTAs of a cluster, along the axis `CLUSTER`, which there is not with one.
      warpgroups: warpgroups of a CTA, along the axis "wg"; None for one without that axis.
      auto_barriers: whether Pallas puts a barrier around accesses to shared memory; else the body has its own.
      reduction_bytes: what Pallas sets aside for reductions over more than a warp; None for its default.
      updated: arrays of which the kernel writes parts. XLA lets it write into the array itself where nothing else
        reads that, and else into a copy.
      kept: references, of `jax.new_ref`, that the kernel changes for whoever holds them.
      ahead: what the kernel brings to the L2 cache, of `ahead.rows_of`; the list gmem.ahead has their references.
      interpret: parameters of Pallas' interpreter, None to compile.

    Returns:
      The outputs and the updated arrays that are not None, by name. Inside jax.shard_map the outputs vary over the
      mesh axes that any of the inputs varies over; Pallas forgets these.
    """
    first_call.prepare()
    taken = smem_bytes(memory, reduction_bytes or 0)
    assert interpret is not None or taken <= room(), f"{name}: {taken} bytes of shared memory of {room()}"
    updated, kept, later = updated or {}, kept or {}, [f"ahead {n}" for n in range(len(ahead))]
    inputs = {**inputs, **dict(zip(later, ahead, strict=True))}
    given, results, changed = (
        {key: x for key, x in part.items() if x is not None} for part in (inputs, outputs, updated)
    )
    scratch = {key: part for key, part in memory.items() if part is not None}

    def run(*refs):
        names = *given, *changed, *kept, *results
        global_refs, shared_refs = refs[: len(names)], refs[len(names) :]
        gmem = dict.fromkeys((*inputs, *updated, *outputs)) | dict(zip(names, global_refs, strict=True))
        smem = dict.fromkeys(memory) | dict(zip(scratch, shared_refs, strict=True))
        gmem["ahead"] = [gmem.pop(key) for key in later]
        with jax.enable_x64(False):
            body(SimpleNamespace(**gmem), SimpleNamespace(**smem))

    run.__name__ = name
    options: dict[str, Any] = {} if warpgroups is None else dict(num_threads=warpgroups, thread_name="wg")
    if cluster > 1:
        options |= dict(cluster=(cluster,), cluster_names=(CLUSTER,))
    reductions: dict[str, Any] = (
        {} if reduction_bytes is None else dict(reduction_scratch_bytes=reduction_bytes)
    )
    references = {key: jax.new_ref(x) for key, x in changed.items()}
    args: tuple[Any, ...] = (*given.values(), *references.values(), *kept.values())
    outs: tuple[Any, ...] = tuple(results.values())
    kernel = plgpu.kernel(
        run,
        out_type=outs,
        # In their order, where a dict's would be sorted: buffers lie in memory as they are declared.
        scratch_types=tuple(part.scratch_type() for part in scratch.values()),
        grid=(ctas,),
        grid_names=("cta",),
        interpret=interpret,
        compiler_params=plgpu.CompilerParams(
            lowering_semantics=plgpu.LoweringSemantics.Lane,
            approx_math=True,
            unsafe_no_auto_barriers=not auto_barriers,
            **reductions,
        ),
        **options,
    )
    arrays = kernel(*args)
    types = [jax.typeof(x) for x in (given | changed).values()]
    varying: frozenset = frozenset().union(*(x.manual_axis_type.varying for x in types))
    made = dict(zip(results, lax.pcast(arrays, tuple(varying), to="varying"), strict=True))
    return made | {key: jax.freeze(reference) for key, reference in references.items()}


def kernel[F: Callable[..., Any]](
    *static: str, chosen: Callable[[Any], dict[str, Any]] | None = None
) -> Callable[[F], F]:
    """A decorator: the function of a kernel is compiled by itself, but where it is interpreted, see `compiled`.

    Args:
      static: names of the function's static arguments; interpret is static, too.
      chosen: from all arguments, by name, to some that take the place of the call's, before it is compiled: what
        depends on the device, and arrays that calls of one kernel have in different shapes.
    """

    def decorated(function: F) -> F:
        jitted = jax.jit(function, static_argnames=(*static, "interpret"))
        signature = inspect.signature(function)

        @functools.wraps(function)
        def call(*args, **options):
            if chosen is not None:
                given = signature.bind(*args, **options)
                given.apply_defaults()
                options |= chosen(SimpleNamespace(**given.arguments))
            return (jitted if options.get("interpret") is None else function)(*args, **options)

        return cast(F, call)

    return decorated


def compiled(run: Callable[..., Any], interpret: Any, static: int = 1) -> Callable[..., Any]:
    """Returns run, compiled by itself: layers of a model then share one kernel, and a call outside jit compiles once.

    Args:
      run: a function of a module.
      interpret: as for `launch`. Where it is given run is returned as it is: the interpreter hangs inside a compiled
        function.
      static: how many of run's first arguments are static.
    """
    return _jitted(run, static) if interpret is None else run


@functools.cache
def _jitted(run: Callable[..., Any], static: int) -> Callable[..., Any]:
    return jax.jit(run, static_argnums=tuple(range(static)))


def default_device() -> Any:
    """The device that arrays lie on where nobody says otherwise: `jax.default_device`, or the first one."""
    chosen = jax.config.jax_default_device
    if chosen is None:
        return jax.devices()[0]
    return jax.devices(chosen)[0] if isinstance(chosen, str) else chosen


def device_reason(needs: Needs = Needs.TMA | Needs.WGMMA, kernels: str = "these kernels") -> str | None:
    """Why JAX's default device cannot run kernels; None if it can.

    Args:
      needs: what they need of it, their `NEEDS`; wgmma and bulk copies are all that any needs.
      kernels: what the reason calls them.
    """
    device = default_device()
    if device.platform != "gpu":
        return f"the default device is a {device.platform}; the kernels need an NVIDIA GPU"
    capability = str(getattr(device, "compute_capability", None))
    *some, last = fitting = capabilities(needs)
    needed = f"{', '.join(some)} or {last}" if some else last
    return None if capability in fitting else f"compute capability {capability}; {kernels} need {needed}"


def num_sms() -> int:
    """Streaming multiprocessors of JAX's default device, NUM_SMS where it does not say. Only speed depends on it."""
    device = default_device()
    return (getattr(device, "core_count", None) if device.platform == "gpu" else None) or NUM_SMS


SMALL_MEMORY = 101_376
"""Bytes of shared memory of a CTA on compute capability 8.6, 8.9 and 12.0."""

SHARED_MEMORY = {"8.0": 166_912, "9.0": SMEM_LIMIT, "10.0": SMEM_LIMIT, "10.3": SMEM_LIMIT}
"""The same of compute capabilities that have more."""


def shared_memory() -> int:
    """Bytes of shared memory that a CTA may have on JAX's default device; the least of all where that is no GPU."""
    return SHARED_MEMORY.get(str(getattr(default_device(), "compute_capability", None)), SMALL_MEMORY)


def room() -> int:
    """Bytes of shared memory that a CTA may have on what a kernel is lowered for, 9.0 where there is no GPU."""
    return SHARED_MEMORY.get(generations.capability(), SMALL_MEMORY)


def grid_index() -> jax.Array:
    """Number of this CTA, or of its cluster where there are clusters, int32."""
    return lax.axis_index("cta").astype(jnp.int32)


def cluster_index() -> jax.Array:
    """Number of this CTA in its cluster, int32."""
    return lax.axis_index(CLUSTER).astype(jnp.int32)


def warpgroup_index() -> jax.Array:
    """Number of this warpgroup in its CTA, int32."""
    return lax.axis_index("wg").astype(jnp.int32)
