"""The rule by mma.sync on a GPU of compute capability 9.0, both passes and their repeats: the cases of `mma_on_gpu`,
in the device's own code and in that of 8.0."""

import mma_on_gpu
import pytest

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("as_8_0", [False, True], ids=["", "as 8.0"])
@pytest.mark.parametrize(("name", "dtype", "config"), mma_on_gpu.CHECKS)
def test_both_passes(name, dtype, config, as_8_0):
    verdict = mma_on_gpu.checked(name, dtype, config, as_8_0)
    assert verdict.startswith("ok"), verdict
