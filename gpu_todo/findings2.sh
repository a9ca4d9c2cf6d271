#!/bin/bash
# bash .gpu/findings2.sh      at most 420 s, one GPU of which it takes less than half of the memory.
#   a  text: two more seeds for Gated DeltaNet and Mamba2's rule    b  words of S3 by depth, and of swaps    c  recall pilots
#   PARTS="a b c"  which of them, in this order.   TOTAL=410  seconds in all.
#   PREV=folder    an unpacked findings2.tar.gz: what it has is kept, and the sweeps go on.
# $OUT/findings2.tar.gz: a folder for each sweep (config.json, runs.jsonl, table.md, figure.png) and logs. $OUT/findings2.txt: summary.
# TINY=1: the same commands with tiny settings, for a CPU.
set -u
here=$(cd "$(dirname "$0")" && pwd); cd "$here/.."
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH} PYTHONUNBUFFERED=1 GDN_COMMIT=${GDN_COMMIT:-$(cat "$here/commit")}
python=${PYTHON:-python3} TOTAL=${TOTAL:-410} PARTS=${PARTS:-a b c} TINY=${TINY:-}
OUT=${OUT:-/tmp/findings2-out}; work=${WORK:-/tmp/findings2}; rm -rf "$work"; mkdir -p "$OUT" "$work/logs"
[ -n "${CUDA_VISIBLE_DEVICES:-}" ] || export CUDA_VISIBLE_DEVICES=0
left() { local n=$((TOTAL - SECONDS - ${1:-0})); echo $((n > 1 ? n : 1)); }
pack() { (cd "$work" && tar czf "$OUT/findings2.tar.gz" --exclude='lock.*' --exclude='*/.*' *); }

# resumed NAME: earlier lines of that sweep
resumed() {
  [ -n "${PREV:-}" ] && [ -s "$PREV/$1/config.json" ] || return 1
  mkdir -p "$work/$1"; cp "$PREV/$1/config.json" "$work/$1/"
  if [ -e "$PREV/$1/runs.jsonl" ]; then cp "$PREV/$1/runs.jsonl" "$work/$1/"; fi
}

# sweep NAME TASK PROCESSES SECONDS [option ...]: processes at one folder; the first makes it, unless it is there
sweep() {
  local name=$1 task=$2 count=$3 limit=$4 begin=$SECONDS i; shift 4
  local folder=$work/$name first=("$@" --out "$work/$name") pids=()
  [ -e "$folder/config.json" ] && first=(--out "$folder" --resume)
  timeout -s INT -k 10 "$limit" $python -m gdn_jax.cli sweep "$task" "${first[@]}" >"$work/logs/$name.1.log" 2>&1 & pids+=($!)
  for ((i = 2; i <= count; i++)); do
    while [ ! -s "$folder/config.json" ] && kill -0 "${pids[0]}" 2>/dev/null; do sleep .5; done
    [ -s "$folder/config.json" ] || break
    timeout -s INT -k 10 $((limit - SECONDS + begin)) $python -m gdn_jax.cli sweep "$task" --out "$folder" --resume >"$work/logs/$name.$i.log" 2>&1 & pids+=($!)
  done
  wait "${pids[@]}"
}

part_a() {
  export XLA_PYTHON_CLIENT_MEM_FRACTION=.21
  local name=text_30m_seeds more=()
  [ -n "$TINY" ] && more=(--length 128 --test-lengths 128 --val-bytes 4096 --steps 2 --hidden-size 32 --num-layers 1 --head-dim 8 --batch-size 2)
  if ! resumed $name && [ -z "$TINY" ]; then
    # The runs that results/text_30m has of this grid, as long as the text is the same; else all of them anew.
    mkdir -p $work/$name
    $python - $work/$name <<'P'
import json, pathlib, sys
old, new = pathlib.Path("results/text_30m"), pathlib.Path(sys.argv[1])
config = json.loads((old / "config.json").read_text())
config["options"] |= {"mixers": ["gated_delta_net", "mamba2"], "lrs": [0.003], "lr_seeds": None, "seeds": 5}
config["command"] = "gdn sweep bytes --config results/configs/text_30m_seeds.full.json"
(new / "config.json").write_text(json.dumps(config, indent=2) + "\n")
lines = [x for x in (old / "runs.jsonl").read_text().splitlines() if (r := json.loads(x))["lr"] == 0.003 and r["mixer"] in ("gated_delta_net", "mamba2")]
(new / "runs.jsonl").write_text("".join(x + "\n" for x in lines))
P
  fi
  sweep $name bytes 2 $(left 160) --config results/configs/text_30m_seeds.full.json "${more[@]}"
  if grep -q "expected the data of the run" $work/logs/$name.1.log; then
    echo "another text here than that of results/text_30m: all ten runs anew" | tee -a $work/logs/$name.txt
    mv $work/logs/$name.1.log $work/logs/$name.refused.log; rm -rf $work/$name
    sweep $name bytes 2 $(left 60) --config results/configs/text_30m_seeds.full.json "${more[@]}"
  fi
}

part_b() {
  export XLA_PYTHON_CLIENT_MEM_FRACTION=.1 XLA_FLAGS=--xla_gpu_autotune_level=0
  local limit=$(left 115) more=() one; [ -n "$TINY" ] && more=(--steps 2 --lrs 0.003 --seeds 1 --together 1 --hidden-size 16 --head-dim 4 --num-heads 2 --val-sequences 8 --test-lengths 32 --scales 1)
  resumed words_s3_by_depth_h200; resumed words_s3_swaps_h200
  sweep words_s3_swaps_h200 permutation 1 $limit --config results/configs/words_s3_swaps.full.json "${more[@]}" & one=$!
  sweep words_s3_by_depth_h200 permutation 3 $limit --config results/configs/words_s3_by_depth.full.json "${more[@]}"
  wait $one
}

# Recall as results/configs/recall_by_state.full.json, heads of 32; three at a time, the learning rates of each in one program.
part_c() {
  export XLA_PYTHON_CLIENT_MEM_FRACTION=.14 XLA_FLAGS=--xla_gpu_autotune_level=0
  local c=results/configs/recall_by_state.full.json every=300 more=() limit pids=() n=0
  [ -n "$TINY" ] && { every=1; more=(vocab_size=128 hidden_size=16 steps=2 'cases=["16:4"]'); }
  pilot() {
    [ "$(left)" -gt ${LEAST:-20} ] || return
    limit=$(left 12)
    timeout -s KILL $((limit + 8)) $python "$here/recall_pilot.py" "$1" $c "$2" $every $limit head_dim=32 val_sequences=256 "${@:3}" "${more[@]}" >"$work/logs/recall_$1.log" 2>&1 &
    pids+=($!); n=$((n + 1))
    if [ $((n % 3)) = 0 ]; then wait "${pids[@]}"; pids=(); fi
  }
  pilot 1-gdn          gated_delta_net
  pilot 2-delta        delta_net
  pilot 3-gdn-usual    gated_delta_net 'lrs=[0.001,0.003]' time_step=1
  pilot 4-gdn-v2048    gated_delta_net 'lrs=[0.001,0.003]' vocab_size=2048
  pilot 5-gdn-tied     gated_delta_net 'lrs=[0.001,0.003]' tie_embeddings=true
  pilot 6-attention    softmax_attention 'lrs=[0.001,0.003]'
  wait
}

for part in $PARTS; do echo "part $part at $SECONDS s"; part_$part; pack; done 2>&1 | tee $work/logs/parts.txt
{
  cat $work/logs/parts.txt
  for f in $work/*/runs.jsonl; do echo "$f $(wc -l <$f)"; done
  for f in $work/logs/*.log; do echo "== ${f##*/}"; case $f in *recall_*) grep -vE "^W|^I" $f | cut -c1-150 ;; *) tail -3 $f | cut -c1-200 ;; esac; done
  $python - $work <<'P'
import json, pathlib, sys
for f in sorted(pathlib.Path(sys.argv[1]).glob("*/runs.jsonl")):
    print("==", f)
    for r in map(json.loads, f.read_text().splitlines()):
        metric = next(k for k in r if k.startswith("test_"))
        tests = " ".join(f"{n}:{x:.4f}" for n, x in r[metric].items())
        print(r["mixer"], r.get("scale", 1), r["lr"], r["seed"], f"val {r[metric.replace('test', 'val')]:.4f}", tests, f"{r['wall']['seconds']:.0f} s")
P
} >$OUT/findings2.txt
pack; cut -c1-180 $OUT/findings2.txt; echo "$SECONDS s"
