"""Pure functions give the answer of numpy with jit and without it."""

from functools import partial

import chex
import jax.numpy as jnp
import numpy as np
from absl.testing import parameterized

from jaxkv.engine import SamplingParams
from jaxkv.engine.sampling import SamplingInputs, pack_controls, sample
from jaxkv.models import rope
from jaxkv.models.config import RopeConfig
from jaxkv.testing import assert_attention, place, random_batch
from jaxkv.testing.layouts import stored
from pallas_kernels import Pages, codes, copy_pages, ragged_paged_attention, write_pages
from pallas_kernels.pages import LAYOUTS

BACKENDS = ("reference", "xla")
every_form = chex.variants(with_jit=True, without_jit=True)
RNG = np.random.default_rng


def ids(*values: int) -> jnp.ndarray:
    return jnp.asarray(values, jnp.int32)


class Variants(chex.TestCase):
    @every_form
    @parameterized.parameters(*BACKENDS)
    def test_attention_agrees_with_naive_attention(self, backend):
        batch = random_batch((5, 0, 30, 17), (1, 0, 7, 2), T=12)
        placed = place(batch, M=2, window=9)
        attention = partial(
            ragged_paged_attention, scale=0.25, window=9, return_lse=True, backend=backend
        )
        arrays = placed.page_table, placed.kv_lens, placed.query_starts
        out, lse = self.variant(attention)(jnp.asarray(batch.q), placed.pages, *arrays)
        assert_attention(np.asarray(out), np.asarray(lse), batch, window=9)

    @every_form
    @parameterized.product(backend=BACKENDS, layout=LAYOUTS)
    def test_written_tokens_are_where_their_slots_say(self, backend, layout):
        kv = RNG(0).standard_normal((5, 8, 4, 16)).astype(np.float32)
        new = RNG(1).standard_normal((3, 4, 16)).astype(np.float32)
        pages = Pages(kv=jnp.asarray(stored(kv, layout)), layout=layout)
        write = self.variant(partial(write_pages, backend=backend))
        written = write(pages, jnp.asarray(new[:, 0::2]), jnp.asarray(new[:, 1::2]), ids(9, 39, 16))
        kv.reshape(40, 4, 16)[[9, 39, 16]] = new
        chex.assert_trees_all_equal(written, Pages(kv=stored(kv, layout), layout=layout))

    @every_form
    @parameterized.product(backend=BACKENDS, layout=LAYOUTS)
    def test_copied_pages_are_those_before_any_copy(self, backend, layout):
        kv = RNG(0).standard_normal((5, 8, 4, 16)).astype(np.float32)
        pages = Pages(kv=jnp.asarray(stored(kv, layout)), layout=layout)
        copied = self.variant(partial(copy_pages, backend=backend))(pages, ids(1, 2), ids(2, 4))
        kv[[2, 4]] = kv[[1, 2]]
        chex.assert_trees_all_equal(copied, Pages(kv=stored(kv, layout), layout=layout))

    @every_form
    def test_symmetric_codes_are_the_nearest(self):
        x = RNG(2).standard_normal((6, 32)).astype(np.float32)

        def encode(x):
            scale = codes.symmetric_scale(x, jnp.int8)
            return codes.encode_symmetric(x, scale, jnp.int8), scale

        code, scale = self.variant(encode)(jnp.asarray(x))
        want_scale = np.abs(x).max(axis=-1, keepdims=True) / 127
        chex.assert_trees_all_close(scale, want_scale, rtol=1e-6)
        chex.assert_trees_all_equal(code, np.round(x / np.asarray(scale)).astype(np.int8))

    @every_form
    @parameterized.parameters(2, 4)
    def test_affine_codes_are_packed_and_come_back(self, bits):
        x = RNG(3).standard_normal((6, 32)).astype(np.float32)

        def there_and_back(x):
            code, parameters = codes.encode_affine(x, bits, axis=-1)
            code = codes.unpack_bits(codes.pack_bits(code, bits), bits)
            return codes.decode_affine(code, codes.unpack_affine(codes.pack_affine(parameters)))

        got = self.variant(there_and_back)(jnp.asarray(x))
        step = np.ptp(x, axis=-1, keepdims=True) / (2**bits - 1)
        chex.assert_trees_all_close(got / step, x / step, rtol=0, atol=0.51)

    @every_form
    def test_rope_rotates_pairs_as_complex_numbers(self):
        x = RNG(4).standard_normal((5, 2, 16)).astype(np.float32)
        positions = np.array([0, 1, 7, 100, 999], np.int32)

        def rotate(x, position):
            return rope.rotate(x, rope.rotation(RopeConfig(theta=1e4), 16, position))

        got = self.variant(rotate)(jnp.asarray(x), jnp.asarray(positions))
        angles = positions[:, None, None] * 1e4 ** (-np.arange(8) / 8)
        turned = (x[..., :8] + 1j * x[..., 8:]) * np.exp(1j * angles)
        want = np.concatenate([turned.real, turned.imag], axis=-1)
        chex.assert_trees_all_close(got, want, rtol=0, atol=4e-4)

    @every_form
    def test_sampling_draws_the_same_tokens_and_the_most_likely_at_temperature_0(self):
        logits = RNG(5).standard_normal((4, 16)).astype(np.float32)
        rows = [SamplingParams(temperature=t, seed=s) for t, s in ((0, 0), (0, 1), (1, 2), (1, 3))]
        controls = jnp.asarray(np.stack([pack_controls(row) for row in rows]))
        inputs = SamplingInputs.unpack(controls, jnp.zeros((4, 2), jnp.uint8), jnp.asarray(False))
        found = self.variant(sample)(jnp.asarray(logits), inputs)
        tokens = np.asarray(found.token)
        chex.assert_trees_all_equal(tokens[:2], logits[:2].argmax(axis=-1).astype(np.int32))
        chex.assert_trees_all_equal(found.token, sample(jnp.asarray(logits), inputs).token)
        wide = logits.astype(np.float64)
        logprobs = wide - np.log(np.exp(wide).sum(axis=-1, keepdims=True))
        want = logprobs[np.arange(4), tokens]
        chex.assert_trees_all_close(found.logprob, want, rtol=1e-7, atol=1e-5)
