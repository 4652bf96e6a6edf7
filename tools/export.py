"""Write the deploy form of a backbone or classifier as ONNX, .pt2 or .pt."""

import argparse

from repa_mm.deploy.export import export
from repa_mm.runtime import FORMS, init_model
from repa_mm.runtime.cli import clear_errors


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__,
        epilog='Of a detector or segmentor this is the backbone; whole ones are exported by '
        'MMDeploy. Images are normalized before.',
    )
    parser.add_argument('config', help='config of the training form')
    parser.add_argument('checkpoint', help='checkpoint in either form')
    parser.add_argument(
        'out', help='file to write: .onnx, .pt2 (torch.export) or .pt (TorchScript)'
    )
    parser.add_argument(
        '--shape',
        type=int,
        nargs=2,
        default=(224, 224),
        metavar=('HEIGHT', 'WIDTH'),
        help='of images, 224 224 by default',
    )
    parser.add_argument(
        '--dynamic',
        action='store_true',
        help='take any number of images of any size; --shape is then an example, see '
        'docs/deployment.md',
    )
    parser.add_argument('--batch', type=int, default=1, help='number of images, 1 by default')
    parser.add_argument('--form', choices=FORMS, default='deploy')
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    with clear_errors():
        model = init_model(args.config, args.checkpoint, args.form)
        part = 'classifier'
        if model.cfg.default_scope != 'mmpretrain':
            model, part = model.backbone, 'backbone'
        error = export(model, args.out, args.shape, args.dynamic, args.batch)
    print(
        f'wrote the {part} to {args.out}; largest difference from PyTorch: '
        f'{error:.1e} of the largest output'
    )


if __name__ == '__main__':
    main()
