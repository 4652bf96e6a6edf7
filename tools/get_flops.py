"""Count parameters and multiply-adds of a model, in its training form and deploy form."""

import argparse

from repa_mm.apis import open_model
from repa_mm.io.command_line import readable_errors, tool_parser
from repa_mm.io.configs import load_config
from repa_mm.measure.complexity import count
from repa_mm.measure.timing import show
from repa_mm.measure.variants import noise_of_size
from repa_mm.reparam import has_training_form, reparameterize


def parse_args() -> argparse.Namespace:
    parser = tool_parser(__doc__)
    parser.add_argument('--part', choices=('model', 'backbone'), default='model')
    parser.add_argument(
        '--input-shape', type=int, nargs=2, default=[224, 224], metavar=('HEIGHT', 'WIDTH'),
        help='size of the images (224 224)',
    )  # fmt: skip
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    shape = tuple(args.input_shape)
    with readable_errors():
        model = open_model(load_config(args.config, args.cfg_options))
    inputs = dict(model.data_preprocessor(noise_of_size(model, shape, 1)), mode='tensor')
    if args.part == 'backbone':
        model, inputs = model.backbone, inputs['inputs'][..., : shape[0], : shape[1]]  # not padded
    forms = {'training' if has_training_form(model) else 'as it is': model}
    if has_training_form(model):
        forms['deploy'] = reparameterize(model)
    rows = []
    for name, form in forms.items():
        parameters, macs = count(form, inputs)
        rows.append([name, f'{parameters / 1e6:.2f}', f'{macs / 1e9:.2f}'])
    title = '{}, {}, {}x{}'.format(args.config, args.part, *shape)
    show(title, ('form', 'parameters, M', 'GMACs'), rows)


if __name__ == '__main__':
    main()
