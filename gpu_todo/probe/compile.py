"""Seconds that each kernel of forward and backward takes to compile, at given widths."""
import os, sys, time, ctypes
import jax, jax.numpy as jnp
sys.path.insert(0, "/work/shared/prototypes")
from offline_ptxas import modules_of
from gdn_jax import gated_delta_rule
K, V, T, B, H, dt = *map(int, sys.argv[1:6]), sys.argv[6]
import pallas_kernels.device.launch as launch; launch.device_reason = lambda: None
def f(q, k, v, g, beta):
    o, _ = gated_delta_rule(q, k, v, g, beta, use_qk_l2norm=True, implementation="mosaic_gpu")
    return o
def loss(*x): return f(*x).astype(jnp.float32).sum()
S = jax.ShapeDtypeStruct
x = [S((B, T, H, K), dt), S((B, T, H, K), dt), S((B, T, H, V), dt), S((B, T, H), "float32"), S((B, T, H), "float32")]
lib = ctypes.CDLL(os.environ["XLA_CUDA_PLUGIN_SO"]); lib.MosaicGpuCompile.restype = ctypes.c_void_p; lib.MosaicGpuCompile.argtypes = [ctypes.c_char_p, ctypes.c_int]
for name, fn in (("forward", f), ("gradients", jax.grad(loss, argnums=(0, 1, 2, 3, 4)))):
    t = time.time(); lowered = jax.jit(fn).trace(*x).lower(lowering_platforms=("cuda",)); print(name, "lowered", round(time.time() - t, 1), flush=True)
    for m in modules_of(lowered):
        t = time.time(); lib.MosaicGpuCompile(m, len(m)); print("   compile", round(time.time() - t, 2), len(m), flush=True)
