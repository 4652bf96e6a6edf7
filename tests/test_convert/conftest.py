import pytest

from repa_mm.convert.regression import refine


@pytest.fixture(autouse=True)
def _few_steps(request, monkeypatch):
    """Most of a test's time would be steps of Adam, which only some tests are about."""
    if request.path.stem not in ('test_regression', 'test_training_form'):
        monkeypatch.setattr(refine, '__defaults__', (10,))
