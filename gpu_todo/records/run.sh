# One H200, 150 s alone: versions of the kernels as packages pk_* beside this, see bench.py. base = before, head = after; others are variants.
# BUDGET: seconds. The GPU tests of the tree: TESTS=1 (60 s more).
BUDGET=${BUDGET:-150} timeout ${LIMIT:-220} python3 .gpu/records/bench.py 2>&1 | grep -v "^[WI][0-9]" | cut -c1-230
[ -z "$TESTS" ] || timeout 100 python3 -m pytest -n 0 -m gpu -p no:cacheprovider tests/test_kernels_gpu.py -x -k "lengths or garbage" 2>&1 | tail -4
