"""The gated delta rule on arrays: forward, backward, and the states at two places of a text."""

import numpy as np

from march_lm import ops

random = np.random.default_rng(0)
batch, tokens, heads, key, value = 1, 100, 2, 16, 32
q, k = random.standard_normal((2, batch, tokens, heads, key), dtype=np.float32)
v = random.standard_normal((batch, tokens, heads, value), dtype=np.float32)
a, b = random.standard_normal((2, batch, tokens, heads), dtype=np.float32)
decay = np.zeros(heads, dtype=np.float32)

out, backward = ops.gated_delta_vjp(q, k, v, a, b, decay, decay, boundaries=[[50, 100]])
print("readout", out.readout.shape, "states", out.boundary_states.shape)

# What tokens 50 to 99 read of the first state, and all of both.
keys = random.standard_normal((2, heads, 8), dtype=np.float32)
queries = random.standard_normal((batch, tokens, heads, 8), dtype=np.float32)
read = ops.anchor_read(q, queries, keys, out.boundary_states, boundaries=[[50, 100]])
print("nothing before the first anchor:", bool((read[:, :50] == 0).all()))

d_q, d_k, d_v, *others = backward(np.ones_like(out.readout))
assert d_v is not None
print("gradient of v", d_v.shape)
