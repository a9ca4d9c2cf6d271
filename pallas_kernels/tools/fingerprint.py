"""A fingerprint of the PTX of every kernel of `calls.CALLS`: a refactoring of kernels changes none of them.

    python -m pallas_kernels.tools.fingerprint [--only TEXT] [--capability X.Y] [--out FOLDER]

Prints one line for each kernel: the first twelve digits of a SHA-256 of its PTX, the number of instructions, and the
name. Comments, source locations, debug sections, the numbers of registers and the kernels' own names do not count.
With --out the PTX that counts is written to files, so that two versions can be compared line by line.

What it needs is in `compiling`; no GPU.
"""

import argparse
import hashlib
import re
from pathlib import Path

from pallas_kernels.tools.compiling import in_process_of_compiler, printed


def normalised(ptx: str) -> str:
    """The lines of PTX that make a program: without comments, source locations, debug sections and kernel names."""
    lines, depth = [], 0
    for name in re.findall(r"\.entry\s+(\w+)", ptx):
        ptx = re.sub(rf"\b{name}", "kernel", ptx)
    for line in ptx.splitlines():
        line = line.split("//")[0].strip()
        if line.startswith(".section"):  # debug information, in braces of its own
            depth = 1
            continue
        if depth:
            depth = 0 if line == "}" else depth
            continue
        if line and not line.startswith((".loc", ".file", "$L__tmp")):
            lines.append(line)
    return _renumbered("\n".join(lines) + "\n")


def _renumbered(ptx: str) -> str:
    """Registers numbered in the order in which they appear."""
    numbers: dict[str, str] = {}

    def new(match: re.Match) -> str:
        return numbers.setdefault(match.group(0), f"%{match.group(1)}{len(numbers)}")

    return re.sub(r"%(rd|rs|r|p|f|fd|h|hh)\d+\b", new, ptx)


def programs(output: str) -> list[str]:
    """The PTX programs in what the compiler printed."""
    return [".version" + part for part in re.split(r"^\s*\.version", output, flags=re.MULTILINE)[1:]]


def main() -> None:
    """Prints one line for each kernel."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--only", default="", help="calls whose name contains this")
    parser.add_argument("--capability", default="9.0", help="compute capability that is compiled for")
    parser.add_argument("--out", type=Path, help="folder for the PTX")
    options = parser.parse_args()
    if not in_process_of_compiler("pallas_kernels.tools.fingerprint", "MOSAIC_GPU_DUMP_PTX"):
        return
    for name, output in printed(options.only, options.capability):
        text = "".join(normalised(program) for program in programs(output))
        instructions = sum(line.endswith(";") and not line.startswith(".") for line in text.splitlines())
        print(f"{hashlib.sha256(text.encode()).hexdigest()[:12]} {instructions:7d}  {name}", flush=True)
        if options.out is not None:
            options.out.mkdir(parents=True, exist_ok=True)
            file = name.replace(": ", "-").replace(", ", "-").replace(" ", "_")
            (options.out / f"{file}.ptx").write_text(text)


if __name__ == "__main__":
    main()
