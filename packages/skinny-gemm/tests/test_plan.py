import json

import pytest

from lldecode_skinny_gemm import plan
from lldecode_skinny_gemm.plan import Choice, Shape, Tile

GPU, SMS = "NVIDIA H200", 132
S = Shape(2624, 6144)
TILE = Tile(40, 2, 8, 5, 1)


@pytest.fixture
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("LLDECODE_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(plan, "driver", lambda: "580")
    monkeypatch.setattr(plan, "shipped", lambda gpu: tmp_path / "shipped.json")
    plan._plans.cache_clear()
    yield tmp_path
    plan._plans.cache_clear()


def entry(provider, tile=None):
    return {"choice": [provider, tile], "us": {"cublas": 2.0, provider: 1.0}}


def test_a_measured_choice_is_taken_at_the_next_measured_m(home):
    plan.write(plan.tuned(GPU), plan.stamp(GPU), {str(S): {"4": entry("lldecode", TILE), "6": entry("cublas"), "32": entry("fused_a")}})
    got = {m: plan.choose(GPU, SMS, S, m, fused_a=True) for m in (4, 5, 6, 20, 33)}
    assert got == {4: Choice("lldecode", TILE), 5: Choice("cublas"), 6: Choice("cublas"), 20: Choice("fused_a"), 33: Choice("cublas")}
    assert isinstance(got[4].tile, Tile)


def test_this_machines_plan_comes_before_the_shipped_one_before_the_rule(home):
    other = Shape(512, 6144)
    plan.write(plan.shipped(GPU), plan.stamp(GPU), {str(S): {"8": entry("cublas")}, str(other): {"8": entry("cublas")}})
    plan.write(plan.tuned(GPU), plan.stamp(GPU), {str(S): {"8": entry("lldecode", TILE)}})
    assert plan.choose(GPU, SMS, S, 8) == Choice("lldecode", TILE)
    assert plan.choose(GPU, SMS, other, 8) == Choice("cublas")
    assert plan.choose(GPU, SMS, Shape(520, 6144), 8).provider == "lldecode"


def test_fused_a_that_is_not_there_is_not_chosen(home):
    fused = Shape(*plan.FUSED_A)
    plan.write(plan.tuned(GPU), plan.stamp(GPU), {str(fused): {"8": entry("fused_a")}})
    assert plan.choose(GPU, SMS, fused, 8, fused_a=False).provider == "lldecode"
    assert plan.choose(GPU, SMS, fused, 8, fused_a=True).provider == "fused_a"


@pytest.mark.parametrize(("key", "value"), [("gpu", "NVIDIA B200"), ("driver", "570"), ("source", "0" * 12)])
def test_a_stale_plan_is_ignored_with_the_reason(home, caplog, key, value):
    plan.write(plan.tuned(GPU), plan.stamp(GPU) | {key: value}, {str(S): {"8": entry("cublas")}})
    assert plan.choose(GPU, SMS, S, 8).provider == "lldecode"
    assert f"plan ignored: {plan.tuned(GPU)}: stale: {key}: expected {plan.stamp(GPU)[key]}, got {value}" in caplog.text


def test_the_shipped_plan_holds_under_another_driver(home):
    plan.write(plan.shipped(GPU), plan.stamp(GPU) | {"driver": "1"}, {str(S): {"8": entry("cublas")}})
    assert plan.choose(GPU, SMS, S, 8) == Choice("cublas")


@pytest.mark.parametrize("text", ["", "{", "[]", '{"gpu": "NVIDIA H200"}'])
def test_a_broken_plan_is_ignored_with_the_reason(home, caplog, text):
    plan.tuned(GPU).write_text(text)
    assert plan.choose(GPU, SMS, S, 8).provider == "lldecode"
    assert f"plan ignored: {plan.tuned(GPU)}: " in caplog.text


def test_cublas_is_left_for_a_margin_of_four_percent():
    assert plan.decide({"cublas": 1.039, "lldecode": 1.0}, TILE) == Choice("cublas")
    assert plan.decide({"cublas": 1.041, "lldecode": 1.0}, TILE) == Choice("lldecode", TILE)
    assert plan.decide({"cublas": 2.0, "lldecode": 1.0, "fused_a": 0.9}, TILE) == Choice("fused_a")
    assert plan.decide({"cublas": 1.0}, None) == Choice("cublas")


def test_the_rule():
    assert plan.heuristic(SMS, S, 16, False).provider == "lldecode"
    assert plan.heuristic(SMS, S, 17, False) == Choice("cublas")
    assert plan.heuristic(SMS, Shape(*plan.FUSED_A), 8, True) == Choice("fused_a")


@pytest.mark.parametrize("sms", [132, 148])
@pytest.mark.parametrize("n", [1, 17, 160, 2624, 7168, 19360])
@pytest.mark.parametrize("k", [64, 192, 256, 2880, 6144, 14336])
@pytest.mark.parametrize("m", [8, 16, 32])
def test_candidates_fit_the_gpu(sms, n, k, m):
    from lldecode_skinny_gemm.tune import configs

    shape = Shape(n, k)
    found = configs(sms, shape, m, tiles=99)
    assert found or n * k > 1e8
    for tile, cfg in found.items():
        assert cfg.smem <= 227 * 1024
        assert 1 <= tile.stages <= cfg.steps
        assert tile.rows % 8 == 0


def test_the_first_candidate_fills_the_gpu():
    for n, k in ((2624, 6144), (2048, 2048), (4096, 2048), (6144, 2048), (2112, 7168), (7168, 14336), (16384, 2048)):
        tile = plan.heuristic(SMS, Shape(n, k), 8, False).tile
        ctas = -(-n // tile.rows) * tile.cluster
        assert ctas / (-(-ctas // SMS) * SMS) > 0.95, (n, k, tile)


GLM52 = {
    **dict(hidden_size=6144, q_lora_rank=2048, kv_lora_rank=512, qk_rope_head_dim=64, num_attention_heads=64, qk_nope_head_dim=192),
    **dict(v_head_dim=256, index_n_heads=32, index_head_dim=128, intermediate_size=12288, moe_intermediate_size=2048, n_shared_experts=1),
    **dict(vocab_size=154880),
}


def test_the_shapes_of_a_rank_of_glm52():
    from lldecode_skinny_gemm.tune import of_model

    got = {str(s) for s in of_model(GLM52, 8)}
    assert got == {
        *("N=2624 K=6144", "N=2048 K=2048", "N=6144 K=2048", "N=6144 K=12288", "N=4096 K=2048", "N=160 K=6144", "N=3072 K=6144"),
        *("N=6144 K=1536", "N=512 K=6144", "N=6144 K=256", "N=19392 K=6144", "N=512 K=192 B=8 n-major", "N=256 K=512 B=8"),
    }


def test_a_run_of_tune_that_was_interrupted_goes_on(home, monkeypatch):
    import torch

    from lldecode_skinny_gemm import tune

    shapes, measured = [Shape(64, 256), Shape(128, 256)], []

    def measure(s, m, *args):
        if len(measured) == 2 * len(plan.MEASURED_M) - 1:
            raise KeyboardInterrupt
        measured.append((s, m))
        return entry("cublas")

    monkeypatch.setattr(plan, "device", lambda i: (GPU, SMS))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(tune, "precompile", lambda wanted, jobs: None)
    monkeypatch.setattr(tune, "measure", measure)
    monkeypatch.setattr(tune, "operands", lambda *a: (torch.zeros(1, 1, 1), [torch.zeros(1, 1, 1)]))
    with pytest.raises(KeyboardInterrupt):
        tune.tune(shapes)
    assert list(json.loads(plan.tuned(GPU).read_text())["shapes"]) == [str(shapes[0])]
    measured.clear()
    assert set(tune.tune(shapes)) == {str(s) for s in shapes}
    assert {s for s, _ in measured} == {shapes[1]}
    assert plan.choose(GPU, SMS, shapes[1], 3) == Choice("cublas")


def test_precompiling_fills_the_disk_cache(home, monkeypatch):
    import torch

    from lldecode_skinny_gemm import tune

    monkeypatch.setenv("CUTE_DSL_ARCH", "")  # and back
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    home.chmod(0o700)
    wanted = list(tune.configs(SMS, Shape(64, 256), 8, tiles=2).values())
    tune.precompile(wanted, 2)
    assert len(list(home.glob("skinny-gemm-*.o"))) == len(wanted) == 2
