python3 -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --upgrade --target /tmp/site .whl/*.whl
export PYTHONUNBUFFERED=1 COLUMNS=170 PYTHONPATH=/tmp/site:$PWD
S=$SECONDS; R=$PWD; mark() { echo "== $1 at $((SECONDS-S))s" | tee -a $OUT/log.txt; }
mkdir -p /tmp/t; tar xzf .gpu/serve_tree.tgz -C /tmp/t; ln -s $R/.gpu /tmp/t/.gpu
(
export CUDA_VISIBLE_DEVICES=1
TOTAL=${TOTAL:-505} bash .gpu/findings/run.sh > /tmp/f.txt 2>&1; tail -90 /tmp/f.txt | cut -c1-200 >> $OUT/findings.txt; mark findings
) &
(
export CUDA_VISIBLE_DEVICES=0
BUDGET=165 LIMIT=200 bash .gpu/records/run.sh > /tmp/rec 2>&1; tail -130 /tmp/rec | cut -c1-230 >> $OUT/records.txt; mark records
(cd /tmp/t; PYTHONPATH=/tmp/site:/tmp/t XLA_PYTHON_CLIENT_PREALLOCATE=false timeout 130 python3 .gpu/serve/bench.py) > /tmp/serve 2>&1; grep -v -i warn /tmp/serve | tail -60 | cut -c1-200 >> $OUT/serve.txt; mark serve
timeout 190 bash .gpu/step/run_step.sh > /tmp/step 2>&1; tail -70 /tmp/step | cut -c1-220 >> $OUT/step.txt; mark step
[ $((SECONDS-S)) -gt 430 ] || { timeout 100 bash .gpu/step/run_ab.sh > /tmp/flags 2>&1; tail -40 /tmp/flags | cut -c1-220 >> $OUT/step.txt; mark ab; }
) &
wait; mark all; cat $OUT/serve.txt | tail -c 3800; tail -c 5200 $OUT/records.txt; tail -c 2900 $OUT/step.txt
