"""Write a whole detector, segmentor or classifier with layers in int8.

The ranges of activations are those on some images: of the config's training data, or of a folder.
The file is run beside PyTorch on other images, and written only if it finds the same.
"""

import argparse

from mmengine.config import Config

from repa_mm.apis import open_model, read_images
from repa_mm.apis.images import cropped
from repa_mm.export import MIN_AGREEMENT, quantize
from repa_mm.io.command_line import readable_errors, tool_parser
from repa_mm.io.configs import load_config


def parse_args() -> argparse.Namespace:
    parser = tool_parser(__doc__)
    parser.add_argument('checkpoint', help='checkpoint in either form')
    parser.add_argument('out', help='file for OpenVINO to write, .xml; its weights are in .bin')
    parser.add_argument('--num-images', type=int, default=64, help='to calibrate on (default: 64)')
    parser.add_argument('--images', help="folder of images (default: the config's training data)")
    parser.add_argument(
        '--tolerance', type=float, default=MIN_AGREEMENT, help='smallest agreement (%(default)s)'
    )
    return parser.parse_args()


def images_to_quantize(
    cfg: Config, number: int, folder: str | None
) -> tuple[list[dict], list[dict]]:
    """Return crops to calibrate on and half as many other images, as batches of one image."""
    half = -(-number // 2)
    if folder:
        found = read_images(cfg, 'train', number + half, folder)
        if len(found) < 2:
            raise ValueError(f'{folder} needs two images: one to calibrate on, one to compare on')
        seen, others = [data for i, data in enumerate(found) if i % 3], found[::3]
    else:
        seen, others = read_images(cfg, 'train', number), read_images(cfg, 'test', half)
    return [cropped(data) for data in seen], others


def main() -> None:
    args = parse_args()
    with readable_errors():
        cfg = load_config(args.config, args.cfg_options)
        images, others = images_to_quantize(cfg, args.num_images, args.images)
        model = open_model(cfg, args.checkpoint, merge=True)
        result = quantize(model, args.out, images, others, args.tolerance)
    layers = result['layers'].values()
    if result['backbone_only']:
        print('in int8 neck and heads do not agree: they stay in float')
    print(
        f'wrote {args.out}: {sum(layers)} of {len(layers)} layers are in int8; agreement with '
        f'PyTorch {result["agreement"]:.4f} on {len(others)} images that it was not '
        f'calibrated on (1 is the same, less than {args.tolerance} is refused)'
    )


if __name__ == '__main__':
    main()
