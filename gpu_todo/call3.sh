set -u
python3 -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --upgrade --target /tmp/site .whl/*.whl 2>&1 | tail -1
export PYTHONUNBUFFERED=1 COLUMNS=170 PYTHONPATH=/tmp/site:$PWD XLA_PYTHON_CLIENT_PREALLOCATE=false
S=$SECONDS; mark() { echo "== $1 at $((SECONDS-S))s" | tee -a $OUT/log.txt; }
T="timeout -s INT -k 5 100 python3 -m pytest -p no:cacheprovider -q -m gpu --dist worksteal --tb=short --maxfail=12"
$T -n 7 tests/test_kernels_backward_gpu.py tests/test_kernels_gpu.py -k "(backward_gpu and packed and (configurations or repeats or segments)) or (small_strengths and lengths1) or (not backward_gpu and (test_configurations or garbage or thousand) and wide)" > /tmp/t1 2>&1 &
$T -n 6 tests/test_kernels_conv_update_gpu.py tests/test_kernels_decode_gpu.py -k "conv_update or test_small or tree" > /tmp/t2 2>&1 &
$T -n 2 tests/test_hybrid.py tests/test_rules.py -k "by_cudnn" > /tmp/t3 2>&1 &
wait; mark tests
for t in 1 2 3; do tail -c 5000 /tmp/t$t > $OUT/tests$t.txt; tail -c 900 /tmp/t$t; done
BUDGET=56 timeout -k 5 66 python3 .gpu/records/bench.py 2>&1 | grep -v "^[WIE][0-9]" | cut -c1-230 | tee $OUT/records_bench.txt; mark records
timeout -k 5 42 python3 .gpu/serve/conv_decode.py 2>&1 | grep -v "^W1\|^I1\|^E1" | tee $OUT/conv_decode.txt; mark token
LEFT=$((276-(SECONDS-S)))
timeout -k 5 $LEFT python3 -c 'import gdn_command,sys; sys.exit(gdn_command.main())' bench --what generate --model 0.4b --batches 1 32 256 --prefill 0 --repeats 5 2>&1 | grep -v "^W1\|^I1\|^E1" | tail -14 | tee $OUT/generate.txt; mark generate
