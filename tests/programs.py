"""What a traced program holds."""

from collections.abc import Iterator

from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn

KERNELS = ("mpmd_map", "core_map", "pallas_call")
"""What a GPU kernel is traced to, by version of JAX."""


def eqns(jaxpr: Jaxpr) -> Iterator[JaxprEqn]:
    """All operations of a jaxpr and of those inside it."""
    for eqn in jaxpr.eqns:
        yield eqn
        for x in eqn.params.values():
            for inner in x if isinstance(x, tuple | list) else (x,):
                inner = inner.jaxpr if isinstance(inner, ClosedJaxpr) else inner
                if isinstance(inner, Jaxpr):
                    yield from eqns(inner)
