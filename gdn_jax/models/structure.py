"""A structure of a model is found once: `nnx.split` visits every attribute of every part, 20 ms for 24 layers."""

import weakref
from typing import Any

import jax
from flax import nnx


class Structure:
    """A model without its arrays, as a static argument of compiled programs: its hash is made once.

    Args:
      graphdef: of `nnx.split`.
      treedef: of the state that `nnx.split` returns with it.
    """

    def __init__(self, graphdef: nnx.GraphDef, treedef: Any):
        self._parts = graphdef, treedef
        self._hash = hash(self._parts)

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        return self is other or (
            isinstance(other, Structure) and self._hash == other._hash and self._parts == other._parts
        )

    def merge(self, arrays: list[Any]) -> Any:
        """The model with these arrays, those of `split` in their order; they may be traced."""
        graphdef, treedef = self._parts
        return nnx.merge(graphdef, jax.tree.unflatten(treedef, arrays))


def split(model: nnx.Module) -> tuple[Structure, list[Any]]:
    """A model's structure and its arrays, as `nnx.split` finds them.

    The structure is kept as long as the model lives and each of its parts has the attributes that it had: the same
    objects under the same names. Arrays are read from the model's variables at every call.
    """
    kept = _KEPT.get(model)
    if kept is not None and kept.holds(model):
        return kept.structure, kept.arrays()
    graphdef, state = nnx.split(model)
    arrays, treedef = jax.tree.flatten(state)
    structure = Structure(graphdef, treedef)
    nodes = dict(nnx.iter_graph(model))
    variables = [nodes[path] for path in nnx.to_flat_state(state).paths]
    kept = _Kept(structure, model, nodes.values(), variables)
    traced = any(isinstance(x, jax.core.Tracer) for x in arrays)
    if not traced and len(variables) == len(arrays) and all(map(_same, kept.arrays(), arrays)):
        if not any(isinstance(node, (list, dict)) for node in nodes.values()):  # these may change unseen
            _KEPT[model] = kept
    return structure, arrays


class _Kept:
    """A structure, and what must not have changed for it to be the model's still."""

    def __init__(self, structure: Structure, model: nnx.Module, nodes, variables: list[nnx.Variable]):
        self.structure = structure
        self._root = tuple(vars(model).items())  # not the model itself, which would then live for ever
        parts = [node for node in nodes if isinstance(node, nnx.Pytree) and node is not model]
        self._parts = [(node, tuple(vars(node).items())) for node in parts]
        self._variables = [(variable, dict(variable.get_metadata())) for variable in variables]

    def holds(self, model: nnx.Module) -> bool:
        """Whether all parts of the model have the attributes that they had."""
        return (
            _has(model, self._root)
            and all(_has(node, attributes) for node, attributes in self._parts)
            and all(variable.get_metadata() == metadata for variable, metadata in self._variables)
        )

    def arrays(self) -> list[Any]:
        """Reads what the model's variables hold now."""
        return [variable.get_raw_value() for variable, _ in self._variables]


_KEPT: weakref.WeakKeyDictionary[nnx.Module, _Kept] = weakref.WeakKeyDictionary()
_MISSING = object()


def _same(a: Any, b: Any) -> bool:
    return a is b


def _has(node: Any, attributes: tuple[tuple[str, Any], ...]) -> bool:
    now = vars(node)
    return len(now) == len(attributes) and all(now.get(name, _MISSING) is value for name, value in attributes)
