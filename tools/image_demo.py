"""Draw a model's predictions on images, with the inferencer of the config's codebase."""

import argparse

from mmengine import DictAction

from repa_mm.config import load_config, readable_errors
from repa_mm.opening import open_model


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument('inputs', help='an image or a folder of images')
    parser.add_argument('config', help="the model's config: a path, or mmdet::swin/….py")
    parser.add_argument('checkpoint', help='path of the checkpoint, in either form')
    parser.add_argument(
        '--out-dir', default='outputs', help='folder for the drawings (%(default)s)'
    )
    parser.add_argument('--device', help='cpu, cuda:0, ... (default: the GPU if there is one)')
    parser.add_argument(
        '--score-thr', type=float, default=0.3, help='lowest score of boxes to draw (%(default)s)'
    )
    parser.add_argument(
        '--cfg-options', nargs='+', action=DictAction, help='override the config: key=value ...'
    )
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    with readable_errors():
        cfg = load_config(args.config, args.cfg_options)
        model = open_model(cfg, args.checkpoint, merge=True)
    if cfg.default_scope == 'mmpretrain':
        from mmpretrain import ImageClassificationInferencer

        model._config, model._dataset_meta = cfg, model.dataset_meta
        inferencer = ImageClassificationInferencer(model, device=args.device)
        inferencer(args.inputs, show_dir=args.out_dir)
        return
    if cfg.default_scope == 'mmdet':
        from mmdet.apis import DetInferencer as Inferencer

        options = dict(pred_score_thr=args.score_thr)
    else:
        from mmseg.apis import MMSegInferencer as Inferencer

        options = {}
        model.dataset_meta = {key: model.dataset_meta.get(key) for key in ('classes', 'palette')}

    class InferencerOfModel(Inferencer):
        def _init_model(self, cfg, weights, device):
            return model.to(device)

    InferencerOfModel(cfg, device=args.device)(args.inputs, out_dir=args.out_dir, **options)


if __name__ == '__main__':
    main()
