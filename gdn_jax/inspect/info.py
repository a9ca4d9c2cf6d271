"""`gdn info`: parts, sizes and costs of a Hugging Face checkpoint, of the model of a run or of a preset."""

import dataclasses
import math
from collections.abc import Iterator
from functools import partial
from itertools import chain, groupby
from pathlib import Path
from typing import Annotated, Literal

from rich.console import Console
from rich.table import Table

from gdn_jax.commands import fields
from gdn_jax.commands.errors import RunError, printable
from gdn_jax.commands.fields import Positive
from gdn_jax.commands.tables import print_whole
from gdn_jax.hf.checkpoint import CONFIG, read_json
from gdn_jax.hf.families import describe
from gdn_jax.hf.load import check_tensors, config_of, head_of, names_of, skipped_of, tensors_of, weights_of
from gdn_jax.hf.text import is_checkpoint
from gdn_jax.inspect.analysis import memory_horizon
from gdn_jax.layers.mixer import MixerCosts, Start
from gdn_jax.models.config import ModelConfig, period_of
from gdn_jax.models.costs import (
    active_parameters,
    layer_costs,
    model_costs,
    parameters,
    shapes,
    title,
    weight_bytes,
)
from gdn_jax.models.presets import PRESETS
from gdn_jax.models.served import slot_bytes
from gdn_jax.parallel import sharding
from gdn_jax.parallel.mesh import MeshShape
from gdn_jax.training.load import open_run
from gdn_jax.training.steps import compute_dtype, model_config
from gdn_jax.training.tasks.table import CLASSES


@dataclasses.dataclass(frozen=True)
class InfoOptions:
    """Layers, parameters, cache and costs of a checkpoint, of the model of a run or of a preset."""

    context: Annotated[int, Positive] = 32768
    """Tokens of a sequence."""
    batch: Annotated[int, Positive] = 1
    """Batch size: sequences at once, each with a cache."""
    mesh: str | None = None
    """A mesh, as in data=8,sharded: prints the memory of each of its devices in training; see docs/parallel.md."""
    weights: Literal["whole", "float8"] = "whole"
    """Storage of large weights: whole, or in 8 bits as by load_hf(..., weights="float8")."""


ABOUT = f"{InfoOptions.__doc__}\n\nPresets: {', '.join(PRESETS)}."
"""The text above the options in --help."""


def info(path: Path, options: InfoOptions, console: Console) -> int:
    """Prints layers, parameters, cache and costs; reads no weights. Returns the exit status.

    Raises:
      RunError: there is no such checkpoint, run or preset, or an option cannot be used.
    """
    fields.check(options)
    if options.mesh is not None and options.weights != "whole":
        raise RunError(
            f"--weights: expected whole with --mesh, which tells of training, got {options.weights}"
        )
    preset = str(path) in PRESETS and not path.exists()
    if not preset and not path.exists():
        raise RunError(
            f"expected a run folder, a folder with a Hugging Face checkpoint or a preset ({', '.join(PRESETS)}), "
            f"got {path}"
        )
    try:
        read = _of_preset if preset else _of_checkpoint if is_checkpoint(path) else _of_run
        heading, config, skipped, time_step = read(path)
        config = dataclasses.replace(config, weights=options.weights)
    except ValueError as error:
        raise RunError(str(error)) from error
    say = partial(console.print, highlight=False, markup=False, soft_wrap=True)
    say(f"{heading}, weights {config.weight_dtype}")
    period = period_of(config.types)
    pattern = ", ".join(
        f"{len([*same])} x {title(config, kind)}" for kind, same in groupby(config.types[:period])
    )
    say(
        f"{config.num_layers} layers of width {config.hidden_size}: {config.num_layers // period} x ({pattern})"
    )
    start = None if time_step is None else config.mixer.start(config, time_step)
    if start is not None and config.mixer.name in config.types:
        say(_start(config, start))
    if skipped:
        say(f"not used: {len(skipped)} tensors, from {printable(skipped[0])} to {printable(skipped[-1])}")
    print_whole(console, _parameters(config))
    if options.mesh is not None:
        print_whole(console, _on_a_mesh(config, options))
    print_whole(console, _cache(config, options))
    for line in _slots(config):
        print_whole(console, line)
    print_whole(console, _costs(config, options.context))
    return 0


def _table(title: str, first: str, *others: str) -> Table:
    """An empty table, whose first column is of words and the others of numbers."""
    table = Table(title=title, title_justify="left")
    table.add_column(first)
    for name in others:
        table.add_column(name, justify="right")
    return table


def _start(config: ModelConfig, start: Start) -> str:
    """Tells how long a state remembers under fresh weights, from a head with middle decay and from erasing."""
    g, beta = start
    both, by_decay, by_erasing = (
        f"{float(memory_horizon(config.head_dim, *rates)):.3g}"
        for rates in ((g, beta), (g, 0.0), (0.0, beta))
    )
    return (
        f"fresh weights: half of a stored key is left after {both} tokens, {by_decay} by the decay of a middle "
        f"head alone, {by_erasing} by erasing alone (write strength {beta:.3g})"
    )


def _of_preset(path: Path) -> tuple[str, ModelConfig, list[str], float | None]:
    return f"{path}: a preset", PRESETS[str(path)], [], 1.0


def _of_checkpoint(path: Path) -> tuple[str, ModelConfig, list[str], float | None]:
    found = read_json(path / CONFIG)
    described = describe(found, str(path / CONFIG))
    tensors = tensors_of(path, described)
    names = names_of(described, tensors)
    config = config_of(described, None, tensors, names)
    head = head_of(described, config, tensors, names)
    skipped = skipped_of(described, tensors, names, head)
    check_tensors(path, chain(weights_of(described.family, config, names), head), tensors, skipped)
    more = ", with a head for the token after the next that is not counted" if head else ""
    return f"{path}: {found['model_type']}{more}", config, [*skipped], None


def _of_run(path: Path) -> tuple[str, ModelConfig, list[str], float | None]:
    _, stored, options = open_run(path)
    task = options.task
    if (start := task.pretrained()) is not None:
        assert start.from_ is not None
        _, config, skipped, _ = _of_checkpoint(start.from_)
        name = f"{path}: a run of {stored['task']} from {start.from_}"
        return name, dataclasses.replace(config, dtype=compute_dtype(options.model)), skipped, None
    config = model_config(options.model, CLASSES[task.task].vocabulary(task))
    return f"{path}: a run of {stored['task']}", config, [], options.model.time_step


def _parameters(config: ModelConfig) -> Table:
    counts = parameters(config)
    total = sum(counts.values())
    kept = config.weight_dtype if config.weights == "whole" else f"{config.weights} and {config.weight_dtype}"
    size = _bytes(weight_bytes(config))
    table = _table(f"parameters, {size} in {kept}", "part", "number", "share")
    for part, count in counts.items():
        table.add_row(part, f"{count:,}", f"{count / total:.1%}")
    table.add_row("all", f"{total:,}", "100.0%", style="bold")
    if config.experts is not None:
        table.add_row(
            "that a token meets", f"{active_parameters(config):,}", f"{active_parameters(config) / total:.1%}"
        )
    return table


def _on_a_mesh(config: ModelConfig, options: InfoOptions) -> Table:
    """Makes the table of what training keeps on each device; asks for no devices."""
    assert options.mesh is not None
    try:
        shape = MeshShape.parse(options.mesh)
        sharding.check(config, shape, shape.data, options.context)
        numbers = sharding.numbers_of_a_device(shapes(config), shape)
    except (ValueError, NotImplementedError) as error:
        raise RunError(f"--mesh: {str(error).removeprefix('mesh: ')}") from error
    table = _table(f"a device of {shape}, float32", "kept", "bytes")
    kept = {"parameters": 1, "their gradients": 1, "two moments of AdamW": 2}
    for name, times in kept.items():
        table.add_row(name, _bytes(4 * times * numbers))
    table.add_row("all, without activations", _bytes(4 * sum(kept.values()) * numbers), style="bold")
    return table


def _cache(config: ModelConfig, options: InfoOptions) -> Table:
    heads = "layers", "number", "of one layer and sequence", "together"
    table = _table(f"cache of {options.batch} x {options.context:,} tokens", *heads)
    for kind in dict.fromkeys(config.types):
        number, one = config.types.count(kind), layer_costs(config, kind, options.context).cache_bytes
        table.add_row(title(config, kind), str(number), _bytes(one), _bytes(number * one * options.batch))
    table.add_row(
        "all", "", "", _bytes(model_costs(config, options.context).cache_bytes * options.batch), style="bold"
    )
    return table


def _slots(config: ModelConfig) -> Iterator[Table | str]:
    """Makes the table of what recurrent layers keep of a served request: states in some dtypes, and rings of 16."""
    heads = "states", "without rings", "with rings of 16 tokens", "such slots in 10 GiB"
    table = _table("slot of a served request, all recurrent layers", *heads)
    try:
        for dtype in ("float32", "bfloat16", "int8"):
            # States in 8 bits are for rings alone. Of the tokens of attention layers there are none.
            plain = "" if dtype == "int8" else _bytes(slot_bytes(config, dtype=dtype, capacity=0))
            ringed = slot_bytes(config, dtype=dtype, ring=16, capacity=0)
            table.add_row(dtype, plain, _bytes(ringed), f"{10 * 2**30 // ringed:,}")
    except NotImplementedError as error:
        yield f"not served: {error}"
        return
    yield table


def _costs(config: ModelConfig, L: int) -> Table:
    """Makes the table of costs: softmax attention against the chunked recurrent mixer, for layers of this model."""
    kinds = [*dict.fromkeys(config.types)]
    columns = {title(config, kind): layer_costs(config, kind, L) for kind in kinds}
    heads = "cost", *(f"{name} layer" for name in columns), "the model"
    columns |= {"the model": model_costs(config, L)}
    table = _table(f"mixing tokens, without projections, at {L:,} tokens", *heads)
    rows = {
        "one pass": "prefill_flops",
        "its activations": "activation_bytes",
        "the next token": "decode_flops",
        "kept for it": "cache_bytes",
    }
    assert {*rows.values()} == {*MixerCosts._fields}
    for text, field in rows.items():
        unit = _bytes if field.endswith("bytes") else _operations
        table.add_row(text, *(unit(getattr(costs, field)) for costs in columns.values()))
    return table


def _bytes(number: int) -> str:
    power = min(3, max(0, int(math.log2(max(number, 1))) // 10))
    return f"{number / 1024**power:.4g} {('B', 'KiB', 'MiB', 'GiB')[power]}"


def _operations(number: int) -> str:
    unit = next((unit for unit in ("T", "G", "M") if number >= _UNITS[unit]), "")
    return f"{number / _UNITS[unit]:,.4g} {unit}FLOP" if unit else f"{number:,} FLOP"


_UNITS = {"T": 1e12, "G": 1e9, "M": 1e6}
