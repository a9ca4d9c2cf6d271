"""transformers' Kimi Linear, Ling and Lara on checkpoints that we write, and ours on those that it writes."""

import json
import tempfile
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import torch
import transformers
from flax import nnx
from safetensors.numpy import load_file

from gdn_jax.hf import load_hf, save_hf
from gdn_jax.losses import linear_softmax_cross_entropy
from gdn_jax.models import generate

DATA = Path(__file__).parents[1] / "data"
FOLDERS = ("kimi_linear_released", "bailing_hybrid_released", "lara_mini")
LOGITS, KL, GRADIENT = 2e-4, 1e-6, 1e-3
"""How far float32 logits of unit size and the divergence of their distributions may be apart, and a gradient, as a
share of its largest number."""
CHOICE = ("gate.e_score_correction_bias", "gate.expert_bias")
"""Names of tensors that take part in the choice of experts alone, and are no parameters of theirs."""

UNSEEN = {
    "kimi_linear": dict(
        hidden_size=96, num_attention_heads=3, num_key_value_heads=3, kv_lora_rank=24, qk_nope_head_dim=24,
        qk_rope_head_dim=8, v_head_dim=16, linear_num_heads=3, linear_head_dim=16, num_experts=6,
        num_experts_per_token=2, moe_intermediate_size=20, intermediate_size=72, num_shared_experts=2,
    ),
    "bailing_hybrid": dict(
        hidden_size=48, num_attention_heads=3, num_key_value_heads=3, kv_lora_rank=16, q_lora_rank=None,
        qk_nope_head_dim=16, qk_rope_head_dim=8, v_head_dim=24, linear_num_heads=3, linear_head_dim=16,
        num_experts=16, num_expert_group=4, topk_group=2, num_experts_per_token=4, moe_intermediate_size=12,
        intermediate_size=56,
    ),
    "lara_mini": dict(
        hidden_size=48, num_attention_heads=2, num_key_value_heads=1, head_dim=24, sliding_window=9,
        linear_num_key_heads=1, linear_num_value_heads=3, linear_key_head_dim=16, linear_value_head_dim=24,
        num_experts=6, num_experts_per_tok=3, moe_intermediate_size=20, shared_expert_intermediate_size=28,
    ),
}  # fmt: skip
"""Fields of a checkpoint's config.json that make another model of the family, which transformers then draws."""


def theirs_of(folder, **options):
    """transformers' model of a folder, none of whose tensors is missing or left over."""
    model, told = transformers.AutoModelForCausalLM.from_pretrained(
        folder,
        output_loading_info=True,
        attn_implementation="eager",
        experts_implementation="eager",  # the other one takes no experts of an odd width in bfloat16
        **options,
    )
    assert not any(told.values()), told
    return model.eval()


def check(what, error, bound):
    """Prints an error; AssertionError where it is above the bound."""
    assert error <= bound, f"{what}: {error:.1e} > {bound:.0e}"
    print(f"    {what}: {error:.1e}", flush=True)


def rows(model):
    """Tokens of two rows, and which of them are no padding on the left."""
    ids = np.random.default_rng(0).integers(0, model.config.vocab_size, (4, 70)).astype(np.int32)
    mask = np.arange(70) >= np.array([[0], [0], [9], [31]])
    return ids, mask


def logits_of(ours, theirs):
    ids, mask = rows(ours)
    got = np.asarray(nnx.jit(lambda model, ids, mask: model(ids, mask=mask)[0])(ours, ids, mask))
    with torch.no_grad():
        want = theirs(torch.tensor(ids).long(), attention_mask=torch.tensor(mask).long()).logits
    return got[mask], want.float().numpy()[mask]


def check_logits(ours, theirs):
    got, want = logits_of(ours, theirs)
    size = max(1.0, float(np.sqrt(np.mean(want**2))))
    check("logits, bare and with padding on the left", np.abs(got - want).max() / size, LOGITS)
    p, q = (np.asarray(jax.nn.log_softmax(x.astype(np.float64))) for x in (want, got))
    check("KL divergence", np.max(np.sum(np.exp(p) * (p - q), axis=-1)), KL)


def check_generation(ours, theirs):
    prompt = rows(ours)[0][:2, :21]
    got = np.asarray(generate(ours, jnp.asarray(prompt), 24))
    options = dict(max_new_tokens=24, min_new_tokens=24, do_sample=False, pad_token_id=0, eos_token_id=None)
    with torch.no_grad():
        want = theirs.generate(torch.tensor(prompt).long(), **options).numpy()[:, 21:]
    assert np.array_equal(got, want), f"another continuation:\n{got}\n{want}"
    print("    24 greedy tokens: the same", flush=True)


def check_gradients(ours, theirs, folder):
    """All gradients, each in the place of its parameter, as both write a checkpoint of it."""
    # torch gives the embedding of a padding token no gradient.
    ids = np.maximum(rows(ours)[0][:2, :50], 1 + (theirs.config.pad_token_id or 0))
    graphdef, params, rest = nnx.split(ours, nnx.Param, ...)

    @jax.jit
    @jax.grad
    def gradient(params):
        x, _ = nnx.merge(graphdef, params, rest).hidden_states(ids[:, :-1])
        head = nnx.merge(graphdef, params, rest).head_weight()
        return linear_softmax_cross_entropy(x, head, ids[:, 1:]).loss / (2 * 49)

    held = nnx.merge(graphdef, gradient(params), rest)
    held.origin = None  # written under the names that transformers writes
    save_hf(held, folder / "ours")
    tokens = torch.tensor(ids).long()
    logits = theirs(tokens[:, :-1]).logits
    torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()).backward()
    with torch.no_grad():
        for parameter in theirs.parameters():
            gradient = parameter.grad
            parameter.copy_(torch.zeros_like(parameter) if gradient is None else gradient)
    theirs.save_pretrained(folder / "theirs")
    written = [load_file(folder / name / "model.safetensors") for name in ("ours", "theirs")]
    shared = written[0].keys() & written[1].keys()
    left = [name for name in written[1].keys() - shared if written[1][name].any()]
    assert not left, f"gradients that we do not write: {left}"
    worst = 0.0
    for name in shared:
        got, want = (tensors[name].astype(np.float64) for tensors in written)
        assert np.isfinite(got).all(), name
        if name.endswith(CHOICE):
            assert not got.any()
            continue
        error = np.abs(got - want).max() / max(np.abs(want).max(), 1e-12)
        assert error <= GRADIENT, f"gradient of {name}: {error:.1e}"
        worst = max(worst, error)
    check(f"gradients of {len(shared)} tensors", worst, GRADIENT)


def check_bfloat16(ours, folder):
    """Both in bfloat16 beside float32: neither is right, and ours is at most twice as far off.

    Where two scores are nearly equal a rounding decides which expert a token gets, so that two right computations are
    off by different amounts.
    """
    exact = logits_of(ours, theirs_of(folder, dtype="float32"))[1]
    half = load_hf(folder, dtype="bfloat16", implementation="recurrent")
    found = logits_of(half, theirs_of(folder, dtype="bfloat16"))
    got, want = (np.sqrt(np.mean((x.astype(np.float64) - exact) ** 2)) for x in found)
    print(f"    bfloat16, rms error of logits: ours {got:.1e}, theirs {want:.1e}", flush=True)
    assert got <= 2 * want


def own(name, folder):
    """A model of transformers with other sizes and random weights, in a folder."""
    fields = json.loads((DATA / folder_of(name) / "config.json").read_text()) | UNSEEN[name]
    if "linear_attn_config" in fields:  # goes before the fields beside it
        fields["linear_attn_config"] |= {
            "num_heads": fields["linear_num_heads"],
            "head_dim": fields["linear_head_dim"],
        }
    config = transformers.AutoConfig.for_model(**fields)
    torch.manual_seed(1)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter + 0.3 * torch.randn_like(parameter) * (parameter.ndim == 1))
            if parameter.ndim > 1:
                parameter.copy_(torch.randn_like(parameter) * parameter.shape[-1] ** -0.5)
    model.float().save_pretrained(folder)


def folder_of(name):
    return next(folder for folder in FOLDERS if folder.startswith(name))


def compare_folder(source, scratch):
    ours = load_hf(source, dtype="float32", implementation="recurrent")
    save_hf(ours, scratch / "saved")
    theirs = theirs_of(scratch / "saved", dtype="float32")
    check_logits(ours, theirs)
    check_generation(ours, theirs)
    check_bfloat16(ours, scratch / "saved")
    check_gradients(ours, theirs, scratch)


def main():
    transformers.logging.set_verbosity_error()
    with tempfile.TemporaryDirectory() as folder:
        for name in FOLDERS:
            print(f"  {name}, written by us", flush=True)
            compare_folder(DATA / name, Path(folder, name))
        for name in UNSEEN:
            print(f"  {name} of other sizes, drawn by transformers", flush=True)
            own(name, Path(folder, "own", name))
            compare_folder(Path(folder, "own", name), Path(folder, f"own_{name}"))


with jax.default_matmul_precision("highest"):
    main()
