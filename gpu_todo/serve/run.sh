# Serving. From the root of the merged tree (branch serve merged), PYTHONPATH set. At most ${1:-170} s. Also carries .gpu/serve/variants and bench.py.
set -u
HERE=$(cd "$(dirname "$0")" && pwd); S=$SECONDS; ALL=${1:-170}; : ${OUT:=/tmp}
export PYTHONUNBUFFERED=1 COLUMNS=170 XLA_PYTHON_CLIENT_PREALLOCATE=false
mark() { echo "== serve: $1 at $((SECONDS-S)) s"; }
left() { echo $((ALL-(SECONDS-S))); }
{
B=$(( $(left) - 26 )); timeout -k 5 $((B+8)) python3 $HERE/bench.py $B 2>&1 | grep -v "^[WIE][0-9]"; mark bench
L=$(left); [ $L -gt 14 ] && timeout -k 3 $((L-2)) python3 -c 'import gdn_command,sys; sys.exit(gdn_command.main())' bench --what decode --tokens 8 --batches 128 --pools bfloat16 --deferred 16 1 --drafts tree chain --repeats 7 2>&1 | grep -v "^[WIE][0-9]"; mark trees
} 2>&1 | tee $OUT/serve.txt
