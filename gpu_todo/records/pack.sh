# NAME FOLDER: puts a copy of FOLDER/pallas_kernels beside this as package pk_NAME, whose imports name itself.
set -e
cd "$(dirname "$0")"; rm -rf pk_$1; cp -r $2/pallas_kernels pk_$1; find pk_$1 -name __pycache__ -prune -exec rm -rf {} +; rm -rf pk_$1/tools pk_$1/decode pk_$1/layer
find pk_$1 -name '*.py' -exec sed -i "s/\bpallas_kernels\b/pk_$1/g" {} +
