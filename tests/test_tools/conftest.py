import pytest

TASKS = ('retinanet', 'mask_rcnn', 'upernet')


@pytest.fixture(scope='session')
def digits(tmp_path_factory):
    """A folder with a few scenes of digits where the demo configs look."""
    pytest.importorskip('sklearn')
    pytest.importorskip('skimage')
    from repa_mm.demo.dataset import write_digit_scenes

    folder = tmp_path_factory.mktemp('user')
    write_digit_scenes(str(folder / 'data/demo'), num_train=8, num_val=4, size=96)
    return folder


@pytest.fixture
def in_digits(digits, monkeypatch, tmp_path):
    monkeypatch.chdir(digits)
    return tmp_path
