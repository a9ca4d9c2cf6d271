#!/bin/bash
# About 110 s on one H200: variants of the kernels in turns, in short bursts (23 small compilations, 7 rounds of 0.25 s each).
cd "$(dirname "$0")" && PYTHONPATH="$PYTHONPATH:$PWD/../.." timeout 170 python3 ab.py 2>&1 | grep --line-buffered -v Warning
