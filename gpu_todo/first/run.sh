#!/bin/bash
# bash .gpu/first/run.sh [TOTAL]    from the repository root, one H200, alone on it; TOTAL seconds in all (200)
# First calls in fresh processes, one after another, without a compilation cache: the merged tree (modes final, off, in_order of
# measure.py) and main as of c03b55c (.gpu/first/before: gdn_jax and pallas_kernels). $OUT/first.txt gets all lines.
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
  echo "cpus $(nproc)"
  one 4096x8rt forward final; one 1x32768 forward final; one 2_8 forward final; one 4096x8 forward final
  one 4096x8rt training final; one 1x32768 training final; one 4096x8 training final
  one 4096x8rt forward before; one 4096x8rt training before; one 1x32768 forward before
  one 4096x8rt forward in_order; one 1x32768 forward in_order
  one 4096x8rt forward off; one 4096x8rt training off
  [ $((TOTAL - SECONDS)) -gt 45 ] && PYTHONPATH=$root:$site timeout -k 5 40 "${PYTHON:-python3}" -m pytest -p no:cacheprovider -q -m gpu \
    tests/test_kernels_ahead.py 2>&1 | tail -4
  one 4096x8rt training in_order; one 1x32768 training before; one 4096x8 training before
  one 2_8 forward before; one 4096x8 forward before
  one 4096x8rt forward final; one 1x32768 forward final; one 2_8 forward final; one 4096x8rt training final
  echo "took $SECONDS s"
} | tee "$OUT/first.txt"
