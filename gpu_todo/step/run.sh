#!/bin/bash
# THIRD SCRIPT (06:05): about 75 s on one H200: gradients of weights by a prototype that fills the GPU evenly, beside cuBLAS, in
# turns (run_dw.sh). Then, if there is time, run_flags.sh (CUDA graphs in other modes, 4 layers, 75 s). Others in this folder:
# run_step.sh 8192 | 2048 | 32768 (the whole step, old and new, from the copy of the branch in new/, 100 s each; LAYERS=24),
# run_step.sh 8192 new "new, concurrent"; run_ab.sh and run_prototype.sh have been run.
cd "$(dirname "$0")" && bash run_dw.sh && bash run_flags.sh
