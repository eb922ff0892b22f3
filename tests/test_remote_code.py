"""A checkpoint of a family we serve that brings code of its own: it is served, the code is not."""

from checkpoint.tiny_directory import add_remote_code, write_model

from jaxinfer.llm import LLM


def answer(path):
    """Returns the ids and the text that a model greedily continues a prompt with."""
    with LLM(str(path), exact=True, max_num_seqs=2, num_pages=32, max_model_len=64) as llm:
        options = {"max_tokens": 8, "temperature": 0.0, "ignore_eos": True, "progress": False}
        [output] = llm.generate("\x10\x20\x30", **options)
    return output.outputs[0].token_ids, output.outputs[0].text


def test_our_own_family_answers_and_the_code_is_never_run(tmp_path, caplog):
    trace = tmp_path / "trace"
    plain = answer(write_model(tmp_path / "plain"))
    assert "auto_map" not in caplog.text
    asking = add_remote_code(write_model(tmp_path / "asking"), trace)
    assert answer(asking) == plain
    assert "config.json: the code that auto_map names is never run" in caplog.text
    assert not trace.exists()
    exec((asking / "modeling_tiny.py").read_text())
    assert trace.exists(), "this code would have said that it was run"
