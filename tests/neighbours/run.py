"""Other libraries' own layers with this one's rule inside, next to themselves.

    python tests/neighbours/run.py [maxtext skyrl keras_hub tokamax transformers] [--folder FOLDER] [--with PACKAGE]

transformers opens the checkpoints of its hybrid families that this library writes, and computes the same; two of each
family have random sizes, and `transformers_models.py NAME SEED ...` draws others.

Makes an environment for each library, installs it from the package index, and runs its file here in that environment
on this checkout: minutes the first time. A file compares outputs within 1e-5 and gradients within 1e-4 of the largest
value, in float32, and ends with an error where they differ. `--with "jax[cuda13]"` is for a GPU.
"""

import argparse
import os
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

HERE = Path(__file__).parent
ROOT = HERE.parents[1]


class Neighbour(NamedTuple):
    """A library: its file here, what is installed, and what of that without its own requirements."""

    script: str
    requirements: str
    alone: str = ""


NEIGHBOURS = {
    # The wheel of maxtext names no requirements but in extras of several hundred packages for each device. These are
    # those that its models import.
    "maxtext": Neighbour(
        "maxtext_layer.py",
        "maxtext==0.2.5 tokamax==0.0.17 flax>=0.12.10 absl-py aqtp cloud-accelerator-diagnostics drjax einops etils "
        "grain huggingface-hub jaxtyping jinja2 ml-collections omegaconf optax orbax-checkpoint packaging "
        "pathwaysutils pillow psutil pydantic pyyaml qwix requests transformers",
    ),
    # skyrl requires peft, and that PyTorch, to save adapters.
    "skyrl": Neighbour(
        "skyrl_layer.py",
        "flax>=0.12.10 cloudpathlib huggingface-hub jaxtyping optax pydantic rich safetensors tokenizers "
        "transformers",
        "skyrl==0.4.0",
    ),
    # keras-hub requires tensorflow-text for other backends and for its tokenizers; a layer needs neither.
    "keras_hub": Neighbour(
        "keras_hub_layer.py",
        "keras==3.15.1 flax>=0.12.10 jaxtyping kagglehub regex tokenizers tqdm",
        "keras-hub==0.32.0",
    ),
    "tokamax": Neighbour("tokamax_op.py", "tokamax[test]==0.0.17 flax>=0.12.10"),
    "transformers": Neighbour(
        "transformers_models.py", "transformers==5.24.0 torch flax>=0.12.10 jaxtyping optax safetensors"
    ),
}


def environment(name: str, folder: Path, extra: list[str]) -> Path:
    """The Python of an environment with a library, which is installed where it is not."""
    python = folder / name / "bin" / "python"
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", folder / name], check=True)
    install = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    neighbour = NEIGHBOURS[name]
    subprocess.run([*install, *neighbour.requirements.split(), *extra], check=True)
    if neighbour.alone:
        subprocess.run([*install, "--no-deps", *neighbour.alone.split()], check=True)
    return python


def main() -> int:
    """Runs the libraries that are named, all by default; how many failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("names", nargs="*", choices=[[], *NEIGHBOURS], help="libraries, all by default")
    parser.add_argument("--folder", type=Path, default=ROOT / ".venv" / "neighbours")
    parser.add_argument("--with", dest="extra", action="append", default=[], metavar="PACKAGE")
    options = parser.parse_args()
    failed = 0
    for name in options.names or NEIGHBOURS:
        python = environment(name, options.folder.absolute(), options.extra)
        where = {**os.environ, "PYTHONPATH": str(ROOT)}
        done = subprocess.run(
            [python, HERE / NEIGHBOURS[name].script], env=where, cwd=options.folder, check=False
        )
        print(f"{name}: {'the same' if done.returncode == 0 else 'FAILED'}", flush=True)
        failed += done.returncode != 0
    return failed


if __name__ == "__main__":
    sys.exit(main())
