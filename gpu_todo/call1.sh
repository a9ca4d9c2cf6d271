python3 -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --upgrade --target /tmp/site .whl/*.whl
export PYTHONPATH=/tmp/site:$PWD PYTHONUNBUFFERED=1 COLUMNS=180 GDN_COMMIT=690161a
gdn() { python3 -c 'import gdn_command,sys; sys.exit(gdn_command.main())' "$@"; }
S=$SECONDS; mark() { echo "== $1 rc=$? at $((SECONDS-S))s"; }
mkdir -p $OUT/log
timeout 140 python3 .gpu/crossover.py 2>&1 | grep -v -i warn | tail -25; mark crossover
(timeout 110 python3 -c 'import gdn_command,sys; sys.exit(gdn_command.main())' bench --what scale --parts rule --mesh context=2 head=2 data=2 --kernels --json $OUT/scale.json 2>&1 | tail -75); mark scale
(
export CUDA_VISIBLE_DEVICES=0
timeout 200 python3 -c 'import gdn_command,sys; sys.exit(gdn_command.main())' bench --what step --lengths 8192 2048 32768 --json $OUT/step.json > /tmp/s1 2>&1; tail -40 /tmp/s1; mark step
timeout 120 python3 -c 'import gdn_command,sys; sys.exit(gdn_command.main())' bench --what step --model qwen3.5-0.8b --lengths 8192 > /tmp/s2 2>&1; tail -22 /tmp/s2; mark step0.8b
timeout 120 python3 -c 'import gdn_command,sys; sys.exit(gdn_command.main())' bench --what step --model 1.3b --lengths 8192 > /tmp/s3 2>&1; tail -22 /tmp/s3; mark step1.3b
) &
(
export CUDA_VISIBLE_DEVICES=1
timeout 200 python3 -c 'import gdn_command,sys; sys.exit(gdn_command.main())' bench --what generate --model qwen3.5-0.8b --batches 1 32 256 --contexts 1024 8192 32768 --json $OUT/gen08.json --figure $OUT/gen08.png > /tmp/g1 2>&1; tail -30 /tmp/g1; mark gen0.8b
timeout 150 python3 -c 'import gdn_command,sys; sys.exit(gdn_command.main())' bench --what generate --model qwen3.5-4b --batches 1 32 256 --contexts 1024 8192 32768 --json $OUT/gen4.json --figure $OUT/gen4.png > /tmp/g2 2>&1; tail -30 /tmp/g2; mark gen4b
export XLA_PYTHON_CLIENT_MEM_FRACTION=.2
for r in a b c; do
 I=auto; [ $r = c ] && I=chunked
 (timeout 100 python3 -c 'import gdn_command,sys; sys.exit(gdn_command.main())' train bytes --steps 150 --length 1024 --batch-size 16 --hidden-size 512 --num-layers 4 --num-heads 4 --head-dim 128 --expand-v 1 --lr 0.002 --implementation $I --no-compilation-cache --out /tmp/run$r > /tmp/t$r 2>&1; tail -4 /tmp/t$r; ls /tmp/run$r; tail -n 1 /tmp/run$r/metrics.jsonl) &
done; wait
cmp /tmp/runa/metrics.jsonl /tmp/runb/metrics.jsonl && echo metrics equal
python3 - <<'P'
import json
a,b,c=([json.loads(l) for l in open(f'/tmp/run{r}/metrics.jsonl')] for r in 'abc')
for x,y,z in zip(a,b,c):
    print({k:(x[k],y[k],z[k]) for k in x if 'loss' in k or 'bits' in k})
P
mark train
) &
wait
