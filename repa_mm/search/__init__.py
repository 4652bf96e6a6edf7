"""The one command: how much faster a model can be on this machine, and what it costs."""

from collections.abc import Sequence

__all__ = ['speed_up']


def speed_up(
    config: str,
    checkpoint: str,
    out_dir: str,
    max_loss: float | None = None,
    latency: float | None = None,
    images: str | None = None,
    num_images: int = 100,
    budgets: Sequence[float] = (0.6, 0.4, 0.25),
    fit_images: int = 64,
    repeats: int = 20,
    cfg_options: dict | None = None,
    device: str | None = None,
    batch_size: int = 1,
) -> list[dict]:
    """Make a trained model faster in all ways that this package has, and measure each of them.

    Candidates are the model with faster parts, and narrower models of several budgets, each in
    PyTorch and in files for the installed runtimes. A RePaFormer is merged first. On a GPU, the
    formats are PyTorch in float32, float16 and bfloat16 (autocast), also compiled, and the
    installed providers of ONNX Runtime. All run in turn in this process, on images as the data set
    has them, and are tested on the same images. The files, and what was measured on the way to
    them, stay in ``out_dir``: a second call continues from there.

    Args:
        config (str): The model's config: a path, or the name of an installed config.
        checkpoint (str): The model's checkpoint: a path or a URL.
        out_dir (str): The folder to write ``results.json`` and ``report.html`` to, and with a
            target the chosen model as ``model.py``, ``model.pth`` and its file.
        max_loss (float, optional): Choose the fastest model that loses at most this many points of
            the metric. The whole 95 % interval of the difference must be above this floor.
        latency (float, optional): Choose the model that loses least of those that take at most this
            fraction of the original's time, in (0, 1).
        images (str, optional): A folder of images, without annotations, instead of the
            config's data. The metric is then the agreement with the original model, see
            :func:`~repa_mm.export.agreement`, in percent.
        num_images (int): Number of images to test on, spread over the config's validation data.
            Defaults to 100. With 0, nothing is tested. A floor needs 30.
        budgets (Sequence[float]): Budgets of the narrower models of a call without a target, as for
            :func:`~repa_mm.convert_pretrained`. Defaults to 0.6, 0.4 and 0.25.
        fit_images (int): Number of images to fit to, and to calibrate int8 on. Defaults to 64.
        repeats (int): Number of turns of the timing. Defaults to 20.
        cfg_options (dict, optional): Values to override in the config.
        device (str, optional): Where models are fitted, timed and tested: 'cpu', or a GPU such as
            'cuda'. Defaults to the GPU if there is one.
        batch_size (int): Number of images that are timed together. Defaults to 1.

    Returns:
        list[dict]: A row for each candidate and format: ``candidate``, ``format``, ``ms`` and
        ``ms_interval`` (quartiles), ``speedup`` (stock's time divided by this one) and
        ``speedup_interval`` (95 %), ``metric``, ``difference`` from stock and ``interval`` (95 %)
        in points, ``tested_in`` (the format whose test it is: the float32 formats of a candidate
        share one), ``mb``, ``config``, ``checkpoint``, ``file`` and ``chosen``. With a target that
        nothing meets, no row is chosen.

    Raises:
        ValueError: If there are no data to test on, a target is out of range, or ``out_dir``
            belongs to another model.
        CheckpointError: If the checkpoint does not fit the config.
    """
    import torch

    from repa_mm.search.judge import LEAST_IMAGES
    from repa_mm.search.search import Search, quiet

    for name, value, is_right, right in (
        ('latency', latency, latency is None or 0 < latency < 1, 'in (0, 1)'),
        ('max_loss', max_loss, max_loss is None or 0 <= max_loss < 100, 'in [0, 100)'),
        ('budgets', budgets, all(0 < budget <= 1 for budget in budgets), 'in (0, 1]'),
        ('fit_images', fit_images, fit_images > 0, 'at least 1'),
        ('repeats', repeats, repeats > 2, 'at least 3'),
        ('num_images', num_images, max_loss is None or num_images >= LEAST_IMAGES,
         f'at least {LEAST_IMAGES}, for a floor (max_loss)'),
    ):  # fmt: skip
        if not is_right:
            raise ValueError(f'{name} must be {right}, not {value}')
    device = device or ('cuda' if torch.cuda.is_available() else 'cpu')
    print(f'searching on {device}')
    with quiet():
        search = Search(
            config, checkpoint, out_dir, images, num_images, fit_images, repeats, cfg_options,
            device, batch_size,
        )  # fmt: skip
    return search.run(max_loss, latency, budgets)
