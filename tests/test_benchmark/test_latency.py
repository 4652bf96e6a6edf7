"""The forms of small models, through the real code but with few images."""

import copy
import json

import pytest
import torch

import repa_mm
from repa_mm.benchmark.execution import accelerated, networks
from repa_mm.benchmark.inputs import NoiseInputs, parse_size
from repa_mm.benchmark.latency import Options, parse_sweep
from repa_mm.benchmark.latency import benchmark as measure
from repa_mm.benchmark.machine import check_device
from repa_mm.benchmark.output import check_outputs, write_json
from repa_mm.benchmark.plots import plot_benchmark
from repa_mm.benchmark.tables import benchmark_text
from repa_mm.benchmark.timing import Recorder
from repa_mm.benchmark.variants import build_variants, randomize_norms
from repa_mm.run import init_model, load_config

PACKAGE = dict(retinanet='mmdet', mask_rcnn='mmdet', upernet='mmseg')
PARTS = {'preprocessing', 'backbone', 'neck', 'head', 'post-processing'}
PARTS_OF = dict(retinanet=PARTS, mask_rcnn=PARTS, upernet=PARTS - {'neck'})


def config(task, prefix='repa_'):
    pytest.importorskip(PACKAGE[task])
    return repa_mm.config_path(f'demo/{task}_{prefix}swin_digits.py')


def benchmark(config, *, title='', **options):
    return measure(Options(config, **options), quiet=True, title=title)


@pytest.fixture(scope='module', params=list(PACKAGE))
def measured(request):
    task = request.param
    return task, benchmark(
        config(task), baseline=config(task, ''), synthetic='64x96', num_images=5, warmup=1
    )


def test_parts_sum_to_the_latency(measured):
    task, result = measured
    (run,) = result['points']
    assert list(run['forms']) == ['vanilla', 'training', 'deploy']
    for form in run['forms'].values():
        assert set(form['parts']) == PARTS_OF[task]
        raw = dict(form['raw'])
        del raw['page faults']
        for total, *parts in zip(raw.pop('total'), *raw.values()):
            assert sum(parts) == pytest.approx(total)
            assert min(parts) > 0
        means = sum(part['mean'] for part in form['parts'].values())
        assert means == pytest.approx(form['latency']['mean'])


def test_result_is_complete(measured, tmp_path):
    task, result = measured
    path = tmp_path / 'new' / 'result.json'
    write_json(result, str(path))
    loaded = json.loads(path.read_text())
    assert loaded['config'] == config(task) and not loaded['interrupted']
    assert 'RePaSwinTransformer' in loaded['config_text']
    assert loaded['options']['synthetic'] == '64x96'
    environment = loaded['environment']
    assert environment['threads'] == torch.get_num_threads()
    assert environment['cpu'] and environment['platform']
    assert environment['versions']['torch'] == torch.__version__
    assert environment['versions']['mmcv']
    (run,) = loaded['points']
    assert run['count'] == 5 and run['shapes'] == [[1, 3, 64, 96]] * 5
    for name, form in run['forms'].items():
        assert len(form['raw']['total']) == form['latency']['count'] == 5
        assert form['images_per_second'] == pytest.approx(1e3 / form['latency']['median'])
        assert form['peak_mib'] > form['weights_mib'] > 0
        assert {'ratio', 'low', 'high'} <= set(form['ratio'])
        if name != 'vanilla':
            assert form['ratio']['low'] <= form['ratio']['high']
    forms = run['forms']
    assert forms['deploy']['parameters'] < 0.8 * forms['training']['parameters']
    assert any('random' in note for note in loaded['notes'])
    if PACKAGE[task] == 'mmdet':
        assert any('boxes found' in note for note in loaded['notes'])


def test_text_and_plot(measured, tmp_path):
    _, result = measured
    text = benchmark_text(result)
    for word in (
        'vanilla',
        'deploy',
        'post-processing',
        'p99',
        'peak memory',
        'noise, 1x3x64x96',
        'float32',
        'Note: weights are random',
    ):
        assert word in text
    assert 'Interrupted' not in text
    assert 'Interrupted' in benchmark_text(dict(result, interrupted=True))
    plot_benchmark(result, str(tmp_path / 'bars.png'))
    assert (tmp_path / 'bars.png').stat().st_size > 5000


@pytest.mark.parametrize(
    'sweep, labels',
    [
        ('size=64x64,96x64', ['64x64', '96x64']),
        ('batch=2,1', ['2', '1']),
        ('idle-ratio=0.25,1', ['0.25', '1']),
    ],
)
def test_sweeps(sweep, labels, tmp_path):
    result = benchmark(
        config('retinanet'),
        part='backbone',
        synthetic='64x64',
        num_images=2,
        warmup=0,
        sweep=sweep,
        memory=False,
    )
    key = sweep.partition('=')[0]
    assert [run['point'][key] for run in result['points']] == labels
    first, second = result['points']
    if key == 'size':
        assert second['shapes'][0] == [1, 3, 96, 64]
    elif key == 'batch':
        assert first['shapes'] == [[2, 3, 64, 64]] and second['count'] == 2
    else:
        a, b = (run['forms']['deploy']['parameters'] for run in (first, second))
        assert a > 1.5 * b
    form = first['forms']['deploy']
    assert list(form['parts']) == ['backbone'] and form['peak_mib'] is None
    assert all(label in benchmark_text(result) for label in labels)
    plot_benchmark(result, str(tmp_path / 'curves.svg'))
    assert '<svg' in (tmp_path / 'curves.svg').read_text()


def test_arithmetic_speed():
    result = benchmark(
        config('retinanet'),
        part='backbone',
        synthetic='64x64',
        num_images=4,
        batch_size=2,
        warmup=0,
        memory=False,
        flops=True,
    )
    (run,) = result['points']
    assert run['peak_tflops'] > 0
    for form in run['forms'].values():
        assert form['tflops'] == pytest.approx(
            2e-12 * form['macs'] * 2 / (form['latency']['median'] / 1e3)
        )
    assert run['forms']['deploy']['macs'] < 0.75 * run['forms']['training']['macs']
    assert 'of one large matrix product' in benchmark_text(result)


def test_interrupted_sweep_reports_what_it_has(monkeypatch):
    real = NoiseInputs.__call__
    calls = []

    def interrupting(self, index):
        if self.size == (96, 96):
            calls.append(index)
            if len(calls) == 5:
                raise KeyboardInterrupt
        return real(self, index)

    monkeypatch.setattr(NoiseInputs, '__call__', interrupting)
    options = dict(sweep='size=64x64,96x96,128x128', num_images=9, warmup=1, memory=False)
    result = benchmark(config('retinanet'), **options)
    # Of the second point: a first run of both forms and the warm-up, then one.
    assert result['interrupted']
    assert [run['count'] for run in result['points']] == [9, 1]
    assert 'Interrupted' in benchmark_text(result)

    monkeypatch.setattr(
        NoiseInputs, '__call__', lambda self, index: (_ for _ in ()).throw(KeyboardInterrupt)
    )
    with pytest.raises(KeyboardInterrupt):
        benchmark(config('retinanet'), **options)


@pytest.mark.parametrize('task', list(PACKAGE))
def test_predict_call(task):
    """What a script of its own would time: nothing is wrapped, and the result is one whole."""
    result = benchmark(
        config(task), part='predict', synthetic='64x96', num_images=5, warmup=1, memory=False
    )
    (point,) = result['points']
    for form in point['forms'].values():
        assert set(form['parts']) == {'predict'}
        assert form['parts']['predict']['mean'] == pytest.approx(form['latency']['mean'])
    assert 'predict call of' in benchmark_text(result)


def test_runs_are_processes_of_their_own(tmp_path):
    options = dict(part='backbone', synthetic='64x64', num_images=5, warmup=0)
    result = benchmark(config('retinanet'), runs=3, **options)
    assert not result['interrupted'] and result['options']['runs'] == 3
    (point,) = result['points']
    assert point['count'] == 15 and point['runs'] == [0] * 5 + [1] * 5 + [2] * 5
    assert len(point['shapes']) == 15
    deploy, training = (point['forms'][name] for name in ('deploy', 'training'))
    ratios = deploy['ratio']['runs']
    for run, ratio in enumerate(ratios):
        samples = [
            sorted(form['raw']['total'][5 * run : 5 * run + 5])[2] for form in (deploy, training)
        ]
        assert ratio == pytest.approx(samples[0] / samples[1])
    text = benchmark_text(result)
    assert f'{min(ratios):.3f} to {max(ratios):.3f}' in text
    assert 'The range of 3 runs' in text and '75 %' in text
    write_json(result, str(tmp_path / 'result.json'))
    plot_benchmark(result, str(tmp_path / 'bars.png'))


def test_an_error_in_a_process_is_that_of_the_tool():
    with pytest.raises(ValueError, match='training fails on an input of 1x3x32x32'):
        benchmark(repa_mm.config_path('repa_swin_t_in1k.py'), synthetic='32x32', runs=2)


@pytest.mark.parametrize('task', list(PACKAGE))
def test_real_data(task, request):
    pytest.importorskip('sklearn')
    pytest.importorskip('skimage')
    from repa_mm.demo.dataset import write_digit_scenes

    tmp_path = request.getfixturevalue('tmp_path')
    request.getfixturevalue('monkeypatch').chdir(tmp_path)
    path = config(task)
    with pytest.raises(FileNotFoundError, match='--synthetic'):
        benchmark(path)
    write_digit_scenes('data/demo', num_train=4, num_val=4, size=96)
    checkpoint = str(tmp_path / 'weights.pth')
    torch.save(init_model(path).state_dict(), checkpoint)
    result = benchmark(
        path, checkpoint=checkpoint, num_images=6, warmup=0, batch_size=2, memory=False
    )
    (run,) = result['points']
    assert run['count'] == 3 and len(run['loading']) == 3 and min(run['loading']) > 0
    assert run['reference'] == 'training'
    assert not any('random' in note for note in result['notes'])
    assert any('more than once' in note for note in result['notes'])
    assert 'test pipeline' in benchmark_text(result)


def test_synthetic_inputs_are_packed_as_real_ones():
    cfg = load_config(config('retinanet'))
    batch = NoiseInputs(cfg, (64, 96), 2)(1)
    image, sample = batch['inputs'][0], batch['data_samples'][0]
    assert image.shape == (3, 64, 96) and image.dtype == torch.uint8
    assert set(cfg.test_pipeline[-1].meta_keys) == set(sample.metainfo_keys())


def test_forms():
    cfg, vanilla = (load_config(config('retinanet', p)) for p in ('repa_', ''))
    forms = build_variants(cfg, baseline=vanilla)
    assert list(forms) == ['vanilla', 'training', 'deploy']
    # BatchNorms must not be the identity that they are at first.
    norm = forms['training'].backbone.stages[0].blocks[0].ffn.norm1
    assert norm.running_var.std() > 0.1 and norm.running_mean.std() > 0.05
    assert list(build_variants(vanilla)) == ['vanilla']
    with pytest.raises(ValueError, match='has channel-idle FFNs itself'):
        build_variants(cfg, baseline=cfg)
    with pytest.raises(ValueError, match='no channel-idle FFN'):
        build_variants(vanilla, baseline=vanilla)
    with pytest.raises(ValueError, match='need --baseline'):
        build_variants(cfg, fair=True)


def test_vanilla_with_the_fast_parts(monkeypatch):
    import repa_mm.models as models

    changed = []
    monkeypatch.setattr(models, 'fast_window_attention', changed.append, raising=False)

    def measured():
        result = benchmark(
            config('retinanet'),
            baseline=config('retinanet', ''),
            part='backbone',
            synthetic='64x64',
            num_images=5,
            warmup=0,
            fair=True,
            memory=False,
        )
        return result, result['points'][0]['forms']

    result, forms = measured()
    assert len(changed) == 1
    assert list(forms) == ['vanilla', 'vanilla, fast parts', 'training', 'deploy']
    deploy = forms['deploy']
    assert deploy['ratio_fair']['ratio'] == pytest.approx(
        deploy['latency']['median'] / forms['vanilla, fast parts']['latency']['median']
    )
    assert 'ratio to vanilla, fast parts' in benchmark_text(result)

    def refuse(model):
        raise ValueError('no window attention')

    monkeypatch.setattr(models, 'fast_window_attention', refuse)
    result, forms = measured()
    assert 'vanilla, fast parts' not in forms
    assert any('no window attention' in note for note in result['notes'])


def test_merged_checkpoint_has_one_form(tmp_path):
    cfg = load_config(config('retinanet'))
    path = str(tmp_path / 'merged.pth')
    torch.save(repa_mm.reparameterize(init_model(cfg), fuse_conv_bn=False).state_dict(), path)
    assert list(build_variants(cfg, path)) == ['deploy']
    torch.save(init_model(config('retinanet', '')).state_dict(), path)
    with pytest.raises(repa_mm.reparam.CheckpointError, match='vanilla'):
        build_variants(cfg, path)


@pytest.mark.parametrize('task', list(PACKAGE))
@pytest.mark.parametrize('how', [dict(), dict(amp='bf16'), dict(channels_last=True)])
def test_accelerated_models_predict_the_same(task, how, relative_error):
    cfg = load_config(config(task))
    model = init_model(cfg)
    randomize_norms(model)
    batch = NoiseInputs(cfg, (64, 96))(0)
    features = []
    keep = model.backbone.register_forward_hook(
        lambda module, args, result: features.append(result[-1].float())
    )
    expected_keys = {name: set(m.__dict__) for name, m in model.named_modules()}
    recorder = Recorder()
    with torch.no_grad():
        (expected,) = model.test_step(copy.deepcopy(batch))
        with accelerated(model, recorder=recorder, **how):
            (actual,), _, parts = recorder.run(model.test_step, copy.deepcopy(batch))
    keep.remove()
    assert set(parts) - {'rest'} == PARTS_OF[task] - {'post-processing'}
    tolerance = 0.1 if 'amp' in how else 1e-4
    assert relative_error(features[1], features[0]) < tolerance
    if task == 'upernet':
        assert actual.seg_logits.data.dtype == torch.float32
        assert relative_error(actual.seg_logits.data, expected.seg_logits.data) < tolerance
    else:
        assert actual.pred_instances.bboxes.dtype == torch.float32
        assert len(actual.pred_instances) == len(expected.pred_instances)
    # Nothing is left behind.
    for name, module in model.named_modules():
        assert 'forward' not in set(module.__dict__) - expected_keys[name]


def test_networks_of_a_two_stage_detector():
    model = init_model(config('mask_rcnn'))
    names = {id(m): n for n, m in model.named_modules()}
    assert {(part, names[id(m)]) for part, m in networks(model)} == {
        ('preprocessing', 'data_preprocessor'),
        ('backbone', 'backbone'),
        ('neck', 'neck'),
        ('head', 'rpn_head'),
        ('head', 'roi_head.bbox_roi_extractor'),
        ('head', 'roi_head.bbox_head'),
        ('head', 'roi_head.mask_roi_extractor'),
        ('head', 'roi_head.mask_head'),
    }


@pytest.mark.parametrize('text', ['', '64', '64x', '0x64', '64x64x3', 'axb'])
def test_bad_sizes(text):
    with pytest.raises(ValueError, match='800x1344'):
        parse_size(text)


@pytest.mark.parametrize(
    'text',
    ['size', 'size=', 'size=3', 'batch=0', 'batch=a', 'depth=3', 'idle-ratio=2', 'idle-ratio=x'],
)
def test_bad_sweeps(text):
    with pytest.raises(ValueError, match='--sweep .* is malformed'):
        parse_sweep(Options(sweep=text))
    assert parse_sweep(Options()) == [({}, Options())]


@pytest.mark.parametrize(
    'options, message',
    [
        (dict(num_images=0), '--num-images'),
        (dict(batch_size=0), '--batch-size'),
        (dict(runs=0), '--runs'),
        (dict(threads=0), '--threads'),
        (dict(device='gpu'), 'unknown device'),
        (dict(device='cuda:99'), 'no device'),
        (dict(tf32=True), 'tf32'),
        (dict(cuda_graphs=True), '--device cuda'),
        (dict(warmup=-1), '--warmup'),
        (dict(part='backbone', synthetic=None), '--synthetic'),
        (dict(part='predict', synthetic=None), '--synthetic'),
        (dict(fair=True), '--baseline'),
        (dict(flops=True), '--part backbone'),
    ],
)
def test_bad_options(options, message):
    with pytest.raises(ValueError, match=message):
        benchmark(config('retinanet'), **{'synthetic': '64x64', **options})


def test_input_that_the_model_refuses():
    with pytest.raises(ValueError, match='training fails on an input of 1x3x32x32'):
        benchmark(repa_mm.config_path('repa_swin_t_in1k.py'), synthetic='32x32')


def test_type_that_the_device_lacks(monkeypatch):
    def refuse(*args, **kwargs):
        raise RuntimeError('not implemented for Half')

    monkeypatch.setattr(torch.nn.Conv2d, 'forward', refuse)
    with pytest.raises(ValueError, match='--amp fp16.*try --amp bf16'):
        check_device('cpu', 'fp16')


def test_outputs_are_checked_first(tmp_path):
    with pytest.raises(IsADirectoryError, match='folder'):
        check_outputs(str(tmp_path))
    with pytest.raises(OSError, match='cannot write'):
        check_outputs('/proc/none/out.json')
    with pytest.raises(ValueError, match='.png'):
        check_outputs(plot=str(tmp_path / 'plot.xyz'))
    check_outputs(str(tmp_path / 'a.json'), str(tmp_path / 'a.png'))
    assert not list(tmp_path.iterdir())
