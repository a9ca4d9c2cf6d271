python3 -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --upgrade --target /tmp/site .whl/*.whl
R=$PWD; export PYTHONUNBUFFERED=1 COLUMNS=170 GDN_COMMIT=$(cat .gpu/commit3) PYTHONPATH=/tmp/site:$PWD
S=$SECONDS; mark() { echo "== $1 at $((SECONDS-S))s" | tee -a $OUT/log.txt; }
gdn() { timeout $1 python3 -c 'import gdn_command,sys; sys.exit(gdn_command.main())' "${@:2}" 2>&1 | grep -v "^W1\|^I1" | tail -${TAIL:-30} >> $OUT/log.txt; }
timeout 40 python3 .gpu/stepcost.py 2>&1 | grep rows >> $OUT/log.txt; mark stepcost
(
export CUDA_VISIBLE_DEVICES=0
gdn 175 bench --what step --lengths 8192 2048 32768 --json $OUT/step.json; mark step
timeout 60 python3 .gpu/conv.py > /tmp/conv.txt 2>&1; tail -25 /tmp/conv.txt | cut -c1-160 >> $OUT/log.txt; mark conv
gdn 75 bench --what backward --rows "16,32" --json $OUT/backward.json; mark backward
gdn 75 bench --what forward --rows "16,32" --json $OUT/forward.json; mark forward
gdn 90 bench --what decode --batches 1 128 512 --pools float32 bfloat16; mark decode
gdn 100 bench --what generate --model qwen3.5-4b --batches 1 32 --contexts 1024 8192 32768 --tokens 16 --prefill 0 --json $OUT/gen4.json; mark gen4
gdn 80 bench --what prefill --tokens 32768 --requests 1 8 64; mark prefill
gdn 80 bench --what parts; mark parts
gdn 70 bench --what step --model 1.3b --lengths 8192 --tokens 32768; mark 1.3b
) &
(
export CUDA_VISIBLE_DEVICES=1
PYTHONPATH=/tmp/site timeout 90 python3 .gpu/records.py > /tmp/rec.txt 2>&1; grep -v "^difference" /tmp/rec.txt | tail -90 | cut -c1-200 > $OUT/records.txt; mark records
touch /tmp/go
bash .gpu/findings2.sh > /tmp/f2.txt 2>&1; tail -60 /tmp/f2.txt | cut -c1-220 >> $OUT/log.txt; mark findings2
) &
(
export CUDA_VISIBLE_DEVICES=1 XLA_PYTHON_CLIENT_MEM_FRACTION=.05
while [ ! -e /tmp/go ]; do sleep 1; done
timeout -s INT -k 10 470 python3 -m pytest -q -m gpu -n 8 --dist worksteal -p no:cacheprovider --maxfail=25 --tb=short tests > $OUT/tests.txt 2>&1; tail -40 $OUT/tests.txt | cut -c1-250 >> $OUT/log.txt; mark tests
) &
wait; mark all; tail -c 11500 $OUT/log.txt
