# Deferred decode. From the root of the merged tree, PYTHONPATH set. At most ${1:-150} s; further arguments: names of variants alone.
set -u
HERE=$(cd "$(dirname "$0")" && pwd); ALL=${1:-150}; shift || true; : ${OUT:=/tmp}
export PYTHONUNBUFFERED=1 COLUMNS=170 XLA_PYTHON_CLIENT_PREALLOCATE=false TF_CPP_MIN_LOG_LEVEL=2
timeout -k 5 "$ALL" python3 $HERE/bench.py $((ALL-8)) "$@" 2>&1 | grep -v "^[WIE][0-9]" | tee $OUT/serve.txt
