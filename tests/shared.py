"""The tests that each form and backbone passes, for those that the projects add."""

import copy
import inspect

import pytest
import torch
import torch.nn as nn
from mmengine.optim import DefaultOptimWrapperConstructor
from torch.nn.modules.batchnorm import _BatchNorm

from repa_mm.reparam import TrainingForm, finish_schedules_, reparameterize
from tests.test_models import test_backbones
from tests.test_reparam import test_forms

OF_FORMS = (
    'a_step_moves_every_parameter',
    'the_weights_of_the_other_form_are_refused',
    'what_the_merge_does_not_know_is_refused',
)
OF_BACKBONES = (
    'merge_is_exact',
    'trains',
    'the_wrong_form_is_refused_whoever_loads',
    'own_weights_in_both_forms',
)


def run_test(test, request, **values) -> None:
    """Run a test of the package on what a project adds; the other arguments are fixtures."""
    names = inspect.signature(test).parameters.keys() - values.keys()
    test(**values, **{name: request.getfixturevalue(name) for name in names})


def check_norms_decay_alike(model, optim_wrapper) -> None:
    """The norms in forms have the learning rate and decay of their block's other norms."""
    how = optim_wrapper.copy()
    constructor = DefaultOptimWrapperConstructor(how, how.pop('paramwise_cfg', None))
    groups = []
    constructor.add_params(groups, model)
    options = {id(g['params'][0]): (g.get('lr'), g.get('weight_decay')) for g in groups}
    forms = [name for name, m in model.named_modules() if isinstance(m, TrainingForm)]
    for block in {name.rpartition('.')[0] for name in forms}:
        norms = {
            name: {options[id(p)] for p in m.parameters()}
            for name, m in model.get_submodule(block).named_modules()
            if isinstance(m, (nn.LayerNorm, nn.GroupNorm, _BatchNorm))
        }
        assert len(norms) > 1 and len(set.union(*norms.values())) == 1, (block, norms)


def merging_before_the_schedule_has_ended_is_refused(name):
    """Of forms with a schedule, which only projects have."""
    form = test_forms.FORMS[name][0]()
    (scheduled,) = [m for m in form.modules() if hasattr(m, 'set_lam')]
    end = scheduled.end
    with pytest.raises(ValueError, match=f'lambda = {1 - end:g}, .* at lambda = {end:g} only'):
        form.merge()
    for distance in (0.001, 2**-24):
        scheduled.set_lam(abs(end - distance))
        with pytest.raises(ValueError, match="cannot merge '0': .*lambda = "):
            reparameterize(nn.Sequential(form))
    # Lambda is state: checkpoints have it, in half precision, too.
    loaded = test_forms.FORMS[name][0]()
    loaded.load_state_dict(finish_schedules_(form).state_dict())
    assert loaded.bfloat16().merge() and copy.deepcopy(form).merge()


def form_tests(forms, *others, small=1, hostile=()):
    """Tests of the rows of `test_forms.FORMS` in `forms`; `others` are names of further tests."""

    @pytest.fixture(autouse=True)
    def rows(monkeypatch):
        for name, row in forms.items():
            monkeypatch.setitem(test_forms.FORMS, name, row)

    @pytest.mark.parametrize('name', forms)
    @pytest.mark.parametrize('test', (*OF_FORMS, *others))
    def as_others(name, test, request):
        check = globals().get(test) or getattr(test_forms, f'test_{test}')
        run_test(check, request, name=name)

    @pytest.mark.parametrize('name', forms)
    @pytest.mark.parametrize('seed', range(8 if len(hostile) > 1 else 4))
    def merges(name, seed, request):
        case = dict(seed=seed, scale=(small, 30)[seed % 2], hostile=seed in hostile)
        case.update(dtype=(torch.float32, torch.float64)[seed // 2 % 2])
        check = test_forms.test_merge_is_exact.hypothesis.inner_test
        run_test(check, request, name=name, **case)

    return rows, as_others, merges


def backbone_tests(backbones, *others, own=None):
    """Tests of the rows of `test_backbones.BACKBONES` in `backbones`.

    `own` are the names of arguments that an ordinary backbone does not have.
    """

    @pytest.fixture(autouse=True)
    def rows(monkeypatch):
        for name, row in backbones.items():
            monkeypatch.setitem(test_backbones.BACKBONES, name, row)
        if own is not None:
            monkeypatch.setattr(test_backbones, 'OWN', own)

    @pytest.mark.parametrize('name', backbones)
    @pytest.mark.parametrize('test', (*OF_BACKBONES, *others))
    def as_others(name, test, request):
        run_test(getattr(test_backbones, f'test_{test}'), request, name=name)

    return rows, as_others


def export_test(rows):
    """A test of the export of the rows of `test_export.BACKBONES` that `rows(module)` returns."""

    def agrees(request, monkeypatch):
        from tests.test_export import test_export

        for name, row in rows(test_export).items():
            monkeypatch.setitem(test_export.BACKBONES, name, row)
            run_test(test_export.test_backbones_agree, request, name=name)

    return agrees
