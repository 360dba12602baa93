"""What doctests in src may take as given. It lies here, above src and tests, so that the wheel does not carry it."""

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def _doctest_names(request: pytest.FixtureRequest, doctest_namespace: dict[str, object]) -> Iterator[None]:
    """Doctests see `torch` and `ritz`, and the default dtype that a reader's own interpreter has."""
    if not isinstance(request.node, pytest.DoctestItem):
        yield
        return
    import ritz

    doctest_namespace.update(torch=torch, ritz=ritz)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    yield
    torch.set_default_dtype(before)
