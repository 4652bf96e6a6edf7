"""The crops of photographs that DINO is tried on."""

import cv2
import pytest

pytest.importorskip('sklearn')
pytest.importorskip('skimage')

from repa_mm.demo.photos import PHOTOGRAPHS, write_photos  # noqa: E402


def crops(root):
    return {str(p.relative_to(root)): cv2.imread(str(p)) for p in sorted(root.glob('*/*/*.png'))}


@pytest.fixture(scope='module')
def folder(tmp_path_factory):
    root = tmp_path_factory.mktemp('photos') / 'set'
    assert write_photos(str(root), num_train=3, num_val=2, size=32)
    return root


def test_each_photograph_is_a_class(folder):
    found = crops(folder)
    assert len(found) == 5 * len(PHOTOGRAPHS)
    assert all(crop.shape == (32, 32, 3) for crop in found.values())


def test_the_seed_decides(folder, tmp_path):
    again, other = tmp_path / 'again', tmp_path / 'other'
    write_photos(str(again), 3, 2, 32)
    write_photos(str(other), 3, 2, 32, seed=1)
    expected = crops(folder)
    assert all((crop == expected[name]).all() for name, crop in crops(again).items())
    assert any((crop != expected[name]).any() for name, crop in crops(other).items())


def test_light_differs_from_crop_to_crop(folder, tmp_path):
    even = tmp_path / 'even'
    write_photos(str(even), 3, 2, 32, light=0.0)

    def spread(found):
        means = [found[f'train/brick/{i:04d}.png'].mean() for i in range(3)]
        return max(means) - min(means)

    # The wall is as bright everywhere.
    assert spread(crops(even)) < 10 < spread(crops(folder))


def test_a_set_is_not_written_twice(folder):
    before = crops(folder).keys()
    assert not write_photos(str(folder), num_train=4)
    assert crops(folder).keys() == before


@pytest.mark.parametrize('wrong', [dict(num_train=0), dict(size=0), dict(light=1.5)])
def test_bad_numbers(wrong, tmp_path):
    with pytest.raises(ValueError, match=f'{next(iter(wrong))} must be'):
        write_photos(str(tmp_path / 'set'), **wrong)
    assert not list(tmp_path.iterdir())
