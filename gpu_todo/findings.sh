#!/bin/bash
# bash .gpu/findings.sh A   (at most 270 s, one GPU): recall pilots side by side; $OUT/recall_pilots.log has every line
# bash .gpu/findings.sh B   (at most 400 s, one GPU or two): text with seeds; $OUT/text_30m_seeds.{runs.jsonl,config.json,...}
# bash .gpu/findings.sh C   (at most 270 s, one GPU): words of S3 by depth, pilots side by side; $OUT/words_pilots.log
#   B goes on with an earlier part where PREV=folder holds its config.json and runs.jsonl.
set -u
here=$(cd "$(dirname "$0")" && pwd); cd "$here/.."
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH} PYTHONUNBUFFERED=1 GDN_COMMIT=${GDN_COMMIT:-$(cat "$here/commit")}
OUT=${OUT:-/tmp/findings-out}; mkdir -p "$OUT"

part_a() {
  export XLA_PYTHON_CLIENT_MEM_FRACTION=.1 XLA_FLAGS=--xla_gpu_autotune_level=0
  local logs=/tmp/findings-pilots c="$here/recall_base.json" every=250 limit=205; rm -rf $logs; mkdir -p $logs
  pilot() { timeout -s KILL 255 python3 "$here/recall_pilot.py" "$1" "$c" "$2" "${every}" $limit "${@:3}" >"$logs/$1.log" 2>&1 & }
  pilot 1-untied       gated_delta_net    'lrs=[0.001,0.003,0.01]'
  pilot 2-tied         gated_delta_net    tie_embeddings=true
  pilot 3-tied         softmax_attention  tie_embeddings=true
  pilot 4-tied-hd8     gated_delta_net    tie_embeddings=true head_dim=8 'lrs=[0.003,0.01]'
  pilot 5-tied         delta_net          tie_embeddings=true
  pilot 6-tied-vary    gated_delta_net    tie_embeddings=true vary_pairs=true
  pilot 7-untied-v1024 gated_delta_net    vocab_size=1024
  every=100 pilot 8-tied-b256 gated_delta_net tie_embeddings=true batch_size=256 'lrs=[0.003]' steps=1000
  wait
  cat $logs/*.log >"$OUT/recall_pilots.log"
  for f in $logs/*.log; do
    head -1 $f | cut -c1-150
    grep -E "step ([0-9]*[05]00) " $f | sed 's/ seed 0//'; tail -2 $f | grep -vE "step [0-9]*[05]00 " | cut -c1-300
  done
}

part_c() {
  export XLA_PYTHON_CLIENT_MEM_FRACTION=.1 XLA_FLAGS=--xla_gpu_autotune_level=0
  local logs=/tmp/findings-words c=results/configs/words_s3_by_depth.full.json limit=205; rm -rf $logs; mkdir -p $logs
  pilot() { timeout -s KILL 255 python3 "$here/recall_pilot.py" "$1" $c "$2" 1000 $limit 'lrs=[0.001,0.003]' 'test_lengths=[32,64]' val_sequences=256 "${@:3}" >"$logs/$1.log" 2>&1 & }
  pilot 1-neg-1         gated_delta_net_neg num_layers=1
  pilot 2-neg-2         gated_delta_net_neg num_layers=2
  pilot 3-neg-4         gated_delta_net_neg num_layers=4
  pilot 4-neg-1-swaps   gated_delta_net_neg num_layers=1 'elements="swaps"'
  pilot 5-gated-2       gated_delta_net     num_layers=2
  pilot 6-attention-4   softmax_attention   num_layers=4
  pilot 7-neg-2-len16   gated_delta_net_neg num_layers=2 length=16 'test_lengths=[16,32]'
  pilot 8-neg-2-nowd    gated_delta_net_neg num_layers=2 weight_decay=0 time_step=0.1
  wait
  cat $logs/*.log >"$OUT/words_pilots.log"
  for f in $logs/*.log; do head -1 $f | cut -c1-150; tail -n +2 $f | sed 's/ seed 0//' | cut -c1-200; done
}

part_b() {
  local new=/tmp/text_30m_seeds devices=${CUDA_VISIBLE_DEVICES:-$(nvidia-smi --query-gpu=index --format=csv,noheader | paste -sd,)}
  local first=${devices%%,*} second=${devices##*,} mem=.9; [ "$first" = "$second" ] && mem=.45
  export XLA_PYTHON_CLIENT_MEM_FRACTION=$mem
  rm -rf $new
  if [ -n "${PREV:-}" ]; then mkdir $new; cp "$PREV/config.json" "$PREV/runs.jsonl" $new/; start=(--out $new --resume)
  else start=(--config results/configs/text_30m.full.json --mixers gated_delta_net mamba2 --lrs 0.003 0.006 --lr-seeds 2 --seeds 5 --out $new); fi
  local begin=$SECONDS
  CUDA_VISIBLE_DEVICES=$first timeout -s INT -k 15 375 python3 -m gdn_jax.cli sweep bytes "${start[@]}" >$OUT/text_1.log 2>&1 &
  while [ ! -s $new/config.json ] && [ $((SECONDS - begin)) -lt 90 ]; do sleep 1; done
  CUDA_VISIBLE_DEVICES=$second timeout -s INT -k 15 $((375 - SECONDS + begin)) python3 -m gdn_jax.cli sweep bytes --out $new --resume >$OUT/text_2.log 2>&1 &
  wait
  for f in config.json runs.jsonl table.md figure.png; do [ -e $new/$f ] && cp $new/$f $OUT/text_30m_seeds.$f; done
  tail -15 $OUT/text_1.log $OUT/text_2.log; wc -l $new/runs.jsonl
}

case ${1:-} in A) part_a ;; B) part_b ;; C) part_c ;; *) echo "A, B or C"; exit 2 ;; esac
