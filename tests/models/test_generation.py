"""Generation: limits of the draw, rows that stop and are listened to, and what is refused."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hybrid_models import call, make, tokens

from gdn_jax.models import generate
from gdn_jax.models.sampling import Sampling


def test_limits_of_the_draw():
    p = np.array([0.05, 0.4, 0.3, 0.15, 0.1])
    logits = jnp.log(jnp.asarray([p, p[::-1]], jnp.float32))

    def kept(**limits):
        got = Sampling(**{"temperature": 1.0, **limits}).limited(logits)
        np.testing.assert_array_equal(np.isfinite(got[1]), np.isfinite(got[0])[::-1])
        return [*np.flatnonzero(np.isfinite(got[0]))]

    assert kept() == [0, 1, 2, 3, 4]
    assert kept(top_k=2) == [1, 2]
    assert kept(top_p=0.69) == [1, 2] and kept(top_p=0.71) == [1, 2, 3]
    assert kept(top_p=0.01) == [1] and kept(top_p=1.0) == [0, 1, 2, 3, 4]
    assert kept(min_p=0.37) == [1, 2, 3] and kept(min_p=0.38) == [1, 2]
    assert kept(min_p=0.0) == [0, 1, 2, 3, 4] and kept(min_p=1.0) == [1]
    assert kept(temperature=0.5, min_p=0.6) == [1]  # at temperature 1 a second one is 0.75 times as likely
    assert kept(top_k=3, top_p=0.8) == [1, 2]  # of three tokens, two have 0.82 of the probability
    assert kept(temperature=0.1, top_p=0.9) == [1]  # the temperature goes first


@pytest.mark.slow
def test_stopping_and_listening():
    """Rows end, steps are heard in order, what the listener raises comes back."""
    model, prompt = make(), tokens(2, 5)
    greedy = np.asarray(generate(model, jax.device_put(prompt), 8))
    np.testing.assert_array_equal(np.asarray(call(model, prompt)[0])[:, -1].argmax(-1), greedy[:, 0])
    heard = []
    listened = generate(model, jax.device_put(prompt), 8, on_token=lambda new: heard.append(new.copy()))
    np.testing.assert_array_equal(listened, greedy)
    np.testing.assert_array_equal(np.stack(heard, axis=1), greedy)

    stop = int(greedy[0, 2])
    stopped = np.asarray(generate(model, jax.device_put(prompt), 8, stop_tokens=[stop]))
    for row, want in zip(stopped, greedy, strict=True):
        end = [*want, stop].index(stop)
        np.testing.assert_array_equal(row[: end + 1], want[: end + 1])
        assert (row[end:] == stop).all() or end == 8

    first = int(greedy[0, 0])
    assert (np.asarray(generate(model, jax.device_put(prompt), 8, stop_tokens=[first]))[0] == first).all()

    heard.clear()
    early = generate(
        model, jax.device_put(prompt), 8, on_token=lambda new: heard.append(new.copy()) or len(heard) == 3
    )
    assert len(heard) == 3
    np.testing.assert_array_equal(early[:, :3], greedy[:, :3])
    assert (np.asarray(early[:, 2:]) == greedy[:, 2:3]).all()

    def fails(new):
        raise KeyError("of the listener")

    with pytest.raises(KeyError, match="of the listener"):
        generate(model, jax.device_put(prompt), 8, on_token=fails)


@pytest.mark.usefixtures("no_type_checks")
def test_generation_errors():
    model, prompt = make(), jax.device_put(tokens(1, 3))
    for message, options in [
        ("top_p: expected a number above 0 and up to 1, got 0", {"top_p": 0.0}),
        ("min_p: expected a number from 0 to 1, got 2", {"min_p": 2.0}),
        ("stop_tokens: expected tokens below vocab_size = 31, got 31", {"stop_tokens": [31]}),
        ("temperature: expected 0 or more, got inf", {"temperature": float("inf")}),
    ]:
        with pytest.raises(ValueError, match=message):
            generate(model, prompt, 3, **options)
    with pytest.raises(ValueError, match="on_token: expected None under jit"):
        jax.jit(lambda prompt: generate(model, prompt, 3, on_token=print))(prompt)
