import os
import shutil
import subprocess
import sys

from mmengine.config import Config

from .cases import DETECTOR, ROOT, Case, tiny


def test_paths_with_spaces_and_letters(inputs, digits, tmp_path, monkeypatch, call):
    """The whole way, in a folder whose name is not ASCII."""
    folder = tmp_path / 'ein schöner Ordner 数据 %s {0} [1]'
    folder.mkdir()
    monkeypatch.chdir(folder)
    monkeypatch.setattr(Config, 'pretty_text', '# a config')
    case = Case(inputs, folder, digits)
    options = case.coco(None)
    config = case.config(
        tiny(**DETECTOR) + 'train_cfg = dict(max_epochs=1, val_interval=1)\n'
        'model["test_cfg"] = dict(score_thr=0.)\n',
        'ä b.py',
    )
    checkpoint = 'work dir ü/epoch_1.pth'
    image = folder / 'coco/bild 1 ß.jpg'
    shutil.copy(inputs / 'image.jpg', image)
    for arguments, written in (
        (['train', config, '--work-dir', 'work dir ü', '--cfg-options', *options], checkpoint),
        (
            [
                'test',
                config,
                checkpoint,
                '--work-dir',
                'x y',
                '--out',
                'ö ö.pkl',
                '--cfg-options',
                *options,
            ],
            'ö ö.pkl',
        ),
        (['reparameterize', config, checkpoint, 'é è.pth'], 'é è.pth'),
        (['image_demo', image, config, 'é è.pth', '--out', 'ñ.png'], 'ñ.png'),
        (
            [
                'benchmark',
                config,
                checkpoint,
                '--synthetic',
                '64x64',
                '--num-images',
                1,
                '--warmup',
                0,
                '--out',
                'ł.json',
                '--plot',
                'ł.png',
            ],
            'ł.png',
        ),
        (['make_demo_data', '--root', 'ż ż', '--num-train', 1, '--num-val', 1], 'ż ż/dataset.json'),
    ):
        status, said = call(*arguments)
        assert status == 0, said
        assert (folder / written).is_file()


def test_names_that_the_locale_does_not_know(inputs, digits, tmp_path):
    """OpenCV ends the process when it gets such a name."""
    shutil.copy(inputs / 'image.jpg', tmp_path / 'ä.jpg')
    environment = dict(LC_ALL='C', PYTHONUTF8='0', PYTHONCOERCECLOCALE='0')

    def draw(out):
        return subprocess.run(
            [
                *(sys.executable, ROOT / 'tools/image_demo.py', tmp_path / 'ä.jpg'),
                *(inputs / 'detector.py', inputs / 'good.pth', '--out', tmp_path / out),
            ],
            cwd=digits,
            env={**os.environ, **environment, 'PYTHONPATH': str(ROOT), 'OMP_NUM_THREADS': '1'},
            capture_output=True,
        )

    result = draw('ñ.png')
    assert result.returncode == 0, result.stderr[-3000:]
    assert (tmp_path / 'ñ.png').read_bytes().startswith(b'\x89PNG')
    result = draw('a.pñg')
    assert result.returncode == 1
    assert b'is not the name of a picture' in result.stderr.splitlines()[-1]
    assert sorted(os.listdir(tmp_path)) == ['ä.jpg', 'ñ.png']
