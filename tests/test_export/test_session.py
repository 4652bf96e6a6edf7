"""Sessions that run files."""

import ctypes
import os
import sys

import numpy as np
import pytest
import torch
import torch.nn as nn

from repa_mm.export.exporter import to_onnx
from repa_mm.export.session import Session

pytest.importorskip('onnxruntime')


def resident():
    """Megabytes of memory that the process has, without what its heap has free.

    A heap with holes, as other tests leave, would serve the session, and keep what it frees.
    """
    ctypes.CDLL(None).malloc_trim(0)
    with open('/proc/self/statm') as file:
        return int(file.read().split()[1]) * os.sysconf('SC_PAGE_SIZE') / 1e6


@pytest.mark.skipif(sys.platform != 'linux', reason='reads /proc')
@pytest.mark.parametrize('precision', [None, 'f32'])
def test_memory_is_given_back(precision):
    if precision:
        pytest.importorskip('openvino')
    side, wide = 384, 128  # 75 MB between both layers
    model = nn.Sequential(nn.Conv2d(3, wide, 1), nn.Softmax(1), nn.Conv2d(wide, 1, 1)).eval()
    names = dict(input_names=['image'], output_names=['map'])
    content = to_onnx(model, (torch.rand(1, 3, side, side),), **names)
    images = np.random.default_rng(0).random((2, 1, 3, side, side), np.float32)
    session = Session(content, precision)
    kept = [next(iter(session(image).values())) for image in images]
    session.keep_memory, before = False, resident()
    freed = [next(iter(session(image).values())) for image in images]
    assert before - resident() > 50
    for a, b, image in zip(kept, freed, images):
        assert np.array_equal(a, b)
        np.testing.assert_allclose(a, model(torch.from_numpy(image)).detach(), atol=1e-5)
