"""Latency of a model: training form, deploy form and vanilla, side by side.

The forms take turns on every image, so whatever else the machine does meets all of them. Latency
is that of a test step: from the loaded images to the predictions, split into preprocessing,
backbone, neck, head, post-processing. Ctrl-C ends the measurement early, with a report of what was
measured.
"""

from repa_mm.benchmark.execution import COMPILE
from repa_mm.benchmark.latency import WHAT, Options, benchmark
from repa_mm.benchmark.output import add_machine_options, run_tool
from repa_mm.benchmark.plots import plot_benchmark
from repa_mm.benchmark.tables import benchmark_text
from repa_mm.run.cli import add_cfg_options, tool_parser

EXAMPLES = """examples:
  # RetinaNet on COCO val2017, against the vanilla model
  %(prog)s configs/retinanet_repa_swin_b.py CHECKPOINT \\
      --baseline configs/retinanet_swin_b.py --baseline-checkpoint VANILLA
  # no data set, no weights
  %(prog)s configs/retinanet_repa_swin_b.py --synthetic 800x1344 \\
      --baseline configs/retinanet_swin_b.py --fair --num-images 30
  # a figure that another run confirms: six processes, timed from outside
  %(prog)s configs/retinanet_repa_swin_b.py --synthetic 800x1344 \\
      --baseline configs/retinanet_swin_b.py --part predict --num-images 6 --warmup 2 --runs 6
  # the backbone alone
  %(prog)s configs/repa_swin_b_in1k.py --baseline configs/swin_b_in1k.py \\
      --part backbone --synthetic 224x224 --batch-size 8
  # how cost grows with the image
  %(prog)s configs/upernet_repa_swin_t.py --plot cost.png \\
      --sweep size=256x256,512x512,768x768
"""


def parse_args() -> dict:
    parser = tool_parser(__doc__, EXAMPLES)
    parser.add_argument('config', help='config of the RePa model')
    parser.add_argument('checkpoint', nargs='?', help='its weights; random if left out')
    parser.add_argument('--baseline', metavar='CONFIG', help='of the vanilla counterpart')
    parser.add_argument('--baseline-checkpoint', metavar='CHECKPOINT')
    parser.add_argument(
        '--fair',
        action='store_true',
        help='also measure the baseline with our window attention and UperNet head',
    )
    what = parser.add_argument_group('what is measured')
    what.add_argument(
        '--part',
        choices=WHAT,
        help='a test step; the call model(..., mode="predict") alone, on normalized noise and '
        'without timers inside, as a script of your own would time it; or the backbone '
        '(%(default)s)',
    )
    what.add_argument(
        '--synthetic', metavar='HxW', help='noise of that size instead of the test set'
    )
    what.add_argument('--batch-size', type=int)
    what.add_argument(
        '--sweep',
        metavar='KEY=VALUES',
        help='size=512x512,800x1344 or batch=1,2,4 or idle-ratio=0.25,0.5',
    )
    what.add_argument('--num-images', type=int, help='images to measure, in each run (%(default)s)')
    what.add_argument('--warmup', type=int, help='batches before those (%(default)s)')
    what.add_argument(
        '--runs',
        type=int,
        help='measure in so many fresh processes, one after the other, and show the range of their '
        'ratios (%(default)s: in this process)',
    )
    how = parser.add_argument_group('how it runs')
    add_machine_options(how, amp=True)
    how.add_argument(
        '--compile',
        nargs='?',
        choices=COMPILE,
        const='backbone',
        help='torch.compile of the backbone, or of all networks',
    )
    how.add_argument(
        '--cuda-graphs', action='store_true', help='replay the backbone from a CUDA graph'
    )
    how.add_argument('--channels-last', action='store_true')
    how.add_argument(
        '--no-memory', dest='memory', action='store_false', help='do not find out the peak memory'
    )
    how.add_argument(
        '--flops',
        action='store_true',
        help='with --part backbone: speed as a share of that of a large matrix product',
    )
    add_cfg_options(how)
    out = parser.add_argument_group('output')
    out.add_argument('--out', metavar='FILE.json', help='everything, as JSON')
    out.add_argument(
        '--plot', metavar='FILE.png', help='bars of the latencies, or curves over a sweep'
    )
    defaults = ('part', 'batch_size', 'num_images', 'warmup', 'runs')
    parser.set_defaults(**{key: getattr(Options, key) for key in defaults})
    return vars(parser.parse_args())


def main() -> None:
    args = parse_args()
    out, plot = args.pop('out'), args.pop('plot')
    options = Options(**args)
    inputs = options.config, options.checkpoint, options.baseline, options.baseline_checkpoint
    run_tool(
        benchmark, dict(options=options), benchmark_text, out, plot, plot_benchmark, inputs=inputs
    )


if __name__ == '__main__':
    main()
