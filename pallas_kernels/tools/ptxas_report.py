"""Registers, spills and warnings of every kernel of `calls.CALLS`, on a machine without a GPU.

    python -m pallas_kernels.tools.ptxas_report [--only TEXT] [--capability X.Y ...]

Columns: registers at entry, bytes spilled (stores, loads), and warnings: wgmma serialised for want of registers
(C7512), set_max_registers ignored. What it needs is in `compiling`.
"""

import argparse
import re

import jax

from pallas_kernels.tools.compiling import in_process_of_compiler, printed


def _line(name: str, text: str) -> str:
    registers = re.findall(r"Used (\d+) registers", text)
    spills = re.findall(r"(\d+) bytes spill stores, (\d+) bytes spill loads", text)
    notes = [code for code in ("C7512", "setmaxnreg ignored") if code in text]
    stores, loads = max((tuple(map(int, pair)) for pair in spills), default=("?", "?"))
    return f"{name:54} {registers[0] if registers else '?':>5} {stores:>6} {loads:>6}  {' '.join(notes)}"


def main() -> None:
    """Prints one line for each kernel."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--only", default="", help="calls whose name contains this")
    parser.add_argument("--capability", nargs="+", default=["9.0"], help="what is compiled for")
    options = parser.parse_args()
    if in_process_of_compiler("pallas_kernels.tools.ptxas_report", "MOSAIC_GPU_DUMP_PTXAS"):
        print(f"{'jax ' + jax.__version__:50} {'regs':>5} {'spill':>6} {'reload':>6}")
        for capability in options.capability:
            for name, text in printed(options.only, capability):
                print(_line(f"{capability} {name}", text), flush=True)


if __name__ == "__main__":
    main()
