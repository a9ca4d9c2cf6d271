# One H200 alone, at most 120 s, from the repository root with PYTHONPATH set, on the tree with branch `records` merged.
# Carries .gpu/records/pk_old, the kernels of main before that branch (commit e20bd2e), with its imports renamed.
# First the GPU tests of what changed (loader of the outputs; packed rows in chains and gradients), then old and new in turns.
mkdir -p ${OUT:=/tmp}; export OUT
T=$SECONDS
XLA_PYTHON_CLIENT_PREALLOCATE=false timeout -s INT -k 5 ${TESTS:-50} python3 -m pytest -q -p no:cacheprovider -m gpu -n 8 --dist worksteal --tb=line --maxfail=6 \
  tests/test_kernels_backward_gpu.py tests/test_kernels_gpu.py -k "(backward_gpu and packed and (configurations or repeats or segments)) or (small_strengths and lengths1) or (not backward_gpu and (test_configurations or garbage or thousand) and wide)" > $OUT/records_tests.txt 2>&1
tail -c 1500 $OUT/records_tests.txt; echo "tests end at $((SECONDS-T)) s"
BUDGET=${BUDGET:-62} timeout -k 5 ${LIMIT:-72} python3 .gpu/records/bench.py 2>&1 | grep -v "^[WIE][0-9]" | cut -c1-230 | tee $OUT/records_bench.txt
echo "end at $((SECONDS-T)) s"
