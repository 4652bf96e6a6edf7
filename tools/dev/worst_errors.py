"""Search for the inputs with the largest rounding errors.

Prints, for every check of tests/test_reparam/rounding_errors.py, the worst errors found and the
case that has them.
"""

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / 'tests' / 'test_reparam'))
from rounding_errors import CHECKS, search  # noqa: E402

# What a trained model and its data are like.
ORDINARY = dict(content='random', spread=1, scale=0, mean=1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument('--cases', type=int, default=2000, help='of each row')
    parser.add_argument('--seed', type=int, default=0)
    parser.add_argument('--check', choices=list(CHECKS), help='only this one')
    args = parser.parse_args()
    for name in [args.check] if args.check else CHECKS:
        for dtype in CHECKS[name].fields['dtype']:
            for values, fixed in (('ordinary', ORDINARY), ('any', {})):
                found = search(name, args.cases, args.seed, dtype=dtype, **fixed)
                overflown = found.pop('overflown')
                print(
                    f'{name}, {dtype}, {values} values: '
                    f'{args.cases - overflown} cases '
                    f'({overflown} more exceed the range)'
                )
                for kind in ('relative', 'roundings'):
                    # Gradients may be zero but for rounding errors.
                    results = [
                        r
                        for r, k in found
                        if k == kind and (kind == 'roundings' or not r.endswith('grad'))
                    ]
                    worst = max(results, key=lambda r: found[r, kind][0])
                    error, case = found[worst, kind]
                    print(f'  {kind} {error:.1e} in {worst} of {case}')


if __name__ == '__main__':
    main()
