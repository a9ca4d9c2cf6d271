src=open("compile.py").read()
exec(src[:src.index("name, B, T, layers, out")])
import optax, numpy as np
from gdn_jax.experiments import steps
from gdn_jax.experiments.options import ScheduleOptions
from gdn_jax.experiments.steps import TrainState
from gdn_jax.experiments.tasks.batch import Batch
o=step_bench.StepBenchOptions(model="qwen3.5-0.8b")
config=step_bench.config_of(o)
model = nnx.eval_shape(lambda: LanguageModel(config, rngs=nnx.Rngs(0)))
graphdef, params, rest = nnx.split(model, nnx.Param, ...)
opt=steps.make_optimizer(ScheduleOptions(),1000,1e-3)
put = lambda t: jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sh), t)
state=put(TrainState(params, jax.eval_shape(opt.init, params)))
n=int(sys.argv[1]); L=8192
batch=put(Batch(*(jax.ShapeDtypeStruct((n//L,L),d) for d in (jnp.int32,jnp.int32,jnp.float32))))
steps.make_functions(graphdef, rest, opt, 1).train.trace(state,batch).lower(lowering_platforms=("cuda",)).compile()
