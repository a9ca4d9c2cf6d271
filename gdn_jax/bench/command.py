"""`gdn bench NAME`: times one part of the library on this device."""

import functools
import operator
from typing import Annotated, Any

from rich.console import Console

from gdn_jax.bench import decode, devices, generate, kernels, parts, prefill, rule, scale, serve, step, whole
from gdn_jax.bench.benchmark import run, sized
from gdn_jax.commands.parsing import parse

BENCHMARKS: dict[str, tuple[type, Any]] = {
    "rule": (rule.RuleBenchmark, rule),
    "kernels": (kernels.KernelBenchmark, kernels),
    "parts": (parts.PartsBenchmark, parts),
    "step": (step.StepBenchmark, step),
    "generate": (generate.GenerateBenchmark, generate),
    "decode": (decode.DecodeBenchmark, decode),
    "prefill": (prefill.PrefillBenchmark, prefill),
    "serve": (serve.ServeBenchmark, serve),
    "scale": (scale.ScaleBenchmark, scale),
    "devices": (devices.DevicesBenchmark, devices),
    "all": (whole.AllBenchmark, whole),
}
"""Name -> the benchmark, and the module whose docstring is its help. Without a name the rule is timed."""


def main(argv: list[str]) -> int:
    """Entry of `gdn bench`; 0 when everything was right and timed, else 1.

    Args:
      argv: a name of BENCHMARKS, which `gdn_command` has checked, and options, or options alone.

    Raises:
      RunError: an option does not fit.
    """
    import tyro

    if argv and argv[0].startswith("-") and argv[0] not in ("-h", "--help"):
        argv = ["rule", *argv]

    def subcommand(name: str, cls: type, text: str) -> Any:
        # The help of one benchmark is whole, in the list of all it is a line.
        text = text if argv[:1] == [name] else text.partition("\n")[0]
        return Annotated[cls, tyro.conf.subcommand(name, description=text)]

    every = (subcommand(name, cls, module.__doc__) for name, (cls, module) in BENCHMARKS.items())
    named = f"gdn bench {argv[0]}" if argv and argv[0] in BENCHMARKS else "gdn bench"
    every_one = functools.reduce(operator.or_, every)
    benchmark = parse(every_one, argv, "gdn bench", rule.RuleBenchmark(), __doc__, named)
    benchmark, note = sized(benchmark, {word.partition("=")[0].replace("_", "-") for word in argv})
    return run(benchmark, Console(), Console(stderr=True), [note] if note else [])
