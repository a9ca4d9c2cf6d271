#!/bin/bash
# About 70 s on one H200: gradients of weights by a prototype that fills the GPU evenly, beside cuBLAS, in turns.
cd "$(dirname "$0")" && PYTHONPATH="$PYTHONPATH:$PWD/../.." timeout 150 python3 dw.py 2>&1 | grep --line-buffered -v Warning
