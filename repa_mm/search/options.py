"""How a search is made."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from repa_mm.search.formats import installed_formats


@dataclass(frozen=True)
class Options:
    """How :func:`~repa_mm.speed_up` searches.

    Args:
        images (str, optional): A folder of images without annotations, instead of the config's
            data. The metric is then :func:`~repa_mm.export.agreement` with the original model, in
            percent.
        num_images (int): Number of images to test on, spread over the config's validation data.
            Defaults to 100. With 0, nothing is tested. A floor needs 30.
        budgets (Sequence[float]): Budgets of the narrower models, as for
            :func:`~repa_mm.convert_pretrained`. Defaults to 0.85, 0.6, 0.4 and 0.25.
        formats (Sequence[str]): Parts of the names of the formats to try, such as 'OpenVINO' or
            'f32'. Defaults to all that are installed.
        fit_images (int): Number of images to fit to. Two thirds of them calibrate int8, which is
            accepted on the others. Defaults to 64.
        repeats (int): Number of turns of the timing. Defaults to 20.
        batch_size (int): Number of images that are timed together. Defaults to 1.
        cfg_options (dict, optional): Values to override in the config, such as paths of the data.
        device (str, optional): Where models are fitted, timed and tested: 'cpu', or a GPU such as
            'cuda'. Defaults to the GPU if there is one.
    """

    images: str | None = None
    num_images: int = 100
    budgets: Sequence[float] = (0.85, 0.6, 0.4, 0.25)
    formats: Sequence[str] = ()
    fit_images: int = 64
    repeats: int = 20
    batch_size: int = 1
    cfg_options: dict | None = None
    device: str | None = None

    def __post_init__(self) -> None:
        if not all(0 < budget <= 1 for budget in self.budgets):
            raise ValueError(f'budgets must be in (0, 1], not {self.budgets}')
        if self.device is None:
            object.__setattr__(self, 'device', 'cuda' if torch.cuda.is_available() else 'cpu')
        kinds, reasons = installed_formats(self.device, self.formats)
        if not kinds:  # nothing would be measured after all fits
            raise ValueError(f'no format to try on {self.device!r}: {reasons or self.formats}')

    @property
    def percents(self) -> list[int]:
        """The budgets in percent, from wide to narrow."""
        return sorted({max(1, round(100 * budget)) for budget in self.budgets}, reverse=True)
