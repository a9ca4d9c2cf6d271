set -u
python3 -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --upgrade --target /tmp/site .whl/*.whl 2>&1 | tail -1
export PYTHONUNBUFFERED=1 COLUMNS=170 PYTHONPATH=/tmp/site:$PWD
S=$SECONDS; mark() { echo "== $1 at $((SECONDS-S))s" | tee -a $OUT/log.txt; }
gdn() { timeout $1 python3 -c 'import gdn_command,sys; sys.exit(gdn_command.main())' "${@:2}" 2>&1 | grep -v "^W1\|^I1" | tail -${TAIL:-40} >> $OUT/log.txt; }
gdn 240 bench --what step --model 0.4b --lengths 2048 8192 32768 --json $OUT/step.json; mark step
gdn 60 bench --what forward --rows "16,32 1x32768" "16,32 4096x8" "2,8 1x32768" --no-peers --json $OUT/forward.json; mark forward
gdn 70 bench --what training --rows "16,32 1x32768" "16,32 4096x8" --no-peers --json $OUT/training.json; mark training
export XLA_PYTHON_CLIENT_PREALLOCATE=false
timeout -s INT -k 8 110 python3 -m pytest -p no:cacheprovider -m gpu -n 8 --dist worksteal --tb=short tests/test_layer_kernels_gpu.py > $OUT/tests.txt 2>&1; mark tests
tail -c 9000 $OUT/log.txt; tail -c 2500 $OUT/tests.txt
