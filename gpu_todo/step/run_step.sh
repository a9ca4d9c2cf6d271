#!/bin/bash
# About 150 s on one H200: tests of the kernels on the device, then the whole step of 0.4b with the SwiGLU as on main
# (old_swiglu.py) and as on branch step, in turns in one process. The branch need not be merged: its packages are in new/.
# run_step.sh 2048 (or 32768) times another length without the tests; run_step.sh 8192 new "new, concurrent" another mode of
# CUDA graphs.
cd "$(dirname "$0")"; HERE=$PWD; S=$PYTHONPATH
if [ -z "$1" ]; then
  (cd new/tests && PYTHONPATH=$HERE/new:$HERE/new/tests:$S timeout 120 python3 -m pytest -c ../../../../pyproject.toml --rootdir . \
    -p no:cacheprovider test_layer_kernels_gpu.py -k swiglu 2>&1 | tail -6 | cut -c1-200)
fi
L=${1:-8192}; shift
PYTHONPATH=$HERE/new:$HERE:$S timeout 280 python3 compare.py $L ${LAYERS:-24} "$@" 2>&1 | grep --line-buffered -v Warning
