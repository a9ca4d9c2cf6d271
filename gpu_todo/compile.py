import os, sys, time, glob, dataclasses
os.environ.setdefault("XLA_FLAGS", "--xla_gpu_enable_triton_gemm=false --xla_gpu_autotune_level=0")
os.environ["JAX_PLATFORMS"] = "cpu"
import jax
from jax._src import xla_bridge as xb
so = glob.glob(os.path.expanduser("~/.cache/gdn-ptxas/*/jax_plugins/xla_cuda13/xla_cuda_plugin.so"))[0]
xb.register_plugin("cuda", library_path=so)
from jax.experimental import topologies
topo = topologies.get_topology_desc("h200", platform="cuda", topology="1x1x1", target_config=open("target.txtpb").read())
dev = topo.devices[0]
print(dev, flush=True)
from jax.sharding import SingleDeviceSharding
sh = SingleDeviceSharding(dev)
import jax.numpy as jnp
from flax import nnx
import gdn_jax
print(gdn_jax.__file__)
import pallas_kernels.device.launch as L
L.device_reason = lambda: None
from gdn_jax.models import LanguageModel, ModelConfig, attention
attention._cudnn = lambda q, k, visible: visible is None or (q.shape[1] % 2 == 0 and k.shape[1] % 2 == 0)
import jax._src.cudnn.fused_attention_stablehlo as FA
FA.check_cudnn_version=lambda: 91200; FA.check_compute_capability=lambda c: True; FA.is_cuda_compute_capability_equal=lambda c: False
from gdn_jax.experiments import step_bench
from gdn_jax.models.presets import PRESETS
import gdn_jax.models.generate
G = sys.modules["gdn_jax.models.generate"]
name, B, T, layers, out = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]), sys.argv[5]
if name in step_bench.SIZES:
    config = ModelConfig(**step_bench.SIZES[name] | {"expand_v": 1.0, "dtype": "bfloat16", "weight_dtype": "bfloat16"})
else:
    config = dataclasses.replace(PRESETS[name], dtype="bfloat16", weight_dtype="bfloat16")
if layers: config = dataclasses.replace(config, num_layers=layers)
model = nnx.eval_shape(lambda: LanguageModel(config, rngs=nnx.Rngs(0)))
graphdef, params = nnx.split(model)
put = lambda t: jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sh), t)
prompt = jax.ShapeDtypeStruct((B, T), jnp.int32, sharding=sh)
t0 = time.time()
lowered = G._generate.trace(graphdef, put(params), prompt, put(jax.ShapeDtypeStruct((B, T), jnp.bool_)), None, None, None, None, num_tokens=64).lower(lowering_platforms=("cuda",))
print("lowered", time.time() - t0, flush=True)
c = lowered.compile()
print("compiled", time.time() - t0, flush=True)
open(out, "w").write(c.as_text())
print(c.memory_analysis())
