import shutil

from mmengine.config import Config

from .cases import DETECTOR, Case, tiny


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
