"""Compile for H200s on a machine without a GPU.  Import this BEFORE jax is used (it sets the environment).

  aot.devices(n)                     n compile-only H200 devices (for meshes: MeshShape(...).make(aot.devices(n)))
  aot.compile_for_h200(fn, args, n_devices=1)   args: arrays or ShapeDtypeStructs (with .sharding for meshes); -> compiled
  aot.sequence(compiled)             kernels, fusions and collectives of the entry in program order
compiled.as_text(), .memory_analysis(), .cost_analysis() work; it cannot run.
"""
import ctypes, glob, os, re, sys, time
os.environ.setdefault("XLA_FLAGS", "--xla_gpu_enable_triton_gemm=false --xla_gpu_autotune_level=0")
os.environ.setdefault("JAX_PLATFORMS", "cpu")
HERE = os.path.dirname(os.path.abspath(__file__))
import jax, jaxlib
jax.config.update("jax_num_cpu_devices", 8)
_cache = sorted(glob.glob(os.path.expanduser("~/.cache/gdn-ptxas/*/jax_plugins/xla_cuda13/xla_cuda_plugin.so")))
_so = [p for p in _cache if f"/{jax.__version__}/" in p or f"/{jaxlib.__version__}" in p] or _cache
_so = _so[-1]
_stub = os.path.join(os.path.dirname(_so), "..", "..", "libcuda.so.1")
ctypes.CDLL(os.path.realpath(_stub), mode=ctypes.RTLD_GLOBAL)   # instead of LD_LIBRARY_PATH
os.environ.setdefault("MOSAIC_GPU_RUNTIME_LIB_PATH", glob.glob(HERE + "/plugin/jax_cuda13_plugin/libmosaic_gpu_runtime.so")[0])
for d in ("/usr/local/cuda/bin", "/usr/local/cuda-13.0/bin"):
    if os.path.exists(d + "/ptxas"): os.environ["PATH"] = d + ":" + os.environ["PATH"]
from jax._src import xla_bridge as xb
xb.register_plugin("cuda", library_path=_so)
import jax._src.custom_partitioning  # its callback, which a real start of the plugin would register
for _callback in xb._plugin_callbacks:
    _callback(c_api=xb._backend_factories["cuda"].c_api)
from jax.experimental import topologies
from jax.sharding import SingleDeviceSharding, NamedSharding, PartitionSpec
_topologies = {}

def devices(n=1):
    if n not in _topologies:
        config = open(HERE + "/h200.txtpb").read()
        _topologies[n] = topologies.get_topology_desc("h200", platform="cuda", topology=f"1x1x{n}", target_config=config)
    return list(_topologies[n].devices)

def kernels_anywhere():
    import pallas_kernels.device.launch as L
    L.device_reason = lambda: None

def compile_for_h200(fn, args, n_devices=1, mesh=None, **jit_options):
    """fn jitted or not. Arrays without a mesh sharding lie on the first device (n_devices = 1) or on all (mesh)."""
    kernels_anywhere()
    dev = devices(n_devices)
    default = SingleDeviceSharding(dev[0]) if mesh is None else NamedSharding(mesh, PartitionSpec())
    def put(x):
        s = getattr(x, "sharding", None)
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s if isinstance(s, NamedSharding) else default)
    args = jax.tree.map(put, args)
    f = fn if hasattr(fn, "trace") else jax.jit(fn, **jit_options)
    t = [time.time()]
    with (jax.set_mesh(mesh) if mesh is not None else jax.enable_x64(False)):
        traced = f.trace(*args); t.append(time.time())
        lowered = traced.lower(lowering_platforms=("cuda",)); t.append(time.time())
        compiled = lowered.compile(); t.append(time.time())
    compile_for_h200.seconds = dict(trace=t[1]-t[0], lower=t[2]-t[1], compile=t[3]-t[2])
    return compiled
compile_for_h200.seconds = {}

def _clean(text):
    return re.sub(r"\b(backend_config|metadata|frontend_attributes)=\{", lambda m: m.group(0), text)

def sequence(compiled, computation=None):
    """[(op, name, result type, detail)] of a computation (default: entry) in program order, calls/graphs opened."""
    comps, cur, entry = {}, None, None
    for line in compiled.as_text().splitlines():
        if not line.startswith(" ") and line.rstrip().endswith("{"):
            m = re.match(r"(ENTRY )?%?([\w.\-]+)", line)
            if m and "(" in line: cur = m.group(2); comps[cur] = []; entry = cur if m.group(1) else entry
        elif line.startswith("}"): cur = None
        elif cur and " = " in line: comps[cur].append(line.strip())
    out = []
    def walk(c):
        for l in comps[c]:
            m = re.match(r"(?:ROOT )?%?([\w.\-]+) = (\(.*?\)|\S+) ([\w\-]+)\((.*)", l)
            if not m: continue
            name, typ, op, rest = m.groups()
            if op in ("parameter", "get-tuple-element", "tuple", "bitcast", "constant", "after-all"): continue
            if op == "call": walk(re.search(r"to_apply=%?([\w.\-]+)", l).group(1)); continue
            detail = ""
            if op == "custom-call":
                detail = re.search(r'custom_call_target="([^"]*)"', l).group(1)
                n = re.search(r'op_name="([^"]*)"', l)
                if n: detail += " " + n.group(1)
            else:
                n = re.search(r'op_name="([^"]*)"', l)
                if n: detail = n.group(1)
            operands = rest[: rest.find(")")]
            out.append((op, name, re.sub(r"\{[^}]*\}", "", typ), detail, operands))
    walk(computation or entry)
    return out
