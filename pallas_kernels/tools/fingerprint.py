"""A fingerprint of the PTX of every kernel configuration: a refactoring of kernels changes none of them.

    python -m pallas_kernels.tools.fingerprint [--only TEXT] [--out FOLDER]

Prints one line for each configuration of `ptxas_report`: the first twelve digits of a SHA-256 of its PTX, the number
of instructions, and the name. Comments, source locations, debug sections, the numbers of registers and the kernels'
own names do not count. With --out the PTX that counts is written to a file for each configuration, so that two
versions can be compared line by line.

What it needs is what `ptxas_report` needs; no GPU.
"""

import argparse
import ctypes
import hashlib
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from pallas_kernels.tools import ptxas_report
from pallas_kernels.tools.configurations import CASES


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


def _printed(library: ctypes.CDLL, name: str) -> str:
    """The compiler's output for a configuration: it writes straight to the standard streams."""
    modules = ptxas_report.modules(ptxas_report.lower(*CASES[name]()))
    libc, saved = ctypes.CDLL(None), [os.dup(stream) for stream in (1, 2)]
    with tempfile.TemporaryFile() as file:
        try:
            for stream in (1, 2):
                os.dup2(file.fileno(), stream)
            for module in modules:
                library.MosaicGpuCompile(module, len(module))
            libc.fflush(None)
        finally:
            for stream, old in zip((1, 2), saved, strict=True):
                os.dup2(old, stream)
                os.close(old)
        file.seek(0)
        return file.read().decode(errors="replace")


def _report(only: str, out: Path | None) -> None:
    library = ptxas_report.compiler()
    for name in CASES:
        if only not in name:
            continue
        sys.stdout.flush()
        text = "".join(normalised(program) for program in programs(_printed(library, name)))
        instructions = sum(line.endswith(";") and not line.startswith(".") for line in text.splitlines())
        print(f"{hashlib.sha256(text.encode()).hexdigest()[:12]} {instructions:7d}  {name}", flush=True)
        if out is not None:
            out.mkdir(parents=True, exist_ok=True)
            (out / f"{name.replace(', ', '-').replace(' ', '_')}.ptx").write_text(text)


def main() -> None:
    """Prints one line for each configuration."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--only", default="", help="configurations whose name contains this")
    parser.add_argument("--out", type=Path, help="folder for the PTX")
    options = parser.parse_args()
    if ptxas_report.PLUGIN in os.environ:
        return _report(options.only, options.out)
    environment = ptxas_report.compile_environment() | {"MOSAIC_GPU_DUMP_PTX": "1"}
    command = [sys.executable, "-m", "pallas_kernels.tools.fingerprint", *sys.argv[1:]]
    sys.exit(subprocess.run(command, env=environment, check=False).returncode)


if __name__ == "__main__":
    main()
