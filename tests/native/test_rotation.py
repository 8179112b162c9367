from __future__ import annotations

import pytest
import torch

from pdhandoff.errors import LocalError
from pdhandoff.native.rotation import hadamard128

SCALE: float = 128**-0.5


def sylvester() -> torch.Tensor:
    signs = [[-1.0 if (i & j).bit_count() % 2 else 1.0 for j in range(128)] for i in range(128)]
    return torch.tensor(signs, dtype=torch.float64) * SCALE


def test_the_matrix_is_sylvesters_and_orthogonal() -> None:
    matrix = hadamard128(torch.eye(128))
    assert torch.equal(matrix, sylvester().float())
    assert torch.allclose(sylvester() @ sylvester().T, torch.eye(128, dtype=torch.float64))


def test_it_agrees_with_the_product_in_float64() -> None:
    x = torch.randn(7, 3, 128, generator=torch.Generator().manual_seed(1))
    assert torch.allclose(hadamard128(x).double(), x.double() @ sylvester(), rtol=1e-5, atol=1e-6)


def test_it_is_its_own_inverse() -> None:
    x = torch.randn(5, 128, generator=torch.Generator().manual_seed(2))
    assert torch.allclose(hadamard128(hadamard128(x)), x, rtol=1e-5, atol=1e-6)


def test_integers_are_exact_up_to_the_final_scale() -> None:
    x = torch.randint(-1000, 1000, (16, 128), generator=torch.Generator().manual_seed(3)).float()
    sums = (x.double() @ (sylvester() * 128**0.5).round()).float()
    assert torch.equal(hadamard128(x), sums * torch.tensor(128.0**-0.5))


def test_types_and_shapes() -> None:
    assert hadamard128(torch.zeros(2, 128, dtype=torch.bfloat16)).dtype is torch.float32
    assert hadamard128(torch.zeros(0, 4, 128)).shape == (0, 4, 128)
    with pytest.raises(LocalError, match="needs 128"):
        hadamard128(torch.zeros(64))
