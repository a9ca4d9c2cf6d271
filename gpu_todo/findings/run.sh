# bash .gpu/findings/run.sh SECONDS WORKERS PLAN...   in a copy of the tree without .git
set -u
python3 -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --upgrade --target /tmp/site .whl/*.whl 2>&1 | tail -1
rm -rf /tmp/repo; mkdir -p /tmp/repo; cp -r gdn_jax pallas_kernels results gdn_command.py pyproject.toml /tmp/repo/
export PYTHONUNBUFFERED=1 COLUMNS=170 GDN_COMMIT=$(cat .gpu/commit) TF_CPP_MIN_LOG_LEVEL=2 ROOT=/tmp/repo PYTHONPATH=/tmp/site:/tmp/repo PREV=$PWD/.gpu/prev
L=$PWD/.gpu/findings/lanes.py; cd /tmp/repo; exec timeout -k 5 "$(($1 + 8))" python3 $L "$@"
