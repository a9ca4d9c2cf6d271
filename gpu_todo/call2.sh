# Two lanes of text_100m; SECS in all.
set -u
python3 -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --upgrade --target /tmp/site .whl/*.whl 2>&1 | tail -1
export PYTHONUNBUFFERED=1 COLUMNS=170 PYTHONPATH=/tmp/site:$PWD GDN_COMMIT=$(cat .gpu/commit) XLA_PYTHON_CLIENT_MEM_FRACTION=0.44
S=$SECONDS; W=/tmp/work/text_100m; mkdir -p /tmp/work
lane() { timeout -s INT -k 8 $1 python3 -c 'import gdn_command,sys; sys.exit(gdn_command.main())' sweep bytes --out $W "${@:2}" 2>&1 | tr '\r' '\n'; }
lane $SECS --config results/configs/text_100m.full.json > /tmp/work/a.log 2>&1 &
while [ ! -e $W/config.json ] && [ $((SECONDS-S)) -lt 120 ]; do sleep 0.5; done; sleep 3
echo "config at $((SECONDS-S)) s"
lane $((SECS-(SECONDS-S))) --resume > /tmp/work/b.log 2>&1 &
for t in 60 120; do sleep 60; nvidia-smi --query-gpu=utilization.gpu,memory.used,power.draw --format=csv,noheader; done
wait
for f in $W/*; do cp $f $OUT/; done; for x in a b; do tail -c 3000 /tmp/work/$x.log | grep -v "^$" | tail -6 | cut -c1-200; tail -c 20000 /tmp/work/$x.log > $OUT/$x.log; done
cut -c1-200 $W/runs.jsonl; grep -o '"wall.*' $W/runs.jsonl; echo "end $((SECONDS-S)) s"
