"""Two processes on half of the batch each, against one on all of it.

Synchronized statistics: tests/test_reparam/test_folded.py, by hand, since
DistributedDataParallel takes SyncBatchNorm on GPUs only.
"""

from tests.toy import run_in_two_processes

GRADIENTS = """
import copy, itertools
import torch.nn as nn
from repa_mm.reparam import ChannelIdleFFN, set_training_path_
from tests.conftest import _randomize, _relative_error


def step(model, x):
    # A loss that is a mean over images, as the gradients of DDP are.
    model(x).pow(3).mean().backward()
    return {n.removeprefix('module.'): p.grad.clone() for n, p in model.named_parameters()}


torch.manual_seed(0)
x = torch.randn(4, 30, 8).double() * 2 + 1
x[2:] += 3
for path, norm, frozen in itertools.product(('literal', 'folded'), ('BN', 'LN'), (False, True)):
    ffns = [ChannelIdleFFN(8, 32, ratio, norm_cfg=dict(type=norm)) for ratio in (0.75, 0.5)]
    model = _randomize(nn.Sequential(*ffns)).double().train()
    for module in model.modules():
        if frozen and isinstance(module, nn.BatchNorm1d):
            module.eval()
    literal = [set_training_path_(copy.deepcopy(model), 'literal') for _ in range(3)]
    set_training_path_(model, path)
    ddp = nn.parallel.DistributedDataParallel(model, broadcast_buffers=False)
    found = step(ddp, x.chunk(2)[rank])
    if norm == 'LN' or frozen:
        expected, same = step(literal[2], x), literal[2]
    else:
        # Plain statistics are those of each process: the gradients are the mean of two that know
        # nothing of each other.
        grads, same = [step(m, part) for m, part in zip(literal, x.chunk(2))], literal[rank]
        expected = {n: (grads[0][n] + grads[1][n]) / 2 for n in grads[0]}
    for name, grad in expected.items():
        assert _relative_error(found[name], grad) < 1e-10, (path, norm, frozen, name)
    for own, buffer in zip(model.buffers(), same.buffers()):
        torch.testing.assert_close(own, buffer, rtol=1e-10, atol=0)
"""

HOOKS = """
from mmengine.dist import all_gather_object
from projects.tests.test_schedules import *

for broadcast in (False, True):
    lambdas, merged = Lambdas(), []

    class Note(Hook):
        def after_test_iter(self, runner, *args, **kwargs):
            merged.append(type(runner.model.backbone[6]) is Faded)

    wrapper = dict(device_ids=None, broadcast_buffers=broadcast)
    runner = make_runner(
        sys.argv[1],
        [SCHEDULE, MERGE, lambdas, Note(), dict(type='EMAHook', momentum=0.3)],
        model=dict(type='ToyScheduled', fades=True),
        launcher='pytorch',
        cfg=dict(model_wrapper_cfg=wrapper),
        train_cfg=dict(by_epoch=True, max_epochs=6, val_interval=6),
    )
    runner.train()
    assert lambdas.seen['rising'] == [0, 0.25, 0.5, 0.75, 1, 1], lambdas.seen
    assert lambdas.seen['fading'] == [1, 0.75, 0.5, 0.25, 0, 0], lambdas.seen
    states = all_gather_object({k: v.detach() for k, v in runner.model.named_parameters()})
    assert all(torch.equal(states[0][k], states[1][k]) for k in states[0])
    model, state = runner.model, copy.deepcopy(runner.model.state_dict())
    assert type(model).__name__ == 'MMDistributedDataParallel'
    runner.test_loop.run()
    assert merged and all(merged) and runner.model is model
    assert all(torch.equal(v, state[k]) for k, v in model.state_dict().items())
"""


def test_two_processes(tmp_path):
    """Gradients of both training paths; schedules, averages and the tested form."""
    run_in_two_processes(GRADIENTS + HOOKS, tmp_path)
