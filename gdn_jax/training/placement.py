"""Places of a run's state and batches: one device, or a mesh of the devices of all processes."""

import contextlib
import dataclasses
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding
from jaxtyping import PyTree

from gdn_jax.commands.errors import RunError
from gdn_jax.parallel import sharding
from gdn_jax.parallel.mesh import MeshShape
from gdn_jax.training.steps import TrainState
from gdn_jax.training.tasks.batch import Batch


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

    def active(self) -> contextlib.AbstractContextManager:
        """Returns the context in which everything on the mesh is traced and run."""
        return contextlib.nullcontext() if self.mesh is None else jax.set_mesh(self.mesh)

    def state(self, params: PyTree, optimizer: Any) -> tuple[TrainState, TrainState | None]:
        """Returns the state before the first step, in its place, and its shardings. Call it inside `active`."""
        if self.mesh is None:
            # Bound to where it lies, as one that is read from a checkpoint is: both take one compiled program.
            state = TrainState(params, optimizer.init(params))
            return jax.tree.map(lambda x: jax.device_put(x, x.sharding), state), None
        try:
            shardings = TrainState._make(sharding.state_shardings(optimizer, params, self.mesh, self.shape))
        except ValueError as error:
            raise RunError(f"--mesh: {error}") from error
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
        where = sharding.batch_sharding(self.mesh)
        rows, tokens = batch.tokens.shape
        more = ((0, -rows % self.shape.data), (0, -tokens % self.shape.context))
        return Batch._make(place(np.pad(np.asarray(x), more), where) for x in batch)

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
