"""When a part runs by its kernels."""


def usable(implementation: str | None, reason: str | None) -> bool:
    """Whether kernels take a call.

    Args:
      implementation: that of the delta rule; "chunked" and "recurrent" never use a kernel.
      reason: why they cannot take the arguments; None if they can.
    """
    if implementation not in (None, "mosaic_gpu") or reason is not None:
        return False
    from pallas_kernels.device.launch import device_reason

    return device_reason() is None
