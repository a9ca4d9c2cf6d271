# bash .gpu/final/run.sh SECONDS: timings alone; then GPU tests of decoding beside findings.
set -u
python3 -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --upgrade --target /tmp/site .whl/*.whl 2>&1 | tail -1
export PYTHONUNBUFFERED=1 COLUMNS=170 XLA_PYTHON_CLIENT_PREALLOCATE=false TF_CPP_MIN_LOG_LEVEL=2 PYTHONPATH=/tmp/site:$PWD
S=$(date +%s)
timeout -k 3 58 python3 .gpu/final/bench.py 50 2>&1 | grep -v "^[WIE][0-9]" > $OUT/final.txt
echo timed $(( $(date +%s) - S )) s
LEFT=$(( $1 - $(date +%s) + S - 8 ))
(XLA_PYTHON_CLIENT_PREALLOCATE=false timeout -k 3 $LEFT python3 -m pytest -p no:cacheprovider -o addopts= -m gpu -q -n 5 --dist worksteal --durations 8 -k "deferred or ring" tests/test_kernels_decode_gpu.py > $OUT/tests.txt 2>&1; echo "tests end $(( $(date +%s) - S )) s" >> $OUT/tests.txt) &
XLA_PYTHON_CLIENT_PREALLOCATE=true bash .gpu/findings/run.sh $((LEFT - 20)) 3 recall_zoology:recall:gated_delta_net,delta_net needle_1_longer:sentence:softmax_attention > $OUT/findings.txt 2>&1
wait
tail -4 $OUT/tests.txt; tail -12 $OUT/findings.txt; cat $OUT/final.txt
