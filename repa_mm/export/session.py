"""Whole models in files, run without PyTorch's modules."""

import io
import json
import os.path as osp

import numpy as np
import torch
import torch.nn.functional as F

RUNTIMES = {'.onnx': 'ONNX Runtime', '.xml': 'OpenVINO'}


class Session:
    """A whole model, as ``tools/export.py`` and ``tools/quantize.py`` write it.

    Args:
        file (str | io.BytesIO): A file of ONNX Runtime (.onnx) or OpenVINO (.xml), or the content
            of an ONNX file.
        precision (str, optional): What OpenVINO computes in, 'f32' or 'bf16'. Defaults to
            OpenVINO's choice, which is bf16 on processors that have it.

    Attributes:
        metadata (dict): What the export noted: 'task', 'classes', 'preprocessing' and others.

    Raises:
        FileNotFoundError, ValueError: If there is no such file, or it is no such model.
        ImportError: If the runtime is not installed.
    """

    def __init__(self, file: str | io.BytesIO, precision: str | None = None) -> None:
        self.name = file if isinstance(file, str) else 'the model'
        suffix = osp.splitext(file)[1] if isinstance(file, str) else '.onnx'
        if suffix not in RUNTIMES:
            kinds = ', '.join(f'{k} ({v})' for k, v in RUNTIMES.items())
            raise ValueError(f'the suffix of {file!r} is none of {kinds}')
        if isinstance(file, str) and not osp.isfile(file):
            raise FileNotFoundError(f'no exported model at {file!r}')
        if precision and suffix != '.xml':
            raise ValueError(f'a precision is for .xml files (OpenVINO), but the model is {file!r}')
        open_file = self._open_onnx if suffix == '.onnx' else self._open_openvino
        try:
            open_file(file, precision)
        except ImportError as error:
            raise ImportError(
                f'{self.name!r} needs {RUNTIMES[suffix]}: pip install '
                f'{"onnxruntime" if suffix == ".onnx" else "openvino"}'
            ) from error
        except Exception as error:  # the runtimes have their own
            raise ValueError(
                f'{RUNTIMES[suffix]} cannot read {self.name!r}: {str(error)[:200]}'
            ) from error
        if 'task' not in self.metadata:
            raise ValueError(
                f'{self.name!r} is no whole model of tools/export.py: a backbone alone, or from '
                'elsewhere'
            )

    def _open_onnx(self, file, precision) -> None:
        import onnxruntime

        content = file if isinstance(file, str) else file.getvalue()
        options = onnxruntime.SessionOptions()
        options.log_severity_level = 3
        session = onnxruntime.InferenceSession(content, options, providers=['CPUExecutionProvider'])
        self.metadata = session.get_modelmeta().custom_metadata_map
        image = session.get_inputs()[0]
        self.shape = [n if isinstance(n, int) else None for n in image.shape]
        self.options = {i.name: len(i.shape) for i in session.get_overridable_initializers()}
        self.outputs = [output.name for output in session.get_outputs()]
        self._run = lambda inputs: session.run(None, inputs)

    def _open_openvino(self, file, precision) -> None:
        import openvino

        core = openvino.Core()
        model = core.read_model(file)
        known = model.has_rt_info(['repa_mm'])
        self.metadata = dict(model.get_rt_info(['repa_mm']).value) if known else {}
        config = {'INFERENCE_PRECISION_HINT': precision} if precision else {}
        compiled = core.compile_model(model, 'CPU', config)
        shape = model.inputs[0].get_partial_shape()
        self.shape = [n.get_length() if n.is_static else None for n in shape]
        self.options = {}
        # In their order, since OpenVINO may rename them.
        self.outputs = self.metadata.get('outputs', '').split(',')
        self._run = lambda inputs: list(compiled(inputs).values())

    @property
    def classes(self) -> list[str]:
        """Names of the classes, empty if the checkpoint did not have them."""
        return json.loads(self.metadata.get('classes', '[]'))

    @property
    def takes_pixels(self) -> bool:
        """Whether images are of type uint8, (B, H, W, 3), and normalized in the graph."""
        return self.metadata.get('preprocessing') == '1'

    def check(self, image: np.ndarray) -> None:
        """Check images before they are run.

        Raises:
            ValueError: If they have another type, shape or size than the model takes.
        """
        dtype, axis = (np.uint8, 3) if self.takes_pixels else (np.float32, 1)
        layout = '(B, H, W, 3)' if self.takes_pixels else '(B, 3, H, W)'
        if image.ndim != 4 or image.shape[axis] != 3:
            raise ValueError(
                f'{self.name!r} takes images of 3 channels in the shape {layout}, but got '
                f'{tuple(image.shape)}'
            )
        if image.dtype != dtype:
            raise ValueError(
                f'{self.name!r} takes images of type {np.dtype(dtype)}, but got {image.dtype}'
            )
        if any(n is not None and n != m for n, m in zip(self.shape, image.shape)):
            expected = ', '.join('any' if n is None else str(n) for n in self.shape)
            raise ValueError(
                f'{self.name!r} was exported for images of shape ({expected}), but got '
                f'{tuple(image.shape)}: export it with --dynamic for other sizes'
            )

    def __call__(self, image: np.ndarray, **options) -> dict[str, np.ndarray]:
        """Run images.

        Args:
            image (np.ndarray): Images as the export says, (B, 3, H, W) and normalized, or (B, H, W,
                3) of type uint8.
            **options: The optional inputs, ``image_size`` of detectors and ``output_size`` of
                segmentors.

        Returns:
            dict: Outputs by name.

        Raises:
            ValueError: If the images do not fit the model, or the runtime fails.
        """
        self.check(image)
        for name, value in options.items():
            if name not in self.options:
                raise ValueError(f'{self.name!r} has no input {name!r}')
            options[name] = np.asarray(value, np.int64)
        try:
            outputs = self._run(dict(image=image, **options))
        except Exception as error:  # the runtimes have their own
            raise ValueError(
                f'{self.name!r} fails on images of shape {tuple(image.shape)}: {str(error)[:200]}'
            ) from error
        return dict(zip(self.outputs, outputs))


def paste_masks(
    masks: torch.Tensor, boxes: torch.Tensor, height: int, width: int, threshold: float = 0.5
) -> torch.Tensor:
    """Masks of whole images from masks inside of boxes.

    Args:
        masks (torch.Tensor): Probabilities (N, h, w).
        boxes (torch.Tensor): (N, 4), in pixels of the whole image.
        height (int): Height of the whole image.
        width (int): Width of the whole image.
        threshold (float): Defaults to 0.5.

    Returns:
        torch.Tensor: Truth values (N, height, width).
    """
    out = torch.zeros(len(masks), height, width, dtype=torch.bool)
    for mask, box, whole in zip(masks, boxes, out):
        left, top = (int(v) for v in (box[:2].floor() - 1).clamp(min=0))
        right = min(int(box[2].ceil()) + 1, width)
        bottom = min(int(box[3].ceil()) + 1, height)
        x = (torch.arange(left, right) + 0.5 - box[0]) / (box[2] - box[0]) * 2 - 1
        y = (torch.arange(top, bottom) + 0.5 - box[1]) / (box[3] - box[1]) * 2 - 1
        grid = torch.stack(torch.meshgrid(x, y, indexing='xy'), -1)[None]
        grid = grid.nan_to_num(posinf=0.0, neginf=0.0)
        pasted = F.grid_sample(mask[None, None], grid, align_corners=False)[0, 0]
        whole[top:bottom, left:right] = pasted >= threshold
    return out
