# text_100m goes on in the background; first calls; GPU tests; then alone: serving, device times of the rule.
set -u
python3 -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --upgrade --target /tmp/site .whl/*.whl 2>&1 | tail -1
export PYTHONUNBUFFERED=1 COLUMNS=170 GDN_COMMIT=$(cat .gpu/commit); ROOT=$PWD
S=$SECONDS; mark() { echo "== $1 at $((SECONDS-S))s" | tee -a $OUT/log.txt; }
W=/tmp/work/text_100m; mkdir -p $W; cp .gpu/text_prev/* $W/
mkdir -p /tmp/repo; cp -r gdn_jax pallas_kernels results gdn_command.py pyproject.toml /tmp/repo/
(cd /tmp/repo; PYTHONPATH=/tmp/site:/tmp/repo XLA_PYTHON_CLIENT_MEM_FRACTION=0.44 timeout -s INT -k 8 330 python3 -c 'import gdn_command,sys; sys.exit(gdn_command.main())' sweep bytes --out $W --resume 2>&1 | tr '\r' '\n' > /tmp/text.log; echo "text ended at $((SECONDS-S)) s" >> $OUT/log.txt) &
TEXT=$!
PYTHONPATH=/tmp/site bash .gpu/first/run.sh 172 2>&1; mark first
export PYTHONPATH=/tmp/site:$ROOT XLA_PYTHON_CLIENT_PREALLOCATE=false
timeout -s INT -k 5 76 python3 -m pytest -p no:cacheprovider -o addopts= -m gpu -n 5 --dist worksteal --tb=short --maxfail=8 tests/test_kernels_decode_gpu.py tests/test_kernels_conv_update_gpu.py tests/test_kernels_backward_gpu.py tests/test_layer_kernels_gpu.py -k "verify_on_a_ring or trees_on_a_ring or rings_past or (many_tokens and True-bfloat16) or 32x1-32-vk-bfloat16 or test_batch[8192-bfloat16] or (wide-keys-1-float16 and segments) or 127x1-32-vk or 127x1-32-kv-bfloat16 or 512x1-32-vk-bfloat16 or 256x2-32-vk-bfloat16 or test_tokens_of_a_layer or test_generation_is or 64x4-32-kv-float32" > $OUT/tests.txt 2>&1
tail -c 2500 $OUT/tests.txt; mark tests
wait $TEXT; mark text
for f in $W/*; do cp $f $OUT/; done; tail -5 /tmp/text.log | cut -c1-200; grep -c "Constant folding" /tmp/text.log; wc -l $W/runs.jsonl
L=$((${SECS:-465}-(SECONDS-S)-34)); [ $L -gt 170 ] && L=170
bash .gpu/serve/run.sh $L; mark serve
PYTHONPATH=/tmp/site bash .gpu/first/again.sh $((${SECS:-465}-(SECONDS-S)-3)) 2>&1; mark end
