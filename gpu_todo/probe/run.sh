set -u
python3 -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --upgrade --target /tmp/site .whl/*.whl 2>&1 | tail -1
export PYTHONUNBUFFERED=1 PYTHONPATH=/tmp/site:$PWD TF_CPP_MIN_LOG_LEVEL=2 XLA_PYTHON_CLIENT_PREALLOCATE=false
{ XLA_FLAGS=--xla_gpu_autotune_level=0 timeout -k 3 45 python3 .gpu/probe/step.py gated_delta_net 30; echo "== autotuned"; timeout -k 3 60 python3 .gpu/probe/step.py gated_delta_net 30; } 2>&1 | grep -v "^[WIE][0-9]" | cut -c1-260 | tee $OUT/probe.txt
