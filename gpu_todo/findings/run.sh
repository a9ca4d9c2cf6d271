#!/bin/bash
# bash .gpu/findings/run.sh    TOTAL seconds in all; jobs from jobs.json beside it; $OUT/findings.tar has everything
here=$(cd "$(dirname "$0")" && pwd)
export PYTHONPATH=${PYTHONPATH:+$PYTHONPATH:}$(cd "$here/../.." && pwd) PYTHONUNBUFFERED=1 OUT=${OUT:-/tmp/findings-out} GDN_COMMIT=$(cat "$here/commit")
[ -n "${CUDA_VISIBLE_DEVICES:-}" ] || export CUDA_VISIBLE_DEVICES=0
cd "$here/../.." && mkdir -p "$OUT" && exec ${PYTHON:-python3} "$here/lanes.py" "$here/jobs.json" "${TOTAL:-400}"
