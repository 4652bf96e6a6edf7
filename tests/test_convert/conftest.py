import pytest

from repa_mm.convert import regression


@pytest.fixture(autouse=True)
def _few_steps(monkeypatch):
    """Most of a test's time would be steps of Adam, which only some tests are about."""
    monkeypatch.setattr(regression, 'STEPS', 10)


@pytest.fixture
def unridged(monkeypatch):
    monkeypatch.setattr(regression, 'RIDGES', (1e-12,))
    monkeypatch.setattr(regression, 'MIN_RIDGE', 0.0)
