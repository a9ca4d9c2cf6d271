python3 -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --upgrade --target /tmp/site .whl/*.whl
export PYTHONUNBUFFERED=1 COLUMNS=170 PYTHONPATH=/tmp/site:$PWD
S=$SECONDS; mark() { echo "== $1 at $((SECONDS-S))s" | tee -a $OUT/log.txt; }
gdn() { timeout $1 python3 -c 'import gdn_command,sys; sys.exit(gdn_command.main())' "${@:2}" 2>&1 | grep -v "^W1\|^I1" | tail -${TAIL:-40} >> $OUT/log.txt; }
(
export CUDA_VISIBLE_DEVICES=1
TOTAL=${TOTAL:-400} bash .gpu/findings/run.sh > /tmp/f.txt 2>&1; tail -90 /tmp/f.txt | cut -c1-200 >> $OUT/findings.txt; mark findings
) &
(
export CUDA_VISIBLE_DEVICES=0
gdn 110 bench --what parts --json $OUT/parts.json; mark parts
gdn 75 bench --what step --lengths 8192 --options remat=rule --json $OUT/rule.json; mark rule
gdn 75 bench --what step --lengths 8192 --options remat=full --json $OUT/full.json; mark full
gdn 75 bench --what step --lengths 8192 --json $OUT/none.json; mark none
gdn 90 bench --what step --model 1.3b --lengths 8192 --tokens 32768 --json $OUT/13.json; mark 1.3b
) &
wait; mark all; tail -c 9000 $OUT/log.txt; tail -c 2800 $OUT/findings.txt
