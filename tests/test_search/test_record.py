"""What is known is found in a folder that has moved, and what is not what it was is found anew."""

import shutil

import pytest

from repa_mm.search.record import Record


def known(folder):
    """What a record says of each name; what it does not know is 'new'."""
    record = Record(str(folder), 'a')
    names = [('fits', '40 %'), ('files', '40 % in onnx'), ('tests', '40 % in float32 on b')]
    names += [('fits', '15 %'), ('files', '18 % in onnx'), ('tests', 'stock in float32 on b')]
    return [record.content[kind].get(name, 'new') for kind, name in names]


@pytest.fixture
def folder(tmp_path):
    folder = tmp_path / 'out'
    (folder / 'candidates').mkdir(parents=True)
    record = Record(str(folder), 'a')

    def write(name, *beside, **values):
        for one in (name, *beside):
            (folder / one).write_text(one)
        return dict(file=name, **values)

    for asked, left in (('40 %', '40'), ('15 %', '18')):
        stem, candidate = f'candidates/{left}', f'{left} %'
        files = f'{stem}.pth', f'{stem}.py'
        record.find('fits', asked, lambda: write(*files, candidate=candidate))  # noqa: B023
        made = lambda: write(f'{stem}.onnx', candidate=candidate)  # noqa: B023, E731
        record.find('files', f'{candidate} in onnx', made)
        record.find('tests', f'{candidate} in float32 on b', lambda: dict(metric=1))
    record.find('tests', 'stock in float32 on b', lambda: dict(metric=1))
    return folder


def test_a_folder_that_has_moved_has_all(folder):
    before = known(folder)
    assert 'new' not in before and folder.name not in str(before)
    assert known(shutil.move(folder, folder.parent / 'other')) == before


@pytest.mark.parametrize(
    'name, lost', [('40.onnx', (0, 1, 2)), ('40.py', (0, 1, 2)), ('18.pth', (3, 4))]
)
def test_a_file_that_changed_is_found_anew_with_all_of_its_candidate(folder, name, lost):
    (folder / 'candidates' / name).write_text('of another model')
    assert [i for i, value in enumerate(known(folder)) if value == 'new'] == [*lost]
    (folder / 'candidates' / name).unlink()
    assert [i for i, value in enumerate(known(folder)) if value == 'new'] == [*lost]


def test_an_export_that_failed_is_tried_again_and_a_refused_one_is_not(folder):
    record = Record(str(folder), 'a')
    for name in ('failed', 'refused'):
        record.find('files', name, lambda: {name: 'why'})  # noqa: B023
    assert {*Record(str(folder), 'a').content['files']} == {
        '40 % in onnx',
        '18 % in onnx',
        'refused',
    }


def test_the_folder_of_something_else_is_refused(folder):
    with pytest.raises(ValueError, match='has the results of another model'):
        Record(str(folder), 'b')
    (folder / 'results.json').unlink()
    (folder / 'model.pth').write_text('mine')
    with pytest.raises(ValueError, match='model.pth of something else'):
        Record(str(folder), 'a')


def test_a_config_finds_what_is_beside_it(folder, monkeypatch):
    """Also in a folder with an apostrophe."""
    from mmengine.config import Config

    path = str(shutil.move(folder, folder.parent / "it's mine"))
    (folder.parent / "it's mine" / 'model.pth').touch()
    cfg = Config(dict(load_from=f'{path}/model.pth', other='/model.pth'))
    with open(f'{path}/model.py', 'w') as file:
        file.write(Record(path, 'a').movable(cfg.pretty_text))
    moved = shutil.move(path, folder.parent / 'moved')
    found = Config.fromfile(f'{moved}/model.py')
    assert found.load_from == f'{moved}/model.pth' and found.other == '/model.pth'
