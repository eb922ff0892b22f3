"""`jaxinfer profile`: what instructions are for, whose time is whose, and the command itself."""

import json
from types import SimpleNamespace

import pytest
import tiny_engine

from jaxinfer import cli, step_driver
from jaxinfer.hlo_kinds import KINDS, Instruction, kind_of_stack, read_instructions
from jaxinfer.op_times import Operation, operations, sum_by_kind
from jaxinfer.step_driver import StepDriver
from jaxinfer.step_profile import KindShare, Profiler, StepProfile, Traffic

HEADER = """HloModule jit_decode, is_scheduled=true

FileNames
1 "/x/jaxinfer/nn/decoder.py"
2 "/x/jaxinfer/nn/norm.py"
3 "/x/kernels/paged_attention/cpu.py"

FunctionNames
1 "DecoderLayer.__call__"
2 "RMSNorm.__call__"
3 "write"
4 "_call"
5 "attend"

FileLocations
1 {file_name_id=1 function_name_id=1 line=49 end_line=49 column=38 end_column=56}
2 {file_name_id=2 function_name_id=2 line=29 end_line=29 column=19 end_column=64}
3 {file_name_id=3 function_name_id=3 line=70 end_line=70 column=1 end_column=2}
4 {file_name_id=3 function_name_id=4 line=90 end_line=90 column=1 end_column=2}
5 {file_name_id=3 function_name_id=5 line=80 end_line=80 column=1 end_column=2}

StackFrames
"""
# Frames of: the layer; its norm; its write and attend, both through `_call`.
PARENTS = {1: (1, 0), 2: (2, 1), 3: (3, 1), 4: (4, 3), 5: (5, 1), 6: (4, 5)}
BODY = """
%fused_computation (param_0.1: f32[8]) -> f32[8] {
  %param_0.1 = f32[8]{0} parameter(0)
  %mul.1 = f32[8]{0} multiply(%param_0.1, %param_0.1), metadata={op_name="mul" stack_frame_id=2}
  %add.1 = f32[8]{0} add(%mul.1, %mul.1), metadata={op_name="jit(decode)/add" stack_frame_id=1}
  ROOT %rsqrt.1 = f32[8]{0} rsqrt(%add.1), metadata={op_name="rsqrt" stack_frame_id=2}
}

ENTRY %main.84 (x.1: f32[8]) -> f32[8] {
  %x.1 = f32[8]{0} parameter(0), metadata={op_name="x"}
  %mul_fusion = f32[8]{0} fusion(%x.1), kind=kLoop, calls=%fused_computation
  %copy.2 = f32[8]{0} copy(%mul_fusion)
  %copy.3 = f32[8]{0} copy(%x.1)
  %ffi_call.1 = (f32[8]{0}, /*index=1*/s32[2]{0:T(2,1)}) custom-call(%copy.2), a={stack_frame_id=4}
  %while.5 = (f32[8]{0}) while(%copy.2), condition=%c, body=%b, metadata={stack_frame_id=1}
  ROOT %ffi_call.2 = f32[8]{0} custom-call(%copy.3), metadata={op_name="f" stack_frame_id=6}
}
"""


@pytest.mark.parametrize("shift", [0, 1], ids=["parents as they are", "parents one too high"])
def test_an_instruction_is_what_its_source_is_for(shift):
    frames = "".join(
        f"{frame} {{file_location_id={location} parent_frame_id={parent + shift}}}\n"
        for frame, (location, parent) in PARENTS.items()
    )
    found = read_instructions(HEADER + frames + BODY)
    assert {name: found[name].kind for name in ("ffi_call.1", "ffi_call.2", "x.1", "copy.3")} == {
        "ffi_call.1": "kv write",
        "ffi_call.2": "attention",
        "x.1": "other",
        "copy.3": "other",
    }
    assert found["mul_fusion"].kind == "norm"  # two of the three it fuses
    assert found["copy.2"].kind == "norm"  # of the operand
    assert [name for name, one in found.items() if one.is_container] == ["while.5"]


def test_without_a_table_of_stacks_the_one_position_decides():
    line = '  %a = f32[8]{0} add(%b, %b), metadata={source_file="/x/jaxinfer/nn/rotary.py"}\n'
    assert read_instructions("ENTRY %main (b: f32[8]) -> f32[8] {\n" + line)["a"].kind == "rotary"


@pytest.mark.parametrize(
    ("stack", "kind"),
    [
        (["kernels/quantized_matmul/format.py:take_rows", "nn/embedding.py:f"], "embedding"),
        (["kernels/quantized_matmul/cpu.py:_product", "nn/mlp.py:MLP.__call__"], "matmul"),
        (["jaxinfer/nn/mlp.py:MLP.__call__"], "activation"),
        (["nn/norm.py:RMSNorm.__call__", "nn/attention.py:Attention.__call__"], "norm"),
        (["kernels/paged_attention/pallas_tpu.py:_run", "nn/attention.py:f"], "attention"),
        (["kernels/paged_attention/x.py:_call", "kernels/paged_attention/x.py:write"], "kv write"),
        (["kernels/decoder_layers/cpu.py:run", "nn/decoder.py:f"], "decoder layers"),
        (["jaxinfer/runner/sampling.py:greedy"], "sampling"),
        (["jaxinfer/runner/programs.py:f"], "other"),
    ],
)
def test_kind_of_stack(stack, kind):
    assert kind_of_stack(stack) == kind
    assert kind in KINDS


def event(name, start, duration, **stats):
    return SimpleNamespace(
        name=name, start_ns=float(start), duration_ns=float(duration), stats=stats.items()
    )


def plane(**lines):
    return SimpleNamespace(
        lines=[SimpleNamespace(name=name, events=events) for name, events in lines.items()]
    )


def test_operations_of_every_platforms_trace():
    cpu = plane(
        python=[event("PjitFunction(f)", 0, 100)],
        tf_XLAEigen=[
            event("dot.1", 10, 5, hlo_op="dot.1", hlo_module="jit_f", _p=7),
            event("add.2", 16, 2, hlo_op="add.2", hlo_module="jit_f", _p=8),
            event("end: add.2", 18, 1, _c=8),
            event("end: other", 90, 1, _c=7),
        ],
        tf_XLAEigen_2=[event("end: dot.1", 30, 1, _c=7)],
    )
    tpu = plane(**{"XLA Ops": [event("%fusion.3 = f32[8]{0} fusion(%x)", 1, 2)], "Steps": []})
    assert list(operations([cpu, tpu])) == [
        Operation("dot.1", 10.0, 15.0, 30.0),
        Operation("add.2", 16.0, 18.0, 18.0),
        Operation("fusion.3", 1.0, 3.0, 3.0),
    ]


def test_a_moment_is_shared_by_what_runs_in_it():
    instructions = {
        "dot": Instruction("matmul", False),
        "norm": Instruction("norm", False),
        "while": Instruction("sampling", True),
    }
    times = sum_by_kind(
        [
            Operation("dot", 100.0, 110.0, 140.0),  # 10 alone, then finishes beside others
            Operation("norm", 110.0, 120.0, 120.0),
            Operation("norm", 150.0, 160.0, 160.0),
            Operation("dot", 150.0, 160.0, 160.0),  # 10 shared
            Operation("while", 200.0, 230.0, 230.0),  # 20 of it are the norm's
            Operation("norm", 205.0, 225.0, 225.0),
            Operation("unheard-of", 300.0, 301.0, 301.0),
        ],
        instructions,
    )
    assert times.kind_ns == {"matmul": 35.0, "norm": 35.0, "sampling": 10.0, "other": 1.0}
    assert times.busy_ns == 81.0
    assert times.counts == {"matmul": 2, "norm": 3, "other": 1}


def test_nothing_ran():
    assert sum_by_kind([], {}).busy_ns == 0.0


def test_traffic_of_a_step():
    traffic = Traffic(
        layers={"matmul": 1000, "norm": 10},
        others={"matmul": 500},
        embedding_row=3,
        token_kv=2,
        windows=(None, 8),
    )
    assert traffic.of_step(2, [20, 5], layers_are_one=False) == {
        "matmul": 1500,
        "norm": 10,
        "embedding": 6,
        "attention": (20 + 5 + 8 + 5) * 2,
        "kv write": 2 * 2 * 2,
    }
    assert traffic.of_step(2, [20, 5], layers_are_one=True) == {
        "decoder layers": 1000 + 10 + 76 + 8,
        "matmul": 500,
        "embedding": 6,
    }


def test_the_table_and_the_json_say_the_same():
    step = StepProfile(
        what="decode",
        steps=4,
        wall_us=90.0,
        traced_us=100.0,
        busy_us=75.0,
        kinds={"matmul": KindShare(70.0, 2.0, 7_000_000), "rotary": KindShare(5.0, 1.0, 0)},
    )
    found = step.as_json()
    assert (found["host_share"], found["bytes"], found["gb_per_s"]) == (0.25, 7_000_000, 77.78)
    assert found["kinds"]["matmul"] == {
        "us": 70.0,
        "ops": 2.0,
        "bytes": 7_000_000,
        "gb_per_s": 100.0,
    }
    assert found["kinds"]["rotary"]["gb_per_s"] is None
    lines = step.table().splitlines()
    assert lines[0] == "decode: 90 µs a step (of 4), 7.0 MB, 77.8 GB/s"
    assert lines[3].split() == ["matmul", "70.0", "70.0%", "2", "7.00", "100.0"]
    assert lines[4].split() == ["rotary", "5.0", "5.0%", "1"]
    assert lines[5].split() == ["host", "25.0", "25.0%"]


def test_steps_of_a_tiny_engine():
    engine = tiny_engine.shared().engine
    model, groups = tiny_engine.tiny_model()
    traffic = Traffic.of(model, groups, engine)
    hidden = model.config.hidden_size
    assert traffic.embedding_row == hidden * 4
    cache = engine.runner.config.cache
    assert traffic.token_kv * len(traffic.windows) == cache.token_bytes
    profiler = Profiler(StepDriver(engine, model, groups))
    for step in (profiler.decode(2, prompt_tokens=8, steps=3), profiler.prefill(16)):
        assert 0 < step.busy_us <= step.traced_us
        assert 0 <= step.host_share < 1
        assert sum(share.us for share in step.kinds.values()) == pytest.approx(step.busy_us)
        for kind in ("matmul", "attention", "kv write", "norm", "rotary", "sampling", "embedding"):
            assert step.kinds[kind].us > 0, kind
            assert step.kinds[kind].ops > 0, kind
        assert step.kinds["matmul"].num_bytes > step.kinds["norm"].num_bytes > 0
    tiny_engine.empty(engine)


def test_the_command(monkeypatch, capsys):
    tokenizer = tiny_engine.shared().tokenizer
    monkeypatch.setattr(step_driver, "open_model", lambda config: (None, None, tokenizer))
    monkeypatch.setattr(step_driver, "load_model", lambda *_: tiny_engine.tiny_model())
    monkeypatch.setattr(step_driver, "set_compilation_cache", lambda directory: None)
    flags = ["--concurrency", "2", "--prompt-tokens", "8", "--prefill-tokens", "16", "--steps", "3"]
    assert cli.main(["profile", "--json", "--exact", "--page-size", "4", *flags]) == 0
    found = json.loads(capsys.readouterr().out)
    decode, prefill = found["steps"]
    assert decode["step"] == "decode, 2 × 4 tokens at 42 of context"
    assert prefill["step"] == "prefill, 16 tokens"
    assert decode["kinds"]["matmul"]["us"] > 0
    assert found["versions"]["jax"]


def test_a_context_that_is_too_short_is_refused(capsys):
    assert cli.main(["profile", "--max-model-len", "512"]) == cli.EXIT_USAGE
    said = capsys.readouterr().err
    assert "max_model_len is 512, and what is measured needs 513" in said
    assert "--prefill-tokens" in said
