"""Registers, spills and warnings of every kernel of `calls.CALLS`, on a machine without a GPU.

    python -m pallas_kernels.tools.ptxas_report [--only TEXT] [--capability X.Y] [--also X.Y ...]

Columns: registers at entry, bytes spilled (stores, loads), and warnings: wgmma serialised for want of registers
(C7512), set_max_registers ignored. The calls are those whose kernels compile for the compute capability. With --also
the same PTX is assembled for later ones of its generation: JAX makes the same for 8.0, 8.6 and 8.9. What it needs is
in `compiling`.
"""

import argparse
import re
import subprocess
import tempfile
from pathlib import Path

import jax

from pallas_kernels.tools.compiling import in_process_of_compiler, printed


def _line(name: str, text: str) -> str:
    registers = re.findall(r"Used (\d+) registers", text)
    spills = re.findall(r"(\d+) bytes spill stores, (\d+) bytes spill loads", text)
    notes = [code for code in ("C7512", "setmaxnreg ignored") if code in text]
    stores, loads = max((tuple(map(int, pair)) for pair in spills), default=("?", "?"))
    return f"{name:50} {registers[0] if registers else '?':>5} {stores:>6} {loads:>6}  {' '.join(notes)}"


def _assembled(text: str, capability: str) -> str:
    """Messages of ptxas on the PTX in what the compiler printed."""
    program = text[text.index(".version") : text.rindex("\n}") + 3]
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "kernel.ptx")
        file.write_text(program)
        arch = f"-arch=sm_{capability.replace('.', '')}"
        command = ["ptxas", "-v", arch, "-O3", str(file), "-o", str(file.with_suffix(".cubin"))]
        return subprocess.run(command, capture_output=True, text=True, check=True).stderr


def main() -> None:
    """Prints one line for each kernel."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--only", default="", help="calls whose name contains this")
    parser.add_argument("--capability", default="9.0", help="compute capability that is compiled for")
    parser.add_argument("--also", nargs="+", default=[], help="later ones that the PTX is assembled for")
    options = parser.parse_args()
    variables = ["MOSAIC_GPU_DUMP_PTXAS", *["MOSAIC_GPU_DUMP_PTX"] * bool(options.also)]
    if not in_process_of_compiler("pallas_kernels.tools.ptxas_report", *variables):
        return
    print(f"{'jax ' + jax.__version__:50} {'regs':>5} {'spill':>6} {'reload':>6}")
    for name, text in printed(options.only, options.capability):
        print(_line(name, text), flush=True)
        for capability in options.also:
            print(_line(f"{name}, {capability}", _assembled(text, capability)), flush=True)


if __name__ == "__main__":
    main()
