"""The implementations of the rule in one table, and the one function that asks whether one of them runs a call."""

import dataclasses
from collections.abc import Callable
from typing import Any, Protocol, runtime_checkable

import jax.numpy as jnp

from gdn_jax.partitioning import expected_shards
from gdn_jax.rule import plain, seam
from gdn_jax.rule.call import APART, CHANNELS, ERASURES, HEADS, Arrays, Call
from gdn_jax.rule.kernels.ampere import Ampere
from gdn_jax.rule.kernels.ampere_channels import AmpereChannels
from gdn_jax.rule.kernels.channels import Channels
from gdn_jax.rule.kernels.hopper import Hopper
from gdn_jax.rule.kernels.kernel_set import KernelSet
from gdn_jax.rule.state_passing import PlainPassing, StatePassing
from gdn_jax.shapes import Dims, Scale, accumulation_dtype

Program = tuple[Callable[..., Any], Call, tuple[Scale, ...]]
"""A function, the call that it takes, and its arguments after the call's arrays."""


@runtime_checkable
class Implementation(Protocol):
    """A way to compute a call, which may refuse it with a reason."""

    @property
    def name(self) -> str:
        """The name by which a caller asks for it."""
        ...

    @property
    def gates(self) -> tuple[str, ...]:
        """The kinds of gates that it takes, see `Call.gates`."""
        ...

    @property
    def by_kernels(self) -> bool:
        """Whether it is a set of kernels, which split their work by the values of cu_seqlens where they are known."""
        ...

    def state_passing(self, call: Call, x: Arrays) -> StatePassing | None:
        """One device's part of a call whose tokens are split over devices; None where it passes no states.

        Args:
          call: holds the factor of the output.
          x: of which dtypes alone count.
        """
        ...

    def reason(self, call: Call, x: Arrays, dims: Dims) -> str | None:
        """Why it cannot run a call on JAX's default device; None if it can."""
        ...

    def program(self, call: Call, x: Arrays, known: bytes | None, scale: Scale) -> Program:
        """The program of a call.

        Args:
          known: values of cu_seqlens as int64.
          scale: the factor of the output.
        """
        ...


@dataclasses.dataclass(frozen=True)
class ByKernels:
    """A set of kernels."""

    kernels: KernelSet
    by_kernels = True

    @property
    def name(self) -> str:
        """See `Implementation`."""
        return self.kernels.name

    @property
    def gates(self) -> tuple[str, ...]:
        """See `Implementation`."""
        return self.kernels.gates

    def state_passing(self, call: Call, x: Arrays) -> StatePassing | None:
        """See `Implementation`."""
        return self.kernels.state_passing(call, x)

    def reason(self, call: Call, x: Arrays, dims: Dims) -> str | None:
        """See `Implementation`."""
        if (device := self.kernels.device_reason()) is not None:  # first: no other arguments would help
            return device
        options: dict[str, Any] = dict(chunk_size=call.chunk_size, packed=x.cu_seqlens is not None)
        reason = self.kernels.check_supported(dims, x.q.dtype, **options)
        if reason is None and accumulation_dtype(x.q, *x[3:7]) != jnp.float32:
            floats = "a gate or" if call.gates == HEADS else "a gate, a strength or"
            return f"{floats} the state is float64; the kernels compute in float32"
        return reason

    def program(self, call: Call, x: Arrays, known: bytes | None, scale: Scale) -> Program:
        """See `Implementation`."""
        call = call._replace(kernels=self.kernels, known_lengths=known, shards=expected_shards(x))
        return seam.program(call, scale)


@dataclasses.dataclass(frozen=True)
class Plain:
    """A form in plain JAX, which runs every call."""

    name: str
    gates = HEADS, CHANNELS, APART, ERASURES
    by_kernels = False

    def state_passing(self, call: Call, x: Arrays) -> StatePassing | None:
        """See `Implementation`."""
        del x
        return PlainPassing(call._replace(state_layout="kv", form=self.name))

    def reason(self, call: Call, x: Arrays, dims: Dims) -> str | None:
        """See `Implementation`."""
        del call, x, dims

    def program(self, call: Call, x: Arrays, known: bytes | None, scale: Scale) -> Program:
        """See `Implementation`."""
        del x, known
        return plain.rule, call._replace(form=self.name), (scale,)


TABLE: tuple[Implementation, ...] = (
    ByKernels(Hopper()),
    ByKernels(Channels()),
    ByKernels(Ampere()),
    ByKernels(AmpereChannels()),
    Plain("chunked"),
    Plain("recurrent"),
)
"""The fastest first where a device runs several. Two of one name take different gates."""

IMPLEMENTATIONS = tuple(dict.fromkeys(one.name for one in TABLE))
"""Names of the implementations, fastest first."""

BY_KERNELS = tuple(dict.fromkeys(one.name for one in TABLE if one.by_kernels))
"""Names of those that are kernels."""

PLAIN = tuple(name for name in IMPLEMENTATIONS if name not in BY_KERNELS)
"""Names of the others."""


def first(call: Call, x: Arrays, dims: Dims, name: str | None = None) -> Implementation:
    """The fastest implementation that runs a call, or the one of that name.

    Raises:
      NotImplementedError: the named one cannot run the call, with the reason.
    """
    reason: str | None = "its kernels have no gates or strengths of each channel"
    for one in TABLE:
        if call.gates in one.gates and name in (one.name, None):
            reason = one.reason(call, x, dims)
            if reason is None:
                return one
    raise NotImplementedError(f"implementation {name!r}: {reason}")
