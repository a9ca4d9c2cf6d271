set -u
python3 -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --upgrade --target /tmp/site .whl/*.whl 2>&1 | tail -1
export PYTHONUNBUFFERED=1 COLUMNS=170 PYTHONPATH=/tmp/site:$PWD
( export XLA_PYTHON_CLIENT_PREALLOCATE=false
timeout -s INT -k 8 60 python3 -m pytest -p no:cacheprovider -q -n 0 --tb=short -m gpu tests/test_rules.py tests/test_hybrid.py -k cudnn > /tmp/cudnn.txt 2>&1; tail -c 3000 /tmp/cudnn.txt > $OUT/cudnn.txt
timeout -s INT -k 8 130 python3 -m pytest -p no:cacheprovider -q -m gpu -n 3 --dist worksteal --tb=short --maxfail=10 tests/test_kernels_gpu.py > /tmp/kernels.txt 2>&1; tail -c 6000 /tmp/kernels.txt > $OUT/kernels.txt ) &
bash .gpu/findings/run.sh ${1:-228} > $OUT/findings.txt 2>&1
cat $OUT/findings.txt; tail -4 $OUT/cudnn.txt; tail -c 800 $OUT/kernels.txt
