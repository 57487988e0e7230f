"""What every codec promises, and how near quantised KV is to what it was (paper, section 4.5)."""

from __future__ import annotations

import itertools

import pytest
import torch
from safetensors.torch import load, save

from kvboost_rag.engine.codecs import CODECS, Int4Codec, Int8Codec, kivi
from kvboost_rag.engine.codecs.kivi import KiviCodec, num_groups, split
from kvboost_rag.engine.types import KV

RAW_TOKENS = 4
QUANTISED = [Int8Codec(), Int4Codec()]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
LENGTHS = [1, 3, 4, 5, 63, 64, 65, 127, 130, 200]
SIZE_BARS = {"int8": 0.56, "int4": 0.32}  # of the bytes of float16


def random_kv(tokens: int, dtype: torch.dtype = torch.float32, layers: int = 2, heads: int = 3, dim: int = 64) -> KV:
    """KV whose channels differ in size and centre, as those of real keys do."""
    g = torch.Generator().manual_seed(tokens)
    keys = torch.randn(layers, heads, tokens, dim, generator=g) * (1 + 3 * torch.rand(dim, generator=g))
    values = torch.randn(layers, heads, tokens, dim, generator=g)
    return KV((keys + 5 * torch.randn(dim, generator=g)).to(dtype), values.to(dtype), None)


def sections(n: int) -> list[range]:
    """Reference: n // 64 groups, all as long as the first, but for the last, which takes the rest."""
    if n == 0:
        return []
    count = max(1, n // 64)
    starts = [k * (n // count) for k in range(count)]
    return [range(start, end) for start, end in zip(starts, [*starts[1:], n], strict=True)]


def steps(kv: KV, bits: int) -> KV:
    """Reference, number by number: the distance between two codes, if scale and minimum were kept exactly.

    Zero for the first tokens. Keys share a step with tokens of their channel, values with channels of their token.
    """
    layers, heads, tokens, dim = kv.keys.shape
    keys, values = torch.zeros(kv.keys.shape), torch.zeros(kv.keys.shape)
    for layer in range(layers):
        for head in range(heads):
            for channel in range(dim):
                for section in sections(tokens - RAW_TOKENS):
                    places = [(layer, head, RAW_TOKENS + t, channel) for t in section]
                    fill(keys, kv.keys, places, bits)
        for token in range(RAW_TOKENS, tokens):
            for section in sections(heads * dim):
                fill(values, kv.values, [(layer, c // dim, token, c % dim) for c in section], bits)
    return KV(keys, values, None)


def fill(out: torch.Tensor, source: torch.Tensor, places: list[tuple[int, int, int, int]], bits: int) -> None:
    numbers = [float(source[place]) for place in places]
    for place in places:
        out[place] = (max(numbers) - min(numbers)) / (2**bits - 1)


def rounding(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """What writing ``x`` as ``dtype`` may change."""
    return x.float().abs() * torch.finfo(dtype).eps / 2 + 1e-6


def named(codec: object) -> str:
    return codec.name if isinstance(codec, KiviCodec) else str(codec)


@pytest.mark.parametrize("name", CODECS)
class TestContract:
    @pytest.mark.parametrize("dtype", DTYPES, ids=str)
    @pytest.mark.parametrize("tokens", LENGTHS)
    def test_what_comes_back_is_the_same_kind_of_kv(self, name: str, tokens: int, dtype: torch.dtype) -> None:
        kv = random_kv(tokens, dtype)
        packed = CODECS[name].encode(kv)
        back = CODECS[packed.codec].decode(packed)
        assert packed.codec == name
        assert (back.keys.shape, back.values.shape) == (kv.keys.shape, kv.values.shape)
        assert (back.keys.dtype, back.values.dtype) == (dtype, dtype)
        assert back.position is None
        torch.testing.assert_close(back.keys.float(), kv.keys.float(), atol=1.0, rtol=0.02)
        torch.testing.assert_close(back.values.float(), kv.values.float(), atol=0.3, rtol=0.02)

    @pytest.mark.parametrize("dtype", DTYPES, ids=str)
    @pytest.mark.parametrize("tokens", [1, 5, 130])
    def test_a_file_gives_back_the_same_bits(self, name: str, tokens: int, dtype: torch.dtype) -> None:
        codec = CODECS[name]
        packed = codec.encode(random_kv(tokens, dtype, dim=15))
        tensors, facts = codec.dump(packed)
        loaded = codec.load(load(save(tensors)), facts)
        again, facts_again = codec.dump(loaded)
        assert facts_again == facts
        assert again.keys() == tensors.keys()
        assert all(again[key].dtype == tensors[key].dtype and torch.equal(again[key], tensors[key]) for key in tensors)
        assert (loaded.codec, loaded.num_bytes) == (packed.codec, packed.num_bytes)
        before, after = codec.decode(packed), codec.decode(loaded)
        assert torch.equal(after.keys, before.keys)
        assert torch.equal(after.values, before.values)

    def test_bytes_are_those_of_the_tensors(self, name: str) -> None:
        packed = CODECS[name].encode(random_kv(70))
        assert packed.num_bytes == sum(tensor.nbytes for tensor in CODECS[name].dump(packed)[0].values())

    def test_a_missing_tensor_or_fact_is_an_error(self, name: str) -> None:
        tensors, facts = CODECS[name].dump(CODECS[name].encode(random_kv(70)))
        for key in tensors:
            with pytest.raises(KeyError):
                CODECS[name].load({k: v for k, v in tensors.items() if k != key}, facts)
        for key in facts:
            with pytest.raises(KeyError):
                CODECS[name].load(tensors, {k: v for k, v in facts.items() if k != key})

    @pytest.mark.parametrize("shape", [(5, 1, 7, 3), (6, 3, 130, 16), (3, 2, 4, 8), (4, 1, 1, 2), (7, 1, 68, 5)])
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    def test_some_layers_are_those_of_the_whole(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        codec = CODECS[name]
        packed = codec.encode(KV(torch.randn(shape).to(dtype), torch.randn(shape).to(dtype), position=None))
        whole = codec.decode(packed)
        for first, last in itertools.combinations_with_replacement(range(shape[0] + 1), 2):
            part = codec.decode(packed, first, last)
            assert torch.equal(part.keys, whole.keys[first:last])
            assert torch.equal(part.values, whole.values[first:last])

    def test_decoding_twice_gives_the_same_and_leaves_the_packing_alone(self, name: str) -> None:
        packed = CODECS[name].encode(random_kv(70, torch.bfloat16))
        before = {key: tensor.clone() for key, tensor in CODECS[name].dump(packed)[0].items()}
        assert torch.equal(CODECS[name].decode(packed).keys, CODECS[name].decode(packed).keys)
        assert all(torch.equal(tensor, before[key]) for key, tensor in CODECS[name].dump(packed)[0].items())


def test_the_registry_knows_each_codec_by_its_name() -> None:
    assert {name: (codec.name, codec.bits, codec.position_free) for name, codec in CODECS.items()} == {
        "raw": ("raw", None, False),
        "int8": ("int8", 8, True),
        "int4": ("int4", 4, True),
    }


@pytest.mark.parametrize("n", [0, 1, 63, 64, 127, 128, 129, 191, 200, 600])
def test_groups_are_those_of_the_reference(n: int) -> None:
    found = [list(row) for _, part in split(torch.arange(n).view(1, n, 1)) for row in part[0, :, :, 0].tolist()]
    assert found == [list(section) for section in sections(n)]
    assert num_groups(n) == len(found)
    assert len(list(split(torch.arange(n).view(1, n, 1)))) <= 2
    assert all(len(section) >= min(n, 64) for section in found)


@pytest.mark.parametrize("codec", QUANTISED, ids=named)
class TestQuantised:
    @pytest.mark.parametrize("dtype", DTYPES, ids=str)
    @pytest.mark.parametrize(("tokens", "heads", "dim"), [(135, 2, 3), (71, 3, 50), (8, 1, 9)])
    def test_no_number_is_off_by_more_than_half_a_step(
        self, codec: KiviCodec, tokens: int, heads: int, dim: int, dtype: torch.dtype
    ) -> None:
        kv = random_kv(tokens, dtype, layers=1, heads=heads, dim=dim)
        back, step = codec.decode(codec.encode(kv)), steps(kv, codec.bits)
        for found, true, exact in (
            (back.keys, kv.keys, step.keys),
            (back.values, kv.values, step.values),
        ):
            kept = exact * (1 + 2**-10) + float(true.float().abs().max()) * 2**-10 / (2**codec.bits - 1)
            error = (found.float() - true.float()).abs()[:, :, RAW_TOKENS:]
            assert (error <= (kept / 2 + rounding(true, dtype))[:, :, RAW_TOKENS:]).all()
            assert error.max() >= exact.max() / 4  # the reference is not far too generous

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
    @pytest.mark.parametrize("tokens", [1, 3, 4, 5, 130])
    def test_the_first_tokens_keep_their_bits(self, codec: KiviCodec, tokens: int, dtype: torch.dtype) -> None:
        kv = random_kv(tokens, dtype)
        back = codec.decode(codec.encode(kv))
        assert torch.equal(back.keys[:, :, :RAW_TOKENS], kv.keys[:, :, :RAW_TOKENS])
        assert torch.equal(back.values[:, :, :RAW_TOKENS], kv.values[:, :, :RAW_TOKENS])
        assert torch.equal(back.values, kv.values) == (tokens <= RAW_TOKENS)

    def test_how_many_first_tokens_are_kept_is_an_option(self, codec: KiviCodec) -> None:
        kv = random_kv(80, torch.float16)
        for num_raw in (0, 9):
            mine = type(codec)(num_raw_tokens=num_raw)
            tensors, facts = mine.dump(mine.encode(kv))
            back = codec.decode(codec.load(tensors, facts))  # the reader need not know the option
            same = (back.keys == kv.keys).all(dim=(0, 1, 3))
            assert same[:num_raw].all()
            assert not same[num_raw:].any()
        with pytest.raises(ValueError, match="num_raw_tokens=-1"):
            type(codec)(num_raw_tokens=-1)

    def test_first_tokens_of_float32_are_kept_as_float16_if_they_fit(self, codec: KiviCodec) -> None:
        kv = random_kv(70)
        assert codec.encode(kv).raw_keys.dtype == torch.float16
        kv.values[0, 0, 1, 0] = 1e5
        packed = codec.encode(kv)
        assert (packed.raw_keys.dtype, packed.raw_values.dtype) == (torch.float16, torch.float32)
        assert torch.equal(codec.decode(packed).values[:, :, :RAW_TOKENS], kv.values[:, :, :RAW_TOKENS])

    def test_a_sink_among_the_first_tokens_costs_the_others_nothing(self, codec: KiviCodec) -> None:
        plain, sunk = random_kv(100), random_kv(100)
        sunk.keys[:, :, :RAW_TOKENS] *= 100
        sunk.values[:, :, :RAW_TOKENS] *= 100
        a, b = codec.decode(codec.encode(plain)), codec.decode(codec.encode(sunk))
        assert torch.equal(a.keys[:, :, RAW_TOKENS:], b.keys[:, :, RAW_TOKENS:])
        assert torch.equal(a.values[:, :, RAW_TOKENS:], b.values[:, :, RAW_TOKENS:])

    def test_a_large_key_channel_costs_the_others_nothing(self, codec: KiviCodec) -> None:
        plain, large = random_kv(150), random_kv(150)
        large.keys[:, 1, :, 7] *= 50
        a, b = codec.decode(codec.encode(plain)).keys, codec.decode(codec.encode(large)).keys
        others = torch.ones(3, 64, dtype=torch.bool)
        others[1, 7] = False
        assert torch.equal(a.transpose(2, 3)[:, others], b.transpose(2, 3)[:, others])
        assert not torch.equal(a, b)

    def test_a_large_value_token_costs_the_others_nothing(self, codec: KiviCodec) -> None:
        plain, large = random_kv(150), random_kv(150)
        large.values[:, :, 20] *= 50
        a, b = codec.decode(codec.encode(plain)).values, codec.decode(codec.encode(large)).values
        others = torch.arange(150) != 20
        assert torch.equal(a[:, :, others], b[:, :, others])
        assert not torch.equal(a, b)

    @pytest.mark.parametrize("tokens", [128, 129, 191, 200, 600])
    @pytest.mark.parametrize("dtype", DTYPES, ids=str)
    def test_size(self, codec: KiviCodec, tokens: int, dtype: torch.dtype) -> None:
        kv = random_kv(tokens, dtype, layers=3)
        assert codec.encode(kv).num_bytes <= SIZE_BARS[codec.name] * 2 * 2 * kv.keys.numel()

    def test_quantising_again_changes_next_to_nothing(self, codec: KiviCodec) -> None:
        kv = random_kv(200)
        once = codec.decode(codec.encode(kv))
        twice = codec.decode(codec.encode(once))
        for a, b, c in ((kv.keys, once.keys, twice.keys), (kv.values, once.values, twice.values)):
            assert (c - b).abs().mean() < (b - a).abs().mean() / 20
            assert (c - b).abs().max() <= a.abs().max() * 2**-10  # float16's grid, on which minimums lie

    @pytest.mark.parametrize("size", [7e4, 3e38], ids=str)
    def test_numbers_beyond_float16_survive_in_bfloat16(self, codec: KiviCodec, size: float) -> None:
        kv = random_kv(70, torch.bfloat16)
        kv.keys[0, 0, 1, 0] = kv.keys[0, 0, 50, 0] = kv.values[1, 2, 60, 3] = size
        packed = codec.encode(kv)
        back = codec.decode(packed)
        assert packed.keys.scale.dtype == packed.values.minimum.dtype == torch.float32
        assert back.keys[0, 0, 1, 0] == kv.keys[0, 0, 1, 0]
        torch.testing.assert_close(back.keys[0, 0, 50, 0].item(), size, rtol=0.01, atol=0)
        torch.testing.assert_close(back.values[1, 2, 60, 3].item(), size, rtol=0.01, atol=0)
        assert back.keys.isfinite().all()
        assert back.values.isfinite().all()

    def test_the_ends_of_float16_do_not_become_infinite(self, codec: KiviCodec) -> None:
        kv = random_kv(70, torch.float16)
        kv.values[:, :, 50, ::2], kv.values[:, :, 50, 1::2] = 65504, -65504
        back = codec.decode(codec.encode(kv)).values[:, :, 50]
        assert torch.equal(back, kv.values[:, :, 50])

    def test_ranges_too_narrow_for_float16_survive(self, codec: KiviCodec) -> None:
        kv = random_kv(70)
        small = KV(kv.keys * 1e-9, kv.values * 1e-9, None)
        packed = codec.encode(small)
        assert packed.keys.scale.dtype == torch.float32
        back = codec.decode(packed)
        torch.testing.assert_close(back.keys[:, :, RAW_TOKENS:] * 1e9, kv.keys[:, :, RAW_TOKENS:], atol=1.0, rtol=0)
        torch.testing.assert_close(back.values[:, :, RAW_TOKENS:] * 1e9, kv.values[:, :, RAW_TOKENS:], atol=0.3, rtol=0)

    def test_a_narrow_range_far_from_zero_is_within_half_a_step(self, codec: KiviCodec) -> None:
        kv = random_kv(70)
        far = KV(kv.keys / 20 + 1000.3, kv.values / 20 - 1000.3, None)
        packed = codec.encode(far)
        back = codec.decode(packed)
        for found, true, codes, axis in (
            (back.keys, far.keys, packed.keys, (2,)),
            (back.values, far.values, packed.values, (1, 3)),
        ):
            others = true[:, :, RAW_TOKENS:]
            ranges = others.amax(axis, keepdim=True) - others.amin(axis, keepdim=True) + 1000 * 2**-10
            assert codes.minimum.dtype == torch.float16
            assert ((found[:, :, RAW_TOKENS:] - others).abs() <= ranges / (2**codec.bits - 1) / 2 + 1e-3).all()

    def test_a_number_half_a_step_beyond_the_last_code_gets_the_last_code(self, codec: KiviCodec) -> None:
        step, levels = 2.0**-24, 2**codec.bits - 1  # float16's smallest number
        keys = torch.zeros(1, 1, 70, 1)
        keys[0, 0, 40:] = (levels + 0.5) * step
        assert (codec.decode(codec.encode(KV(keys, keys, None))).keys - keys).abs().max() <= step / 2

    @pytest.mark.parametrize("constant", [0.0, 0.1, -3.3, 1000.3, 1e5, 1e-7])
    def test_channels_that_never_change_are_as_exact_as_float16(self, codec: KiviCodec, constant: float) -> None:
        kv = KV(torch.full((1, 2, 70, 8), constant), torch.full((1, 2, 70, 8), constant), None)
        back = codec.decode(codec.encode(kv))
        torch.testing.assert_close(back.keys, kv.keys, rtol=2**-11, atol=2**-25)
        torch.testing.assert_close(back.values, kv.values, rtol=2**-11, atol=2**-25)

    @pytest.mark.parametrize("shape", [(0, 3, 9, 4), (2, 0, 9, 4), (2, 3, 0, 4), (2, 3, 9, 0)], ids=str)
    def test_nothing_is_kept_of_nothing(self, codec: KiviCodec, shape: tuple[int, ...]) -> None:
        packed = codec.encode(KV(torch.zeros(shape), torch.zeros(shape), None))
        assert packed.num_bytes == 0
        loaded = codec.load(*codec.dump(packed))
        assert codec.decode(loaded).keys.shape == codec.decode(loaded).values.shape == shape

    def test_values_may_be_narrower_than_keys_and_neither_contiguous(self, codec: KiviCodec) -> None:
        kv = random_kv(130, torch.bfloat16)
        wide = torch.zeros(2, 130, 3, 128, dtype=torch.bfloat16)
        wide[..., :64], wide[..., 64:96] = kv.keys.transpose(1, 2), kv.values[..., :32].transpose(1, 2)
        packed = codec.encode(KV(wide[..., :64].transpose(1, 2), wide[..., 64:96].transpose(1, 2), None))
        back, plain = codec.decode(packed), codec.decode(codec.encode(KV(kv.keys, kv.values[..., :32].clone(), None)))
        assert torch.equal(back.keys, plain.keys)
        assert torch.equal(back.values, plain.values)
        wide.fill_(9.0)  # nothing is shared
        assert torch.equal(codec.decode(packed).keys, plain.keys)

    @pytest.mark.parametrize("block", [1, 2 * 3 * 126 * 64, 3 * 3 * 126 * 64 + 1])
    def test_decoding_some_layers_at_a_time_changes_nothing(
        self, codec: KiviCodec, block: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        packed = codec.encode(random_kv(130, layers=5))
        whole = codec.decode(packed)
        monkeypatch.setattr(kivi, "BLOCK", block)
        parts = codec.decode(packed)
        assert torch.equal(parts.keys, whole.keys)
        assert torch.equal(parts.values, whole.values)

    @pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
    @pytest.mark.parametrize("token", [0, 69])
    def test_nan_and_infinity_are_refused(self, codec: KiviCodec, bad: float, token: int) -> None:
        for part in ("keys", "values"):
            kv = random_kv(70)
            getattr(kv, part)[1, 2, token, 3] = bad
            with pytest.raises(ValueError, match="NaN or infinity"):
                codec.encode(kv)

    def test_what_does_not_fit_the_codec_is_refused(self, codec: KiviCodec) -> None:
        keys, values = torch.zeros(1, 1, 70, 4), torch.zeros(1, 1, 70, 4)
        with pytest.raises(ValueError, match="position must be None, not 7"):
            codec.encode(KV(keys, values, 7))
        with pytest.raises(ValueError, match="float64"):
            codec.encode(KV(keys.double(), values.double(), None))
        with pytest.raises(ValueError, match="float16 values"):
            codec.encode(KV(keys, values.half(), None))
        with pytest.raises(ValueError, match="do not belong together"):
            codec.encode(KV(keys, values[:, :, 1:], None))
        values[0, 0, 60, 0], values[0, 0, 60, 1] = 3e38, -3e38
        with pytest.raises(ValueError, match="too far apart"):
            codec.encode(KV(keys, values, None))

    @pytest.mark.parametrize(
        "key",
        ["raw_keys", "raw_values"]
        + [f"{part}_{name}" for part in ("keys", "values") for name in ("codes", "scale", "minimum")],
    )
    def test_tensors_that_do_not_fit_are_refused(self, codec: KiviCodec, key: str) -> None:
        tensors, facts = codec.dump(codec.encode(random_kv(140, torch.bfloat16)))
        good, dim = tensors[key], 2 if key.startswith("raw") else 0
        altered = (good.narrow(dim, 0, good.shape[dim] - 1), torch.cat([good, good], dim), good[None], good.double())
        for bad in altered:
            with pytest.raises(ValueError, match=r"."):
                codec.load(tensors | {key: bad.contiguous()}, facts)

    @pytest.mark.parametrize(
        ("fact", "bad"),
        [
            ("num_tokens", "3"),
            ("num_tokens", "-1"),
            ("num_tokens", "141"),
            ("num_tokens", "many"),
            ("bits", "2"),
            ("dtype", "float64"),
            ("dtype", "float16"),
        ],
    )
    def test_facts_that_do_not_fit_are_refused(self, codec: KiviCodec, fact: str, bad: str) -> None:
        tensors, facts = codec.dump(codec.encode(random_kv(140, torch.bfloat16)))
        with pytest.raises((KeyError, ValueError)):
            codec.load(tensors, facts | {fact: bad})

    def test_more_first_tokens_than_tokens_are_refused(self, codec: KiviCodec) -> None:
        tensors, facts = codec.dump(codec.encode(random_kv(9)))
        with pytest.raises(ValueError, match="4 raw tokens of 3"):
            codec.load(tensors, facts | {"num_tokens": "3"})

    def test_another_codecs_file_is_refused(self, codec: KiviCodec) -> None:
        other = next(other for other in QUANTISED if other is not codec)
        kv = KV(torch.zeros(1, 1, 0, 1), torch.zeros(1, 1, 0, 1), None)  # no codes whose number could tell
        with pytest.raises(ValueError, match=f"not {codec.name}'s"):
            codec.load(*other.dump(other.encode(kv)))


@pytest.mark.parametrize("count", [0, 1, 2, 7, 8])
def test_two_codes_share_a_byte(count: int) -> None:
    codes = (torch.arange(count) * 7 % 16).to(torch.uint8)
    packed = Int4Codec().pack(codes)
    assert packed.numel() == (count + 1) // 2
    assert torch.equal(Int4Codec().unpack(packed, count), codes)
