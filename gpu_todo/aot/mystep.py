import aot, sys, jax, jax.numpy as jnp, numpy as np, re
from flax import nnx
from gdn_jax.experiments import step_bench, steps
from gdn_jax.experiments.options import ScheduleOptions
from gdn_jax.experiments.steps import TrainState
from gdn_jax.experiments.tasks.batch import Batch
from gdn_jax.models import LanguageModel
aot.kernels_anywhere()
layers=int(sys.argv[1])
import dataclasses
opts = step_bench.StepBenchOptions(lengths=(8192,), options=(f"num_layers={layers}",*sys.argv[3:]))
config = step_bench.config_of(opts)
model = nnx.eval_shape(lambda: LanguageModel(config, rngs=nnx.Rngs(0)))
graphdef, params, rest = nnx.split(model, nnx.Param, ...)
optimizer = steps.make_optimizer(ScheduleOptions(), 1000, 1e-3)
state = jax.eval_shape(lambda p: TrainState(p, optimizer.init(p)), params)
S=jax.ShapeDtypeStruct
batch = Batch(S((8,8192),jnp.int32),S((8,8192),jnp.int32),S((8,8192),jnp.float32))
train = steps.make_functions(graphdef, rest, optimizer, 1).train
c = aot.compile_for_h200(train, (state,batch))
print(aot.compile_for_h200.seconds, c.memory_analysis().temp_size_in_bytes/2**30)
open(sys.argv[2],"w").write(c.as_text())
with open(sys.argv[2]+".seq","w") as f:
    for s in aot.sequence(c): print(*s, sep=" | ", file=f)
