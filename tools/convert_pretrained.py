"""Give a trained detector, segmentor or classifier channel-idle FFNs, without training.

The FFNs of the backbone are fitted to what they compute on some images, in closed form. Labels are
not needed. The tool writes a checkpoint, and its config beside it.
"""

import argparse

from mmengine import DictAction

from repa_mm.fit.pretrained import convert_checkpoint, result_text


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument('config', help="the model's config, or an installed one: mmdet::swin/….py")
    parser.add_argument('checkpoint', help="the model's checkpoint, a file or a URL")
    parser.add_argument('out', help='checkpoint to write, ….pth; its config becomes ….py')
    parser.add_argument(
        '--idle-ratio',
        type=float,
        nargs='+',
        default=[0.75],
        help='share of FFN channels that skip the activation: one, or one for each block '
        '(default: 0.75)',
    )
    parser.add_argument(
        '--allocate',
        choices=['uniform', 'by_error'],
        default='uniform',
        help='the same idle ratio for all blocks, or lower ones for blocks that lose more, at the '
        'same multiply-adds (default: uniform)',
    )
    parser.add_argument(
        '--norm',
        choices=['keep', 'fold'],
        default='keep',
        help='keep the LayerNorms before the FFNs, or fold them (default: keep)',
    )
    parser.add_argument('--num-images', type=int, default=64, help='of calibration (default: 64)')
    parser.add_argument('--images', help="folder of images (default: the config's training data)")
    parser.add_argument(
        '--skip-unsupported',
        action='store_true',
        help='leave blocks as they are whose FFN cannot become channel-idle',
    )
    parser.add_argument(
        '--distill',
        type=int,
        default=0,
        metavar='ITERS',
        help='imitate the original model for so many iterations afterwards, without labels',
    )
    parser.add_argument('--device', help='for the fit (default: a GPU, if there is one)')
    parser.add_argument(
        '--cfg-options', nargs='+', action=DictAction, help='values of the config: key=value'
    )
    return parser.parse_args()


def main() -> None:
    args = vars(parse_args())
    if len(args['idle_ratio']) == 1:
        (args['idle_ratio'],) = args['idle_ratio']

    def progress(row) -> None:
        print(f'{row.name}: the fit leaves {row.unexplained:.2%} of the variance', flush=True)

    print(result_text(convert_checkpoint(**args, progress=progress), args['out']))


if __name__ == '__main__':
    main()
