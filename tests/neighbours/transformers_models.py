"""transformers' models on checkpoints that we write, and ours on those that it writes.

    python tests/neighbours/transformers_models.py [NAME SEED ...]

Without names: the checkpoints of Kimi Linear, Ling and Lara in tests/data, and two of each family with random sizes.
"""

import contextlib
import copy
import re
import sys
import tempfile
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import torch
import transformers
import transformers_drawn
from flax import nnx
from safetensors.numpy import load_file

from gdn_jax.hf import load_hf, save_hf
from gdn_jax.losses import linear_softmax_cross_entropy
from gdn_jax.models import generate

DATA = Path(__file__).parents[1] / "data"
FOLDERS = ("kimi_linear_released", "bailing_hybrid_released", "lara_mini")
LOGITS, KL, GRADIENT = 2e-4, 1e-6, 1e-3
NOTHING = 1e-4
"""How far float32 logits of unit size and the divergence of their distributions may be apart, and a gradient, as a
share of its largest number, but at least of what rounding leaves of the largest number of all."""
SKIPPED = re.compile(r"\b(visual|mtp)\.")
CHOICE = ("gate.e_score_correction_bias", "gate.expert_bias")
"""Names of tensors that take part in the choice of experts alone, and are no parameters of theirs."""


PROMPTS = {
    "21 tokens": (21, 30),
    "one token": (1, 12),
    "two tokens": (2, 12),
    "padding on the left": (24, 24),
}
"""Lengths of prompts, and how many tokens follow them."""


def theirs_of(folder, **options):
    """transformers' model of a folder, none of whose tensors is missing; what it does not use is told by us too."""
    model, told = transformers.AutoModelForCausalLM.from_pretrained(
        folder,
        output_loading_info=True,
        attn_implementation="eager",
        experts_implementation="eager",  # the other one takes no experts of an odd width in bfloat16
        **options,
    )
    unused = {*told.pop("unexpected_keys")}
    assert not any(told.values()) and unused <= {*load_hf(folder).origin.skipped}, (told, unused)
    return model.eval()


def check(what, error, bound):
    """Prints an error; AssertionError where it is above the bound."""
    assert error <= bound, f"{what}: {error:.1e} > {bound:.0e}"
    print(f"    {what}: {error:.1e}", flush=True)


def rows(model, length=150):
    """Tokens of rows, and which of them are no padding on the left; the last rows have two tokens and one."""
    ids = np.random.default_rng(0).integers(1, model.config.vocab_size, (6, length)).astype(np.int32)
    return ids, np.arange(length) >= np.array([[0], [0], [9], [length // 2], [length - 2], [length - 1]])


@contextlib.contextmanager
def float64(theirs):
    """A model of transformers in float64, also where its code asks for float32."""
    before = torch.float32, torch.Tensor.float
    theirs.double()
    torch.float32, torch.Tensor.float = torch.float64, torch.Tensor.double
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.float32, torch.Tensor.float = before
        torch.set_default_dtype(torch.float32)
        theirs.float()


def their_logits(theirs, ids, mask=None):
    mask = None if mask is None else torch.tensor(mask).long()
    with torch.no_grad():
        logits = theirs(torch.tensor(ids).long(), attention_mask=mask, use_cache=False).logits
    return (logits if logits.dtype == torch.float64 else logits.to(torch.float32)).numpy()


def logits_of(ours, theirs):
    ids, mask = rows(ours)
    got = np.asarray(nnx.jit(lambda model, ids, mask: model(ids, mask=mask)[0])(ours, ids, mask))
    return got[mask], their_logits(theirs, ids, mask)[mask]


def errors_of_moved_weights(theirs, ids, mask, draws=8):
    """Largest errors of transformers' float32 logits beside its float64, each with other weights: every number moved
    by up to one unit in the last place."""
    kept = {name: x.clone() for name, x in theirs.state_dict().items()}
    for seed in range(draws):
        random = torch.Generator().manual_seed(seed)
        moved = {
            name: x * (1 + 2.0**-23 * (2 * torch.rand(x.shape, generator=random) - 1))
            if x.is_floating_point()
            else x
            for name, x in kept.items()
        }
        theirs.load_state_dict(moved)
        got = their_logits(theirs, ids, mask)[mask]
        with float64(theirs):
            exact = their_logits(theirs, ids, mask)[mask]
        yield np.abs(got - exact).max()
    theirs.load_state_dict(kept)


def log_softmax(x):
    x = x.astype(np.float64)
    return (
        x - np.log(np.sum(np.exp(x - x.max(-1, keepdims=True)), -1, keepdims=True)) - x.max(-1, keepdims=True)
    )


def check_logits(ours, theirs):
    got, want = logits_of(ours, theirs)
    size = max(1.0, float(np.sqrt(np.mean(want**2))))
    ids, mask = rows(ours)
    with float64(theirs):
        exact = their_logits(theirs, ids, mask)[mask]
    off, theirs_off = (np.abs(x - exact).max() / size for x in (got, want))
    apart = np.abs(got - want).max() / size
    print(f"    logits of bare and padded rows: {apart:.1e} apart, theirs {theirs_off:.1e} off", flush=True)
    # Of a model that amplifies roundings, transformers' own are farther off than the bound: of these weights or, as
    # what a rounding does is chance, of weights that differ from them in the last place.
    bound = max(LOGITS, theirs_off)
    if off > bound:
        bound = max(bound, *(x / size for x in errors_of_moved_weights(theirs, ids, mask)))
        print(f"    theirs with weights moved in the last place: up to {bound:.1e} off", flush=True)
    check("logits beside transformers in float64", off, bound)
    p, q = log_softmax(want), log_softmax(got)
    check("KL divergence", np.max(np.sum(np.exp(p) * (p - q), axis=-1)), KL)
    ids, call = rows(ours)[0][:2], nnx.jit(lambda model, ids: model(ids)[0])
    errors = [np.abs(call(ours, ids[:, :n]) - their_logits(theirs, ids[:, :n])).max() for n in (1, 3)]
    check("logits of one token and of three", max(errors) / size, LOGITS)


def check_generation(ours, theirs):
    for what, (length, more) in PROMPTS.items():
        prompt, mask = (x[:4] for x in rows(ours, length))
        mask = mask if "padding" in what else np.ones_like(mask)
        got = np.asarray(generate(ours, jnp.asarray(prompt), more, mask=jnp.asarray(mask)))
        options = dict(max_new_tokens=more, min_new_tokens=more, do_sample=False, pad_token_id=0)
        with torch.no_grad():
            want = theirs.generate(
                torch.tensor(prompt).long(),
                attention_mask=torch.tensor(mask).long(),
                eos_token_id=None,
                **options,
            ).numpy()[:, length:]
        assert np.array_equal(got, want), f"another continuation of {what}:\n{got}\n{want}"
    print(f"    greedy tokens after {', '.join(PROMPTS)}: the same", flush=True)


def written(folder):
    """Tensors of a folder; a convolution in several tensors, which are not cut at the same places, as one."""
    found = {}
    for file in sorted(folder.glob("*.safetensors")):
        found |= load_file(file)
    # Those of a decoder alone, with or without the model for images around it.
    found = {x.replace("language_model.", ""): y for x, y in found.items() if not SKIPPED.search(x)}
    for name in [name for name in found if name.endswith("q_conv1d.weight")]:
        parts = [found.pop(name.replace("q_conv1d", f"{x}_conv1d")) for x in "qkv"]
        found[name.replace("q_conv1d", "conv1d")] = np.concatenate(parts)
    return found


def their_gradients(theirs, ids, mask, weights, folder):
    """Gradients in the places of a checkpoint's tensors."""
    tokens = torch.tensor(ids).long()
    logits = theirs(tokens[:, :-1], attention_mask=torch.tensor(mask[:, :-1]).long(), use_cache=False).logits
    losses = torch.nn.functional.cross_entropy(
        logits.flatten(0, 1), tokens[:, 1:].flatten(), reduction="none"
    )
    theirs.zero_grad()
    ((losses * torch.tensor(weights).flatten()).sum() / weights.sum()).backward()
    held = copy.deepcopy(theirs)
    with torch.no_grad():
        for parameter, place in zip(theirs.parameters(), held.parameters(), strict=True):
            place.copy_(torch.zeros_like(parameter) if parameter.grad is None else parameter.grad)
    held.save_pretrained(folder)
    theirs.zero_grad()
    return written(folder)


def round_weights(theirs):
    """Moves every weight up or down by half a unit in the last place of float32."""
    signs = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in theirs.parameters():
            up = torch.randint(2, parameter.shape, generator=signs)
            parameter.mul_(1 + (2 * up - 1) * 2.0**-24)


def check_gradients(ours, theirs, folder):
    """All gradients, of rows with padding, each in the place of its parameter, as both write a checkpoint of it."""
    ids, mask = (x[:4] for x in rows(ours, 70))
    # torch gives the embedding of a padding token no gradient.
    ids = np.maximum(ids, 1 + (theirs.config.get_text_config().pad_token_id or 0))
    weights = (mask[:, :-1] & mask[:, 1:]).astype(np.float32)
    graphdef, params, rest = nnx.split(ours, nnx.Param, ...)

    @jax.jit
    @jax.grad
    def gradient(params):
        model = nnx.merge(graphdef, params, rest)
        x, _ = model.hidden_states(ids[:, :-1], mask=mask[:, :-1])
        loss = linear_softmax_cross_entropy(x, model.head_weight(), ids[:, 1:], label_weights=weights)
        return loss.loss / weights.sum()

    held = nnx.merge(graphdef, gradient(params), rest)
    theirs_found = their_gradients(theirs, ids, mask, weights, folder / "theirs")
    with float64(theirs):
        want = their_gradients(theirs, ids, mask, weights, folder / "exact")
        round_weights(theirs)
        rounded = their_gradients(theirs, ids, mask, weights, folder / "rounded")
    for name, origin in (
        ("as_loaded", ours.origin),
        ("as_own", None),
    ):  # the first one, but for published names
        held.origin = origin
        save_hf(held, folder / name)
        got = written(folder / name)
        if got.keys() == want.keys():
            break
    assert got.keys() == want.keys(), got.keys() ^ want.keys()
    largest = max(np.abs(x).max() for name, x in want.items() if not name.endswith(CHOICE))
    worst, theirs_worst = 0.0, 0.0
    for name, exact in want.items():
        assert np.isfinite(got[name]).all(), name
        if name.endswith(CHOICE):
            assert not got[name].any()
            continue
        size = max(np.abs(exact).max(), NOTHING * largest)
        off, theirs_off, by_rounding = (
            np.abs(found[name] - exact).max() / size for found in (got, theirs_found, rounded)
        )
        # No computation in float32 knows a gradient better than a rounding of the weights moves it.
        bound = max(GRADIENT, theirs_off, 2 * by_rounding)
        assert off <= bound, f"gradient of {name}: {off:.1e} > {bound:.1e}, theirs {theirs_off:.1e}"
        worst, theirs_worst = max(worst, off), max(theirs_worst, theirs_off)
    what = f"gradients of {len(want)} tensors, of rows with padding, beside transformers in float64"
    print(f"    {what}: {worst:.1e}, theirs {theirs_worst:.1e}", flush=True)


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


def check_written(ours, theirs, scratch):
    """What we write is what we read, and transformers computes the same with it, also as a model of our own."""
    ids, mask = rows(ours)
    before = their_logits(theirs, ids, mask)[mask]
    own = nnx.clone(ours)
    own.origin = None
    for what, model, bound in (("saved", ours, 0.0), ("own", own, LOGITS)):
        save_hf(model, scratch / what, max_file_bytes=60_000)
        again = load_hf(scratch / what, dtype="float32")
        # Layers that need other fields in another family have them in the place of those of their own.
        assert again.config == ours.config or what == "own"
        after = their_logits(theirs_of(scratch / what, dtype="float32"), ids, mask)[mask]
        check(f"logits of transformers with what is written, {what}", np.abs(after - before).max(), bound)
        if again.config == ours.config:
            pairs = zip(*(jax.tree.leaves(nnx.state(m, nnx.Param)) for m in (ours, again)), strict=True)
            assert all(np.array_equal(a, b) for a, b in pairs)
    print("    saved and loaded: the same bits", flush=True)


def compare_folder(source, scratch):
    ours, theirs = load_hf(source, dtype="float32"), theirs_of(source, dtype="float32")
    check_written(ours, theirs, scratch)
    check_logits(ours, theirs)
    check_generation(ours, theirs)
    check_gradients(ours, theirs, scratch)
    return ours


def main(names, seeds):
    transformers.logging.set_verbosity_error()
    drawn = [*zip(names, map(int, seeds), strict=True)]
    with tempfile.TemporaryDirectory() as folder:
        for name in () if drawn else FOLDERS:
            print(f"  {name}", flush=True)
            check_bfloat16(compare_folder(DATA / name, Path(folder, name)), Path(folder, name, "saved"))
        for name, seed in drawn or [(x, i) for x in transformers_drawn.FAMILIES for i in (0, 1)]:
            source = Path(folder, f"{name}_{seed}")
            spelling = transformers_drawn.draw(name, seed, source)
            print(f"  {name} of random sizes, {seed}: {spelling}", flush=True)
            compare_folder(source, Path(folder, f"{name}_{seed}_again"))


with jax.default_matmul_precision("highest"):
    main(sys.argv[1::2], sys.argv[2::2])
