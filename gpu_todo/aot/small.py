import sys; sys.path.insert(0,"/tmp/aot")
import aot, jax, jax.numpy as jnp
c = aot.compile_for_h200(lambda x: jnp.sum(x@x), (jax.ShapeDtypeStruct((64,64), jnp.float32),))
print(aot.compile_for_h200.seconds); 
for r in aot.sequence(c): print(r)
print(c.memory_analysis())
