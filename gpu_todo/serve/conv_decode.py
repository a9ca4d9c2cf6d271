"""Convolution and decode of one token, before and after, variants in turns. `python conv_decode.py [tiny]`"""
import importlib.util, os, sys
from functools import partial
import jax, jax.numpy as jnp, numpy as np

HERE = os.path.dirname(os.path.abspath(__file__))
tiny = "tiny" in sys.argv
spec = importlib.util.spec_from_file_location("old_step", HERE + "/before/pallas_kernels/decode/step.py")
old = importlib.util.module_from_spec(spec); sys.modules["old_step"] = old; spec.loader.exec_module(old)

from gdn_jax import serving
from gdn_jax.checks import device_time
from gdn_jax.checks.device_time import GRAPH_OPTIONS
from pallas_kernels.decode import conv_update as cu, step as new

Hk, HV, K = (1, 2, 32) if tiny else (16, 32, 128)
D = 2 * Hk * K + HV * K
PERIOD = 2 if tiny else 8
slots_of_pool = 8 if tiny else 512

def before(w, gates, slots, token, pools):
    x, a, b = token
    B = x.shape[0]
    y, conv = serving.causal_conv1d_update(x, pools[0], w, read_slots=slots, implementation="xla")
    q, k, v = jnp.split(y, [Hk * K, 2 * Hk * K], -1)
    if tiny:
        o, state = serving.decode(q.reshape(B, Hk, K), k.reshape(B, Hk, K), v.reshape(B, HV, K), a, b, pools[1], read_slots=slots, **gates)
        return o, (conv, state)
    o, state = old.step(q.reshape(B, 1, Hk, K), k.reshape(B, 1, Hk, K), v.reshape(B, 1, HV, K), a[:, None], b[:, None], pools[1],
                        read_slots=slots, write_slots=slots[:, None], scale=K**-0.5, **gates)
    return o[:, 0], (conv, state)

def after(w, gates, slots, token, pools, channels=None):
    x, a, b = token
    if tiny or channels is None:
        y, conv = serving.causal_conv1d_update(x, pools[0], w, read_slots=slots)
    else:
        y, conv = cu.conv_update(x, pools[0], w, read_slots=slots, write_slots=slots, config=cu.Config(channels))
    o, state = serving.decode_packed(y, a, b, pools[1], read_slots=slots, **gates)
    return o, (conv, state)

VARIANTS = {"before": before, "after": after, "after, 128 channels": partial(after, channels=128), "after, 512 channels": partial(after, channels=512), "after, 1024 channels": partial(after, channels=1024)}

def main():
    rng = np.random.default_rng(0)
    for N in ((1, 3) if tiny else (1, 128, 512, 32)):
        for dtype in ("float32",) if tiny or N in (1, 32) else ("float32", "bfloat16"):
            normal = lambda *s: jnp.asarray(rng.standard_normal(s, np.float32))
            w, slots = normal(D, 4), jnp.asarray(rng.permutation(slots_of_pool)[:N], jnp.int32)
            gates = dict(A_log=jnp.log(jnp.asarray(rng.uniform(0.1, 16, HV), jnp.float32)), dt_bias=jnp.asarray(rng.uniform(-6, -2, HV), jnp.float32))
            tokens = [(normal(N, D).astype("bfloat16"), normal(N, HV).astype("bfloat16"), normal(N, HV).astype("bfloat16")) for _ in range(PERIOD)]
            start = normal(slots_of_pool, D, 3).astype("bfloat16"), jax.random.normal(jax.random.key(0), (slots_of_pool, HV, K, K)).astype(dtype)
            runs, pools, first, found = {}, {}, {}, {}
            for name, f in VARIANTS.items():
                def period(pools, tokens, f=f):
                    outputs = []
                    for t in tokens:
                        o, pools = f(w, gates, slots, t, pools)
                        outputs.append(o)
                    return pools, outputs
                options = {} if tiny else GRAPH_OPTIONS
                mine = jax.tree.map(jnp.array, start)
                runs[name] = jax.jit(period, donate_argnums=0).lower(mine, tokens).compile(compiler_options=options)
                pools[name], o = runs[name](mine, tokens)
                first[name] = jax.device_get((pools[name][0], o[-1])) + (np.asarray(jnp.sum(jnp.abs(pools[name][1].astype(jnp.float32)))),)
                found[name] = []
            for turn in range(1 if tiny else 3):
                for name, run in runs.items():
                    def once(name=name, run=run):
                        pools[name], o = run(pools[name], tokens)
                        jax.block_until_ready((pools[name], o))
                    found[name].append(device_time.of_calls(once, 2 if tiny else 7).median_ms * 1e3 / PERIOD)
            base = first["before"]
            for name in VARIANTS:
                conv, o, size = first[name]
                same = (np.asarray(conv).view(np.uint16) == np.asarray(base[0]).view(np.uint16)).all()
                error = np.abs(o.astype(np.float32) - base[1].astype(np.float32)).max()
                print(f"TOKEN {dtype} {N} requests, {name}: {min(found[name]):.2f} us (turns {' '.join(f'{x:.2f}' for x in found[name])}); conv states same bits {same}, |o - before| {error:.1e} of {np.abs(base[1].astype(np.float32)).max():.1f}, |state| {float(size):.6g}", flush=True)
            del pools, runs

main()
