#!/bin/bash
# The findings at size, on a machine with two GPUs. Run in the repository root:
#
#     GDN_COMMIT=<commit> OUT=<folder> bash findings_gpu.sh SECONDS
#
# Everything ends before SECONDS are over. By value: text, recall, the model of notebook 10, words of S3. What an earlier
# call left (PREV, a folder with its *.tar.gz) is continued: finished runs are not made again.
set -u
end=$(($(date +%s) + $1 - 15))
PREV=${PREV:-}
runs=${RUNS:-/tmp/findings}; mkdir -p "$runs" "$OUT"
export PYTHONPATH=/tmp/site:$PWD PYTHONUNBUFFERED=1 XLA_PYTHON_CLIENT_PREALLOCATE=false TF_CPP_MIN_LOG_LEVEL=2 COLUMNS=160
export XLA_FLAGS="--xla_gpu_autotune_level=0 --xla_gpu_enable_triton_gemm=false"
configs=${CONFIGS:-results/configs}
gdn() { python3 -c 'import gdn_command,sys; sys.exit(gdn_command.main())' "$@"; }
left() { echo $((end - $(date +%s))); }
say() { echo "$(date +%T) $*" | tee -a "$OUT/progress.txt"; }
save() {  # finished runs, tables and figures; called often, so that a cut-off loses little
    for name in text_30m recall_by_state words_s3_by_depth; do
        [ -d "$runs/$name" ] && tar czf "$OUT/$name.tgz.tmp" --exclude='lock*' --exclude='*.tmp' -C "$runs" "$name" &&
            mv "$OUT/$name.tgz.tmp" "$OUT/$name.tgz"
    done
    tail -n 60 "$runs"/*.log > "$OUT/logs.txt" 2>/dev/null
}

python3 -c "import jax; jax.jit(lambda x: x + 1)(1.0)" 2>/tmp/flags.err || { say "flags refused: $(tail -1 /tmp/flags.err)"; unset XLA_FLAGS; }
[ -n "$PREV" ] && for file in "$PREV"/*.tgz; do [ -e "$file" ] && tar xzf "$file" -C "$runs"; done
find "$runs" -name 'lock*' -delete
# Files of the corpus into the cache of the disk.
( cd "$(python3 -c 'import sysconfig; print(sysconfig.get_path("purelib"))')" && find . -name '*.py' -print0 | xargs -0 -P 8 -n 500 cat > /dev/null ) &
say "start, $(left) s left, commit ${GDN_COMMIT:-unknown}"
nvidia-smi --query-gpu=index,name,memory.total --format=csv,noheader 2>/dev/null | tee -a "$OUT/progress.txt"

# sweep TASK NAME GPU...: one process for each GPU named (a number may come again), all at one folder.
sweep() {
    local task=$1 name=$2 number=0 gpu; shift 2
    [ "$(left)" -lt 45 ] && { say "$name: no time"; return; }
    [ -e "$runs/$name/table.md" ] && { say "$name: is finished"; return; }
    say "$name: begins, $(left) s left"
    for gpu in "$@"; do
        number=$((number + 1))
        local how=(--resume)
        if [ ! -e "$runs/$name/config.json" ] && [ $number = 1 ]; then how=(--config "$configs/$name.${SIZE:-full}.json"); fi
        ( export CUDA_VISIBLE_DEVICES=$gpu
          while [ $number != 1 ] && [ ! -e "$runs/$name/config.json" ] && [ "$(left)" -gt 0 ]; do sleep 0.2; done
          sleep "$number"
          export -f gdn
          timeout -s TERM -k 5 "$(left)" bash -c 'gdn "$@"' gdn sweep "$task" --out "$runs/$name" "${how[@]}" > "$runs/$name.$number.log" 2>&1
          echo "$(date +%T) $name process $number on GPU $gpu: status $?" >> "$OUT/progress.txt" ) &
    done
}
watch_until() {  # until the sweeps named have no process, or the time is over
    while [ "$(jobs -r | wc -l)" -gt 0 ] && [ "$(left)" -gt 0 ]; do
        sleep 5; save
        for name in "$@"; do [ -e "$runs/$name/runs.jsonl" ] && echo "$(date +%T) $name $(wc -l < "$runs/$name/runs.jsonl") runs"; done > "$runs/counts.txt"
        (nvidia-smi --query-gpu=index,utilization.gpu,memory.used --format=csv,noheader 2>/dev/null; free -g | grep Mem; cat "$runs/counts.txt") > "$OUT/state.txt"
    done
}

# The order of the mixers of the file, and a GPU for each: gated_delta_net, delta_net, mamba2, hybrid, softmax, linear.
sweep bytes text_30m 0 1 1 0 0 1
watch_until text_30m
say "text: $(tr "\n" " " < "$runs/counts.txt"), $(left) s left"
sweep recall recall_by_state 0 1 0 1 0 1 0 1 0 1
if [ "$(left)" -gt 75 ] && [ ! -e "$runs/gates/gates.npz" ]; then
    # 1.9 million parameters: less than 4 MB in float16.
    ( export CUDA_VISIBLE_DEVICES=1; export -f gdn
      timeout -s TERM -k 5 "$(left)" bash -c 'gdn "$@"' gdn train bytes --packages --out "$runs/gates" --length 2048 --batch-size 16 \
          --steps ${GATES_STEPS:-1500} --hidden-size 160 --num-layers 6 --num-heads 3 --head-dim 32 --expand-v 2 --mlp-ratio 2.5 --lr 0.003 \
          --eval-every 500 --save-every ${GATES_STEPS:-1500} --log-every 50 --no-deterministic --tie-embeddings > "$runs/gates.log" 2>&1 &&
      JAX_PLATFORMS=cpu python3 - "$runs/gates" "$runs/gates/gates.npz" <<'P' && tar czf "$OUT/gates.tgz" --exclude=checkpoints -C "$runs" gates
import sys, jax, numpy as np
from flax import nnx
from gdn_jax.experiments.load import load_run
flat = jax.tree_util.tree_flatten_with_path(nnx.state(load_run(sys.argv[1]).model, nnx.Param))[0]
np.savez(sys.argv[2], **{jax.tree_util.keystr(path): np.asarray(x, np.float16) for path, x in flat})
P
      say "gates: status $?" ) &
fi
watch_until recall_by_state
say "recall: $(tr "\n" " " < "$runs/counts.txt"), $(left) s left"
sweep permutation words_s3_by_depth 0 1 0 1 0 1 0 1
watch_until words_s3_by_depth
wait
save
say "end, $(left) s left"; cat "$OUT/progress.txt"; tail -n 4 "$runs"/*.log
