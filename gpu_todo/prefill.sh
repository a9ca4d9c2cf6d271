#!/bin/bash
# bash .gpu/prefill.sh   (150 s, one GPU, from the repository root): GPU tests of prefill over a pool, then its times
set -u
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH} PYTHONUNBUFFERED=1
OUT=${OUT:-/tmp/prefill-out}; mkdir -p "$OUT"
start=$(date +%s)
timeout -s INT 70 python3 -m pytest -q -m gpu -p no:cacheprovider --durations=4 tests/test_kernels_prefill_gpu.py \
  -k "small-bfloat16-crossed or small-null or long or many-bfloat16 or (test_prefill and small and not bfloat16) or copied or past" 2>&1 | tail -25
echo "tests: $(( $(date +%s) - start )) s"
PREFILL_SECONDS=$(( 147 - $(date +%s) + start )) python3 .gpu/prefill.py
