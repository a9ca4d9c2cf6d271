#!/usr/bin/env bash
# pack.sh NAME=COMMIT...   makes records.tar.gz of these variants
set -euo pipefail
cd "$(dirname "$0")/.."
rm -rf /tmp/records-pack && mkdir /tmp/records-pack
for pair in "$@"; do
  mkdir "/tmp/records-pack/${pair%%=*}"
  git archive "${pair#*=}" gdn_jax pallas_kernels gdn_command.py pyproject.toml | tar -x -C "/tmp/records-pack/${pair%%=*}"
done
tar -czf .gpu/records.tar.gz -C /tmp/records-pack $(cd /tmp/records-pack && ls)
ls -la .gpu/records.tar.gz
