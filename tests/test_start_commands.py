"""Start commands as users were shown them: flags under their names, a TOML file, several models."""

import json
import urllib.error
import urllib.request

import pytest
from serve_process import ServeProcess, free_port
from test_convert import CONFIG, write_model

pytestmark = pytest.mark.slow

MODEL = CONFIG | {"vocab_size": 258}
SMALL = ("--max-num-batched-tokens", "16", "--decode-steps", "1")


def write(path):
    write_model(path, MODEL)
    names = {"bos_token": "<s>", "eos_token": "</s>"}
    (path / "tokenizer_config.json").write_text(json.dumps(names))
    return path


@pytest.fixture
def directory(tmp_path):
    return write(tmp_path / "Mistral-7B-Instruct")


def ask(server, path, body):
    """Returns (status, parsed answer)."""
    request = urllib.request.Request(server.url + path, json.dumps(body).encode())
    try:
        with urllib.request.urlopen(request, timeout=60) as reply:
            return reply.status, json.load(reply)
    except urllib.error.HTTPError as error:
        with error:
            return error.code, json.load(error)


def config_of(server, model):
    """The settings in effect that /metrics shows of a model."""
    [line] = [
        line
        for line in server.get("/metrics").splitlines()
        if line.startswith("jaxinfer_config_info{") and f'model_name="{model}"' in line
    ]
    pairs = line[line.index("{") + 1 : line.rindex("}")].split('",')
    return dict(pair.rstrip('"').split('="', 1) for pair in pairs)


def test_one_command_that_combines_the_flags(directory):
    port = free_port()  # the documented command says 8000
    flags = f"""-m {directory} -p {port} -c mistral --max-total-tokens 64 --max-batch-size 4
        --num-threads 2 --gpu-layers 20 --max-cache-size 1MiB --served-model-name mistral""".split()
    with ServeProcess(*flags, *SMALL) as server:
        assert server.url == f"http://127.0.0.1:{port}"
        config = config_of(server, "mistral")
        assert (config["max_model_len"], config["max_num_seqs"]) == ("64", "4")
        assert (config["num_threads"], config["chat_template"]) == ("2", "mistral")
        assert 0 < int(config["kv_cache_memory"]) <= 2**20
        assert "gpu_layers 20 has no effect: all layers run on one platform" in server.text
        # The curl request, shortened to what a context of 64 bytes holds.
        body = {
            "model": "mistral",
            "messages": [{"role": "user", "content": "What is AI?"}],
            "max_tokens": 500,
            "temperature": 0.7,
            "stream": False,
        }
        status, answer = ask(server, "/v1/chat/completions", body)
        assert (status, answer["model"]) == (200, "mistral")
        assert answer["usage"]["prompt_tokens"] == 1 + len("[INST] What is AI?[/INST]")
        assert answer["usage"]["total_tokens"] <= 64
        body["messages"][0]["content"] = "a" * 64
        status, answer = ask(server, "/v1/chat/completions", body)
        assert (status, answer["error"]["code"]) == (400, "context_length_exceeded")


def test_a_toml_file_of_three_tables_and_the_environment(directory, tmp_path, monkeypatch):
    path = tmp_path / "config.toml"
    path.write_text(f"""
        [model]
        path = "{directory}"
        model_type = "llama"
        tokenizer_path = "{directory}"
        [server]
        host = "0.0.0.0"
        port = 8080
        parallelism = 4
        [acceleration]
        dtype = "fp16"
        use_flash_attn = true
    """)
    monkeypatch.setenv("MISTRALRS_USE_PAGEABLE_KERNELS", "1")
    with ServeProcess("-c", str(path), *SMALL, "--max-num-seqs", "4") as server:
        assert "the KV cache is always paged here" in server.text
        assert "tensor_parallel is 4, but there are 1 cpu devices; using 1" in server.text
        assert "listening on http://0.0.0.0:" in server.text
        assert config_of(server, directory.name)["dtype"] == "float16"
        body = {"prompt": "Hello", "max_tokens": 3}
        assert ask(server, "/v1/completions", body)[0] == 200


def test_several_models(directory, tmp_path):
    other = write(tmp_path / "CodeLlama-7b")
    path = tmp_path / "models.json"
    models = [
        {"name": "mistral", "path": str(directory), "chat_template": "mistral"},
        {"name": "code", "path": str(other), "chat_template": "llama", "max_model_len": 48},
    ]
    path.write_text(json.dumps({"models": models}))
    flags = ("--config-path", str(path), "--max-num-seqs", "4", "--max-model-len", "64")
    with ServeProcess(*flags, *SMALL) as server:
        listed = json.loads(server.get("/v1/models"))["data"]
        assert [(model["id"], model["max_model_len"], model["status"]) for model in listed] == [
            ("mistral", 64, "loaded"),
            ("code", 48, "loaded"),
        ]
        chat = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}
        prompts = {}
        for name in ("mistral", "code"):
            status, answer = ask(server, "/v1/chat/completions", {**chat, "model": name})
            assert (status, answer.get("model")) == (200, name), answer
            prompts[name] = answer["usage"]["prompt_tokens"]
        assert prompts["mistral"] != prompts["code"], "each has its own template"
        status, answer = ask(server, "/v1/chat/completions", {**chat, "model": "gpt-4"})
        assert (status, answer["error"]["code"]) == (404, "model_not_found")
        assert ask(server, "/v1/models/unload", {"model": "code"})[1]["status"] == "unloaded"
        assert ask(server, "/v1/chat/completions", {**chat, "model": "code"})[0] == 404
        assert ask(server, "/v1/models/load", {"model": "code"})[1]["status"] == "loaded"
        assert ask(server, "/v1/chat/completions", {**chat, "model": "code"})[0] == 200
        text = server.get("/metrics")
        assert 'vllm:prompt_tokens_total{model_name="mistral"}' in text
        tokens = 2 * prompts["code"]
        assert f'vllm:prompt_tokens_total{{model_name="code"}} {tokens}.0' in text
        assert 'xla_compilations_total{phase="after_warmup"} 0.0' in text
