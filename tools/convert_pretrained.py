"""Give a trained detector, segmentor or classifier channel-idle FFNs, without training.

The FFNs of the backbone are fitted to what they compute on some images, in closed form. Labels are
not needed. The tool writes a checkpoint, and a config beside it that inherits CONFIG.
"""

from repa_mm.run.cli import add_cfg_options, clear_errors, tool_parser


def parse_args() -> dict:
    parser = tool_parser(__doc__)
    parser.add_argument('config', help="the model's config, or an installed one: mmdet::swin/….py")
    parser.add_argument('checkpoint', help="the model's checkpoint, a file or a URL")
    parser.add_argument(
        'out', help='checkpoint to write, ….pth; its config becomes ….py. With --sweep, a folder'
    )
    how_much = parser.add_mutually_exclusive_group()
    how_much.add_argument(
        '--idle-ratio',
        type=float,
        nargs='+',
        help='share of FFN channels that skip the activation: one, or one for each block '
        '(default: 0.75); with --sweep, those to try (default: 0 0.25 0.5 0.75 0.9 1)',
    )
    how_much.add_argument(
        '--target-gmacs',
        type=float,
        help='multiply-adds of the reparameterized backbone, in 1e9, in place of an idle ratio; '
        'for an image of 224x224, or of the only size it takes',
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
        '--select',
        choices=['eliminate', 'score'],
        default='eliminate',
        help='how the active channels are chosen: by backward elimination from all channels, or '
        'by what no affine function explains of each (default: eliminate)',
    )
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
    parser.add_argument(
        '--resume', action='store_true', help='go on with an interrupted conversion'
    )
    sweep = parser.add_argument_group('a table of trade-offs')
    sweep.add_argument(
        '--sweep',
        action='store_true',
        help='convert with several idle ratios, and compare quality and latency',
    )
    sweep.add_argument('--test', action='store_true', help='with --sweep: test each model, too')
    parser.add_argument(
        '--device',
        help='for fits and latencies (default: a GPU, if there is one); distillations and tests '
        'run where MMEngine puts them',
    )
    add_cfg_options(parser)
    args = parser.parse_args()
    if args.test and not args.sweep:
        parser.error('--test goes with --sweep')
    return vars(args)


def main() -> None:
    args = parse_args()
    sweep, test, ratios = (args.pop(key) for key in ('sweep', 'test', 'idle_ratio'))

    def progress(row) -> None:
        print(f'{row.name}: the fit leaves {row.unexplained:.2%} of the variance', flush=True)

    with clear_errors():
        if sweep:
            from repa_mm.benchmark.sweep import RATIOS, sweep_conversions, sweep_text

            result = sweep_conversions(**args, ratios=ratios or RATIOS, test=test)
            print(sweep_text(result))
            return
        from repa_mm.fit.pretrained import convert_checkpoint, result_text

        ratios = ratios or [0.75]
        args['idle_ratio'] = ratios[0] if len(ratios) == 1 else ratios
        print(result_text(convert_checkpoint(**args, progress=progress), args['out']))


if __name__ == '__main__':
    main()
