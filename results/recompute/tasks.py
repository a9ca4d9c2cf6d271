"""The tables of sweeps in tasks/*.md."""

import re
import statistics

from results.recompute.printed import Checks, tables
from results.recompute.stored import LINES, NAMES, ROOT, chosen, learned, runs_of, score
from results.recompute.student import half_width


def of_tasks() -> Checks:
    """The tables of sweeps in tasks/*.md."""
    for path in sorted((ROOT / "tasks").glob("*.md")):
        for head, rows, after in tables(path):
            link = re.match(r"All of it: \[([^\]]+)\]", after)
            if not link or "learning rate" not in head:
                continue
            sweep, at = link[1], head.index("learning rate")
            scales = sorted({line["scale"] for line in LINES[sweep]})
            seen: dict[str, list[tuple[str, ...]]] = {}
            for row in rows:
                mixer, rank = NAMES[row[0]], 0
                if "state" in head:
                    models = seen.setdefault(mixer, [])
                    models += [] if tuple(row[1:4]) in models else [tuple(row[1:4])]
                    rank = models.index(tuple(row[1:4]))
                begins = [x for x in ("write start", "time step") if x in head]
                start = float(row[head.index(begins[0])]) if begins else None
                runs = chosen(runs_of(sweep, mixer, scales[rank], start))
                where = f"tasks/{path.name}, {sweep}, {', '.join(row[:at])}"
                yield f"{where}, learning rate", row[at], runs[0]["lr"]
                kept = [run for run in runs if learned(run)]
                if "learned" in head:
                    k, n = row[head.index("learned")].split(" of ")
                    yield f"{where}, learned", k, len(kept)
                    yield f"{where}, runs", n, len(runs)
                for title, cell in zip(head, row, strict=True):
                    size = re.fullmatch(r"(\d+) \w+", title)
                    if not size or cell == "-":
                        continue
                    scores = [score(run, size[1]) for run in kept]
                    mean, *width = cell.split(" ± ")
                    yield f"{where}, {title}", mean, statistics.fmean(scores)
                    if width:
                        yield f"{where}, {title}, interval", width[0], half_width(scores)
