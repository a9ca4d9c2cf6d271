"""Times the whole training step of a model, and says where its time goes.

A step is that of `gdn train`: forward, backward, clipping, AdamW, on random tokens. Its time is the mean of several
that follow one another without a pause. Seconds to the first step are those of initialising the model, and of
tracing, compiling and running the first step. On a GPU the kernels of a step are added up by kind from a profile.

With --peers the same model is also timed with another library's rule in its layers: all else is this library's, its
kernels of what stands around the rule too, so the difference of the two steps is that of the rules. It is not a step
of the other library's own model and trainer. Its rule is first compared with the recurrence on one row.

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

from gdn_jax.bench import measure, peers, profiles
from gdn_jax.bench.benchmark import Benchmark, Case, Result
from gdn_jax.bench.passes import Problem
from gdn_jax.bench.peers import JaxPeer
from gdn_jax.bench.rows import Row
from gdn_jax.bench.sizes import model_config
from gdn_jax.bench.training import StepProblem, training_step
from gdn_jax.commands.errors import fail
from gdn_jax.commands.fields import Distinct, Positive
from gdn_jax.models import ModelConfig
from gdn_jax.models.costs import multiplied_parameters
from gdn_jax.training.peak import attention_flops, share_of_peak
from gdn_jax.training.placement import Placement

STEPS = 4
"""Steps of one measurement."""

OWN = ("chunk_gates", "gated_inverse", "outputs", "segment_", "chains", "gradients", "channel_", "mma_")
RULE = (*OWN, *(name for peer in peers.IN_LAYERS.values() for name in peer.kernels))
"""Beginnings of the names of a rule's kernels."""

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
    peers: tuple[Literal["jax-linear-attention"], ...] = ()
    """Other libraries whose rule the layers have in the place of ours, a line of the table for each."""

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
        config = self.config()
        for name in self.peers:
            if why := peers.reason(peers.IN_LAYERS[name]):
                fail("peers", "libraries that can be timed here", f"{name}: {why}")
            if config.rule != "gated_delta" or config.mixer.name != "gated_delta_net":
                fail("peers", "none but for layers with the gated delta rule", name)
            if config.dtype == "float32":
                fail("peers", "none with --dtype float32, which their kernels do not take", name)

    def cases(self, note: Callable[[str], None]) -> Iterator[Case]:
        """A case for each length, by this library and by the others."""
        config = self.config()
        for length in self.lengths:
            about = {"length": length} | ({"rule": "gdn-jax"} if self.peers else {})
            yield Case(about, partial(self.time_length, config, about))
            for name in self.peers:
                about = {"length": length, "rule": name}
                yield Case(about, partial(self.time_peer, peers.IN_LAYERS[name], config, about))

    def time_peer(self, peer: JaxPeer, config: ModelConfig, about: dict[str, Any]) -> Iterator[Result]:
        """Times the step with a peer's rule in the layers, after a look at that rule."""
        row = Row(config.num_heads, config.num_v_heads or config.num_heads, (about["length"],))
        problem = Problem(row._replace(width=config.head_dim), "training", str(config.dtype), self.seed)
        if failure := peers.miss(problem, peer.measure(problem, 1)[1]):
            yield Result(about, failure=failure)
            return
        del problem
        yield from self.time_length(dataclasses.replace(config, rule=peer.in_layers()), about)

    def time_length(self, config: ModelConfig, about: dict[str, Any]) -> Iterator[Result]:
        """Times the step on rows of one length."""
        length = about["length"]
        problem = StepProblem(config, self.tokens // length, length, Placement(), self.seed)
        with training_step(problem) as step:
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
            "grad norm": step.grad_norm,
            **{f"{kind} ms": ms for kind, ms in kinds.items()},
            "longest kernels ms": kernels,
        }
        yield Result(about, timing, numbers)


def _kinds(once: Callable[[], Any], calls: int = 3) -> tuple[dict[str, float], dict[str, float]]:
    """Milliseconds of a step by kind, and of the thirty kernels that take longest."""
    found = profiles.kernels(profiles.profile(lambda: jax.block_until_ready(once()), calls))
    *times, _ = profiles.by_kernel(found, calls)
    by_kind: dict[str, float] = defaultdict(float)
    for name, _, ms in times:
        by_kind[next(kind for kind, names in KINDS if names.search(name))] += ms
    return dict(by_kind), {name: ms for name, _, ms in times[:30]}
