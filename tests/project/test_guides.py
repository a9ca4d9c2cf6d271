"""The guides: their code runs, taken from the pages, and their tables and formulas are those of the code."""

import ast
import re
from functools import partial
from importlib import import_module
from importlib.util import find_spec

import jax
import optax
import pytest
from flax import nnx
from release import package

from gdn_jax.bench.sizes import model_config
from gdn_jax.layers.table import TOKEN_MIXERS
from gdn_jax.models import LanguageModel, ModelConfig
from gdn_jax.models.costs import parameters
from gdn_jax.rule.call import CHANNELS, HEADS
from gdn_jax.rule.implementations import TABLE

DOCS = package.ROOT / "docs"
NOT_RUN = "# not run by the tests: "
"""How the code of a page begins that needs the network."""
GUIDES = (
    "checkpoints",
    "choosing",
    "coming_from",
    "devices",
    "finetune",
    "fp8",
    "gallery",
    "generation",
    "memory",
    "models",
    "neighbours",
    "own_model",
    "parallel",
    "policy_gradients",
    "pretrain",
    "qwen",
    "serve",
    "which_call",
)


def blocks(page: str) -> list[str]:
    """The Python of a page, from top to bottom."""
    found = re.findall(r"(?ms)^```python\n(.*?)^```$", (DOCS / f"{page}.md").read_text())
    for block in found:
        ast.parse(block)
    return [block for block in found if not block.startswith(NOT_RUN)]


def run(page: str) -> dict:
    """Runs the blocks of a page one after another, and returns its names."""
    names = {"__name__": "page"}
    exec(compile("\n".join(blocks(page)), f"{page}.md", "exec"), names)
    return names


def test_the_guide_on_choosing_runs():
    run("choosing")


@pytest.mark.slow
@pytest.mark.usefixtures("no_type_checks")  # which know no ShapeDtypeStruct
@pytest.mark.parametrize(
    "page",
    [
        "checkpoints",
        "coming_from",
        "devices",
        "faq",
        "gallery",
        "index",
        "models",
        "parallel",
        "qwen",
        "serve",
        "which_call",
    ],
)
def test_a_guide_runs(page, tmp_path, monkeypatch):
    """In a folder of its own, as one writes files."""
    monkeypatch.chdir(tmp_path)
    run(page)


@pytest.mark.slow
def test_pretraining_learns_and_goes_on(tmp_path, monkeypatch, capsys):
    """The script a second time, with more steps: it begins at its last checkpoint."""
    monkeypatch.chdir(tmp_path)
    first, script = blocks("pretrain")
    assert script.count("\n") < 75
    exec(compile(first, "tokens", "exec"), {})
    for steps in (40, 60):
        exec(
            compile(script.replace("16, 40, 20", f"16, {steps}, 20"), "script", "exec"), {"__name__": "page"}
        )
    lines = capsys.readouterr().out.splitlines()
    assert [int(line.split()[1][:-1]) for line in lines] == [20, 40, 60]
    assert float(lines[-1].split()[6]) < float(lines[0].split()[6]) - 0.1


@pytest.mark.parametrize("page", sorted(path.stem for path in DOCS.glob("*.md")))
def test_blocks_import_what_there_is(page):
    """Also those that need the network, a checkpoint or another library."""
    for block in re.findall(r"(?ms)^```python\n(.*?)^```$", (DOCS / f"{page}.md").read_text()):
        for x in ast.walk(ast.parse(block)):
            if isinstance(x, ast.ImportFrom) and x.module.split(".")[0] == "gdn_jax":
                module = import_module(x.module)
                for name in x.names:
                    assert hasattr(module, name.name) or find_spec(f"{x.module}.{name.name}"), ast.unparse(x)


def test_every_guide_has_its_parts():
    """A goal with code, one pitfall, and a link to the reference."""
    for page in GUIDES:
        text = (DOCS / f"{page}.md").read_text()
        assert text.count("\n## Pitfall\n") == 1 and "](reference/" in text and blocks(page), page


def test_memory_of_a_step(capsys):
    """The formula, against the temporaries that the compiler reported and the parameters of the code."""
    names = run("memory")
    said = re.findall(r"prints ([\d.]+), ([\d.]+) and ([\d.]+) GiB", (DOCS / "memory.md").read_text())
    fits = re.findall(r"that ([\d,]+), ([\d,]+) and ([\d,]+) tokens", (DOCS / "memory.md").read_text())
    printed = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert [x for _, x, _ in printed] == list(said[0])
    assert [x for *_, x in printed] == [x.replace(",", "") for x in fits[0]]
    of_table = dict(re.findall(r"(?m)^\| `(none|rule|full)` \|[^|]*\| ([\d.]+) \| [\d,]+ \|$", performance()))
    for remat, temporaries in of_table.items():
        config = model_config("0.4b", dtype="bfloat16", remat=remat)
        kept = names["gib_of_step"](config, 65536) - names["gib_of_step"](config, 0)
        assert kept == pytest.approx(float(temporaries), rel=0.03)
    assert len(of_table) == 3
    (in_use,) = re.findall(r"at most ([\d.]+) GiB of the GPU's memory were in use", performance())
    large = names["gib_of_step"](model_config("1.3b", remat="rule"), 65536)
    assert (
        large == pytest.approx(float(in_use), rel=0.02)
        and f"gives {large:.1f}." in (DOCS / "memory.md").read_text()
    )


def performance() -> str:
    return (DOCS / "log" / "tables.md").read_text()


def test_weights_and_moments_are_twelve_bytes():
    """AdamW keeps 12 bytes of each parameter, with the weights; its counters come on top."""
    config = model_config("tiny")

    def state():
        model = LanguageModel(config, rngs=nnx.Rngs(0))
        return nnx.state((model, nnx.Optimizer(model, optax.adamw(1e-3), wrt=nnx.Param)))

    kept = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(jax.eval_shape(state)))
    assert kept == pytest.approx(12 * sum(parameters(config).values()), abs=64)


def made(mixer, config):
    return mixer.make(config, rngs=nnx.Rngs(0))


def test_the_gallery_has_every_mixer():
    """Its last two columns are what a default layer of each mixer says."""
    rows = re.findall(r"(?m)^\| `(\w+)` \|.*\| (yes|no) \| (yes|no) \|$", (DOCS / "gallery.md").read_text())
    found = {}
    for name, mixer in TOKEN_MIXERS.items():
        config = ModelConfig(mixer=mixer)
        layer = nnx.eval_shape(partial(made, mixer, config))
        found[name] = tuple("yes" if x else "no" for x in (layer.can_be_served, mixer.splits_tokens(config)))
    assert {name: tuple(x) for name, *x in rows} == found


def test_the_support_matrix_has_every_set_of_kernels():
    """Which sets of kernels take a decay of each head, and which one of each channel."""
    rows = re.findall(
        r"(?m)^\| `(gated_delta_rule|delta_rule)` \| (\w+)[^|]* \| (\w+)[^|]* \|",
        (DOCS / "devices.md").read_text(),
    )
    assert re.search(
        r"(?m)^\| call \| `\"mosaic_gpu\"`, .* \| `\"mosaic_mma\"`, ", (DOCS / "devices.md").read_text()
    )
    for call, *cells in rows:
        gates = {"gated_delta_rule": HEADS, "delta_rule": CHANNELS}[call]
        named = {
            name for name, cell in zip(("mosaic_gpu", "mosaic_mma"), cells, strict=True) if cell != "none"
        }
        assert named == {one.name for one in TABLE if one.by_kernels and gates in one.gates}
    assert len(rows) == 2
