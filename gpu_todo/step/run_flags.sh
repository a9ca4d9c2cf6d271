#!/bin/bash
# About 75 s on one H200: three programs of 4 layers. With 24 layers two programs take about 130 s:
# run_flags.sh 24 "as it is" concurrent. More variants: "loops too", "no graphs", "graphs from 1".
cd "$(dirname "$0")" && PYTHONPATH="$PYTHONPATH:$PWD/../.." timeout 280 python3 flags.py "${1:-4}" 170 "${@:2}" 2>&1 | grep --line-buffered -v Warning
