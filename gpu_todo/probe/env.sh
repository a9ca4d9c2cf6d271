version=0.12.0; here=/work/shared/prototypes
version=$(/work/main/.venv/bin/python -c 'import jax; print(jax.__version__)')
cache=$HOME/.cache/gdn-ptxas/$version; plugin=$cache/jax_plugins/xla_cuda13/xla_cuda_plugin.so
if [ ! -f "$plugin" ]; then mkdir -p "$cache"; /work/main/.venv/bin/python -m pip download -q --no-deps -d "$cache" "jax-cuda13-pjrt==$version"; /work/main/.venv/bin/python -m zipfile -e "$cache"/jax_cuda13_pjrt-*.whl "$cache" && rm "$cache"/*.whl; fi
[ -f "$cache/libcuda.so.1" ] || gcc -shared -fPIC -o "$cache/libcuda.so.1" "$here/stub_libcuda.c" -Wl,-soname,libcuda.so.1
for d in /usr/local/cuda/bin /usr/local/cuda-13.0/bin; do [ -x "$d/ptxas" ] && PATH=$d:$PATH; done
export XLA_CUDA_PLUGIN_SO=$plugin LD_LIBRARY_PATH=$cache:${LD_LIBRARY_PATH:-} PYTHONPATH=/work/main
