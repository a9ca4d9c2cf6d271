#!/bin/bash
# bash .gpu/first/run.sh [TOTAL]    from the repository root, one H200, alone on it; TOTAL seconds in all (200)
# First calls in fresh processes, one after another, without a compilation cache: the merged tree (modes final, off, in_order of
# measure.py) and main as of c03b55c (.gpu/first/before: gdn_jax and pallas_kernels). $OUT/first2.txt gets all lines.
here=$(cd "$(dirname "$0")" && pwd); root=$(cd "$here/../.." && pwd); cd "$root" || exit 1
OUT=${OUT:-/tmp/first-out}; mkdir -p "$OUT"; TOTAL=${1:-${TOTAL:-200}}; site=${PYTHONPATH:-}
export PYTHONUNBUFFERED=1 XLA_PYTHON_CLIENT_PREALLOCATE=false TF_CPP_MIN_LOG_LEVEL=2
unset JAX_COMPILATION_CACHE_DIR
one() {  # ROW WHAT MODE
  local left=$((TOTAL - SECONDS)) tree=$root; [ "$3" = before ] && tree=$here/before
  [ "$left" -lt 12 ] && { echo "left out: $*"; return; }
  # The tree first: what the caller's PYTHONPATH has of the packages must not come before it.
  (cd /tmp && PYTHONPATH=$tree:$site timeout -k 5 $((left < 40 ? left : 40)) "${PYTHON:-python3}" "$here/measure.py" "$@" 2>&1) \
    | grep -v "^[WIE][0-9]" | cut -c1-700 || true
}
{
  echo "again: cpus $(nproc)"
  for m in final before final before; do one 4096x8rt forward $m; done; for m in final before; do one 4096x8rt training $m; done
  true
  true
  echo "took $SECONDS s"
} | tee "$OUT/first2.txt"
