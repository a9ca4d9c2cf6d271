"""Low-rank changes: nothing at first, all that is trained, merged without a trace, written as a checkpoint."""

import hf_checkpoints
import jax
import numpy as np
import pytest
from flax import nnx
from small_layers import drawn

from gdn_jax.hf import load_hf, save_hf
from gdn_jax.layers import GatedDeltaNet
from gdn_jax.losses import linear_softmax_cross_entropy
from gdn_jax.models.lora import Change, LoRALinear, LoRAParam, add_lora, lora_changes, merge_lora, set_lora
from gdn_jax.parts.kernels import FEW_ROWS

ALL = (
    "q_proj",
    "k_proj",
    "v_proj",
    "o_proj",
    "g_proj",
    "a_proj",
    "b_proj",
    "gate_proj",
    "up_proj",
    "down_proj",
)


def load():
    return load_hf(hf_checkpoints.FOLDER / "qwen3_5", implementation="recurrent")


@pytest.mark.slow
def test_a_loaded_model_is_fine_tuned_and_written(tmp_path):
    model, ids = load(), jax.device_put(hf_checkpoints.expected("qwen3_5")["ids"][:, :17])
    _, before = nnx.split(model)
    before = jax.tree.map(np.asarray, nnx.to_pure_dict(before))
    add_lora(model, 2, projections=ALL, alpha=4.0, rngs=nnx.Rngs(0))
    graphdef, changes, rest = nnx.split(model, LoRAParam, ...)

    def loss(changes, rest):
        model = nnx.merge(graphdef, changes, rest)
        x, _ = model.hidden_states(ids[:, :-1])
        return linear_softmax_cross_entropy(x, model.head_weight(), ids[:, 1:]).loss

    @jax.jit
    def step(changes, rest):
        value, grads = jax.value_and_grad(loss)(changes, rest)
        return value, grads, jax.tree.map(lambda p, g: p - 1e-2 * g, changes, grads)

    first, grads, changes = step(changes, rest)
    for path, g in jax.tree.leaves_with_path(nnx.to_pure_dict(grads)):
        moves = path[-1].key == "b"  # b is 0, and so is the gradient of a
        assert np.isfinite(g).all() and (np.abs(g).max() > 0) == moves, path
    second, grads, changes = step(changes, rest)
    third, _, changes = step(changes, rest)
    assert third < second < first
    assert all(np.abs(g).max() > 0 for g in jax.tree.leaves(grads))

    nnx.update(model, changes)
    changed = nnx.jit(lambda model: model(ids)[0])(model)
    with pytest.raises(
        ValueError,
        match=r"model: expected .* config, got also blocks\.0\.\S+\.a; call merge_lora first",
    ):
        save_hf(model, tmp_path / "unmerged")
    merge_lora(model)
    np.testing.assert_array_equal(nnx.jit(lambda model: model(ids)[0])(model), changed)
    after = nnx.to_pure_dict(nnx.state(model))
    same = jax.tree.map(lambda a, b: np.array_equal(a, b), before, after)
    for path, equal in jax.tree.leaves_with_path(same):
        name = jax.tree_util.keystr(path)
        assert equal == (not any(f"'{part}'" in name for part in ALL) or "bias" in name), name
    save_hf(model, tmp_path / "saved")
    loaded = load_hf(tmp_path / "saved")
    jax.tree.map(np.testing.assert_array_equal, nnx.to_pure_dict(nnx.state(loaded)), after)


def test_long_rows():
    """Of more than a few tokens a layer multiplies by several weights at once: also by those that change."""
    layer = drawn(lambda rngs: GatedDeltaNet(16, num_heads=2, head_dim=8, write_start=0.1, rngs=rngs))
    for name in ("q_proj", "b_proj"):
        changed = LoRALinear(getattr(layer, name), 2, 1.0, rngs=nnx.Rngs(0))
        changed.b[...] = jax.device_put(np.ones(changed.b.shape, np.float32))
        setattr(layer, name, changed)
    x = jax.device_put(np.random.default_rng(0).standard_normal((1, FEW_ROWS + 4, 16)).astype(np.float32))

    @nnx.jit
    def outputs(layer, x):
        merged = nnx.clone(layer)
        merged.q_proj, merged.b_proj = merged.q_proj.merged(), merged.b_proj.merged()
        return layer(x)[0], merged(x)[0]

    np.testing.assert_array_equal(*outputs(layer, x))


@pytest.mark.slow
def test_it_changes_nothing_at_first():
    model = load()
    add_lora(model, 3, projections=["down_proj", "q_proj"], rngs=nnx.Rngs(0))
    kinds = [type(block.mixer.q_proj) for block in model.blocks] + [
        type(block.mlp.down_proj) for block in model.blocks
    ]
    assert set(kinds) == {LoRALinear} and not isinstance(model.blocks[0].mixer.k_proj, LoRALinear)
    ids = jax.device_put(hf_checkpoints.expected("qwen3_5")["ids"][:, :5])
    call = nnx.jit(lambda model: model(ids)[0])
    np.testing.assert_array_equal(call(model), call(load()))


@pytest.mark.parametrize("alpha, scale", [(None, 1), (6.0, 2)])
def test_the_change_is_alpha_over_the_rank(alpha, scale):
    """x (W + alpha / r A B), with A and B of rank r = 3; without alpha x (W + A B)."""
    model = load()
    kernel = np.asarray(model.blocks[0].mlp.down_proj.kernel[...], np.float64)
    add_lora(model, 3, alpha=alpha, projections=["down_proj"], rngs=nnx.Rngs(0))
    changed = model.blocks[0].mlp.down_proj
    rng = np.random.default_rng(0)
    a, b = rng.standard_normal((kernel.shape[0], 3)), rng.standard_normal((3, kernel.shape[1]))
    changed.a[...], changed.b[...] = jax.device_put((a.astype(np.float32), b.astype(np.float32)))
    x = rng.standard_normal((5, kernel.shape[0]))
    got = nnx.jit(lambda layer, x: layer(x))(changed, x.astype(np.float32))
    np.testing.assert_allclose(got, x @ (kernel + scale * a @ b), rtol=1e-4, atol=1e-4)


@pytest.mark.usefixtures("no_type_checks")
@pytest.mark.parametrize(
    "message, rank, options",
    [
        ("rank: expected a positive integer, got 0", 0, {}),
        ("alpha: expected a positive number, got 0", 1, {"alpha": 0.0}),
        ("projections: expected some of a_proj, .*, v_proj, got z_proj", 1, {"projections": ["z_proj"]}),
    ],
)
def test_errors(message, rank, options):
    with pytest.raises(ValueError, match=message):
        add_lora(load(), rank, **options, rngs=nnx.Rngs(0))


def test_twice_is_an_error():
    model = load()
    add_lora(model, 1, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match="model: expected one without low-rank changes"):
        add_lora(model, 1, rngs=nnx.Rngs(0))


def test_changes_are_set_and_found_by_place():
    """Under the names of their projections; other places, other sizes and a second change are errors."""
    model, rng = load(), np.random.default_rng(0)
    linear = model.blocks[1].mlp.up_proj
    shapes = ((linear.in_features, 2), (2, linear.out_features))
    a, b = (jax.device_put(rng.standard_normal(shape).astype(np.float32)) for shape in shapes)
    with pytest.raises(
        ValueError, match=r"changes: expected places of projections, got blocks\.9\.mixer\.q_proj"
    ):
        set_lora(model, {"blocks.9.mixer.q_proj": Change(a, b, 1.0)})
    with pytest.raises(
        ValueError, match=r"changes: expected A and B of shapes .* for blocks\.1\.mlp\.down_proj"
    ):
        set_lora(model, {"blocks.1.mlp.down_proj": Change(a, b, 1.0)})
    set_lora(model, {"blocks.1.mlp.up_proj": Change(a, b, 0.5)})
    ((place, found),) = lora_changes(model).items()
    assert place == "blocks.1.mlp.up_proj" and found.scale == 0.5
    np.testing.assert_array_equal(found.a, a)
    np.testing.assert_array_equal(found.b, b)
    with pytest.raises(ValueError, match="model: expected one without low-rank changes"):
        set_lora(model, {"blocks.1.mlp.up_proj": Change(a, b, 0.5)})
