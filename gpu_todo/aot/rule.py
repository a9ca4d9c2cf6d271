import aot, sys, jax, jax.numpy as jnp, re
from jax.sharding import NamedSharding
from gdn_jax.experiments.scale_bench import ScaleBenchOptions, _call, _specs
from gdn_jax.checks.rows import Inputs
from gdn_jax.parallel.mesh import MeshShape
from gdn_jax.parallel.communication import traffic
from functools import partial
shape = MeshShape.parse(sys.argv[1]); rows, length = int(sys.argv[2]), int(sys.argv[3])
heads = (16, 32)
o = ScaleBenchOptions(implementation="mosaic_gpu")
mesh = shape.make(aot.devices(shape.size))
t, s = _specs(shape)
D = 128
S = lambda sh, d, sp: jax.ShapeDtypeStruct(sh, d, sharding=NamedSharding(mesh, sp))
bf = jnp.bfloat16
x = Inputs(S((rows,length,heads[0],D),bf,t),S((rows,length,heads[0],D),bf,t),S((rows,length,heads[1],D),bf,t),
  S((rows,length,heads[1]),jnp.float32,t),S((rows,length,heads[1]),jnp.float32,t),S((rows,heads[1],D,D),jnp.float32,s),
  S((rows,length,heads[1],D),bf,t),S((rows,heads[1],D,D),jnp.float32,s))
import gdn_jax; print(gdn_jax.__file__, Inputs._fields)
c = aot.compile_for_h200(partial(_call, o, shape), (x,), shape.size, mesh)
text = c.as_text(); open(sys.argv[4] if len(sys.argv)>4 else "last.txt","w").write(re.sub(r'backend_config=\{"dialect[^\n]*','',text))
print(aot.compile_for_h200.seconds, traffic(text), c.memory_analysis().temp_size_in_bytes/2**30)
for r in aot.sequence(c): print(r[0], r[1], r[2][:110], '|', r[3].replace('jit(_call)','')[-90:], '|', r[4][:90])
