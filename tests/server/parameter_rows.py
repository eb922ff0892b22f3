"""Values of parameters at, within and beyond their limits, as the conformance notes have them."""

# name -> (accepted values, refused values with their codes)
BELOW, ABOVE = "integer_below_min_value", "integer_above_max_value"
LOW, HIGH = "decimal_below_min_value", "decimal_above_max_value"
TYPE = "invalid_type"
RANGES = {
    "temperature": ([0, 2, 0.5, 5e-324], [(-0.1, LOW), (2.1, HIGH), ("1", TYPE), (True, TYPE)]),
    "top_p": ([0, 1], [(-0.1, LOW), (1.1, HIGH), ([], TYPE)]),
    "min_p": ([0, 1], [(-0.1, LOW), (1.1, HIGH)]),
    "top_k": ([-1, 0, 1, 8.0, 2**31 - 1], [(-2, BELOW), (2**31, ABOVE), (8.5, TYPE)]),
    "n": ([1, 128, 2.0], [(0, BELOW), (-1, BELOW), (129, ABOVE), (10**6, ABOVE), (2.5, TYPE)]),
    "seed": (
        [0, -(2**63), 2**63 - 1],
        [(2**63, ABOVE), (-(2**63) - 1, BELOW), (2**64, ABOVE), (10**5000, ABOVE), (True, TYPE)],
    ),
    "presence_penalty": ([-2, 2], [(-2.1, LOW), (2.1, HIGH), (10**400, HIGH)]),
    "frequency_penalty": ([-2, 2], [(-2.1, LOW), (2.1, HIGH)]),
    "repetition_penalty": ([1, 1.5, 0.5], [(0, LOW), (-1, LOW), (1e9, HIGH), ("1", TYPE)]),
    "repeat_penalty": ([1.2], [(0, LOW)]),
    "min_tokens": ([0, 1], [(-1, BELOW), (2**31, ABOVE)]),
    "priority": ([0, -5, 2**63 - 1], [(2**63, ABOVE), ("1", TYPE)]),
    "stop": (["a", ["a"], ["a"] * 16, []], [("", None), ([""], None), ([1], TYPE), (1, TYPE)]),
    "stop_token_ids": ([[], [0, 257]], [([258], None), ([-1], BELOW), ("1", TYPE)]),
    "ignore_eos": ([True, False], [(1, TYPE), ("true", TYPE)]),
    "include_stop_str_in_output": ([True], [(0, TYPE)]),
    "skip_special_tokens": ([False], [("no", TYPE)]),
    "speculation": ([True, False], [("ngram", TYPE), (1, TYPE)]),
    "return_token_ids": ([True], [(1, TYPE)]),
    "add_special_tokens": ([True], [(1, TYPE)]),
    "logit_bias": (
        [{}, {"0": -100, "257": 100}, {"5": 1.5}],
        [
            ({key: 1}, None)
            for key in ("258", "-1", "999999999999", "1e3", "abc", "257.0", "", "\u0663")
        ]
        + [({"1": 101}, HIGH), ({"1": -101}, LOW), ({"1": None}, TYPE), ({"1": "5"}, TYPE)]
        + [([], TYPE), ({str(i): 0 for i in range(301)}, None)],
    ),
    "cache_salt": (["mine"], [(5, TYPE)]),
    "user": (["me"], [(5, TYPE)]),
    "metadata": ([{}], [("x", TYPE)]),
    "store": ([True], [("x", TYPE)]),
    "service_tier": (["auto"], [(1, TYPE)]),
    "stream": ([False, True], [("true", TYPE), (1, TYPE)]),
    "bad_words": ([[], ["x"]], [([""], None), ([1], TYPE), ("x", TYPE), (["x"] * 257, None)]),
    "allowed_token_ids": ([[0, 257]], [([], "empty_array"), ([258], None), ([-1], BELOW)]),
    "truncate_prompt_tokens": (
        [-1, 1, 2**31 - 1],
        [(-2, BELOW), (0, None), (2**31, ABOVE), ("5", TYPE)],
    ),
    "truncation_side": (["left", "right"], [("middle", "invalid_value"), (1, TYPE)]),
    "prompt_logprobs": ([0, 20], [(-1, BELOW), (21, ABOVE), (True, TYPE)]),
    "return_tokens_as_token_ids": ([True, False], [(1, TYPE)]),
}
GRAMMARS = {
    "guided_json": ([{}, {"type": "object"}, '{"type": "object"}'], [(5, TYPE), ("{", None)]),
    "json_schema": ([{}], [(5, TYPE), ([], TYPE)]),
    "guided_regex": (["a+"], [(5, TYPE), ({}, TYPE)]),
    "regex": (["a+"], [(5, TYPE)]),
    "guided_choice": ([["a"], ["a", "b"]], [([], "empty_array"), ("a", TYPE), ([1], TYPE)]),
    "guided_grammar": (['start: "a"'], [(5, TYPE)]),
    "ebnf": (['start: "a"'], [(5, TYPE)]),
    "grammar": (
        ['start: "a"', {"type": "regex", "value": "a"}],
        [(5, TYPE), ({}, TYPE), ({"type": "x", "value": "a"}, None), ({"type": "regex"}, None)],
    ),
    "structured_outputs": (
        [{"json": {}}, {"regex": "a"}, {"choice": ["a"]}, {"json_object": True}],
        [
            ({}, None),
            ({"json": {}, "regex": "a"}, None),
            ({"what": 1}, "unsupported_parameter"),
            ("x", TYPE),
        ],
    ),
    "response_format": (
        [
            {"type": "text"},
            {"type": "json_object"},
            {"type": "json_schema", "json_schema": {"name": "a", "schema": {}}},
        ],
        [
            ({}, None),
            ({"type": "sound"}, None),
            ("x", TYPE),
            ({"type": "json_schema"}, None),
            ({"type": "json_schema", "json_schema": {"name": "a b", "schema": {}}}, None),
            ({"type": "json_schema", "json_schema": {"name": "a" * 65, "schema": {}}}, None),
            ({"type": "json_schema", "json_schema": {"name": "a", "schema": 5}}, TYPE),
        ],
    ),
}
RANGES |= GRAMMARS
FUNCTION = {"name": "f", "parameters": {"type": "object", "properties": {}}}
TOOL = {"type": "function", "function": FUNCTION}
NAMED = {"type": "function", "function": {"name": "f"}}


def tool(**changes):
    return {"type": "function", "function": {**FUNCTION, **changes}}


CHAT_RANGES = {
    "tools": (
        [[], [TOOL], [tool(name=f"f{i}") for i in range(128)], [tool(name="f" * 64)]],
        [
            ("x", TYPE),
            ([{}], None),
            ([TOOL, TOOL], None),
            ([tool(name=f"f{i}") for i in range(129)], "array_above_max_length"),
            ([tool(name="f" * 65)], None),
            ([tool(name="a b")], None),
            ([tool(parameters=5)], TYPE),
            ([{"type": "code_interpreter"}], None),
        ],
    ),
    "tool_choice": (
        ["none", "auto"],
        [("required", None), (NAMED, None), ("wild", None), (5, None), ({}, None)],
    ),
    "parallel_tool_calls": ([True, False], [(1, TYPE), ("no", TYPE)]),
    "functions": ([[], [FUNCTION]], [("x", TYPE), ([{}], None), ([FUNCTION] * 2, None)]),
    "function_call": (["none", "auto"], [("wild", None), ({"name": "f"}, None), (5, None)]),
    "include_reasoning": ([True, False], [(1, TYPE)]),
    "max_tokens": ([1, 2**31, 2**63 - 1, 2**63], [(0, BELOW), (-1, BELOW), (1.5, TYPE)]),
    "max_completion_tokens": ([1, 2**63], [(0, BELOW), ("5", TYPE)]),
    "logprobs": ([True, False], [(1, TYPE)]),
    "echo": ([True, False], [(1, TYPE)]),
    "reasoning_effort": (["low"], [("wild", "invalid_value"), (1, TYPE)]),
    "modalities": ([["text"]], [(["audio"], "unsupported_parameter"), ("text", TYPE)]),
    "documents": ([[{"text": "x"}]], [(["x"], TYPE), ({}, TYPE)]),
    "chat_template_kwargs": ([{"enable_thinking": False}], [([], TYPE), ({"tools": []}, None)]),
}
COMPLETION_RANGES = {
    "max_tokens": ([1, 2**63], [(0, BELOW), (-1, BELOW), (True, TYPE)]),
    "logprobs": ([0, 20], [(-1, BELOW), (21, ABOVE), (2**40, ABOVE), (True, TYPE)]),
    "echo": ([True, False], [(1, TYPE)]),
    "best_of": ([1, 20], [(0, None), (21, ABOVE), (-1, BELOW), ("2", TYPE)]),
    "suffix": ([""], [("x", "unsupported_parameter")]),
}

UNSUPPORTED = {
    "typical_p": [0.9],
    "tfs": [0.5],
    "top_a": [0.1],
    "mirostat": [2],
    "xtc_probability": [0.5],
    "dynatemp_range": [1],
    "smoothing_factor": [0.1],
    "dry_multiplier": [0.8],
    "use_beam_search": [True],
}
CHAT_UNSUPPORTED = {
    "audio": [{"voice": "x"}],
    "web_search_options": [{}],
    "chat_template": ["{{ 1 }}"],
}
OFF = {
    "typical_p": 1,
    "top_a": 0,
    "mirostat": 0,
    "xtc_probability": 0.0,
    "dry_multiplier": 0,
    "dry_base": 1.75,
    "use_beam_search": False,
    "length_penalty": 1,
    "early_stopping": False,
    "response_format": {"type": "text"},
    "return_tokens_as_token_ids": False,
    "spaces_between_special_tokens": True,
    "cache_prompt": True,
    "n_predict": -1,
}
