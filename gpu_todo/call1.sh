# Tests of serving and of first calls, alone on the GPU; then first calls; then how fast needle_3 trains.
set -u
python3 -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --upgrade --target /tmp/site .whl/*.whl 2>&1 | tail -1
export PYTHONUNBUFFERED=1 COLUMNS=170 GDN_COMMIT=$(cat .gpu/commit) TF_CPP_MIN_LOG_LEVEL=2; ROOT=$PWD; S=$SECONDS
mark() { echo "== $1 at $((SECONDS-S))s" | tee -a $OUT/log.txt; }
export PYTHONPATH=/tmp/site:$ROOT XLA_PYTHON_CLIENT_PREALLOCATE=false
T="python3 -m pytest -p no:cacheprovider -o addopts= -m gpu -n 6 --dist worksteal --tb=short --maxfail=25 -rs"
timeout -s INT -k 8 330 $T tests/test_kernels_decode_gpu.py tests/test_kernels_conv_update_gpu.py tests/test_kernels_ahead.py tests/test_layer_kernels_gpu.py "tests/test_kernels_backward_gpu.py" --deselect nothing -k "not test_kernels_backward_gpu or (segments and wide-keys-1-float16)" > $OUT/tests.txt 2>&1
tail -c 6000 $OUT/tests.txt; mark tests
one() { (cd /tmp; timeout -k 5 45 python3 $ROOT/.gpu/first/measure.py "$@" 2>&1 | grep -v "^[WIE][0-9]" | cut -c1-500) | tee -a $OUT/first.txt; }
one 4096x8rt forward final; one 4096x8rt training final; one 1x32768 training final; one 1x32768 forward final
export JAX_COMPILATION_CACHE_DIR=/tmp/cache; one 4096x8rt training final; one 4096x8rt training final; one 1x32768 forward final; one 1x32768 forward final
unset JAX_COMPILATION_CACHE_DIR; mark first
gdn() { timeout -k 5 70 python3 -c 'import gdn_command,sys; sys.exit(gdn_command.main())' "$@"; }
for m in gated_delta_net; do
 (gdn sweep sentence --config results/configs/needle_3.full.json --mixers $m --lrs 0.003 --lr-seeds 1 --seeds 1 --steps 300 --val-sequences 64 --test-lengths 1024 8192 --out /tmp/n3 2>&1 | tr '\r' '\n' | tail -4; cut -c1-900 /tmp/n3/runs.jsonl) > /tmp/probe.txt 2>&1; cat /tmp/probe.txt | tee -a $OUT/probe.txt
done; mark probe
