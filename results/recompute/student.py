"""Student's t: two-sided p-values and 95 % intervals, by integration."""

import math
import statistics

QUANTILES: dict[int, float] = {}


def tail(t: float, freedom: int, parts: int = 20_000) -> float:
    """Two-sided p-value of Student's t: with t = sqrt(freedom) tan(x) the density is that of cos(x)^(freedom - 1)."""

    def integral(low: float) -> float:
        width = (math.pi / 2 - low) / parts
        values = [max(math.cos(low + i * width), 0.0) ** (freedom - 1) for i in range(parts + 1)]
        return width / 3 * (values[0] + values[-1] + 4 * sum(values[1:-1:2]) + 2 * sum(values[2:-1:2]))

    return integral(math.atan(t / math.sqrt(freedom))) / integral(0.0)


def half_width(values: list[float]) -> float:
    """Half of the 95 % interval of a mean."""
    freedom = len(values) - 1
    if freedom not in QUANTILES:
        low, high = 1.0, 20.0
        for _ in range(50):
            middle = (low + high) / 2
            low, high = (middle, high) if tail(middle, freedom, 2000) > 0.05 else (low, middle)
        QUANTILES[freedom] = low
    return QUANTILES[freedom] * statistics.stdev(values) / math.sqrt(len(values))
