import sys, time, os
os.environ["JAX_PLATFORMS"]="cpu"
import jax; jax.config.update("jax_num_cpu_devices", 8)
import numpy as np, jax.numpy as jnp
from flax import nnx
import gdn_jax, dataclasses
import pallas_kernels.device.launch as L; L.device_reason = lambda: None
from gdn_jax.experiments import step_bench, steps
from gdn_jax.experiments.options import ScheduleOptions
from gdn_jax.experiments.placement import Placement
from gdn_jax.experiments.tasks.batch import Batch
from gdn_jax.models import LanguageModel
from gdn_jax.parallel.mesh import MeshShape
from gdn_jax.parallel.sharding import state_shardings, batch_sharding
shape = MeshShape.parse(sys.argv[1]); rows, length = int(sys.argv[2]), int(sys.argv[3])
devices=jax.devices()[:shape.size]
if len(sys.argv)>4 and sys.argv[4]=="compile":
    import aot; devices=aot.devices(shape.size)
config = step_bench.config_of(step_bench.StepBenchOptions(model="0.4b", dtype="bfloat16"))
print(gdn_jax.__file__, config.num_layers)
graphdef, params, rest = nnx.split(nnx.eval_shape(lambda: LanguageModel(config, rngs=nnx.Rngs(0))), nnx.Param, ...)
mesh = shape.make(devices)
placement = Placement(shape, mesh); placement.check(config, rows, length)
optimizer = steps.make_optimizer(ScheduleOptions(), 1000, 1e-3)

from jax.sharding import NamedSharding
with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
    found = state_shardings(optimizer, params, mesh, shape)
    shardings = steps.TrainState(*found)
    state = steps.TrainState(params, jax.eval_shape(optimizer.init, params))
    where = batch_sharding(mesh)
    b = jax.ShapeDtypeStruct((rows, length), jnp.int32)
    batch = Batch(b, b, jax.ShapeDtypeStruct((rows, length), jnp.float32))
    lying = lambda arrays, sh: jax.tree.map(lambda x, w: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=w), arrays, sh)
    rest = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype) if isinstance(x, jax.ShapeDtypeStruct) else x, rest)
    train = steps.make_functions(graphdef, rest, optimizer, 1, shardings=shardings).train
    t=[time.time()]
    traced = train.trace(lying(state, shardings), lying(batch, Batch._make([where]*3))); t.append(time.time())
    print("trace", t[1]-t[0], "eqns", len(str(traced.jaxpr)) if len(sys.argv)>5 else "", flush=True)
    if len(sys.argv)>4:
        low = traced.lower(lowering_platforms=("cuda",)); t.append(time.time()); print("lower", t[2]-t[1], flush=True)
        if sys.argv[4]=="compile":
            c = low.compile(); t.append(time.time())
            from gdn_jax.parallel.communication import traffic
            print("compile", t[3]-t[2], traffic(c.as_text()), c.memory_analysis().temp_size_in_bytes/2**30)
            open("step_%s.txt" % sys.argv[1], "w").write(c.as_text())
