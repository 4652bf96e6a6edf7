"""Show the whole job on a small data set: train, test in both forms, compare, draw."""

from repa_mm.demo.run import main

if __name__ == '__main__':
    main()
