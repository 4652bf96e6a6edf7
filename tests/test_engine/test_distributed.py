"""Two processes on half of the batch each, against one on all of it.

Synchronized statistics: tests/test_reparam/test_folded.py, by hand, since
DistributedDataParallel takes SyncBatchNorm on GPUs only.
"""

import copy
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn as nn

from repa_mm.reparam import ChannelIdleFFN, set_training_path

ROOT = Path(__file__).parents[2]


def free_port():
    with socket.socket() as s:
        s.bind(('127.0.0.1', 0))
        return s.getsockname()[1]


def step(model, x):
    """A loss that is a mean over images, as DDP's gradients are."""
    model(x).pow(3).mean().backward()
    return {n: p.grad.clone() for n, p in model.named_parameters()}


def _worker(rank, port, models, x, queue):
    dist.init_process_group('gloo', f'tcp://127.0.0.1:{port}', rank=rank, world_size=2)
    found = []
    for model in models:
        model = nn.parallel.DistributedDataParallel(copy.deepcopy(model), broadcast_buffers=False)
        grads = step(model, x.chunk(2)[rank])
        found.append(
            (
                {n[7:]: g.numpy() for n, g in grads.items()},
                {n: b.numpy() for n, b in model.module.named_buffers()},
            )
        )
    queue.put((rank, found))
    dist.barrier()
    os._exit(0)  # see repa_mm.run.end_process


def two_processes(models, x):
    """Of each process, for each model, gradients and buffers."""
    context = mp.get_context('spawn')
    queue, port = context.SimpleQueue(), free_port()
    processes = [
        context.Process(target=_worker, args=(rank, port, models, x, queue), daemon=True)
        for rank in range(2)
    ]
    for p in processes:
        p.start()
    deadline = time.time() + 120
    found = {}
    while len(found) < 2:
        assert time.time() < deadline and not any(p.exitcode for p in processes), 'a process failed'
        if queue.empty():
            time.sleep(0.1)
        else:
            rank, result = queue.get()
            found[rank] = result
    for p in processes:
        p.join()
    return found[0], found[1]


def test_two_processes(randomize, relative_error):
    cases = [
        ('literal', 'BN', True),
        ('folded', 'BN', True),
        ('literal', 'LN', False),
        ('folded', 'LN', False),
        ('literal', 'BN', False),
        ('folded', 'BN', False),
    ]
    models = []
    for path, norm, frozen in cases:
        model = nn.Sequential(
            *[ChannelIdleFFN(8, 32, ratio, norm_cfg=dict(type=norm)) for ratio in (0.75, 0.5)]
        )
        randomize(model).double().train()
        for module in model.modules():
            if frozen and isinstance(module, nn.BatchNorm1d):
                module.eval()
        models.append(set_training_path(model, path))
    x = torch.randn(4, 30, 8).double() * 2 + 1
    x[2:] += 3
    found = two_processes(models, x)

    for i, (_, norm, frozen) in enumerate(cases):
        if norm == 'LN' or frozen:
            # The gradients of one process with the whole batch.
            whole = set_training_path(copy.deepcopy(models[i]), 'literal')
            expected = [step(whole, x)] * 2
            buffers = [dict(whole.named_buffers())] * 2
        else:
            # Plain statistics are those of each process: the gradients are
            # the mean of two that know nothing of each other.
            alone = [set_training_path(copy.deepcopy(models[i]), 'literal') for _ in range(2)]
            grads = [step(m, part) for m, part in zip(alone, x.chunk(2))]
            expected = [{n: (grads[0][n] + grads[1][n]) / 2 for n in grads[0]}] * 2
            buffers = [dict(m.named_buffers()) for m in alone]
        for rank in range(2):
            actual = found[rank][i]
            for name, grad in expected[rank].items():
                assert relative_error(torch.as_tensor(actual[0][name]), grad) < 1e-10
            for name, buffer in buffers[rank].items():
                assert torch.allclose(
                    torch.as_tensor(actual[1][name]).double(), buffer.double(), rtol=1e-10
                )


DYING = """
import os, signal, sys, torch
from tests.test_engine.toy import *
from repa_mm.run import end_process
torch.distributed.init_process_group('gloo')

class Dies(Hook):
    def before_train_iter(self, runner, batch_idx, data_batch=None):
        if runner.iter == 1 and torch.distributed.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)

make_runner(sys.argv[1], [Dies()], launcher='pytorch',
            cfg=dict(model_wrapper_cfg=dict(device_ids=None))).train()
end_process()
"""


def test_a_process_that_dies_ends_the_job(tmp_path):
    script = tmp_path / 'dying.py'
    script.write_text(DYING)
    result = subprocess.run(
        [
            sys.executable,
            '-m',
            'torch.distributed.run',
            '--nproc_per_node=2',
            f'--master_port={free_port()}',
            str(script),
            str(tmp_path),
        ],
        capture_output=True,
        text=True,
        timeout=200,
        env=dict(os.environ, PYTHONPATH=str(ROOT), OMP_NUM_THREADS='1'),
    )
    assert result.returncode != 0
    assert 'SIGKILL' in result.stderr and 'dying.py' in result.stderr
