python3 -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --upgrade --target /tmp/site .whl/*.whl
export PYTHONUNBUFFERED=1 COLUMNS=170 PYTHONPATH=/tmp/site:$PWD
S=$SECONDS; R=$PWD; mark() { echo "== $1 at $((SECONDS-S))s" | tee -a $OUT/log.txt; }
mkdir -p /tmp/t; tar xzf .gpu/serve_tree.tgz -C /tmp/t; ln -s $R/.gpu /tmp/t/.gpu
(
export CUDA_VISIBLE_DEVICES=1
TOTAL=${TOTAL:-500} bash .gpu/findings/run.sh > /tmp/f.txt 2>&1; tail -90 /tmp/f.txt | cut -c1-200 >> $OUT/findings.txt; mark findings
) &
(
export CUDA_VISIBLE_DEVICES=0
(cd /tmp/t; PYTHONPATH=/tmp/site:/tmp/t XLA_PYTHON_CLIENT_PREALLOCATE=false timeout 150 python3 .gpu/serve/bench.py) > /tmp/serve 2>&1; grep -v -i warn /tmp/serve | tail -60 | cut -c1-200 >> $OUT/serve.txt; mark serve
timeout 170 bash .gpu/step/run.sh > /tmp/step 2>&1; tail -70 /tmp/step | cut -c1-220 >> $OUT/step.txt; mark step
PYTEST_S=1 BUDGET=120 timeout 150 bash .gpu/records/run.sh > /tmp/rec 2>&1; tail -110 /tmp/rec | cut -c1-230 >> $OUT/records.txt; mark records
timeout 100 bash .gpu/step/run_flags.sh > /tmp/flags 2>&1; tail -40 /tmp/flags | cut -c1-220 >> $OUT/step.txt; mark flags
) &
(
export CUDA_VISIBLE_DEVICES=1 XLA_PYTHON_CLIENT_PREALLOCATE=false
(cd /tmp/t; PYTHONPATH=/tmp/site:/tmp/t timeout 300 python3 -m pytest -p no:cacheprovider -n 4 tests/test_kernels_decode_gpu.py -m gpu) > /tmp/st 2>&1; tail -25 /tmp/st | cut -c1-250 >> $OUT/serve.txt; mark serve_tests
timeout 150 python3 -m pytest -n 4 -m gpu -p no:cacheprovider tests/test_kernels_gpu.py tests/test_kernels_backward_gpu.py -k "packed or lengths" > /tmp/rt 2>&1; tail -5 /tmp/rt | cut -c1-200 >> $OUT/records.txt; mark records_tests
) &
wait; mark all; cat $OUT/serve.txt | tail -c 4000; tail -c 5000 $OUT/records.txt; tail -c 2900 $OUT/step.txt
