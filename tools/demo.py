"""Train a small model on a small data set, test both forms, compare them and draw predictions."""

from repa_mm.demo.run import main

if __name__ == '__main__':
    main()
