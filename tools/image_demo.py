"""Draw a model's predictions on images, with the inferencer of the config's codebase."""

import argparse

from mmengine import DictAction

from repa_mm import reparameterize_
from repa_mm.config import load_config
from repa_mm.opening import deploy_, open_model
from repa_mm.reparam import has_deploy_form, has_training_form


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
    cfg = load_config(args.config, args.cfg_options)
    if has_deploy_form(open_model(cfg, args.checkpoint)):
        deploy_(cfg.model)
    if cfg.default_scope == 'mmdet':
        from mmdet.apis import DetInferencer as Inferencer

        options = dict(out_dir=args.out_dir, pred_score_thr=args.score_thr)
    elif cfg.default_scope == 'mmseg':
        from mmseg.apis import MMSegInferencer as Inferencer

        options = dict(out_dir=args.out_dir)
    else:
        from mmpretrain import ImageClassificationInferencer as Inferencer

        options = dict(show_dir=args.out_dir)
    inferencer = Inferencer(cfg, args.checkpoint, device=args.device)
    if has_training_form(inferencer.model):
        reparameterize_(inferencer.model)
    inferencer(args.inputs, **options)


if __name__ == '__main__':
    main()
