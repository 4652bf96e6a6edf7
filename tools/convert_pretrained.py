"""Give a trained detector, segmentor or classifier channel-idle FFNs, without training.

The FFNs of the backbone are fitted to what they compute on some images, in closed form. Labels are
not needed. The tool writes a checkpoint, and a config beside it that inherits CONFIG.
"""

from repa_mm.runtime.cli import add_cfg_options, clear_errors, tool_parser


def parse_args() -> dict:
    parser = tool_parser(__doc__)
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
        '--norm',
        choices=['keep', 'fold'],
        default='keep',
        help='keep the LayerNorms before the FFNs, or fold them (default: keep)',
    )
    parser.add_argument('--num-images', type=int, default=64, help='to calibrate on (default: 64)')
    parser.add_argument('--images', help="folder of images (default: the config's training data)")
    parser.add_argument(
        '--select',
        choices=['eliminate', 'score'],
        default='eliminate',
        help='how the active channels are chosen (default: eliminate)',
    )
    parser.add_argument('--device', help='default: a GPU, if there is one')
    add_cfg_options(parser)
    return vars(parser.parse_args())


def main() -> None:
    args = parse_args()
    with clear_errors():
        from repa_mm.runtime.pretrained import convert_checkpoint

        if len(args['idle_ratio']) == 1:
            args['idle_ratio'] = args['idle_ratio'][0]
        result = convert_checkpoint(
            **args, progress=lambda row: print(f'{row.name}: {row.unexplained:.4f}', flush=True)
        )
    print(result['report'])
    print(f'fitted on {result["images"]} images')
    if result['held_out']:
        values = ', '.join(f'{value:.1%}' for value in result['differences'])
        print(f'on {result["held_out"]} others the outputs differ by {values} of their variance')
    before, after = (value / 1e9 for value in result['macs'])
    print(f'backbone, 224x224: {before:.2f} -> {after:.2f} GMACs, reparameterized')
    print(f'wrote {args["out"]} and {result["config"]}')


if __name__ == '__main__':
    main()
