# From the root of the merged tree (branch serve merged), PYTHONPATH set. At most 100 s.
# Also carries .gpu/serve/before: gdn_jax and pallas_kernels of e20bd2e, and conv_decode.py beside this file.
HERE=$(cd "$(dirname "$0")" && pwd); ROOT=$PWD; S=$SECONDS
export PYTHONUNBUFFERED=1 COLUMNS=170 XLA_PYTHON_CLIENT_PREALLOCATE=false JAX_COMPILATION_CACHE_DIR=${JAX_COMPILATION_CACHE_DIR:-/tmp/jax-cache-serve}
mark() { echo "== $1 at $((SECONDS-S)) s"; }
timeout -s INT -k 5 40 python3 -m pytest -p no:cacheprovider -q -m gpu -n 6 --tb=short tests/test_kernels_conv_update_gpu.py "tests/test_kernels_decode_gpu.py::test_small" 2>&1 | tail -25; mark tests
timeout -k 5 45 python3 $HERE/conv_decode.py 2>&1 | grep -v "^W1\|^I1\|^E1" | tail -45; mark token
gdn() { timeout -k 5 $1 python3 -c 'import gdn_command,sys; sys.exit(gdn_command.main())' "${@:2}" 2>&1 | grep -v "^W1\|^I1\|^E1" | tail -12; }
LEFT=$((98-(SECONDS-S))); [ $LEFT -gt 15 ] && gdn $LEFT bench --what generate --model 0.4b --batches 1 32 256 --prefill 0 --repeats 5; mark generate
LEFT=$((98-(SECONDS-S))); [ $LEFT -gt 18 ] && (echo "before:"; cd $HERE/before && PYTHONPATH=${PYTHONPATH/$ROOT/$HERE\/before} gdn $LEFT bench --what generate --model 0.4b --batches 1 32 256 --prefill 0 --repeats 5); mark "generate before"
