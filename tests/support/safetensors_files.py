"""Safetensors files of any tensors, written by code of the tests."""

import json
import struct

import numpy as np


def write(file, tensors):
    """Writes (dtype as the header spells it, array)s by name."""
    header, end, content = {}, 0, b""
    for name, (dtype, array) in tensors.items():
        data = np.ascontiguousarray(array).tobytes()
        header[name] = {"dtype": dtype, "shape": array.shape, "data_offsets": [end, end + len(data)]}
        end += len(data)
        content += data
    text = json.dumps(header).encode()
    file.write_bytes(struct.pack("<Q", len(text)) + text + content)
