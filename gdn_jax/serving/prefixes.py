"""Requests that begin alike share what a model remembers of the beginning of their prompts."""

from collections import OrderedDict
from typing import Any

import jax
import numpy as np

from gdn_jax.serving.pools import GRID
from gdn_jax.shapes import ArgumentError, check_whole


class Prefixes:
    """Contents of slots after beginnings of prompts: as many of those used last as a number of bytes has room for.

    Beginnings are found by their tokens, so that no two share one contents by chance.

    Args:
      stride: the numbers of tokens of beginnings are multiples of it; itself a multiple of 64.
      most_bytes: of all contents together.

    Raises:
      ValueError: a number does not fit.
    """

    def __init__(self, stride: int, most_bytes: int):
        check_whole("prefix_stride", stride, GRID)
        if stride % GRID:
            raise ArgumentError("prefix_stride", f"a multiple of {GRID}", stride)
        check_whole("prefix_bytes", most_bytes, 0)
        self.stride, self.most_bytes = stride, most_bytes
        self._kept: OrderedDict[bytes, Any] = OrderedDict()
        self.bytes = 0
        """Bytes of all contents together."""

    def whole(self, prompt: np.ndarray, seen: int, length: int) -> int:
        """How many of the next `length` tokens of a prompt a program reads, to end where contents are kept."""
        end = seen + length
        last = end - end % self.stride
        return last - seen if self.most_bytes and seen < last < len(prompt) else length

    def find(self, prompt: np.ndarray) -> tuple[int, Any]:
        """The longest beginning of a prompt, without its last token, that is kept: its length and contents; or else
        0 and None."""
        for length in range((len(prompt) - 1) // self.stride * self.stride, 0, -self.stride):
            if (contents := self._kept.get(key := prompt[:length].tobytes())) is not None:
                self._kept.move_to_end(key)
                return length, contents
        return 0, None

    def wants(self, prompt: np.ndarray, seen: int) -> bool:
        """Whether the contents after the first tokens of a prompt are to be kept."""
        return (
            bool(self.most_bytes and seen and seen % self.stride == 0)
            and prompt[:seen].tobytes() not in self._kept
        )

    def keep(self, prompt: np.ndarray, seen: int, contents: Any) -> None:
        """Keeps contents, which stay on the device, in the place of those that were used longest ago."""
        size = _bytes(contents)
        if size > self.most_bytes:
            return
        while self.bytes + size > self.most_bytes:
            _, oldest = self._kept.popitem(last=False)
            self.bytes -= _bytes(oldest)
        self._kept[prompt[:seen].tobytes()] = contents
        self.bytes += size


def _bytes(contents: Any) -> int:
    return sum(x.nbytes for x in jax.tree.leaves(contents))
