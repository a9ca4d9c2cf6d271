# Two lanes of text_100m in the background (they go on after this call), and the GPU tests beside them.
set -u
python3 -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --upgrade --target /tmp/site .whl/*.whl 2>&1 | tail -1
export PYTHONUNBUFFERED=1 COLUMNS=170 PYTHONPATH=/tmp/site:$PWD GDN_COMMIT=$(cat .gpu/commit)
S=$SECONDS; mark() { echo "== $1 at $((SECONDS-S))s" | tee -a $OUT/log.txt; }
W=/tmp/work/text_100m; mkdir -p /tmp/work; rm -rf /tmp/repo; cp -r . /tmp/repo
cat > /tmp/lane.sh <<'L'
cd /tmp/repo; export PYTHONPATH=/tmp/site:/tmp/repo XLA_PYTHON_CLIENT_MEM_FRACTION=0.36
exec python3 -c 'import gdn_command,sys; sys.exit(gdn_command.main())' sweep bytes --out /tmp/work/text_100m "$@"
L
setsid bash /tmp/lane.sh --config results/configs/text_100m.full.json > /tmp/work/a.log 2>&1 < /dev/null &
setsid bash -c 'while [ ! -e /tmp/work/text_100m/config.json ]; do sleep 0.5; done; sleep 2; exec bash /tmp/lane.sh --resume' > /tmp/work/b.log 2>&1 < /dev/null &
export XLA_PYTHON_CLIENT_PREALLOCATE=false
T="timeout -s INT -k 8 $((555-(SECONDS-S))) python3 -m pytest -p no:cacheprovider -o addopts= -m gpu -n 11 --dist worksteal --tb=short --maxfail=30"
$T tests/test_kernels_conv_update_gpu.py tests/test_kernels_decode_gpu.py tests/test_layer_kernels_gpu.py tests/test_kernels_prefill_gpu.py tests/test_serving.py tests/test_hybrid.py tests/test_rules.py tests/test_kernels_gpu.py tests/test_kernels_backward_gpu.py > /tmp/t1 2>&1
mark tests; tail -c 14000 /tmp/t1 > $OUT/tests.txt; tail -c 5000 /tmp/t1
nvidia-smi --query-gpu=utilization.gpu,memory.used --format=csv,noheader
LEFT=$((575-(SECONDS-S))); [ $LEFT -gt 0 ] && sleep $LEFT
cp $W/runs.jsonl $W/config.json $OUT/; cut -c1-160 $W/runs.jsonl; for x in a b; do tail -c 700 /tmp/work/$x.log | tr '\r' '\n' | tail -4; cp /tmp/work/$x.log $OUT/; done; mark end
