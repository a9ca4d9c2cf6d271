#!/usr/bin/env bash
# From the repository root, one GPU: variants of .gpu/records.tar.gz in one run (main and head twice, each in a process of its own, so that
# what a process adds to its times shows), then the GPU tests of this branch. About 60 s and up to 240 s.
python .gpu/records.py
timeout 240 python -m pytest -x -q -n 0 -p no:cacheprovider -m gpu tests/test_kernels_gpu.py tests/test_kernels_backward_gpu.py \
  -k "strength or case_table or garbage or packed" 2>&1 | tail -15
