"""Export a whole detector, segmentor or classifier, or a backbone, to ONNX.

The exported model is compared with PyTorch on images, and written only if they agree. Its inputs
and outputs are in docs/deploy.md.
"""

import argparse

from repa_mm.config import load_config, readable_errors, tool_parser
from repa_mm.export import NUM_IMAGES, agreeing_onnx, example_shape, noise, onnx_backbone, resized
from repa_mm.files import write_bytes
from repa_mm.opening import open_model, read_images


def parse_args() -> argparse.Namespace:
    parser = tool_parser(__doc__)
    parser.add_argument('checkpoint', help='checkpoint in either form')
    parser.add_argument('out', help='file to write, .onnx')
    parser.add_argument(
        '--backbone',
        action='store_true',
        help='export the backbone only; for classifiers, up to the logits',
    )
    parser.add_argument(
        '--preprocessing',
        action='store_true',
        help='take images of type uint8, (B, H, W, 3), as OpenCV reads them, and normalize them in '
        'the graph (whole models only)',
    )
    parser.add_argument(
        '--shape',
        type=int,
        nargs=2,
        metavar=('HEIGHT', 'WIDTH'),
        help='size of the images (default: 224 224); with --dynamic, size of the example (default: '
        'a size that suits the model)',
    )
    parser.add_argument(
        '--dynamic',
        action=argparse.BooleanOptionalAction,
        help='take any number of images of any size (default for whole models)',
    )
    parser.add_argument('--batch', type=int, default=1, help='number of images (default: 1)')
    parser.add_argument(
        '--images', help="folder of images to compare on (default: the config's test data)"
    )
    parser.add_argument(
        '--unchecked',
        action='store_true',
        help='compare on noise, where there are no images; the metadata of the file say so',
    )
    args = parser.parse_args()
    if args.backbone and args.preprocessing:
        parser.error('--preprocessing is for whole models, without --backbone')
    return args


def main() -> None:
    args = parse_args()
    with readable_errors():
        cfg = load_config(args.config, args.cfg_options)
        images = None if args.unchecked else read_images(cfg, 'test', NUM_IMAGES, args.images)
        model = open_model(cfg, args.checkpoint, merge=True)
        what, unit = type(model).__name__, 'objects, of pixels, or of a score'
        dynamic = not args.backbone if args.dynamic is None else args.dynamic
        if args.backbone:
            height, width = args.shape or (example_shape(model) if dynamic else (224, 224))
            data = resized(images or noise(cfg), [(height, width)] * args.batch)
            example = model.data_preprocessor(data)['inputs'][..., :height, :width]  # not padded
            part = model if cfg.default_scope == 'mmpretrain' else model.backbone
            what, unit = type(part).__name__, 'the largest feature'
            content, error = onnx_backbone(part, example, dynamic)
        else:
            content, error = agreeing_onnx(
                model, images, args.shape, dynamic, args.batch, args.preprocessing
            )
        write_bytes(args.out, content)
    on = 'noise' if args.unchecked else f'{len(images)} images'
    print(f'wrote {args.out}: {what}, differs from PyTorch by {error:.1e} of {unit} on {on}')


if __name__ == '__main__':
    main()
