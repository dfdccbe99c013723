import json
import re
import textwrap

import pytest

from lldecode.testing_vllm import run_vllm, tiny_model

pytestmark = pytest.mark.vllm

SPARSE = "vllm.models.deepseek_v32.nvidia.model.DeepseekV32ForCausalLM"
SPARSE_MTP = "vllm.models.deepseek_v32.nvidia.mtp.DeepseekV32MTP"
GENERIC = "vllm.model_executor.models.deepseek_v2."
GENERIC_MTP = "vllm.model_executor.models.deepseek_mtp.DeepSeekMTP"
BREAKABLE = "VLLM_USE_BREAKABLE_CUDAGRAPH"

PRELUDE = """
import json, os, pickle, sys
from lldecode import plugin
from lldecode.feature import declined
from lldecode_sm100_routing.vllm import NAME, release_breakable
import vllm.model_executor.models.registry as registry
registry._run_in_subprocess = lambda inspect: inspect()  # the same answer, without a process for each class
from vllm import envs
from vllm.config import KVTransferConfig
from vllm.engine.arg_utils import AsyncEngineArgs, EngineArgs
from vllm.model_executor.model_loader.utils import get_model_cls

def configure(model="glm52", mtp=0, **args):
    if mtp:
        args["speculative_config"] = {"method": "mtp", "num_speculative_tokens": mtp, **args.get("speculative_config", {})}
    if "kv_transfer_config" in args:
        args["kv_transfer_config"] = KVTransferConfig(**args["kv_transfer_config"])
    args = {"tensor_parallel_size": 8, "distributed_executor_backend": "mp"} | args
    return EngineArgs(model=f"{sys.argv[1]}/{model}", skip_tokenizer_init=True, load_format="dummy", **args).create_engine_config()

def seen(config):
    models = [config.model_config]
    if config.speculative_config and config.speculative_config.draft_model_config:
        models.append(config.speculative_config.draft_model_config)
    return {
        "architectures": [m.architectures for m in models],
        "hf": [m.hf_config.architectures for m in models],
        "overrides": [m.model_class_overrides for m in models],
        "kv": config.cache_config.cache_dtype,
        "v2": config.use_v2_model_runner,
        "mode": config.compilation_config.mode.name,
        "graphs": config.compilation_config.cudagraph_mode.name,
        "custom_ops": config.compilation_config.custom_ops,
        "breakable": os.environ.get("VLLM_USE_BREAKABLE_CUDAGRAPH"),
        "envs": envs.VLLM_USE_BREAKABLE_CUDAGRAPH,
        "imported": "vllm.models.deepseek_v32" in sys.modules,
    }

def classes(config):
    models = [config.model_config]
    if config.speculative_config:
        models.append(config.speculative_config.draft_model_config)
    return [f"{c.__module__}.{c.__qualname__}" for c in map(get_model_cls, models)]

def reasons():
    return declined().get(NAME, {})

def report(value):
    print("REPORT", json.dumps(value))
"""


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    root = tmp_path_factory.mktemp("models")
    sparse = {"index_topk": 2048, "index_head_dim": 128}
    tiny_model(root / "glm52", "glm52")
    tiny_model(root / "dsv32", "dsv32", **sparse)
    tiny_model(root / "dsv3", "dsv32", architectures=["DeepseekV3ForCausalLM"], model_type="deepseek_v3")
    tiny_model(root / "glm52-float16", "glm52", dtype="float16")
    tiny_model(root / "glm52-narrow", "glm52", kv_lora_rank=256)
    llama = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "dtype": "bfloat16", "num_attention_heads": 8}
    (root / "llama").mkdir()
    (root / "llama" / "config.json").write_text(json.dumps(llama | {"hidden_size": 512, "num_hidden_layers": 1, "vocab_size": 1024}))
    return root


def run(body, *args, **kw):
    done = run_vllm(PRELUDE + textwrap.dedent(body), *map(str, args), **kw)
    lines = [line.removeprefix("REPORT ") for line in done.stdout.splitlines() if line.startswith("REPORT ")]
    assert len(lines) == 1, done.stdout[-2000:]
    return json.loads(lines[0])


ROUTED = {"kv": "fp8", "v2": True, "mode": "NONE", "graphs": "FULL_AND_PIECEWISE", "breakable": "1", "envs": True, "imported": False}
STOCK = {"kv": "auto", "v2": False, "mode": "VLLM_COMPILE", "graphs": "FULL_AND_PIECEWISE", "breakable": None, "envs": False}

CAPABILITIES = ["8.0", "8.9", "9.0", "10.0", "10.3", "11.0", "12.0", "12.1"]
CELLS = [(cc, flag, model, mtp) for cc in CAPABILITIES for flag in ("auto", "on") for model in ("glm52", "dsv32") for mtp in (0, 3)]
CELLS = [c for c in CELLS if c[1] == "auto" or c[0] == "9.0"]  # on elsewhere: the start fails, or nothing differs from auto

KV = {"kv_role": "kv_both"}
OFFLOADING = "vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector"

# name: (engine arguments, environment, part of the reason)
LEFT = {
    "kv bfloat16": ({"kv_cache_dtype": "bfloat16"}, {}, "got bfloat16"),
    "kv bfloat16 of V3.2": ({"model": "dsv32", "kv_cache_dtype": "bfloat16"}, {}, "got bfloat16"),
    "backend": ({"attention_config": {"backend": "FLASH_ATTN_MLA_SPARSE"}}, {}, "got FLASH_ATTN_MLA_SPARSE"),
    "backend of a kind": ({"attention_config": {"backend_per_kind": {"mla_attention": "FLASHMLA_SPARSE"}}}, {}, "each kind"),
    "fp4 indexer": ({"attention_config": {"use_fp4_indexer_cache": True}}, {}, "fp4"),
    "V1": ({}, {"VLLM_USE_V2_MODEL_RUNNER": "0"}, "VLLM_USE_V2_MODEL_RUNNER=0"),
    "override": (
        {"model_class_overrides": {"GlmMoeDsaForCausalLM": "vllm.model_executor.models.deepseek_v2:GlmMoeDsaForCausalLM"}},
        {},
        "model_class_overrides",
    ),
    "compile mode": ({"compilation_config": {"mode": 3}}, {}, "compilation mode"),
    "breakable off": ({}, {BREAKABLE: "0"}, "VLLM_USE_BREAKABLE_CUDAGRAPH=0"),
    "async tp": ({"compilation_config": {"pass_config": {"fuse_gemm_comms": True}}}, {}, "async TP"),
    "sequence parallel": ({"compilation_config": {"pass_config": {"enable_sp": True}}}, {}, "sequence parallelism"),
    "lora": ({"enable_lora": True}, {}, "LoRA"),
    "dcp": ({"decode_context_parallel_size": 2}, {}, "decode context"),
    "pcp": ({"prefill_context_parallel_size": 2}, {}, "prefill context"),
    "pp": ({"tensor_parallel_size": 4, "pipeline_parallel_size": 2}, {}, "pipeline"),
    "calculated scales": ({"kv_cache_dtype": "fp8", "calculate_kv_scales": True}, {}, "calculate_kv_scales"),
    "skipped layers": ({"kv_cache_dtype": "fp8", "kv_cache_dtype_skip_layers": ["0"]}, {}, "kv_cache_dtype_skip_layers"),
    "block size": ({"block_size": 16}, {}, "got 16"),
    "layer-wise connector": ({"kv_transfer_config": {"kv_connector": "ExampleConnector", **KV}}, {}, "ExampleConnector"),
    "layer-wise child": (
        {
            "kv_transfer_config": {
                "kv_connector": "MultiConnector",
                "kv_connector_extra_config": {"connectors": [{"kv_connector": "ExampleConnector", **KV}]},
                **KV,
            }
        },
        {},
        "ExampleConnector",
    ),
    "connector of the user's": (
        {"kv_transfer_config": {"kv_connector": "OffloadingConnector", "kv_connector_module_path": OFFLOADING, **KV}},
        {},
        f"{OFFLOADING}.OffloadingConnector",
    ),
    "peer": ({"kv_transfer_config": {"kv_connector": "NixlConnector", **KV}}, {}, "every peer"),
    "offloading to peers": ({"kv_offloading_size": 1.0, "kv_offloading_backend": "lmcache"}, {}, "LMCacheMPConnector"),
    "ngram": ({"speculative_config": {"method": "ngram", "num_speculative_tokens": 2}}, {}, "ngram"),
    "bf16 draft": ({"mtp": 2, "speculative_config": {"kv_cache_dtype": "bfloat16"}}, {}, "draft kv_cache_dtype"),
    "draft backend": ({"mtp": 2, "speculative_config": {"attention_backend": "FLASHMLA_SPARSE"}}, {}, "draft attention backend"),
    "float16": ({"model": "glm52-float16"}, {}, "got float16"),
    "other sizes": ({"model": "glm52-narrow"}, {}, "got (256, 64, 128), 512"),
    "pooling": ({"runner": "pooling", "convert": "embed"}, {}, "got pooling"),
    "prompt embeds": ({"enable_prompt_embeds": True}, {}, "prompt embeds"),
}

# name: (engine arguments, environment, what differs from ROUTED)
KEPT = {
    "plain": ({}, {}, {}),
    "kv fp8": ({"kv_cache_dtype": "fp8"}, {}, {}),
    "kv fp8_e4m3": ({"kv_cache_dtype": "fp8_e4m3"}, {}, {"kv": "fp8_e4m3"}),
    "kv fp8_ds_mla": ({"kv_cache_dtype": "fp8_ds_mla"}, {}, {"kv": "fp8_ds_mla"}),
    "backend": ({"attention_config": {"backend": "FLASHMLA_SPARSE"}}, {}, {}),
    "V2": ({}, {"VLLM_USE_V2_MODEL_RUNNER": "1"}, {}),
    "breakable on": ({}, {BREAKABLE: "1"}, {}),
    "compile mode none": ({"compilation_config": {"mode": 0}}, {}, {}),
    "graphs full": ({"compilation_config": {"cudagraph_mode": "FULL_DECODE_ONLY"}}, {}, {"graphs": "FULL_DECODE_ONLY"}),
    "eager": ({"enforce_eager": True}, {}, {"graphs": "NONE", "breakable": None, "envs": False}),
    "block size": ({"block_size": 64}, {}, {}),
    "offloading": ({"kv_offloading_size": 1.0}, {}, {}),
    "peer": ({"kv_transfer_config": {"kv_connector": "NixlConnector", **KV}, "kv_cache_dtype": "fp8"}, {}, {}),
    "fp8 draft": ({"mtp": 2, "speculative_config": {"kv_cache_dtype": "fp8"}}, {}, {}),
}


@pytest.fixture(scope="module")
def configurations(models):
    """Every cell and case in one process: {"cells": ..., "left": ..., "kept": ...}, each also as stock vLLM has it."""
    body = """
        from vllm.platforms import current_platform
        from vllm.platforms.interface import DeviceCapability

        cells, left, kept = json.loads(sys.argv[2])

        def restart(cc, flag):
            if plugin.active():
                plugin.active().engine.reconcile([])
            plugin._active = None
            release_breakable()
            capability = DeviceCapability(*map(int, cc.split(".")))
            type(current_platform).get_device_capability = classmethod(lambda cls, device_id=0: capability)
            os.environ["LLDECODE_SM100_ROUTING"] = flag
            plugin.register()
            return next(s for s in plugin.active().statuses if s.name == NAME)

        def attempt(args, env):
            os.environ.update(env)
            before = reasons()
            try:
                out = seen(configure(**args))
            except Exception as e:
                out = {"error": f"{type(e).__name__}: {e}"}
            after = reasons()
            for name in env:
                os.environ.pop(name)
            return out | {"reason": [r for r in after if after[r] != before.get(r, 0)]}

        configure()  # the first one loads the plugin
        out = {"cells": [], "left": {}, "kept": {}}
        for cc, flag, model, mtp in cells:
            status = restart(cc, flag)
            out["cells"].append([status.state, status.reason, attempt({"model": model, "mtp": mtp}, {})])
        restart("10.0", "auto")
        for group, cases in (("left", left), ("kept", kept)):
            for name, (args, env, _) in cases.items():
                out[group][name] = {"on": attempt(args, env)}
        restart("10.0", "off")
        for group, cases in (("left", left), ("kept", kept)):
            for name, (args, env, _) in cases.items():
                out[group][name]["stock"] = attempt(args, env)
        report(out)
    """
    return run(body, models, json.dumps([CELLS, LEFT, KEPT]), cc="10.0")


@pytest.mark.parametrize("cell", CELLS, ids=lambda c: "-".join(map(str, c)))
def test_capability(configurations, cell):
    cc, flag, model, mtp = cell
    state, reason, found = configurations["cells"][CELLS.index(cell)]
    arch = {"glm52": "GlmMoeDsaForCausalLM", "dsv32": "DeepseekV32ForCausalLM"}[model]
    names = [[arch]] + [["DeepSeekMTPModel"]] * bool(mtp)
    if cc in ("10.0", "10.3") or flag == "on":
        assert state == "on", reason
        assert {k: found[k] for k in ROUTED} == ROUTED
        ours = ["LldecodeDeepseekV32ForCausalLM", "LldecodeDeepseekV32MTPModel"]
        assert found["architectures"] == found["hf"] == [[o, *n] for o, n in zip(ours, names, strict=False)]
    else:
        assert state == "refused"
        assert f"capability {cc}" in reason if cc == "9.0" else f"got {cc}" in reason
        assert {k: found[k] for k in STOCK} == STOCK
        assert found["architectures"] == found["hf"] == names
        assert found["overrides"] == [{}] * len(names)


@pytest.mark.parametrize("case", LEFT)
def test_generic_is_stock_with_the_reason(configurations, case):
    on, stock = configurations["left"][case]["on"], configurations["left"][case]["stock"]
    assert len(on["reason"]) == 1
    assert LEFT[case][2] in on["reason"][0]
    assert ("error" in stock) == (case == "offloading to peers")  # lmcache is not installed, which stock finds too
    assert on | {"reason": []} == stock


@pytest.mark.parametrize("case", KEPT)
def test_choice_is_kept_and_the_rest_is_routed(configurations, case):
    on, stock = configurations["kept"][case]["on"], configurations["kept"][case]["stock"]
    assert on["reason"] == []
    assert {k: on[k] for k in ROUTED} == ROUTED | KEPT[case][2]
    assert on["architectures"][0][0] == "LldecodeDeepseekV32ForCausalLM"
    assert stock["architectures"][0] == ["GlmMoeDsaForCausalLM"]


@pytest.fixture(scope="module")
def process(models, tmp_path_factory):
    """One process that configures several engines after another, the first of which it also hands to workers."""
    handed = tmp_path_factory.mktemp("handed") / "config.pkl"
    body = """
        import copy, functools
        import vllm.model_executor.models.config as hooks
        from vllm.utils.argparse_utils import FlexibleArgumentParser

        out = {}
        AsyncEngineArgs.add_cli_args(FlexibleArgumentParser())  # what --help does
        out["help"] = {
            "state": next(s for s in plugin.active().statuses if s.name == NAME).state,
            "breakable": os.environ.get("VLLM_USE_BREAKABLE_CUDAGRAPH"),
            "imported": "vllm.models.deepseek_v32" in sys.modules,
        }

        def engine(**args):
            config = configure(**args)
            return config, seen(config)

        first, before = engine(mtp=3)
        with open(sys.argv[2], "wb") as f:
            pickle.dump(first, f)

        def worker(config):
            found = {"classes": classes(config), "v2": config.use_v2_model_runner}
            from vllm.models.deepseek_v32.nvidia.attention import DeepseekV32Attention
            return found | {"breaks": hasattr(DeepseekV32Attention._fused_attention, "__wrapped__")}

        read, write = os.pipe()
        if not os.fork():
            os.write(write, json.dumps(worker(first)).encode())
            os._exit(0)
        os.close(write)
        out["fork"] = json.loads(os.fdopen(read).read())

        # from here on the engines run in this process
        out["first"] = worker(first)
        envs.enable_envs_cache()
        declined_one, out["second"] = engine(mtp=3, decode_context_parallel_size=2)
        out["second classes"] = classes(declined_one)
        plain, out["v3"] = engine(model="dsv3", mtp=3)
        out["v3 classes"] = classes(plain)
        envs.enable_envs_cache()
        third, out["third"] = engine(mtp=3)
        out["third classes"] = classes(third)
        out["first again"] = classes(first)
        envs.enable_envs_cache()
        llama, out["llama"] = engine(model="llama")
        envs.disable_envs_cache()

        again = configure(mtp=3)
        once = seen(again)
        hooks.MODELS_CONFIG_MAP["GlmMoeDsaForCausalLM"].verify_and_update_config(again)
        out["twice"] = [once, seen(again)]
        configure(model="llama")
        hooks.MODELS_CONFIG_MAP["GlmMoeDsaForCausalLM"].verify_and_update_config(again)
        out["twice, after another"] = seen(again)
        left = configure(model="dsv32", kv_cache_dtype="bfloat16")
        once = seen(left)
        hooks.MODELS_CONFIG_MAP["DeepseekV32ForCausalLM"].verify_and_update_config(left)
        out["left twice"] = [once, seen(left)]

        os.environ["VLLM_USE_BREAKABLE_CUDAGRAPH"] = "1"
        configure()
        out["user's switch"] = seen(configure(model="llama"))["breakable"]
        os.environ.pop("VLLM_USE_BREAKABLE_CUDAGRAPH", None)

        from vllm.models.deepseek_v32.nvidia.attention import DeepseekV32Attention
        bound = DeepseekV32Attention._fused_attention
        DeepseekV32Attention._fused_attention = functools.wraps(bound)(lambda *args: bound(*args))
        out["wrapped by a feature"] = seen(configure())["v2"]
        DeepseekV32Attention._fused_attention = bound.__wrapped__
        out["bound early"] = seen(configure())["v2"]
        DeepseekV32Attention._fused_attention = bound

        stock = registry.ModelRegistry.models["GlmMoeDsaForCausalLM"]
        registry.ModelRegistry.register_model("GlmMoeDsaForCausalLM", "vllm.models.deepseek_v32:DeepseekV32ForCausalLM")
        out["registered elsewhere"] = seen(configure())["v2"]
        registry.ModelRegistry.models["GlmMoeDsaForCausalLM"] = stock

        from vllm.config import VllmConfig
        unsupported = VllmConfig._get_v2_model_runner_unsupported_features
        del VllmConfig._get_v2_model_runner_unsupported_features
        out["unreadable"] = seen(configure())["v2"]
        VllmConfig._get_v2_model_runner_unsupported_features = unsupported

        out["reasons"] = list(reasons())
        report(out)
    """
    out = run(body, models, handed, cc="10.0")
    out["handed"] = handed
    return out


def test_help_imports_and_sets_nothing(process):
    assert process["help"] == {"state": "on", "breakable": None, "imported": False}


def test_forked_worker_has_the_classes(process):
    assert process["fork"] == {"classes": [SPARSE, SPARSE_MTP], "v2": True, "breaks": True}


@pytest.mark.parametrize("with_plugin", [True, False])
def test_spawned_worker_has_the_classes(process, models, with_plugin):
    body = """
        with open(sys.argv[2], "rb") as f:
            config = pickle.load(f)
        from vllm.plugins import load_general_plugins
        load_general_plugins()
        found = {"classes": classes(config), "v2": config.use_v2_model_runner}
        from vllm.models.deepseek_v32.nvidia.attention import DeepseekV32Attention
        report(found | {"breaks": hasattr(DeepseekV32Attention._fused_attention, "__wrapped__"), "plugin": plugin.active() is not None})
    """
    env = {BREAKABLE: "1"} | ({} if with_plugin else {"VLLM_PLUGINS": "fake_cuda"})
    found = run(body, models, process["handed"], cc="10.0", env=env)
    # the runner comes from the plugin alone: it has to be where the workers are
    assert found == {"classes": [SPARSE, SPARSE_MTP], "v2": with_plugin, "breaks": True, "plugin": with_plugin}


def test_handed_configuration_needs_nothing_of_ours(process):
    # a worker without the package unpickles it; the name of the mark on the model config begins with an underscore
    assert not re.search(rb"(?<!_)lldecode_sm100_routing", process["handed"].read_bytes())


def test_second_engine_sees_nothing_of_the_first(process):
    assert process["first"] == {"classes": [SPARSE, SPARSE_MTP], "v2": True, "breaks": True}
    assert {k: process["second"][k] for k in STOCK} == STOCK
    assert process["second classes"] == [f"{GENERIC}GlmMoeDsaForCausalLM", GENERIC_MTP]
    assert process["llama"]["breakable"] is None
    assert process["llama"]["envs"] is False


def test_plain_v3_mtp_is_untouched(process):
    assert process["v3 classes"] == [f"{GENERIC}DeepseekV3ForCausalLM", GENERIC_MTP]
    assert {k: process["v3"][k] for k in STOCK} == STOCK
    assert process["v3"]["overrides"] == [{}, {}]


def test_third_engine_is_routed_again(process):
    assert process["third"] | {"imported": False} == process["twice"][0] | {"imported": False}
    assert {k: process["third"][k] for k in ROUTED if k != "imported"} == {k: v for k, v in ROUTED.items() if k != "imported"}
    assert process["third classes"] == process["first again"] == [SPARSE, SPARSE_MTP]


def test_hooked_twice_is_hooked_once(process):
    once, twice = process["twice"]
    assert once["breakable"] == "1"
    assert twice == once == process["twice, after another"]
    once, twice = process["left twice"]
    assert once["kv"] == "auto"
    assert twice == once


def test_switch_set_by_the_user_is_not_taken_back(process):
    assert process["user's switch"] == "1"


def test_class_that_was_bound_early_is_left(process):
    assert process["wrapped by a feature"] is True
    assert process["bound early"] is False
    assert any("imported before" in r for r in process["reasons"])


def test_class_that_is_registered_by_somebody_else_is_left(process):
    assert process["registered elsewhere"] is False
    assert any("is registered as vllm.models.deepseek_v32:" in r for r in process["reasons"])


def test_configuration_that_cannot_be_read_is_left(process):
    assert process["unreadable"] is False
    assert any(r.startswith("cannot read the configuration: AttributeError") for r in process["reasons"])
