"""Places of a run's state and batches: one device, or a mesh of the devices of all processes."""

import contextlib
import dataclasses
from functools import cached_property
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding
from jaxtyping import PyTree

from gdn_jax.commands.errors import RunError
from gdn_jax.parallel import sharding
from gdn_jax.parallel.mesh import MeshShape
from gdn_jax.training.steps import TrainState
from gdn_jax.training.tasks.batch import Batch


class Arguments(NamedTuple):
    """Arguments of a training step, see `steps.Functions`."""

    rest: PyTree
    state: TrainState
    batch: Batch


@dataclasses.dataclass(frozen=True)
class Placement:
    """A mesh and what lies where on it. Without a mesh everything is as JAX puts it."""

    shape: MeshShape = dataclasses.field(default_factory=MeshShape)
    mesh: Mesh | None = None

    @classmethod
    def on(cls, text: str | None) -> "Placement":
        """Returns the placement on all devices that an option asks for; without one, that of JAX.

        Raises:
          RunError: the text is no mesh, or not one of as many devices as there are.
        """
        if text is None:
            return cls()
        try:
            shape = MeshShape.parse(text)
            return cls(shape, shape.make())
        except ValueError as error:
            raise RunError(f"--{error}") from error

    def check(self, config: Any, batch: int, length: int) -> None:
        """Raises RunError where the model or its batches do not divide, see `parallel.sharding.check`."""
        if self.mesh is None:
            return
        try:
            sharding.check(config, self.shape, batch, length)
        except (ValueError, NotImplementedError) as error:
            raise RunError(f"--mesh: {error}") from error

    @property
    def devices(self) -> tuple[jax.Device, ...]:
        """The devices in the mesh's order; without one, where JAX puts an array."""
        return (*jnp.zeros(()).devices(),) if self.mesh is None else (*self.mesh.devices.flat,)

    def active(self) -> contextlib.AbstractContextManager:
        """Returns the context in which everything is traced and run: the mesh, or one device as a mesh.

        That device too, because on a machine with several JAX cannot know that no operation will be split.
        """
        return jax.set_mesh(self._here)

    @cached_property
    def _here(self) -> Mesh:
        """The mesh, or one of the device where JAX puts an array."""
        return MeshShape().make([*self.devices]) if self.mesh is None else self.mesh

    def shapes(
        self, rest: PyTree, params: PyTree, batch: Batch, optimizer: Any
    ) -> tuple[Arguments, TrainState | None]:
        """Returns the shapes of a step's arguments and where they lie, and the shardings of the state.

        Arrays may be shapes.
        """
        state = TrainState(params, jax.eval_shape(optimizer.init, params))
        if self.mesh is None:
            here = jnp.zeros(()).sharding
            return Arguments(_at(rest), _at(state, here), _at(batch)), None
        mesh, shardings = self.mesh, self._shardings(params, optimizer)
        specs = sharding.parameter_specs(rest, self.shape)
        rest = jax.tree.map(lambda x, spec: _shape(x, NamedSharding(mesh, spec)), rest, specs)
        rows, tokens = (n + more for n, (_, more) in zip(batch.tokens.shape, self._more(batch), strict=True))
        where = sharding.batch_sharding(self.mesh)
        batch = jax.tree.map(lambda x: jax.ShapeDtypeStruct((rows, tokens), x.dtype, sharding=where), batch)
        return Arguments(rest, jax.tree.map(_shape, state, shardings), batch), shardings

    def state(self, params: PyTree, optimizer: Any) -> tuple[TrainState, TrainState | None]:
        """Returns the state before the first step, in its place, and its shardings. Call it inside `active`."""
        if self.mesh is None:
            # Bound to where it lies, as one that is read from a checkpoint is: both take one compiled program.
            state = TrainState(params, jax.jit(optimizer.init)(params))
            return jax.tree.map(lambda x: jax.device_put(x, x.sharding), state), None
        shardings = self._shardings(params, optimizer)
        params = jax.tree.map(place, params, shardings.params)
        return TrainState(
            params, jax.jit(optimizer.init, out_shardings=shardings.opt_state)(params)
        ), shardings

    def frozen(self, rest: PyTree) -> PyTree:
        """Puts what is not trained in its place: on a mesh as the parameters of those names."""
        if self.mesh is None:
            return rest
        specs = sharding.parameter_specs(rest, self.shape)
        return jax.tree.map(lambda x, spec: place(x, NamedSharding(self.mesh, spec)), rest, specs)

    def batch(self, batch: Batch) -> Batch:
        """Puts a batch, of which every process has the whole, in its place.

        Rows and tokens that do not count are added where their numbers do not divide.
        """
        if self.mesh is None:
            return batch
        where, more = sharding.batch_sharding(self.mesh), self._more(batch)
        return Batch._make(place(np.pad(np.asarray(x), more), where) for x in batch)

    def _shardings(self, params: PyTree, optimizer: Any) -> TrainState:
        """Shardings of the state on the mesh."""
        assert self.mesh is not None
        try:
            return TrainState._make(sharding.state_shardings(optimizer, params, self.mesh, self.shape))
        except ValueError as error:
            raise RunError(f"--mesh: {error}") from error

    def _more(self, batch: Batch) -> tuple[tuple[int, int], tuple[int, int]]:
        """Rows and tokens that are added before and after those of a batch."""
        rows, tokens = batch.tokens.shape
        return (0, -rows % self.shape.data), (0, -tokens % self.shape.context)

    def whole(self, tree: PyTree) -> PyTree:
        """Returns arrays of the mesh, of each of which this process has the whole. All processes call this."""
        if self.mesh is None:
            return tree
        everywhere = NamedSharding(self.mesh, PartitionSpec())
        copies = jax.jit(lambda x: x, out_shardings=everywhere)(tree)
        return jax.tree.map(lambda x: x.addressable_data(0), copies)


def place(x: PyTree, where: Sharding) -> jax.Array:
    """Makes an array of which each device takes its part. Every process has the whole of x."""
    whole = np.asarray(x)
    return jax.make_array_from_callback(whole.shape, where, lambda index: whole[index])


def _shape(x: Any, where: Sharding | None = None) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where)


def _at(tree: PyTree, where: Sharding | None = None) -> PyTree:
    """Shapes of arrays that all lie in one place; None: where JAX puts them."""
    return jax.tree.map(lambda x: _shape(x, where), tree)
