python3 -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --upgrade --target /tmp/site .whl/*.whl
export PYTHONUNBUFFERED=1 COLUMNS=170 PYTHONPATH=/tmp/site:$PWD
S=$SECONDS; mark() { echo "== $1 at $((SECONDS-S))s" | tee -a $OUT/log.txt; }
gdn() { timeout $1 python3 -c 'import gdn_command,sys; sys.exit(gdn_command.main())' "${@:2}" 2>&1 | grep -v "^W1\|^I1" | tail -${TAIL:-30} >> $OUT/log.txt; }
(
export CUDA_VISIBLE_DEVICES=1 XLA_PYTHON_CLIENT_PREALLOCATE=false
timeout -s INT -k 8 268 python3 -m pytest -p no:cacheprovider -m gpu -n 18 --dist worksteal --tb=short --maxfail=30 tests/test_kernels_decode_gpu.py tests/test_layer_kernels_gpu.py tests/test_kernels_gpu.py tests/test_kernels_backward_gpu.py > /tmp/tests.txt 2>&1; tail -c 60000 /tmp/tests.txt > $OUT/tests.txt; mark tests
) &
(
export CUDA_VISIBLE_DEVICES=0
gdn 175 bench --what step --lengths 8192 2048 32768 --json $OUT/step.json; mark step
gdn 80 bench --what decode --implementations mosaic_gpu --batches 128 512 1 --pools float32 bfloat16 --deferred 1 16 --tokens 1 4 --repeats 12 --json $OUT/decode.json; mark decode
gdn $((275-SECONDS+S)) bench --what forward --rows "16,32" --json $OUT/forward.json; mark forward
) &
wait; mark all; tail -c 7500 $OUT/log.txt; tail -c 3500 $OUT/tests.txt
