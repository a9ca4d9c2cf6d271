"""What a traced program holds."""

from collections.abc import Iterator

from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn

KERNELS = ("mpmd_map", "core_map", "pallas_call")
"""What a GPU kernel is traced to, by version of JAX."""


def eqns(jaxpr: Jaxpr, closed: tuple[str, ...] = ()) -> Iterator[JaxprEqn]:
    """All operations of a jaxpr and of those inside it, but for what is inside of those with these names."""
    for eqn in jaxpr.eqns:
        yield eqn
        if eqn.primitive.name in closed:
            continue
        for x in eqn.params.values():
            for inner in x if isinstance(x, tuple | list) else (x,):
                inner = inner.jaxpr if isinstance(inner, ClosedJaxpr) else inner
                if isinstance(inner, Jaxpr):
                    yield from eqns(inner, closed)
