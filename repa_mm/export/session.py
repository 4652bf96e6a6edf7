"""Whole models in files, run without PyTorch's modules, with as many threads as PyTorch has."""

import os.path as osp

import numpy as np
import torch

#: Inputs that may be left out, with the values that stand for the size of the images themselves.
OPTIONS = dict(image_size=[[2**30, 2**30]], output_size=[0, 0])


def openvino_model(file):
    """Return the OpenVINO model of a file, see :class:`Session`, with the options as inputs.

    OpenVINO's own reader makes constants of inputs that may be left out.
    """
    import openvino

    is_model, weights = isinstance(file, openvino.Model), [b''] * isinstance(file, bytes)
    model = file.clone() if is_model else openvino.Core().read_model(file, *weights)
    for op in model.get_ops():
        if (name := op.get_friendly_name()) in OPTIONS and op.get_type_name() == 'Constant':
            shape = [-1, 2] if name == 'image_size' else [2]
            option = openvino.op.Parameter(openvino.Type.i64, openvino.PartialShape(shape))
            option.output(0).set_names({name})
            op.output(0).replace(option.output(0))
            model.add_parameters([option])
    return model


class Session:
    """A model, as ``tools/export.py`` and ``tools/quantize.py`` write it, on the CPU.

    ``metadata`` is what the export noted, as strings ('task', 'classes', 'mean', …), and
    ``options`` are the names of the inputs that may be left out. Threads may share a session.

    Args:
        file (str | bytes | openvino.Model): A file for OpenVINO (.xml) or ONNX, the content of an
            ONNX file, or OpenVINO's model.
        precision (str, optional): What OpenVINO computes in, 'f32' or 'bf16'; it runs ONNX, too.
            Defaults to OpenVINO's choice for its own files, which is bf16 on processors that have
            it, and to ONNX Runtime for ONNX.
    """

    def __init__(self, file, precision: str | None = None) -> None:
        is_xml = isinstance(file, str) and osp.splitext(file)[1] == '.xml'
        if is_xml or precision or not isinstance(file, (str, bytes)):
            self._open_openvino(file, precision)
        else:
            self._open_onnx(file)
        if 'outputs' in self.metadata:
            self.outputs = self.metadata['outputs'].split(',')

    def _open_onnx(self, file: str | bytes) -> None:
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.log_severity_level = 3
        options.intra_op_num_threads = torch.get_num_threads()
        session = onnxruntime.InferenceSession(file, options, ['CPUExecutionProvider'])
        self.metadata = session.get_modelmeta().custom_metadata_map
        self.options = [i.name for i in session.get_overridable_initializers()]
        self.outputs = [o.name for o in session.get_outputs()]
        self._run = lambda inputs: session.run(None, inputs)

    def _open_openvino(self, file, precision: str | None) -> None:
        import openvino

        model = openvino_model(file)
        self.metadata = {}
        self.options = [x.any_name for x in model.inputs if 'image' not in x.names]
        if model.has_rt_info(['framework']):  # the metadata of the ONNX file
            self.metadata = dict(model.get_rt_info(['framework']).value)
        config = {'INFERENCE_NUM_THREADS': torch.get_num_threads()}
        if precision:
            config['INFERENCE_PRECISION_HINT'] = precision
        compiled = openvino.Core().compile_model(model, 'CPU', config)
        self.outputs = range(len(compiled.outputs))

        def run(inputs):  # each call has its own request, which threads must not share
            found = compiled.create_infer_request().infer(inputs, share_inputs=True)
            return [*found.values()]  # in their order, since OpenVINO may rename them

        self._run = run

    def __call__(self, image: np.ndarray, **options) -> dict[str, np.ndarray]:
        """Run normalized images (B, C, H, W), and return the outputs by name, or else number.

        Options are the ``image_size`` of detectors and the ``output_size`` of segmentors.
        """
        options = {x: np.asarray(options.get(x, OPTIONS[x]), np.int64) for x in self.options}
        return dict(zip(self.outputs, self._run(dict(image=image, **options))))
