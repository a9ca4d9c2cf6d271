"""The site, without the tools that build it: what the reference has, the figures, and the state page's arithmetic."""

import ast
import hashlib
import json
import re
import shutil
import subprocess
import sys
from functools import cache
from importlib.util import module_from_spec, spec_from_file_location
from itertools import pairwise
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from release import package

from gdn_jax import delta_rule

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PACKAGES = ("gdn_jax", "gdn_jax.layers", "gdn_jax.models", "gdn_jax.serving", "gdn_jax.hf", "gdn_jax.rules")
MACHINERY = {"borders", "gradient_order", "prefix"}
"""Modules of `gdn_jax.parallel` that its functions are made of; nobody calls them."""


def load(path):
    """A module of docs/, which is no package."""
    spec = spec_from_file_location(path.stem, path)
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


names = load(DOCS / "site" / "entries.py")
ENTRIES = names.entries(DOCS / "reference")
TARGETS = names.targets(ENTRIES)


@cache
def body(module):
    """The statements of a module, read and not imported."""
    path = ROOT / module.replace(".", "/")
    path = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    return ast.parse(path.read_text()).body


def public_names(package):
    lists = [x.value for x in body(package) if isinstance(x, ast.Assign) and x.targets[0].id == "__all__"]
    return {f"{package}.{name}" for name in ast.literal_eval(lists[0])}


def defined(module):
    kinds = ast.FunctionDef | ast.ClassDef
    names = [x.name for x in body(module) if isinstance(x, kinds)]
    return {f"{module}.{name}" for name in names if not name.startswith("_")}


def test_every_public_name_has_one_entry():
    assert len(ENTRIES) == len(set(ENTRIES)), sorted(name for name in ENTRIES if ENTRIES.count(name) > 1)
    wanted = set().union(*map(public_names, PACKAGES))
    for path in (ROOT / "gdn_jax" / "parallel").glob("[!_]*.py"):
        if path.stem not in MACHINERY:
            wanted |= defined(f"gdn_jax.parallel.{path.stem}")
    assert not wanted - set(ENTRIES), f"no entry in docs/reference: {sorted(wanted - set(ENTRIES))}"


def test_every_entry_is_there():
    def values(module):
        for x in body(module):
            if isinstance(x, ast.Assign | ast.AnnAssign | ast.ImportFrom):
                found = (
                    x.names if isinstance(x, ast.ImportFrom) else getattr(x, "targets", None) or [x.target]
                )
                yield from (ast.unparse(y).rpartition(" ")[2] for y in found)

    for name in ENTRIES:
        module, _, last = name.rpartition(".")
        assert name == "gdn_jax.shapes" or definition(name) or last in values(module), name


def test_every_page_has_a_place():
    """What `make docs` would warn of: a page that no menu leads to."""
    menu = (ROOT / "mkdocs.yml").read_text().split("\nnav:\n")[1].split()
    pages = [*DOCS.glob("**/*.md"), *ROOT.glob("notebooks/*.ipynb"), *ROOT.glob("results/*.md")]
    pages += ROOT.glob("results/tasks/*.md")
    assert not {path.relative_to(ROOT).as_posix() for path in pages} - set(menu)
    assert all((ROOT / word).exists() for word in menu if word.endswith((".md", ".ipynb")))


def test_pages_link_to_what_the_site_has():
    """What `make docs` would warn of: a link to a file of the repository that is not published."""
    hooks = ast.parse((DOCS / "site" / "hooks.py").read_text()).body
    (patterns,) = (x.value for x in hooks if isinstance(x, ast.Assign) and x.targets[0].id == "PUBLISHED")
    files = {path for pattern in ast.literal_eval(patterns) for path in ROOT.glob(pattern)}
    pages = [path for path in files if path.suffix == ".md" and path != ROOT / "README.md"]
    links = [(page, to.split("#")[0]) for page in pages for to in package.paths_in(page.read_text())]
    dead = [f"{page.name}: {to}" for page, to in links if (page.parent / to).resolve() not in files]
    assert pages and not dead


CHECKS_NOTHING = {
    "gdn_jax": {"kkt", "wy", "chunk_output", "chunk_cumsum", "debug_checks"},
    "gdn_jax.layers": {"RecurrentMixer", "RecurrentCache"},
    "gdn_jax.models": {"Block", "LanguageModel", "NoDecayParam", "weight_decay_mask"},
    "gdn_jax.models.inference.program": {"for_inference", "for_decoding"},
    "gdn_jax.models.lora": {"merge_lora", "lora_changes"},
    "gdn_jax.inspect.analysis": {"memory_horizon"},
    "gdn_jax.rules": {
        "Rule",
        "RuleInputs",
        "gated_linear_attention",
        "softmax_attention",
    },
    "gdn_jax.serving": {"ByteStates", "Chain", "RingPool", "QueueFull"},
    "gdn_jax.parallel.mesh": {"ShardAxes", "axes_set", "dividing", "tokens_of"},
    "gdn_jax.parallel.sharding": {"parameter_specs", "state_shardings", "batch_sharding"},
    "gdn_jax.parallel.context": {"by_states"},
    "gdn_jax.parallel.context_conv": {"short_conv_by_kernels"},
    "gdn_jax.parallel.exchange": {"rule_by_heads", "pays", "reason", "sent_bytes", "steps"},
    "gdn_jax.parallel.head_shards": {
        "projections_on_mesh",
        "swiglu_on_mesh",
        "short_conv_on_mesh",
        "causal_conv1d_on_mesh",
        "splits_heads",
    },
    "gdn_jax.parallel.token_shards": {"ByTokens", "splits_tokens"},
    "gdn_jax.parallel.processes": {"leave", "is_first", "wait", "any_process"},
}
"""Entries without errors of their own: records, and functions whose wrong arguments are errors of JAX."""


def definition(name):
    """The function or class of an entry, wherever it is defined; None for a value."""
    module, _, last = name.rpartition(".")
    for x in body(module):
        if isinstance(x, ast.FunctionDef | ast.ClassDef) and x.name == last:
            return x
        if isinstance(x, ast.ImportFrom):
            for alias in x.names:
                if last == (alias.asname or alias.name):
                    return definition(f"{x.module}.{alias.name}")
    return None


def parameters(x):
    """Names of the arguments of a function or class, or of the fields of a record."""
    if isinstance(x, ast.ClassDef):
        made = [f for f in x.body if isinstance(f, ast.FunctionDef) and f.name == "__init__"]
        if not made:
            fields = [f for f in x.body if isinstance(f, ast.AnnAssign) and "ClassVar" not in ast.unparse(f)]
            described = [f for f, after in pairwise([*x.body, None]) if isinstance(after, ast.Expr)]
            return [f.target.id for f in fields if f not in described]
        x = made[0]
    arguments = x.args.posonlyargs + x.args.args + x.args.kwonlyargs
    return [a.arg for a in arguments if a.arg not in ("self", "cls")]


def said(name):
    """The docstring of an entry."""
    return ast.get_docstring(definition(name)) or ""


LIST = re.compile(r"^(?:Args|Attributes|Class attributes|Fields):(.*(?:\n(?: .*|$))*)", re.MULTILINE)
ITEM = re.compile(r"(?:^|[.;:] |\n) *((?:\*{0,2}\w+(?:, | and ))*\*{0,2}\w+)(?: \[[^\]]*\])?:")
PARAMETERS = re.compile(r"^Parameters:.*(?:\n .*)*", re.MULTILINE)
"""Arrays of a layer, which are told in prose."""
HANDS_ON = re.compile(r"(?i)\bothers?\b|those of|as for|as in|fields of|arguments of")
"""What an item says that leaves arguments to another docstring."""


def handing_on(text):
    """What of a docstring may leave arguments to others: such items of its lists, or all where it has no list."""
    lists = LIST.findall(text)
    if not lists:
        return text
    items = [item for part in lists for item in re.split(r"\n(?=  \S)", part) if HANDS_ON.search(item)]
    return " ".join((*items, *PARAMETERS.findall(text)))


@cache
def referred(name):
    """Entries, and parts of layers, to which a docstring leaves arguments, and those to which these leave them."""
    found, new = set(), {name}
    while new:
        found |= new
        pairs = [(place, x) for place in new for x in re.findall(r"`(\w[\w.]+)`", handing_on(said(place)))]
        names = {TARGETS.get(x, x) for _, x in pairs} | {
            place.rpartition(".")[0] + "." + x for place, x in pairs
        }
        new = {x for x in names if x in ENTRIES or x.startswith("gdn_jax.parts.")} - found
        new = {x for x in new if definition(x)}
    return found


def told(text):
    """Names that a docstring describes: the items of its lists, or all its words where it has no list."""
    lists = LIST.findall(text)
    names = [item for part in lists for item in ITEM.findall(part)] or [text]
    return {word for part in (*names, *PARAMETERS.findall(text)) for word in re.findall(r"\w+", part)}


def test_what_a_docstring_tells():
    text = "Scales x by eps.\n\nArgs:\n  q, k: arrays. *v: one,\n    at most w.\n\nReturns:\n  o: x + eps."
    assert told(text) == {"q", "k", "v"}
    assert told("Scales x.\n\nReturns:\n  o.") == {"Scales", "x", "Returns", "o"}
    assert handing_on(text) == "" and handing_on("See `f`.\n\nArgs:\n  x: see `g`.\n  Others: as for `h`.")[
        2:
    ] == ("Others: as for `h`.")
    assert told("A layer.\n\nAttributes:\n  d: width.\n\nParameters: a and\n  b.") >= {"d", "a", "b"}


def test_entries_say_arguments_and_errors():
    """Each argument has its item in the docstring or in that of an entry it refers to; errors are told, too."""
    missing = []
    for name in ENTRIES:
        x = definition(name)
        if x is None:
            continue
        text = said(name)
        words = set().union(*(told(said(other)) for other in referred(name)))
        unnamed = [a for a in parameters(x) if a not in words]
        missing += [f"{name}: says nothing of {a}" for a in unnamed]
        room, _, last = name.rpartition(".")
        if "Raises:" not in text and last not in CHECKS_NOTHING.get(room, ()):
            missing.append(f"{name}: says nothing of errors")
    assert not missing, "\n".join(missing)


def test_names_of_texts():
    """Names as texts use them: the public one where two entries end alike, none where it could be either."""
    assert TARGETS["gated_delta_rule"] == "gdn_jax.gated_delta_rule"
    assert TARGETS["context.gated_delta_rule"] == "gdn_jax.parallel.context.gated_delta_rule"
    assert TARGETS["serving.causal_conv1d"] == "gdn_jax.serving.causal_conv1d"
    assert "causal_conv1d" not in TARGETS and "check" not in TARGETS
    assert TARGETS["sharding.check"] == "gdn_jax.parallel.sharding.check"


@pytest.mark.parametrize("name", ["rule.svg", "family.svg", "gain.svg"])
def test_figures_are_those_of_the_script(name):
    figures = load(DOCS / "figures.py").FIGURES
    assert (DOCS / name).read_text() == figures[name](), "run python docs/figures.py"


def test_times_of_the_readme_are_those_of_the_page():
    """Milliseconds and ratios of its table, for the sizes that the figure has."""
    script = load(DOCS / "figures.py")
    rows = re.findall(
        r"\| (forward|backward) \| (\w+)[ *]* \| ([\d.]+) \| ([\d.]+)[ \w*]* \| ([\d.]+) \|",
        (ROOT / "README.md").read_text(),
    )
    of_page = [
        (passed.lower(), time.size, f"{time.ours:.3f}", f"{time.other:.3g}", f"{time.ours / time.other:.2f}")
        for passed in script.SIZES
        for time in script.times(passed)
    ]
    assert len(rows) >= 3
    assert {*rows} <= {*of_page}


def test_docstrings_become_lists():
    to_markdown = load(DOCS / "site" / "docstrings.py").to_markdown
    text = "Says x * y.\n\n    S <- x\n\nArgs:\n  q, k: x [B],\n    `a * b`.\n  v: one.\n\nRaises:\n  TypeError: x."
    assert to_markdown(text).split("\n") == [
        "Says x \\* y.",
        "",
        "    S <- x",
        "",
        "",
        "**Args**",
        "",
        "",
        "- `q, k`: x \\[B\\],",
        "    `a * b`.",
        "- `v`: one.",
        "",
        "",
        "",
        "**Raises**",
        "",
        "",
        "- `TypeError`: x.",
        "",
    ]


def test_notebooks_become_pages():
    notebooks = load(DOCS / "site" / "notebooks.py")
    for path in sorted((ROOT / "notebooks").glob("*.ipynb")):
        page = notebooks.page(path)
        names = notebooks.figures(path)
        assert page.startswith("# ") and names
        assert re.findall(r"notebook\]\((.*?)\)", page) == list(names)
        assert all(png.startswith(b"\x89PNG") for png in names.values())


# The state page. tests/data/state_page.json has tokens and what the page's function made of them;
# `python tests/project/test_site.py` writes it again.
EXAMPLE = ROOT / "tests" / "data" / "state_page.json"
NODE = shutil.which("node")
SCRIPT = (DOCS / "state.html").read_text().split('<script id="gdn-rule">')[1].split("</script>")[0]
"""The page's function."""
DIGEST = hashlib.sha256(SCRIPT.encode()).hexdigest()


def states_of_the_page(tokens):
    """The states [tokens][rule][K][V] that the JavaScript of docs/state.html makes, run by node."""
    program = f"""{SCRIPT}
const tokens = {json.dumps(tokens)};
const zeros = [[0, 0, 0], [0, 0, 0]];
let states = [zeros, zeros];
console.log(JSON.stringify(tokens.map(({{k, v, alpha, beta}}) => {{
  states = [true, false].map((replaces, i) => gdnPhases(states[i], k, v, Math.log(alpha), beta, replaces)[2]);
  return states;
}})));"""
    done = subprocess.run([NODE, "-e", program], capture_output=True, text=True, check=True)
    return json.loads(done.stdout)


def test_cells_of_sentences_have_the_names_of_their_columns():
    """Numbers stay a table: the names are those that a card on a narrow screen needs."""
    tables = load(DOCS / "site" / "tables.py")

    def table(last):
        rows = "".join(f"<tr><td>{i}</td>\n<td style='x'><b>b</b></td><td>{last}</td></tr>" for i in range(2))
        heads = "<th>claim</th><th>here &amp; there</th><th>verdict</th>"
        return f"<table>\n<thead><tr>{heads}</tr></thead>\n<tbody>{rows}</tbody></table>"

    numbers, words = table("1.0"), table("a sentence " * 6)
    page = tables.named_cells(f"<p>{numbers}</p>{words}")
    assert numbers in page and page.count("<table data-sentences>") == 1
    names = re.findall(r'<td data-column="([^"]*)"', page)
    assert names == ["claim", "here &amp; there", "verdict"] * 2


def test_state_page_is_the_rule():
    """Against the definition, token by token: the gated delta rule, and linear attention, which erases nothing."""
    example = json.loads(EXAMPLE.read_text())
    tokens, states = example["tokens"], np.array(example["states"])
    k, v, alpha, beta = (np.array([token[name] for token in tokens], np.float32) for name in tokens[0])
    with np.errstate(divide="ignore"):
        g = np.log(alpha)
    k, v, g, beta = (jnp.repeat(x[None, :, None], 2, 0) for x in map(jnp.asarray, (k, v, g, beta)))
    erase = beta * jnp.array([1.0, 0.0])[:, None, None]  # row 0 erases, row 1 does not
    S = jnp.zeros((2, 1, 2, 3))
    for t, expected in enumerate(states):
        q, kt, vt, gt, et, wt = (x[:, t : t + 1] for x in (k, k, v, g, erase, beta))
        _, S = delta_rule(q, kt, vt, gt, erase=et, write=wt, initial_state=S, implementation="recurrent")
        np.testing.assert_allclose(S[:, 0], expected, atol=1e-6)


def test_example_is_of_this_state_page():
    """Where there is no node, this notices a change of the page's function."""
    changed = (
        "the function of docs/state.html is another: where node is, run python tests/project/test_site.py"
    )
    assert json.loads(EXAMPLE.read_text())["sha256 of the function"] == DIGEST, changed


@pytest.mark.skipif(NODE is None, reason="needs node")
def test_state_page_makes_the_example():
    example = json.loads(EXAMPLE.read_text())
    np.testing.assert_allclose(states_of_the_page(example["tokens"]), example["states"], atol=1e-12)


def write_example():
    """Writes twelve tokens of three keys, with decays and strengths from 0 to 1, and what node makes of them."""
    if NODE is None:
        return "node is not installed: it runs the page's function"
    rng = np.random.default_rng(0)
    angles = rng.choice([0.0, 0.9, 1.6], 12)
    tokens = [
        {
            "k": [float(np.cos(x)), float(np.sin(x))],
            "v": rng.uniform(-1, 1, 3).round(2).tolist(),
            "alpha": a,
            "beta": b,
        }
        for x, a, b in zip(angles, [1, 0.9, 0.5, 1, 1, 0] * 2, [1, 0.5, 1, 0, 0.8, 1] * 2, strict=True)
    ]
    temporary = EXAMPLE.with_suffix(".tmp")
    example = {"sha256 of the function": DIGEST, "tokens": tokens, "states": states_of_the_page(tokens)}
    temporary.write_text(json.dumps(example) + "\n")
    temporary.replace(EXAMPLE)
    return 0


if __name__ == "__main__":
    sys.exit(write_example())


TIMES = re.compile(r"\b\d+(?:\.\d+)?\s?(?:ms|us|%|GiB|TB/s|tokens a second)\b")
NEEDED = {
    "a date": re.compile(r"20\d\d-\d\d-\d\d"),
    "a command": re.compile(r"gdn (bench|check|train|info|generate|sweep)|python -m|python tests/|make "),
    "a device": re.compile(r"H100|H200|CPU|cores"),
}


@pytest.mark.parametrize(
    "page", [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))], ids=lambda p: p.stem
)
def test_sections_with_measured_numbers_say_when_where_and_how(page):
    """Two numbers with a unit make a section one of measurements."""
    for section in re.split(r"(?m)^(?=#{1,3} )", page.read_text()):
        if len(TIMES.findall(section)) > 1:
            missing = [what for what, pattern in NEEDED.items() if not pattern.search(section)]
            assert not missing, f"{section.splitlines()[0]}: expected {', '.join(missing)}"
