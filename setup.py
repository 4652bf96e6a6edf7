"""Packaging of RePa-MM: metadata, and the files that MIM looks for."""

import os
import os.path as osp
import shutil

from setuptools import find_packages, setup
from setuptools.command.build_py import build_py
from setuptools.command.develop import develop

ROOT = osp.dirname(osp.abspath(__file__))
# MIM (`mim train`, `mim download`, ...) looks for these in <package>/.mim.
MIM_FILES = ('configs', 'tools', 'model-index.yml')
# demo.py runs demo/, which is not in the wheel.
NOT_PACKED = shutil.ignore_patterns('__pycache__', '*.py[co]', '.*', 'demo.py')


def read(*parts):
    with open(osp.join(ROOT, *parts), encoding='utf-8') as file:
        return file.read()


def version():
    names = {}
    exec(read('repa_mm', 'version.py'), names)
    return names['__version__']


def link_mim_files():
    """Link the files for MIM into the package, for an editable install."""
    folder = osp.join(ROOT, 'repa_mm', '.mim')
    os.makedirs(folder, exist_ok=True)
    for name in MIM_FILES:
        link = osp.join(folder, name)
        if osp.lexists(link):
            shutil.rmtree(link) if osp.isdir(link) and not osp.islink(link) else os.remove(link)
        try:
            os.symlink(osp.join('..', '..', name), link)
        except OSError:  # Windows without the right to make links
            copy(osp.join(ROOT, name), link)


def copy(source, target):
    if osp.isdir(source):
        shutil.copytree(source, target, ignore=NOT_PACKED)
    else:
        shutil.copyfile(source, target)


class BuildPy(build_py):
    """Adds ``repa_mm/.mim`` to a wheel, or to the sources if editable."""

    def run(self):
        if getattr(self, 'editable_mode', False):
            link_mim_files()
            super().run()
            return
        # Files of an earlier build would go into the wheel.
        package = osp.join(self.build_lib, 'repa_mm')
        shutil.rmtree(package, ignore_errors=True)
        super().run()
        os.makedirs(osp.join(package, '.mim'))
        for name in MIM_FILES:
            copy(osp.join(ROOT, name), osp.join(package, '.mim', name))


class Develop(develop):
    """The editable install of older versions of pip."""

    def run(self):
        link_mim_files()
        super().run()


setup(
    name='repa-mm',
    version=version(),
    description='RePaFormers for OpenMMLab: detectors and segmentors with '
    'Vision Transformer backbones that reparameterize into smaller, faster '
    'ones, exactly',
    long_description=read('README.md') if osp.exists(osp.join(ROOT, 'README.md')) else '',
    long_description_content_type='text/markdown',
    author='The RePa-MM authors',
    project_urls={
        'Paper': 'https://arxiv.org/abs/2505.21847',
        "Code of the paper's authors": 'https://github.com/Ackesnal/RePaViT',
    },
    license='Apache License 2.0',
    keywords='computer vision, object detection, semantic segmentation, '
    'vision transformer, structural reparameterization, pruning, model compression, OpenMMLab',
    classifiers=[
        'Development Status :: 4 - Beta',
        'Operating System :: OS Independent',
        'Programming Language :: Python :: 3',
        'Topic :: Scientific/Engineering :: Artificial Intelligence',
    ],
    packages=find_packages(include=['repa_mm', 'repa_mm.*']),
    package_data={'repa_mm': ['py.typed']},
    python_requires='>=3.10',
    # MMCV and MMEngine are not required here: the packages of OpenMMLab and of OneDL install the
    # same modules, so that naming one would overwrite the other. `import repa_mm` checks what is
    # installed.
    install_requires=['numpy', 'torch>=2.1'],
    extras_require={
        'demo': ['scikit-image', 'scikit-learn'],
        'deploy': ['onnx', 'onnxruntime'],
        'quantize': ['nncf', 'onnx', 'onnxruntime', 'openvino'],
        'speed_up': ['greenlet', 'nncf', 'onnx', 'onnxruntime', 'openvino'],
        'tests': ['hypothesis', 'pytest', 'scikit-image', 'scikit-learn'],
    },
    cmdclass={'build_py': BuildPy, 'develop': Develop},
    zip_safe=False,
)
