# Expected: about 170 s (bench about 110 s, then tests about 60 s). One H200 as CUDA_VISIBLE_DEVICES=0.
S=$SECONDS
export XLA_PYTHON_CLIENT_PREALLOCATE=false
(timeout 280 python3 .gpu/serve/bench.py > /tmp/serve_bench 2>&1; grep -v -i warn /tmp/serve_bench | tail -60; echo "== bench at $((SECONDS-S))s")
# After the timing, so that they do not disturb it.
timeout 200 python3 -m pytest -p no:cacheprovider tests/test_kernels_decode_gpu.py -m gpu -k "deferred or ring or drafts or copied or ten_thousand or bits_do_not or (small and (plain or token or uneven or heads)) or (test_batches and (x2 or x4 or x8 or x16))" > /tmp/serve_tests 2>&1; tail -6 /tmp/serve_tests; echo "== tests at $((SECONDS-S))s"
