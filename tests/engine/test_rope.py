"""Keys moved by rotation equal keys computed at the new place."""

from __future__ import annotations

import pytest
import torch

from kvboost_rag.engine.rope import Rope, move

INV_FREQ = 1.0 / (10_000 ** (torch.arange(0, 16, 2) / 16))


def rotate(plain: torch.Tensor, start: int, rope: Rope) -> torch.Tensor:
    """Reference: equation 3 of the paper, token by token, in float64, pairs (i, i + half)."""
    out = plain.double().clone()
    half = rope.rotary_dim // 2
    for t in range(plain.shape[-2]):
        angle = rope.inv_freq.double() * (start + t)
        a, b = plain[..., t, :half].double(), plain[..., t, half : 2 * half].double()
        out[..., t, :half] = a * angle.cos() - b * angle.sin()
        out[..., t, half : 2 * half] = b * angle.cos() + a * angle.sin()
    return out


@pytest.mark.parametrize("distance", [1, 137, -40, 5000, 100_000])
@pytest.mark.parametrize("head_dim", [16, 24], ids=["whole head", "partial rotary"])
def test_moved_keys_equal_keys_computed_there(distance: int, head_dim: int) -> None:
    torch.manual_seed(0)
    rope, plain, start = Rope(INV_FREQ), torch.randn(3, 2, 5, head_dim), 50
    moved = move(rotate(plain, start, rope).float(), distance, rope)
    torch.testing.assert_close(moved, rotate(plain, start + distance, rope).float(), atol=2e-5, rtol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_move_by_zero_copies_the_bits(dtype: torch.dtype) -> None:
    keys = torch.randn(2, 2, 7, 16).to(dtype)
    assert torch.equal(move(keys, 0, Rope(INV_FREQ)), keys)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_out_is_filled_in_place_and_the_source_left_alone(dtype: torch.dtype) -> None:
    rope, keys = Rope(INV_FREQ), torch.randn(2, 2, 7, 16).to(dtype)
    before, buffer = keys.clone(), torch.zeros(2, 2, 20, 16, dtype=dtype)
    move(keys, 9, rope, out=buffer[:, :, 5:12])
    assert torch.equal(buffer[:, :, 5:12], move(keys, 9, rope))
    assert torch.equal(keys, before)
    assert not buffer[:, :, :5].any()
    assert not buffer[:, :, 12:].any()


def test_bfloat16_is_rotated_in_float32() -> None:
    rope, keys = Rope(INV_FREQ), torch.randn(1, 1, 64, 16).bfloat16()
    exact = move(keys.float(), 1000, rope)
    assert torch.equal(move(keys, 1000, rope), exact.bfloat16())


def test_angles_are_kept_for_the_next_layers_and_never_for_another_place() -> None:
    rope = Rope(torch.tensor([1.0, 0.1]))
    device = torch.device("cpu")
    first = rope.angles(range(3, 6), device)
    assert rope.angles(range(3, 6), device)[0] is first[0]
    for distances in (range(4, 7), range(3, 7), range(-3, -6, -1)):
        expected = torch.tensor(list(distances), dtype=torch.float64)[:, None] * rope.inv_freq.double()
        cos, sin, _ = rope.angles(distances, device)
        torch.testing.assert_close(cos, expected.cos().float(), atol=0, rtol=0)
        torch.testing.assert_close(sin, expected.sin().float(), atol=0, rtol=0)
    rope.let_go()
    assert rope.angles(range(-3, -6, -1), device)[0] is not cos
    assert Rope(torch.tensor([1.0, 0.2])).angles(range(3, 6), device)[0] is not first[0]
