"""Times the whole training step of a model, and says where its time goes.

A step is that of `gdn train`: forward, backward, clipping, AdamW, on random tokens. Its time is the mean of several
that follow one another without a pause. Seconds to the first step are those of initialising the model, and of
tracing, compiling and running the first step. On a GPU the kernels of a step are added up by kind from a profile.

The defaults fit a GPU of 80 GB, of which JAX takes 60 GiB: at 32768 tokens the model 0.4b needs 30 GiB for
temporaries and 4.4 GiB for its state. Memory grows with the tokens.
"""

import dataclasses
import re
from collections import defaultdict
from collections.abc import Callable, Iterator
from functools import partial
from typing import Annotated, Any, ClassVar, Literal

import jax

from gdn_jax.bench import measure, profiles
from gdn_jax.bench.benchmark import Benchmark, Case, Result
from gdn_jax.bench.sizes import model_config
from gdn_jax.bench.training import training_step
from gdn_jax.commands.errors import fail
from gdn_jax.commands.fields import Distinct, Positive
from gdn_jax.models import ModelConfig
from gdn_jax.models.costs import multiplied_parameters
from gdn_jax.training.peak import attention_flops, share_of_peak
from gdn_jax.training.placement import Placement

STEPS = 4
"""Steps of one measurement."""

RULE = ("chunk_gates", "gated_inverse", "outputs", "segment_", "chains", "gradients", "channel_", "mma_")
KINDS = (
    ("rule", re.compile("|".join(rf"^{name}\w*mosaic" for name in RULE))),
    (
        "products",
        re.compile(
            r"nvjet|gemm|cutlass|cublas|xmma|splitK|^swiglu_(product|cotangents)|^weight_gradient|^cross_entropy",
            re.IGNORECASE,
        ),
    ),
    (
        "fused parts",
        re.compile(
            "^(short_conv|add_norm|gated_norm|log_decays|swiglu|eight_bits|embedding_gradient|logit_cotangents)"
        ),
    ),
    ("copies", re.compile("memcpy|memset|copy", re.IGNORECASE)),
    ("element-wise", re.compile("")),
)
"""Kind -> names of kernels, the first that fits."""


@dataclasses.dataclass(frozen=True)
class StepBenchmark(Benchmark):
    """The whole training step of a model."""

    on_cpu: ClassVar[dict[str, Any]] = {"model": "tiny", "lengths": (128, 512), "tokens": 2048}

    repeats: Annotated[int, Positive] = 5
    """Measurements, of four steps each."""
    model: str = "0.4b"
    """The model: tiny, 0.4b with 24 layers of width 1024, 1.3b with 24 of width 2048, or a preset of gdn info, such
    as qwen3.5-0.8b."""
    lengths: Annotated[tuple[int, ...], Distinct, Positive] = (2048, 8192, 32768)
    """Tokens of a row, one line of the table for each."""
    tokens: Annotated[int, Positive] = 32768
    """Tokens of a step: its rows have the same length."""
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """Compute dtype."""
    options: tuple[str, ...] = ()
    """More fields of the ModelConfig, as in remat=rule."""

    def config(self) -> ModelConfig:
        """The model's configuration.

        Raises:
          RunError: there is no such model, an option does not name a field, or its value does not fit.
        """
        return model_config(self.model, self.options, dtype=self.dtype)

    def check(self) -> None:
        """See `Benchmark.check`."""
        super().check()
        self.config()
        for length in self.lengths:
            if self.tokens % length:
                fail("lengths", f"divisors of --tokens {self.tokens}", length)

    def cases(self, note: Callable[[str], None]) -> Iterator[Case]:
        """A case for each length."""
        for length in self.lengths:
            yield Case({"length": length}, partial(self.time_length, self.config(), length))

    def time_length(self, config: ModelConfig, length: int) -> Iterator[Result]:
        """Times the step on rows of one length."""
        with training_step(config, self.tokens // length, length, Placement(), self.seed) as step:
            timing = measure.by_clock(step.once, self.repeats, STEPS)
            kinds, kernels = _kinds(step.once) if measure.on_gpu() else ({}, {})
        per_second = self.tokens / timing.ms * 1e3
        flops = attention_flops(config, length)
        numbers = {
            "tokens/s": per_second,
            "of peak": share_of_peak(multiplied_parameters(config), per_second, flops),
            "temp GiB": measure.temporary_gib(step.program),
            "init s": step.init_s,
            "first s": step.first_step_s,
            "loss": step.loss,
            **{f"{kind} ms": ms for kind, ms in kinds.items()},
            "longest kernels ms": kernels,
        }
        yield Result({"length": length}, timing, numbers)


def _kinds(once: Callable[[], Any], calls: int = 3) -> tuple[dict[str, float], dict[str, float]]:
    """Milliseconds of a step by kind, and of the thirty kernels that take longest."""
    by_kind: dict[str, float] = defaultdict(float)
    by_name: dict[str, float] = defaultdict(float)
    for kernel in profiles.kernels(profiles.profile(lambda: jax.block_until_ready(once()), calls)):
        by_kind[next(kind for kind, names in KINDS if names.search(kernel.name))] += kernel.ms / calls
        by_name[kernel.name] += kernel.ms / calls
    longest = sorted(by_name.items(), key=lambda item: -item[1])[:30]
    return dict(by_kind), dict(longest)
