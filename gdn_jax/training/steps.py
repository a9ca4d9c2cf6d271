"""Pure functions of training: one optimiser step, one validation batch, and the optimiser of both."""

import math
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int, PyTree

from gdn_jax import models
from gdn_jax.commands.errors import RunError
from gdn_jax.hf.load import load_hf
from gdn_jax.layers import RecurrentMixer
from gdn_jax.models.lora import LoRAParam, add_lora
from gdn_jax.models.mtp import MTPHead
from gdn_jax.parallel.token_shards import loss_on_mesh
from gdn_jax.parts.products import counting
from gdn_jax.training.optimizers import OPTIMIZERS
from gdn_jax.training.options import ModelOptions, ScheduleOptions
from gdn_jax.training.starts import Start, empty
from gdn_jax.training.tasks.batch import Batch
from gdn_jax.training.tasks.options import TaskOptions

AT_ONCE = 64
"""Arrays whose sums of squares are added by one kernel."""


class TrainState(NamedTuple):
    """All that an optimiser step changes."""

    params: PyTree  # the nnx.Param of the model, an nnx.State
    opt_state: optax.OptState


class StepMetrics(NamedTuple):
    """Scalars of one step, computed before its update."""

    loss: Float[Array, ""]  # mean nats of a weighted prediction
    accuracy: Float[Array, ""]
    grad_norm: Float[Array, ""]  # before clipping
    saturated: Float[Array, ""] | float = 0.0  # numbers of both passes, see `parts.products.counting`


class Sums(NamedTuple):
    """Sums over the weighted predictions of a batch."""

    loss: Float[Array, ""]
    correct: Float[Array, ""]
    weight: Float[Array, ""]


class Functions(NamedTuple):
    """Compiled functions of a run.

    The first argument is `rest` of `nnx.split(model, kind, ...)`. It holds the weights that are not trained, which
    would be part of the program if they were constants.
    """

    train: Callable[[PyTree, TrainState, Batch], tuple[TrainState, StepMetrics]]
    evaluate: Callable[[PyTree, PyTree, Batch], Sums]
    evaluate_each: Callable[
        [PyTree, PyTree, Batch, Sequence[Array | np.ndarray]], Sums
    ]  # for each of several weights


def compute_dtype(options: ModelOptions) -> str:
    """Returns the dtype of activations: the one asked for, or bfloat16 unless the device is a CPU."""
    if options.dtype != "auto":
        return options.dtype
    return "float32" if jax.default_backend() == "cpu" else "bfloat16"


def model_config(options: ModelOptions, vocab_size: int) -> models.ModelConfig:
    """Returns the configuration of the options' model, with the dtype of this device where theirs is "auto"."""
    values = options.config_values() | {"dtype": compute_dtype(options)}
    return models.ModelConfig(vocab_size=vocab_size, **values)


def make_model(options: ModelOptions, vocab_size: int, seed: int | Array) -> models.LanguageModel:
    """Makes the language model of the options with fresh weights. The seed may be traced.

    Raises:
      RunError: the sizes do not make a model.
    """
    try:
        config = model_config(options, vocab_size)
        model = models.LanguageModel(config, rngs=nnx.Rngs(jax.random.key(seed)))
        if options.mtp_weight:
            model.mtp = nnx.data(MTPHead(config, rngs=nnx.Rngs(jax.random.fold_in(jax.random.key(seed), 1))))
    except (ValueError, NotImplementedError) as error:
        raise RunError(str(error)) from error
    if options.time_step != 1:
        scale_time_steps(model, options.time_step)
    return model


def start_model(task: TaskOptions, model: ModelOptions, vocab_size: int, seed: int) -> models.LanguageModel:
    """Makes the model that a run starts from: fresh, or that of a checkpoint, with low-rank changes if asked for.

    Weights that are trained are float32, others in the compute dtype.

    Raises:
      RunError: the sizes do not make a model, or the checkpoint cannot be used.
    """
    start = task.pretrained()
    if start is None:
        return make_model(model, vocab_size, seed)
    assert start.from_ is not None
    dtype, rank = compute_dtype(model), start.lora_rank
    implementation = None if model.implementation == "auto" else model.implementation
    try:
        made = load_hf(
            start.from_,
            dtype=dtype,
            weight_dtype="float32" if rank is None else dtype,
            implementation=implementation,
            remat=model.remat,
        )
    except (ValueError, NotImplementedError) as error:
        raise RunError(f"--from: {error}") from error
    if not model.mtp_weight:
        made.mtp = None  # no loss reaches the head for the token after the next
    elif made.mtp is None:
        raise RunError(f"--mtp-weight: expected 0 for a checkpoint without a head, got {model.mtp_weight:g}")
    if rank is not None:
        try:
            add_lora(made, rank, projections=start.lora_projections, rngs=nnx.Rngs(seed))
        except ValueError as error:
            raise RunError(f"--lora-{error}") from error
    return made


def trained(task: TaskOptions) -> type[nnx.Param]:
    """The type of the parameters that a run trains."""
    start = task.pretrained()
    return nnx.Param if start is None or start.lora_rank is None else LoRAParam


def scale_time_steps(model: models.LanguageModel, factor: float | Float[Array, ""]) -> None:
    """Multiplies the time steps of all gates, in place: 0.1 makes half-lives ten times as long."""
    for mixer in _mixers(model):
        mixer.scale_time_steps(factor)


def set_write_start(model: models.LanguageModel, start: Float[Array, ""]) -> None:
    """Makes write strengths start elsewhere, in place; see `write_start` of a ModelConfig, which the model has."""
    for mixer in _mixers(model):
        mixer.set_write_start(start)


def _mixers(model: models.LanguageModel) -> list[RecurrentMixer]:
    """The token mixers with gates: attention has none."""
    return [block.mixer for block in model.blocks if isinstance(block.mixer, RecurrentMixer)]


def make_schedule(options: ScheduleOptions, steps: int, lr: float | Array) -> optax.Schedule:
    """Makes the learning rate of an update from the count before it: a linear rise to lr, then half a cosine."""
    rising = max(1, round(options.warmup * steps))
    shape = optax.warmup_cosine_decay_schedule(
        init_value=1 / (rising + 1),
        peak_value=1.0,
        warmup_steps=rising,
        decay_steps=max(steps, rising + 1),
        end_value=options.end_lr,
    )
    return lambda count: lr * shape(count)


def make_optimizer(
    options: ScheduleOptions, steps: int, lr: float | Array
) -> optax.GradientTransformationExtraArgs:
    """Makes the options' optimiser after a clip of the global norm.

    The learning rate may be traced: runs that differ in it alone share their compiled step.
    """
    make, schedule = OPTIMIZERS[options.optimizer], make_schedule(options, steps, lr)
    return optax.chain(clip_by_global_norm(options.clip), make(schedule, options.weight_decay))


def clip_by_global_norm(most: float) -> optax.GradientTransformationExtraArgs:
    """Makes what `optax.clip_by_global_norm` makes, with the norm that is given to it or the `global_norm` below."""

    def update(updates, state, params=None, *, norm=None, **others):
        del params, others
        norm = global_norm(updates) if norm is None else norm
        return jax.tree.map(lambda g: _clipped(g, norm, most), updates), state

    return optax.GradientTransformationExtraArgs(optax.init_empty_state, update)


# Of an array each, and traced once for each shape: a deep model has hundreds of arrays.
@partial(jax.jit, static_argnums=2)
def _clipped(g: Array, norm: Float[Array, ""], most: float) -> Array:
    return jnp.where(norm < most, g, g / norm.astype(g.dtype) * most)


@jax.jit
def _squares(g: Array) -> Float[Array, "N"]:
    return jnp.square(g).ravel() if g.ndim < 2 else jnp.sum(g * g, axis=-1).ravel()


@jax.jit
def _divided(g: Array, weight: Float[Array, ""]) -> Array:
    return g / weight


def global_norm(grads: PyTree) -> Float[Array, ""]:
    """Returns the square root of the sum of all squares.

    The squares of an array are added along its last axis, and these sums of many arrays at once. With one number for
    each array a GPU would run two kernels an array, and a deep model has hundreds. On several devices each has the
    sums of all of them: to join sums that are split, XLA would gather the gradients.
    """
    sums = [*map(_squares, jax.tree.leaves(grads))]
    if jax.sharding.get_abstract_mesh().size > 1:
        sums = [jax.lax.with_sharding_constraint(x, PartitionSpec()) for x in sums]
    # The barrier, because the compiler would add the sums of each array by itself.
    joined = (jnp.concatenate(sums[i : i + AT_ONCE]) for i in range(0, len(sums), AT_ONCE))
    return jnp.sqrt(sum(jnp.sum(jax.lax.optimization_barrier(x)) for x in joined))


def _sums(model: models.LanguageModel, x: Float[Array, "B T D"], batch: Batch) -> Sums:
    sums = loss_on_mesh(
        x,
        model.head_weight(),
        jnp.asarray(batch.targets),
        label_weights=jnp.asarray(batch.weights),
        implementation=model.config.implementation,
    )
    return Sums(sums.loss, sums.correct, sums.weight)


def loss_sum(
    graphdef: nnx.GraphDef,
    rest: PyTree,
    params: PyTree,
    batch: Batch,
    places: Int[Array, "B N"] | None = None,
    mtp_weight: float = 0.0,
    start: Start = empty,
) -> tuple[Float[Array, ""], Sums]:
    """Sum of the weighted losses of a batch, to be differentiated, and all sums of the model's own logits.

    With places, different ones of each row that hold all that counts, no other logits are computed. With an
    mtp_weight the loss of the head for the token after the next is added, times this weight; no sum counts it. The
    start is what rows begin from, see `starts`.
    """
    model, tokens = nnx.merge(graphdef, params, rest), jnp.asarray(batch.tokens)
    x, later = model.hidden_states(tokens, cache=start(model, tokens))[0], 0.0
    if mtp_weight:
        later = mtp_weight * _after_next(model, x, batch).loss
    if places is not None:
        x, batch = _at((x, batch), places)
    sums = _sums(model, x, batch)
    return sums.loss + later, sums


def _after_next(model: models.LanguageModel, x: Float[Array, "B T D"], batch: Batch) -> Sums:
    """Sums of the logits of the head for the token after the next. The last place of a row has none."""
    tokens, targets, weights = (jnp.roll(jnp.asarray(y), -1, axis=1) for y in batch[:3])
    hidden, _ = model.mtp(model.embedded(tokens), x)
    return _sums(model, hidden, Batch(tokens, targets, weights.at[:, -1].set(0)))


def _at(rows: PyTree, places: Int[Array, "B N"]) -> PyTree:
    """Entries of arrays [B, T, ...] at different places of each row, [B, N, ...]."""
    row, places = jnp.arange(places.shape[0])[:, None], jnp.asarray(places)
    exact = dict(unique_indices=True, mode="promise_in_bounds")
    return jax.tree.map(lambda x: jnp.asarray(x).at[row, places].get(**exact), rows)


def sums_by_weights(
    graphdef: nnx.GraphDef,
    rest: PyTree,
    params: PyTree,
    batch: Batch,
    weights: Float[Array, "S B T"],
    places: Int[Array, "B N"] | None = None,
) -> Sums:
    """Returns the sums of a batch for each of several weights in place of its own.

    The model reads the batch once, and its logits are computed once.

    Places are as for `loss_sum`, of all weights together.

    Returns:
      Sums of arrays [S].
    """
    model = nnx.merge(graphdef, params, rest)
    x, _ = model.hidden_states(jnp.asarray(batch.tokens))
    if places is not None:
        x, batch = _at((x, batch), places)
        weights = jnp.take_along_axis(weights, jnp.asarray(places)[None], axis=2)
    return jax.vmap(lambda weights: _sums(model, x, batch._replace(weights=weights)))(weights)


def train_step(
    graphdef: nnx.GraphDef,
    rest: PyTree,
    optimizer: optax.GradientTransformation,
    accumulate: int,
    state: TrainState,
    batch: Batch,
    places: Int[Array, "B N"] | None = None,
    mtp_weight: float = 0.0,
    start: Start = empty,
) -> tuple[TrainState, StepMetrics]:
    """Makes one optimiser step.

    The loss is sum(weight * nll) / sum(weight) over the whole batch, also when the batch is cut into `accumulate`
    pieces: gradients of the pieces are added in float32.

    Args:
      graphdef, rest: of `nnx.split(model, kind, ...)`, where kind is the type of what is trained.
      optimizer: see `make_optimizer`.
      accumulate: pieces; divides the batch size.
      state: before the step.
      batch: of the step.
      places: as for `loss_sum`, of a batch that is not cut.
      mtp_weight, start: as for `loss_sum`; of a batch that is cut, the rows of each piece.

    Returns:
      The state after the step, and its metrics.
    """

    def counted_loss(variables, batch, places=None):
        params, counter = variables
        with counting(counter):
            return loss_sum(graphdef, rest, params, batch, places, mtp_weight, start)

    gradient = jax.grad(counted_loss, has_aux=True)
    zero = jnp.zeros((), jnp.float32)
    if accumulate == 1:
        (grads, saturated), sums = gradient((state.params, zero), batch, places)
    else:
        pieces = jax.tree.map(lambda x: x.reshape(accumulate, -1, *x.shape[1:]), batch)

        def piece(total, part):
            return jax.tree.map(jnp.add, total, gradient((state.params, zero), part)), None

        nothing = ((jax.tree.map(jnp.zeros_like, state.params), zero), Sums(zero, zero, zero))
        ((grads, saturated), sums), _ = jax.lax.scan(piece, nothing, pieces)
    grads = jax.tree.map(lambda g: _divided(g, sums.weight), grads)
    norm = global_norm(grads)
    update = optax.with_extra_args_support(optimizer).update
    updates, opt_state = update(grads, state.opt_state, state.params, norm=norm)
    params = optax.apply_updates(state.params, updates)
    loss, accuracy = sums.loss / sums.weight, sums.correct / sums.weight
    return TrainState(params, opt_state), StepMetrics(loss, accuracy, norm, saturated)


def make_functions(
    graphdef: nnx.GraphDef,
    optimizer: optax.GradientTransformation,
    accumulate: int,
    deterministic: bool = True,
    shardings: TrainState | None = None,
    mtp_weight: float = 0.0,
    start: Start = empty,
) -> Functions:
    """Compiled step functions of a model.

    Args:
      graphdef, optimizer, accumulate, mtp_weight, start: see `train_step`.
      shardings: of the state, which keeps them; None on one device.
      deterministic: on a GPU, compile without atomics and without choosing kernels by timing them, either of
        which makes two runs differ in the last bits. (Two and a resumed run of 60 steps agree on one H200 with
        it, jax 0.11.2, and do not without; a CPU agrees in any case.)
    """

    def train(rest: PyTree, state: TrainState, batch: Batch) -> tuple[TrainState, StepMetrics]:
        own: Any = dict(mtp_weight=mtp_weight, start=start)
        return train_step(graphdef, rest, optimizer, accumulate, state, batch, **own)

    def evaluate(rest: PyTree, params: PyTree, batch: Batch) -> Sums:
        return loss_sum(graphdef, rest, params, batch)[1]

    def evaluate_each(
        rest: PyTree, params: PyTree, batch: Batch, weights: Sequence[Array | np.ndarray]
    ) -> Sums:
        return sums_by_weights(graphdef, rest, params, batch, jnp.stack(weights))

    flags = compiler_flags(deterministic)
    where: dict[str, Any] = {} if shardings is None else {"out_shardings": (shardings, None)}
    return Functions(
        jax.jit(train, donate_argnums=1, compiler_options=flags, **where),
        jax.jit(evaluate, compiler_options=flags),
        jax.jit(evaluate_each, compiler_options=flags),
    )


def compiler_flags(deterministic: bool) -> dict[str, bool] | None:
    """Returns options of `jax.jit` with which the present device repeats a run bit for bit."""
    return {"xla_gpu_deterministic_ops": True} if deterministic and jax.default_backend() == "gpu" else None


def mean(sums: list[Sums]) -> tuple[float, float]:
    """Returns mean loss in nats and mean accuracy over the weighted predictions of all batches, NaN without any."""
    loss, correct, weight = (math.fsum(float(s[i]) for s in sums) for i in range(3))
    return (loss / weight, correct / weight) if weight else (math.nan, math.nan)


def validate(
    functions: Functions, rest: PyTree, params: PyTree, batches: Iterable[Batch]
) -> tuple[float, float]:
    """Returns the `mean` of the batches under the parameters."""
    return mean([functions.evaluate(rest, params, batch) for batch in batches])
