"""How an operation that XLA cannot look into is split over the devices of a mesh: by axes that the operation names.

A kernel is opaque to XLA, which without a word from us gathers its operands onto every device. The dimensions of
every array get names here, of which some may be split: "b" for rows and "h" for heads. Any other dimension that is
sharded is gathered before the operation.

Where a mesh of `MeshShape.make` is set, its axes say what lies over them, and `on_shards` is a `jax.shard_map`. On
automatic axes of another mesh it tells XLA's partitioner. Where the mesh has explicit axes, shardings are part of the
arrays' types and `on_explicit_shards` reads them there.
"""

import math
import warnings
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import jax
import numpy as np
from jax import export, lax
from jax.custom_batching import custom_vmap
from jax.experimental.custom_partitioning import ArrayMapping, SdyShardingRule, custom_partitioning
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from gdn_jax.parallel.mesh import CONTEXT, DATA, HEAD, axes_set

Axes = tuple[str, ...]
"""Names of an array's dimensions. One of a name that may be split has that name's size, or a multiple of it. For a
result of `on_shards` "+" and a name may follow."""

AXIS_OF = {"b": DATA, "t": CONTEXT, "h": HEAD}
"""Axes of a mesh of `MeshShape.make` by the names of the dimensions that lie over them."""


def on_shards(
    f: Callable[..., Any],
    static: Hashable,
    args: Sequence[Any],
    operands: Sequence[Any],
    results: Callable[[Any], Any],
    sizes: Mapping[str, int],
) -> Any:
    """f(static, *args), which under jit every device computes on its own shard of the arrays, without communication.

    However often a program calls the same f with the same static argument and shapes, it is lowered once: a kernel
    takes up to half a second to lower, and a deep model calls each one in every layer.

    Args:
      f: maps a static argument and arrays to arrays; a function of a module, so that calls can be seen to be alike.
        Along the names of `sizes` it treats every index by itself, so that f of a shard is the shard of f. A
        dimension of n times a name's size holds n indices in a row for each of that name's.
      static: what else f depends on.
      args: pytrees of arrays or None.
      operands: for each argument the names of its dimensions, a string such as "b t h k" in place of every array; "."
        is a dimension of no name.
      results: the same of f's results, from their shapes. "+b" after the names: f of a shard of "b" gives a part of
        a sum, which is taken over all shards.
      sizes: how many equal parts each name that may be split has at most.

    Returns:
      f(static, *args). Under vmap f runs unsplit.
    """
    compiled = jax.jit(f, static_argnums=0)
    leaves, treedef = jax.tree.flatten(tuple(args))
    shapes = jax.eval_shape(partial(compiled, static), *args)
    ins, outs = _flat_axes(tuple(args), tuple(operands)), _flat_axes(shapes, results(shapes))

    def whole(*leaves: jax.Array) -> tuple[jax.Array, ...]:
        return tuple(jax.tree.leaves(compiled(static, *jax.tree.unflatten(treedef, leaves))))

    if (devices := axes_set()) is None:
        split = _by_partitioner(compiled, static, treedef, whole, ins, outs, sizes)
    else:
        lie = [PartitionSpec(*map(AXIS_OF.get, _dimensions(names))) for names in (*ins, *outs)]
        chosen = _choose(devices, sizes, (*ins, *outs), lie)
        split = partial(_on_known_axes, f, static, treedef, ins, outs, tuple(chosen.items()))

    @custom_vmap
    def call(*leaves):
        return split(*leaves)

    @call.def_vmap
    def _(axis_size, batched, *leaves):
        in_axes = tuple(0 if b else None for b in batched)
        return jax.vmap(whole, in_axes, axis_size=axis_size)(*leaves), (True,) * len(outs)

    return jax.tree.unflatten(jax.tree.structure(shapes), call(*leaves))


# Compiled by itself, so that the layers of a model share what is traced and lowered of one.
@partial(jax.jit, static_argnums=range(6))
def _on_known_axes(f, static, treedef, ins, outs, chosen, *leaves: jax.Array) -> tuple[jax.Array, ...]:
    """The leaves of f(static, *args), each name over the mesh axes that are chosen for it."""
    chosen = dict(chosen)

    def shard(*leaves: jax.Array) -> tuple[jax.Array, ...]:
        parts = jax.tree.leaves(f(static, *jax.tree.unflatten(treedef, leaves)))
        return tuple(_summed(chosen, *part) for part in zip(outs, parts, strict=True))

    given, made = (tuple(_spec(chosen, names) for names in side) for side in (ins, outs))
    # Nothing differentiates through it, and kernels do not say over which mesh axes their results vary.
    return jax.shard_map(shard, in_specs=given, out_specs=made, check_vma=False)(*leaves)


def _by_partitioner(
    compiled: Any,
    static: Hashable,
    treedef: Any,
    whole: Callable[..., tuple[jax.Array, ...]],
    ins: Sequence[Axes],
    outs: Sequence[Axes],
    sizes: Mapping[str, int],
) -> Callable[..., tuple[jax.Array, ...]]:
    """`whole`, of which XLA asks how it is split while it compiles the program."""

    def choose(mesh: Mesh, arrays, names: Sequence[Axes]) -> tuple[Mesh, dict[str, tuple[str, ...]]]:
        given = [x.sharding for x in arrays]
        if mesh.empty:  # shardings of no mesh: every device computes the whole
            devices = next(s.device_set for s in given if s is not None)
            return Mesh(np.array(sorted(devices, key=lambda device: device.id)), ("device",)), {}
        specs = [PartitionSpec() if s is None else s.spec for s in given]  # None: not decided yet
        return mesh, _choose(mesh.shape, sizes, names, specs)

    def partition(mesh: Mesh, operands, results):
        mesh, chosen = choose(mesh, (*operands, *results), (*ins, *outs))

        def shard(*leaves: jax.Array) -> tuple[jax.Array, ...]:
            lowered = _lowered(compiled, static, jax.tree.unflatten(treedef, leaves), mesh)
            parts = jax.tree.leaves(lowered.call(*jax.tree.unflatten(treedef, leaves)))
            return tuple(_summed(chosen, *part) for part in zip(outs, parts, strict=True))

        given, made = ([NamedSharding(mesh, _spec(chosen, names)) for names in side] for side in (ins, outs))
        return mesh, shard, tuple(made), tuple(given)

    def infer(mesh: Mesh, operands, results):
        mesh, chosen = choose(mesh, operands, ins)
        return tuple(NamedSharding(mesh, _spec(chosen, names)) for names in outs)

    def rule(mesh, operand_types, result_types) -> SdyShardingRule:
        return _rule((ins, operand_types), (outs, result_types))

    partitioned = custom_partitioning(whole)
    partitioned.def_partition(partition, infer_sharding_from_operands=infer, sharding_rule=rule)
    return partitioned


def _lowered(compiled: Any, static: Hashable, args: tuple[Any, ...], mesh: Mesh) -> export.Exported:
    """A function of one shard as a module, to be called from others.

    The partitioner asks for a module of its own for each call. JAX keeps what it has traced and lowered of a function
    that is compiled by itself, which an export reads, but not what is lowered as a part of such modules.
    """
    platform = mesh.devices.flat[0].platform
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), args)
    return export.export(compiled, platforms=("cuda" if platform == "gpu" else platform,))(static, *shapes)


def lie_on_explicit_axes(*arrays: jax.Array) -> bool:
    """Whether the type of one of these arrays says how it lies on explicit axes of a mesh."""
    return any(AxisType.Explicit in jax.typeof(x).sharding.mesh.axis_types for x in arrays)


def on_explicit_shards(
    f: Callable[..., Any],
    args: Sequence[Any],
    operands: Sequence[Any],
    results: Any,
    sizes: Mapping[str, int],
    in_place: bool = False,
) -> Any:
    """f(*args), on the shards of the arrays where their types say how they lie on explicit axes of a mesh.

    Args: those of `on_shards`; `results` are the names themselves.
      in_place: whether f has kernels that write into its arguments: JAX then cannot keep in the types of arrays over
        which mesh axes they vary.

    Returns:
      f(*args). Results are sharded along the names that were split. One that has none of a name that was split has to
      be the same on all shards of it.
    """
    leaves, treedef = jax.tree.flatten(tuple(args))
    meshes = [mesh for x in leaves if AxisType.Explicit in (mesh := jax.typeof(x).sharding.mesh).axis_types]
    if not meshes:
        return f(*args)
    mesh = meshes[0]
    ins = _flat_axes(tuple(args), tuple(operands))
    explicit = {
        name for name, kind in zip(mesh.axis_names, mesh.axis_types, strict=True) if kind == AxisType.Explicit
    }
    chosen = _choose(mesh.shape, sizes, ins, [jax.typeof(x).sharding.spec for x in leaves])
    in_specs = [_spec(chosen, names) for names in ins]
    out_specs = jax.tree.map(lambda names: _spec(chosen, tuple(names.split())), results)
    leaves = [jax.sharding.reshard(x, NamedSharding(mesh, s)) for x, s in zip(leaves, in_specs, strict=True)]
    split = {axis for over in chosen.values() for axis in over}
    # A result without such a name is the same on all shards, which JAX does not see.
    check_vma = not in_place and all(split == _mesh_axes(s) for s in jax.tree.leaves(out_specs))

    def shard(*leaves: jax.Array) -> Any:
        return f(*jax.tree.unflatten(treedef, vary_alike(leaves)))

    return jax.shard_map(
        shard,
        mesh=mesh,
        in_specs=tuple(in_specs),
        out_specs=out_specs,
        axis_names=explicit,
        check_vma=check_vma,
    )(*leaves)


def warn_of_gathers(
    names: Sequence[str], args: Sequence[Any], operands: Sequence[str | None], sizes: Mapping[str, int]
) -> None:
    """Warns, while the program is compiled, of each array that lies split along a dimension that cannot be: every
    device gathers the whole of it.

    Args:
      names: of the arrays, for the text.
      args: arrays or None.
      operands, sizes: see `on_shards`.
    """

    def check(name: str, axes: Axes, sharding: Any) -> None:
        if not isinstance(sharding, NamedSharding):
            return
        for axis, entry in zip(axes, sharding.spec, strict=False):
            over = entry if isinstance(entry, tuple) else () if entry is None else (entry,)
            if (
                _parts(sharding.mesh.shape, over) == 1
                or _prefix(sharding.mesh.shape, sizes.get(axis, 1), set(), over) == over
            ):
                continue
            limit = f", which can be split {sizes[axis]} ways" if axis in sizes else ", which cannot be split"
            text = f"{name}: its {_MEANING.get(axis, axis)} lie on mesh axes {', '.join(over)}{limit}; it is gathered"
            warnings.warn(text, stacklevel=2)

    for name, x, axes in zip(names, args, operands, strict=True):
        if x is None or axes is None:
            continue
        told = partial(check, name, tuple(axes.split()))
        if lie_on_explicit_axes(x):
            told(jax.typeof(x).sharding)
        else:
            jax.debug.inspect_array_sharding(x, callback=told)


_MEANING = {
    "b": "rows",
    "s": "slots",
    "h": "heads",
    "t": "tokens",
    "k": "keys' widths",
    "v": "values' widths",
    ".": "inner dimensions",
}


def vary_alike(arrays: Any) -> Any:
    """The arrays of a pytree, inside jax.shard_map all varying over the mesh axes that one of them varies over.

    A loop's carry must be of one type, and so must a primal and the cotangent that a custom_vjp gives for it. In
    reverse mode this sums the cotangents of an array that came replicated. Outside shard_map it
    does nothing, nor with check_vma=False.
    """

    def varying(x) -> frozenset:
        return jax.typeof(x).manual_axis_type.varying

    axes = frozenset().union(*(varying(x) for x in jax.tree.leaves(arrays)))
    return jax.tree.map(lambda x: lax.pcast(x, tuple(axes - varying(x)), to="varying"), arrays)


def expected_shards(arrays: Any) -> int | None:
    """Devices that XLA may split a computation on these arrays over; None where there is nothing for it to split.

    Inside `jax.shard_map` the arrays are shards already. On explicit axes they are split by their types. Where a mesh
    of one device is set there is no other.
    """
    here = jax.sharding.get_abstract_mesh()
    if jax.device_count() == 1 or (not here.empty and here.size == 1):
        return None
    meshes = [jax.typeof(x).sharding.mesh for x in jax.tree.leaves(arrays)]
    if any({AxisType.Manual, AxisType.Explicit} & {*mesh.axis_types} for mesh in meshes):
        return None
    return max((mesh.size for mesh in meshes if not mesh.empty), default=1)


def _flat_axes(tree: Any, axes: Any) -> tuple[Axes, ...]:
    """Names of the dimensions of every array of a tree, whose None need none."""
    names = jax.tree.map(lambda x, a: None if x is None else a, tree, axes, is_leaf=lambda x: x is None)
    return tuple(tuple(a.split()) for a in jax.tree.leaves(names))


def _choose(
    mesh: Mapping[str, int], sizes: Mapping[str, int], axes: Sequence[Axes], specs: Sequence[PartitionSpec]
) -> dict[str, tuple[str, ...]]:
    """For each name the mesh axes to split it over: those of the array that lies on most devices along it."""
    chosen: dict[str, tuple[str, ...]] = {}
    for name, size in sizes.items():
        taken = {axis for other in chosen.values() for axis in other}
        found = [_prefix(mesh, size, taken, entry) for entry in _entries(name, axes, specs)]
        chosen[name] = max(found, key=lambda entry: _parts(mesh, entry), default=())
    return chosen


def _entries(name: str, axes: Sequence[Axes], specs: Sequence[PartitionSpec]) -> Iterator[tuple[str, ...]]:
    """Mesh axes over which each dimension of that name is sharded."""
    for names, spec in zip(axes, specs, strict=True):
        for dimension, entry in enumerate(spec):
            if entry is not None and names[dimension] == name:
                yield entry if isinstance(entry, tuple) else (entry,)


def _prefix(mesh: Mapping[str, int], size: int, taken: set[str], entry: tuple[str, ...]) -> tuple[str, ...]:
    """The first of these mesh axes that are free and divide the size together."""
    for end in range(len(entry), 0, -1):
        if not taken & {*entry[:end]} and size % _parts(mesh, entry[:end]) == 0:
            return entry[:end]
    return ()


def _parts(mesh: Mapping[str, int], entry: tuple[str, ...]) -> int:
    return math.prod(mesh[axis] for axis in entry)


def _spec(chosen: Mapping[str, tuple[str, ...]], names: Axes) -> PartitionSpec:
    return PartitionSpec(*(chosen.get(name) or None for name in _dimensions(names)))


def _mesh_axes(spec: PartitionSpec) -> set[str]:
    """Mesh axes that an array is split over."""
    entries = (entry if isinstance(entry, tuple) else (entry,) for entry in spec if entry is not None)
    return {axis for entry in entries for axis in entry}


def _dimensions(names: Axes) -> Axes:
    return tuple(name for name in names if not name.startswith("+"))


def _summed(chosen: Mapping[str, tuple[str, ...]], names: Axes, x: jax.Array) -> jax.Array:
    """x, summed over the shards of the names that say so."""
    over = [axis for name in names if name.startswith("+") for axis in chosen.get(name[1:], ())]
    return lax.psum(x, tuple(over)) if over else x


def _rule(*sides: tuple[Sequence[Axes], Sequence[Any]]) -> SdyShardingRule:
    """Along which dimensions Shardy carries a sharding from array to array: those of the same name and size.

    A name whose size differs between arrays, such as heads that share keys, is one factor for each size: as parts of
    a compound factor Shardy would split a mesh axis where it does not divide the first, which JAX cannot express.
    """
    used = 0

    def mapping(names: Axes, shape: Sequence[int]) -> ArrayMapping:
        nonlocal used
        factors = []
        for name, size in zip(_dimensions(names), shape, strict=True):
            used += 1
            factors.append(f"other{used}" if name == "." else f"{name}{size}")
        return ArrayMapping(*factors)

    arrays = (tuple(mapping(names, x.shape) for names, x in zip(*side, strict=True)) for side in sides)
    return SdyShardingRule(*arrays)
