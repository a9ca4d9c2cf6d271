"""Variants of `ring_step`: module and configuration; f4 is whether the pool is float32. In the order of their importance."""
import ring_step_v as v

A = "meet=True, early=True, late_u=True"
T = A + ", tensor=True"
N = ", near=True, near_state=f4"
VARIANTS = {
    "floor (copies alone, wrong)": (v, "C(128, floor=True)"),
    "all": (v, f"C(128, {T}{N}, blocks=True)"),
    "all, no near": (v, f"C(128, {T}, blocks=True)"),
    "all, no blocks": (v, f"C(128, {T}{N})"),
    "all, near state only": (v, f"C(128, {T}, near_state=f4, blocks=True)"),
    "meet early late_u": (v, f"C(128, {A})"),
    "meet early late_u tensor": (v, f"C(128, {T})"),
    "all, 2 x 16 KB": (v, f"C(128, stages=2, chunk_bytes=16384, {T}{N}, blocks=True)"),
    "near": (v, "C(128, near=True, near_state=f4)"),
    "meet": (v, "C(128, meet=True)"),
    "late_u": (v, "C(128, late_u=True)"),
    "blocks tall": (v, "C(128, tall=True, blocks=True)"),
    "all, 3 warpgroups, 6 stages": (v, f"C(128, warpgroups=3, stages=6, {T}{N}, blocks=True)"),
    "early": (v, "C(128, early=True)"),
}
