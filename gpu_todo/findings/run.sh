#!/bin/bash
# bash .gpu/findings/run.sh [TOTAL]    from the repository root, one H200; TOTAL seconds in all (220)
# $OUT/findings.tar gets the folders of sweeps (config.json, runs.jsonl, table.md, figure.png) and logs.
# GDN_COMMIT: the commit of the tree; without it .gpu/findings/commit. PREV: an unpacked findings.tar to go on with.
# PYTHON, EXTRA (more options of every sweep, for a test on a CPU), PARITY_LEAST (seconds that parity_far needs to begin).
here=$(cd "$(dirname "$0")" && pwd); root=$(cd "$here/../.." && pwd); cd "$root" || exit 1
export PYTHONPATH=${PYTHONPATH:+$PYTHONPATH:}$root PYTHONUNBUFFERED=1 OUT=${OUT:-/tmp/findings-out}
export GDN_COMMIT=${GDN_COMMIT:-$(cat "$here/commit")}
[ -n "${CUDA_VISIBLE_DEVICES:-}" ] || export CUDA_VISIBLE_DEVICES=0
TOTAL=${1:-${TOTAL:-220}}
exec timeout -k 5 "$((TOTAL + 5))" "${PYTHON:-python3}" "$here/lanes.py" "$TOTAL"
