"""Bounds that the kernels miss on a GPU, by how much, and the comparison that knows them."""

import numpy as np
from tolerances import head_axis, kernel_tolerance, worst_ratio

from gdn_jax.checks.cases import Case

MISSED = {
    ("K1-V1", "bfloat16", "dg"): 3.26e-2,
    ("K1-V1", "bfloat16", "dh_0"): 2.02e-2,
    ("beta-2-no-decay", "bfloat16", "o"): 1.3e-2,
    ("beta-2-no-decay", "bfloat16", "final_state"): 1.75e-2,
    ("beta-2-no-decay", "bfloat16", "dq"): 1.29e-2,
    ("beta-2-no-decay", "bfloat16", "dk"): 1.79e-2,
    ("beta-2-no-decay", "bfloat16", "dv"): 1.58e-2,
    ("beta-2-no-decay", "bfloat16", "dh_0"): 2.6e-2,
    ("repeated-keys-beta-2", "bfloat16", "o"): 2.5e0,  # the inverse's float16 operands lose everything
    ("repeated-keys-beta-2", "bfloat16", "final_state"): 3.98e0,
    ("repeated-keys-beta-2", "bfloat16", "dq"): 2.54e0,
    ("repeated-keys-beta-2", "bfloat16", "dk"): 1.2e0,
    ("repeated-keys-beta-2", "bfloat16", "dv"): 4.04e0,
    ("repeated-keys-beta-2", "bfloat16", "dg"): 8.38e0,
    ("repeated-keys-beta-2", "bfloat16", "dbeta"): 1.93e0,
    ("repeated-keys-beta-2", "bfloat16", "dh_0"): 5.26e0,
    ("scale-0", "bfloat16", "dh_0"): 1.5e-2,
    ("K1-V1", "float16", "o"): 1.2e-3,
    ("K1-V1", "float16", "dv"): 1.1e-3,
    ("K1-V1", "float16", "dg"): 4e-3,
    ("K1-V1", "float16", "dh_0"): 3.5e-3,
    ("beta-2", "float16", "o"): 1.05e-3,
    ("beta-2", "float16", "final_state"): 9.1e-4,
    ("beta-2", "float16", "dq"): 1e-3,
    ("beta-2", "float16", "dk"): 1.33e-3,
    ("beta-2", "float16", "dv"): 9.68e-4,
    ("beta-2", "float16", "dh_0"): 1.17e-3,
    ("beta-2-no-decay", "float16", "o"): 2.7e-3,
    ("beta-2-no-decay", "float16", "final_state"): 3.6e-3,
    ("beta-2-no-decay", "float16", "dq"): 2.64e-3,
    ("beta-2-no-decay", "float16", "dk"): 3.54e-3,
    ("beta-2-no-decay", "float16", "dv"): 3.48e-3,
    ("beta-2-no-decay", "float16", "dg"): 9.01e-3,
    ("beta-2-no-decay", "float16", "dbeta"): 3.61e-3,
    ("beta-2-no-decay", "float16", "dh_0"): 5.2e-3,
    ("repeated-keys-beta-2", "float16", "o"): 2.1e-2,
    ("repeated-keys-beta-2", "float16", "final_state"): 3.05e-2,
    ("repeated-keys-beta-2", "float16", "dq"): 2.19e-2,
    ("repeated-keys-beta-2", "float16", "dk"): 2.13e-2,
    ("repeated-keys-beta-2", "float16", "dv"): 2.82e-2,
    ("repeated-keys-beta-2", "float16", "dg"): 3.77e-2,
    ("repeated-keys-beta-2", "float16", "dbeta"): 2.3e-2,
    ("repeated-keys-beta-2", "float16", "dh_0"): 1.18e-2,
}
"""(case, dtype, output or gradient): error on an H200."""

MISSED_BY_MMA = {
    **{miss: error for miss, error in MISSED.items() if miss[:2] in (
        ("beta-2-no-decay", "bfloat16"), ("repeated-keys-beta-2", "bfloat16"), ("beta-2", "float16"),
        ("K1-V1", "bfloat16"), ("scale-0", "bfloat16"),
    )},
    ("scale-0", "float16", "dh_0"): 1.74e-3,
}  # fmt: skip
"""The same of the kernels by mma.sync on an H100: to 2 % those of the others, or less, and one that these were not
asked for. Float16 was run in every third case."""

CEILING = 1.25
"""What a miss may grow by: errors are the same at every repeat, and differ a little between compilers."""


def misses(case: Case, dtype: str, expected: dict, got: dict, known: dict | None = None) -> list[str]:
    """What is wrong with the outputs and gradients in `got`, one line each, all of them.

    known: the misses of these kernels, None for `MISSED`.
    """
    lines, known = [], MISSED if known is None else known
    for name, y in got.items():
        reference = expected[name]
        if reference is None or y is None:
            if reference is not None or y is not None:
                lines.append(f"{name} is {'absent' if y is None else 'there'}, which it should not be")
            continue
        if np.any(reference) and not np.any(y):  # an error of 1, which is less than some of those below
            lines.append(f"({case.name!r}, {dtype!r}, {name!r}): nothing but zeros")
            continue
        error = worst_ratio(reference, np.asarray(y), head_axis(name))
        bound = kernel_tolerance(name, dtype, case)
        measured = known.get((case.name, dtype, name))
        line = f"({case.name!r}, {dtype!r}, {name!r}): {error:.3e}, bound {bound:.2e}"
        if measured is None:
            if not error <= bound:
                lines.append(line)
        elif error <= bound:
            lines.append(f"{line}: no longer missed, take it out of MISSED")
        elif not error <= CEILING * measured:
            lines.append(f"{line}: more than {CEILING} times the {measured:.2e} of MISSED")
    return lines


def check(case: Case, dtype: str, expected: dict, got: dict, known: dict | None = None) -> None:
    """Fails with all `misses` of a case."""
    wrong = misses(case, dtype, expected, got, known)
    assert not wrong, "\n" + "\n".join(wrong)
