"""Configuration of a language model: the one list of its options."""

import dataclasses
import inspect
import math
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import jax.numpy as jnp
from jax.typing import DTypeLike

from gdn_jax.layers.mixer import MixerConfig
from gdn_jax.layers.options import check_positive
from gdn_jax.layers.table import TOKEN_MIXERS
from gdn_jax.parts.products import PRODUCTS
from gdn_jax.rules import RULES, Rule
from gdn_jax.shapes import ArgumentError, check_choice

DTYPES = ("float32", "bfloat16")
REMAT = ("none", "rule", "full")
WEIGHTS = ("whole", "float8")
DEFAULT_MIXER = "gated_delta_net"
DEFAULT_PERIOD = 4
"""Layers of which the last is attention, where a model has attention and does not say where."""
ATTENTION_TYPES = ("attention", "window_attention")
"""Types of layers that keep keys and values instead of a state."""
QK_NORMS = ("none", "head", "width")


@dataclasses.dataclass(frozen=True)
class AttentionConfig:
    """The attention layers of a hybrid model. Every value is checked when the object is made.

    Fields:
      num_heads: query heads.
      num_kv_heads: key and value heads, a divisor of num_heads; None: num_heads.
      head_dim: width of a head.
      qk_norm: RMSNorm of queries and keys before the rotation: "none"; "head", over each head; "width", over all
        heads together.
      output_gate: multiplies the output of each head by sigmoid(x Wg).
      rotary_dim: first dimensions of a head that are rotated by the position, an even number; 0: no positions.
      rope_theta: base of the rotation's wavelengths.
      bias: gives the projections a bias.
      reordered_norm: the blocks of these layers norm what their parts write, x + norm(part(x)), instead of what they
        read, x + part(norm(x)).
      window: tokens that one sees, itself and those before it; None: all before it.

    Raises:
      ValueError: names the field, what was expected and what came.
    """

    num_heads: int = 4
    num_kv_heads: int | None = None
    head_dim: int = 32
    qk_norm: str = "none"
    output_gate: bool = False
    rotary_dim: int = 0
    rope_theta: float = 1e4
    bias: bool = False
    reordered_norm: bool = False
    window: int | None = None

    def __post_init__(self):
        check_positive(num_heads=self.num_heads, head_dim=self.head_dim)
        if self.num_kv_heads is not None and (self.num_kv_heads < 1 or self.num_heads % self.num_kv_heads):
            raise ArgumentError(
                "num_kv_heads", f"a divisor of num_heads = {self.num_heads}", self.num_kv_heads
            )
        check_choice("qk_norm", self.qk_norm, QK_NORMS)
        if not 0 <= self.rotary_dim <= self.head_dim or self.rotary_dim % 2:
            raise ArgumentError(
                "rotary_dim", f"an even number up to head_dim = {self.head_dim}", self.rotary_dim
            )
        if not 0 < self.rope_theta < math.inf:
            raise ArgumentError("rope_theta", "a positive number", self.rope_theta)
        if self.window is not None:
            check_positive(window=self.window)


@dataclasses.dataclass(frozen=True)
class LatentAttentionConfig:
    """The multi-head latent attention of a model, in the place of an `AttentionConfig`.

    Fields:
      num_heads: heads.
      nope_dim: width of the part of a key that each head has of its own and nothing rotates.
      rope_dim: width of the part that all heads share, even where it is rotated.
      v_dim: width of a value.
      kv_rank: width of the vector that keys and values of all heads come from.
      q_rank: the same for queries; None: a projection of full rank.
      rope_theta: base of the rotation's wavelengths; None: no positions.
      head_gate: multiplies the output of each head by a sigmoid of one number.

    Raises:
      ValueError: names the field, what was expected and what came.
    """

    num_heads: int = 4
    nope_dim: int = 32
    rope_dim: int = 16
    v_dim: int = 32
    kv_rank: int = 64
    q_rank: int | None = None
    rope_theta: float | None = None
    head_gate: bool = False
    window: ClassVar[None] = None
    reordered_norm: ClassVar[bool] = False

    def __post_init__(self):
        sizes = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)[:5]}
        check_positive(**sizes)
        if self.q_rank is not None:
            check_positive(q_rank=self.q_rank)
        if self.rope_theta is not None and not 0 < self.rope_theta < math.inf:
            raise ArgumentError("rope_theta", "a positive number", self.rope_theta)
        if self.rope_theta is not None and self.rope_dim % 2:
            raise ArgumentError("rope_dim", "an even number where it is rotated", self.rope_dim)

    @property
    def key_dim(self) -> int:
        """Width of a key."""
        return self.nope_dim + self.rope_dim


@dataclasses.dataclass(frozen=True)
class SigmoidRouting:
    """Choice of experts by sigmoids of float32 scores with a bias that is learned by other means than the loss.

    Fields:
      groups: of experts that lie side by side, a divisor of their number. A group counts the sum of its two largest.
      kept_groups: groups that a token chooses its experts from.
      factor: of the weights of a token's experts.

    Raises:
      ValueError: names the field, what was expected and what came.
    """

    groups: int = 1
    kept_groups: int = 1
    factor: float = 1.0

    def __post_init__(self):
        check_positive(groups=self.groups, kept_groups=self.kept_groups)
        if self.kept_groups > self.groups:
            raise ArgumentError("kept_groups", f"at most groups = {self.groups}", self.kept_groups)
        if not 0 < self.factor < math.inf:
            raise ArgumentError("factor", "a positive number", self.factor)


@dataclasses.dataclass(frozen=True)
class ExpertsConfig:
    """The mixture of experts that replaces the SwiGLU. Every value is checked when the object is made.

    Fields:
      num_experts: number of experts, each a SwiGLU.
      per_token: k of the top-k routing: experts of each token.
      expert_size: inner width of an expert.
      shared_size: inner width of the shared expert, a SwiGLU for every token.
      normalise: divides a token's router weights by their sum.
      routing: router; None: softmax of the scores.
      shared_gate: multiplies the output of the shared expert by sigmoid(x w).

    Raises:
      ValueError: names the field, what was expected and what came.
    """

    num_experts: int
    per_token: int
    expert_size: int
    shared_size: int
    normalise: bool = True
    shared_gate: bool = True
    routing: SigmoidRouting | None = None

    def __post_init__(self):
        check_positive(
            num_experts=self.num_experts,
            per_token=self.per_token,
            expert_size=self.expert_size,
            shared_size=self.shared_size,
        )
        if self.per_token > self.num_experts:
            raise ArgumentError("per_token", f"at most num_experts = {self.num_experts}", self.per_token)
        if (r := self.routing) is None:
            return
        if self.num_experts % r.groups or self.num_experts // r.groups < 2:
            raise ArgumentError("groups", f"groups of 2 or more of {self.num_experts} experts", r.groups)
        if self.per_token > (most := self.num_experts // r.groups * r.kept_groups):
            raise ArgumentError(
                "per_token", f"at most {most}, the experts of {r.kept_groups} groups", self.per_token
            )


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """Sizes and arithmetic of a LanguageModel. Every value is checked when the object is made.

    Fields:
      vocab_size: number of tokens.
      hidden_size: width of the residual stream.
      num_layers: blocks.
      mixer: the recurrent layers: a name of `layers.table.TOKEN_MIXERS`, kept as its object, or an object like those.
      num_heads: query and key heads of a recurrent layer.
      num_v_heads: its value and state heads, a multiple of num_heads; None: num_heads.
      head_dim: K. num_heads * head_dim = 0.75 * hidden_size and expand_v = 2 give a mixer of about
        6 * hidden_size^2 parameters.
      expand_v: V / K, with head_dim * expand_v whole.
      conv_size: taps of the short convolution, 2 to 4.
      intermediate_size: inner width of the SwiGLU; None: mlp_ratio * hidden_size, up to a multiple of 8.
      mlp_ratio: read only where intermediate_size is None.
      allow_neg_eigval: write strength in [0, 2] instead of [0, 1].
      write_start: initial write strength of the recurrent layers, between 0 and 1 (twice that with allow_neg_eigval),
        set by a learned bias; None: no bias, 0.5. See `gdn_jax.layers.GatedDeltaNet`.
      rule: rule of the GatedDeltaNets: a name of `rules.RULES`, or a `rules.Rule` of your own. Sizes and parameters
        do not depend on it. Other mixers have their own rule.
      tie_embeddings: use the embedding as the output projection, which saves vocab_size * hidden_size parameters;
        with a small vocabulary a projection of its own learns faster.
      norm_eps: of every RMSNorm.
      dtype: compute dtype, float32 or bfloat16, kept as its name. Parameters, norms, gates, states and logits are
        float32 in any case.
      residual_dtype: dtype of the residual stream between the blocks, float32 or bfloat16, kept as its name. bfloat16
        halves the traffic, but rounds away small contributions of late blocks to a large sum.
      implementation: of the rule, see `gated_delta_rule`; None: the fastest that supports the call. With "chunked" or
        "recurrent" the other parts run in plain JAX too; with "mosaic_gpu" a part without a kernel warns.
      layer_types: of every layer, the name of the mixer, such as "gated_delta_net", "attention" or
        "window_attention"; None: every fourth one is attention where `attention` is given, none where it is not.
      attention: an AttentionConfig or LatentAttentionConfig of the layers "attention"; None where there are none.
      window_attention: of the layers "window_attention", with a window; None where there are none.
      experts: the mixture of experts of the layers that are not in dense_layers; None: every layer has a SwiGLU.
      dense_layers: layers, counted from 0, that keep the SwiGLU where others have experts.
      mixer_norm_eps: of the RMSNorm at the output of a recurrent layer; None: norm_eps.
      zero_centred_norms: norms multiply by 1 + weight, but for the one at the output of a recurrent layer.
      scale_embedding: multiply the embedding by sqrt(hidden_size) on the way in.
      weight_dtype: of the parameters, float32 or bfloat16, kept as its name. A_log and dt_bias are float32 in any
        case.
      remat: how much of a block the backward pass recomputes.
        "none": nothing; the block keeps all residuals.
        "rule": projections, convolution, norms and SwiGLU. The block keeps its input and the residuals of the rule;
          the implementation "recurrent" and rules without a derivative of their own have no residuals to keep.
        "full": everything. The block keeps only its input, and a step costs about one more forward pass.
      scan_layers: compile one block, or one period of blocks of several types, and scan over the weights of all: a
        deep model compiles as fast as a shallow one, for a copy of the weights in each pass. We have not
        measured its cost on a GPU, so it is off by default. A call with a cache, or with `around`, never scans.
      matmul: products of the blocks' projections in training, a name of `gdn_jax.parts.products.PRODUCTS`: "default",
        in the compute dtype; "float8", in FP8 with cotangents in E5M2; "float8_e4m3", with cotangents in E4M3. Output
        projection, routers, experts and models for inference are not affected.
      weights: storage of the blocks' large weights: "whole", in weight_dtype, or "float8", in E4M3 with a scale for
        each block of 128 x 128, half the memory of bfloat16. You cannot train such a model; its recurrent layers must
        be GatedDeltaNets and its attention softmax attention. Embedding, head, norms, convolutions, routers and the
        low-rank projections of decays and strengths stay whole.

    Raises:
      ValueError: names the field, what was expected and what came.
    """

    vocab_size: int = 256
    hidden_size: int = 128
    num_layers: int = 4
    num_heads: int = 2
    num_v_heads: int | None = None
    head_dim: int = 32
    expand_v: float = 2.0
    conv_size: int = 4
    intermediate_size: int | None = None
    mlp_ratio: float = 8 / 3
    allow_neg_eigval: bool = False
    write_start: float | None = None
    rule: str | Rule = "gated_delta"
    tie_embeddings: bool = False
    norm_eps: float = 1e-5
    dtype: DTypeLike = "float32"
    residual_dtype: DTypeLike = "float32"
    implementation: str | None = None
    layer_types: tuple[str, ...] | None = None
    attention: Any = None
    experts: ExpertsConfig | None = None
    dense_layers: tuple[int, ...] = ()
    mixer_norm_eps: float | None = None
    zero_centred_norms: bool = False
    scale_embedding: bool = True
    weight_dtype: DTypeLike = "float32"
    remat: str = "none"
    scan_layers: bool = False
    mixer: Any = TOKEN_MIXERS[DEFAULT_MIXER]
    window_attention: AttentionConfig | None = None
    matmul: str = "default"
    weights: str = "whole"

    def __post_init__(self):
        for name in ("dtype", "residual_dtype", "weight_dtype"):
            dtype = getattr(self, name)
            dtype = dtype if isinstance(dtype, str) else jnp.dtype(dtype).name
            object.__setattr__(self, name, dtype)  # what a frozen dataclass leaves to its own constructor
        for name, rule in RULES.items():
            if self.rule == rule:
                object.__setattr__(self, "rule", name)
        if not isinstance(self.mixer, MixerConfig):
            check_choice("mixer", self.mixer, tuple(TOKEN_MIXERS))
            object.__setattr__(self, "mixer", TOKEN_MIXERS[self.mixer])
        check_positive(vocab_size=self.vocab_size, num_layers=self.num_layers)
        self.mixer.check(self)
        if self.intermediate_size is not None:
            check_positive(intermediate_size=self.intermediate_size)
        elif not 0 < self.mlp_ratio < math.inf or self.mlp_size < 1:
            raise ArgumentError(
                "mlp_ratio",
                f"a positive number that gives hidden_size = {self.hidden_size} an inner width of at least 1",
                self.mlp_ratio,
            )
        check_choice("dtype", self.dtype, DTYPES)
        check_choice("residual_dtype", self.residual_dtype, DTYPES)
        check_choice("weight_dtype", self.weight_dtype, DTYPES)
        check_choice("remat", self.remat, REMAT)
        check_choice("matmul", self.matmul, tuple(PRODUCTS))
        check_choice("weights", self.weights, WEIGHTS)
        check_choice("scan_layers", self.scan_layers, (True, False))
        self._check_layers()
        if self.weights != "whole":
            self._check_kept()

    def _check_kept(self):
        if self.matmul != "default":
            raise ArgumentError(
                "matmul", "'default' with weights = 'float8', which are not trained", self.matmul
            )
        if self.mixer.name != DEFAULT_MIXER or isinstance(self.attention, LatentAttentionConfig):
            raise ArgumentError(
                "weights", "'whole' for other layers than GatedDeltaNet and softmax attention", self.weights
            )

    def _check_layers(self):
        if self.layer_types is not None:
            if len(self.layer_types) != self.num_layers:
                raise ArgumentError(
                    "layer_types", f"one for each of {self.num_layers} layers", len(self.layer_types)
                )
            for layer_type in self.layer_types:
                check_choice("layer_types", layer_type, (self.mixer.name, *ATTENTION_TYPES))
        attends = self.attention is not None and self.num_layers >= DEFAULT_PERIOD
        if (
            self.layer_types is not None
        ):  # else not asked for one by one: a wrong number of layers may be huge
            attends = "attention" in self.layer_types
        if (self.attention is not None) != attends:
            wanted, got = ("an AttentionConfig", "None") if self.attention is None else ("None", "one")
            layers = "an attention layer" if self.attention is None else "no attention layer"
            raise ArgumentError("attention", f"{wanted} with {layers} in layer_types", got)
        self._check_windows()
        if any(not 0 <= i < self.num_layers for i in self.dense_layers):
            raise ArgumentError("dense_layers", f"layers from 0 to {self.num_layers - 1}", self.dense_layers)
        if not 0 < self.norm_eps < math.inf:
            raise ArgumentError("norm_eps", "a positive number", self.norm_eps)
        if self.mixer_norm_eps is not None and not self.mixer_norm_eps > 0:
            raise ArgumentError("mixer_norm_eps", "a positive number", self.mixer_norm_eps)

    def _check_windows(self):
        windows = self.layer_types is not None and "window_attention" in self.layer_types
        if (self.window_attention is not None) != windows:
            wanted, got = ("an AttentionConfig", "None") if windows else ("None", "one")
            layers = "a layer" if windows else "no layer"
            raise ArgumentError(
                "window_attention", f"{wanted} with {layers} of that type in layer_types", got
            )
        if self.window_attention is not None and self.window_attention.window is None:
            raise ArgumentError("window_attention", "an AttentionConfig with a window", None)
        if isinstance(self.attention, AttentionConfig) and self.attention.window is not None:
            raise ArgumentError(
                "attention", "no window, which layers of type window_attention have", self.attention.window
            )

    def attention_of(self, layer_type: str) -> Any:
        """The attention of layers of a type; None for the recurrent ones."""
        return {"attention": self.attention, "window_attention": self.window_attention}.get(layer_type)

    @property
    def types(self) -> tuple[str, ...]:
        """Type of every layer."""
        if self.layer_types is not None:
            return self.layer_types
        period = 0 if self.attention is None else DEFAULT_PERIOD
        return hybrid_layers(self.num_layers, period, self.mixer.name)

    @property
    def kinds(self) -> tuple[tuple[str, bool], ...]:
        """Type of every layer, and whether it has experts: layers of one kind differ in their weights alone."""
        return tuple((layer_type, self.has_experts(layer)) for layer, layer_type in enumerate(self.types))

    def of_each_kind(self) -> tuple["ModelConfig", tuple[int, ...]]:
        """The model with one layer of each kind, and how many of that kind there are: a model may have thousands."""
        kinds = self.kinds
        different = [*dict.fromkeys(kinds)]
        small = dataclasses.replace(
            self,
            num_layers=len(different),
            layer_types=tuple(layer_type for layer_type, _ in different),
            dense_layers=tuple(i for i, (_, experts) in enumerate(different) if self.experts and not experts),
            scan_layers=False,
        )
        return small, tuple(kinds.count(kind) for kind in different)

    def has_experts(self, layer: int) -> bool:
        """Whether a layer, counted from 0, has a mixture of experts."""
        return self.experts is not None and layer not in self.dense_layers

    @property
    def mlp_size(self) -> int:
        """Inner width of the SwiGLU."""
        if self.intermediate_size is not None:
            return self.intermediate_size
        return -(-round(self.mlp_ratio * self.hidden_size) // 8) * 8

    def options_of(self, function: Callable[..., Any]) -> dict[str, Any]:
        """The fields that a function has parameters for, by name: an option that both know cannot be forgotten."""
        parameters = inspect.signature(function).parameters
        names = (field.name for field in dataclasses.fields(self) if field.name in parameters)
        return {name: getattr(self, name) for name in names}


def period_of(things: Sequence[Any]) -> int:
    """The shortest period of a sequence whose length is a multiple of it."""
    n = len(things)
    return next(
        p for p in range(1, n + 1) if n % p == 0 and all(things[i] == things[i - p] for i in range(p, n))
    )


def hybrid_layers(
    num_layers: int, attention_every: int, mixer: str = TOKEN_MIXERS[DEFAULT_MIXER].name
) -> tuple[str, ...]:
    """Layer types of which the last of every `attention_every` is attention, the others `mixer`. For 0 none is."""
    return tuple(
        "attention" if attention_every and (i + 1) % attention_every == 0 else mixer
        for i in range(num_layers)
    )
