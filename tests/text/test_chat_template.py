"""Chat templates: choice, refusals, content forms, and the sandbox's limits (B09, B10)."""

import json
import threading
import time
from datetime import datetime

import pytest

from jaxinfer.testing import byte_tokenizer
from jaxinfer.text import ChatTemplate, TemplateError, load_tokenizer
from jaxinfer.text import sandbox as sandbox_module
from jaxinfer.text.chat_template import RESERVED_KWARGS, builtin_names

USER = {"role": "user", "content": "hi"}
CHAT = [
    {"role": "system", "content": "SYS"},
    USER,
    {"role": "assistant", "content": "yo"},
    {"role": "user", "content": "q"},
]
PARTS = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
TEXT_TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
PARTS_ONLY_TEMPLATE = (
    "{% for m in messages %}{% for part in m.content %}[{{ part.text }}]{% endfor %}{% endfor %}"
)


@pytest.fixture
def short_timeout(monkeypatch):
    monkeypatch.setattr(sandbox_module, "RENDER_TIMEOUT_S", 0.3)


def message_of(template, messages=(USER,), **options):
    with pytest.raises(TemplateError) as caught:
        template.render(list(messages), **options)
    return str(caught.value)


# --- B09: what templates say and need ---------------------------------------------------------


def test_a_templates_own_refusal_is_the_message():
    template = ChatTemplate(
        "{% if messages[0].role == 'system' %}"
        "{{ raise_exception('System role not supported') }}{% endif %}"
        "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
        "{{ raise_exception('Roles must alternate') }}{% endif %}{{ m.content }}{% endfor %}"
    )
    assert template.render([USER]) == "hi"
    assert message_of(template, CHAT) == "System role not supported"
    assert message_of(template, [USER, USER]) == "Roles must alternate"


def test_strftime_now_is_server_time_in_any_format():
    template = ChatTemplate("{{ strftime_now('%d %b %Y %H:%M|%A %j %%') }}")
    before = datetime.now()
    rendered = template.render([USER])
    expected = (before, datetime.now())
    assert rendered in [now.strftime("%d %b %Y %H:%M|%A %j %%") for now in expected]


def test_a_syntax_error_names_the_line_and_disables_chat_only():
    tokenizer = byte_tokenizer("ok\n\n{% for %}")
    template = ChatTemplate.from_tokenizer(tokenizer)
    assert template.unavailable is not None
    message = message_of(template)
    assert "byte_tokenizer (default), line 3: " in message
    assert "--chat-template" in message
    with pytest.raises(TemplateError, match="line 1"):
        ChatTemplate("{{ messages[ }}")


def test_without_a_template_the_message_names_the_flag_and_the_built_in_ones():
    message = message_of(ChatTemplate.from_tokenizer(byte_tokenizer()))
    assert "no chat template" in message
    assert "--chat-template" in message
    assert "chatml" in message


def test_tool_use_is_chosen_where_tools_are_given():
    named = {"default": "D{{ tools }}", "tool_use": "T{{ tools|length }}", "rag": "R"}
    template = ChatTemplate.from_tokenizer(byte_tokenizer(named))
    assert template.render([USER]) == "DNone"
    assert template.render([USER], tools=[]) == "D[]"
    assert template.render([USER], tools=[{"type": "function"}]) == "T1"
    assert ChatTemplate({"default": "D"}).render([USER], tools=[{}]) == "D"
    assert "no template named 'default', only rag" in message_of(ChatTemplate({"rag": "R"}))


def test_precedence_of_the_sources(tmp_path):
    byte_tokenizer()._backend.save(str(tmp_path / "tokenizer.json"))
    config = {"chat_template": [{"name": "default", "template": "config"}]}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    assert ChatTemplate.from_tokenizer(load_tokenizer(tmp_path)).render([USER]) == "config"
    (tmp_path / "chat_template.jinja").write_text("file")
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_text("tools")
    tokenizer = load_tokenizer(tmp_path)
    assert ChatTemplate.from_tokenizer(tokenizer).render([USER]) == "file"
    assert ChatTemplate.from_tokenizer(tokenizer).render([USER], tools=[{}]) == "tools"
    override = tmp_path / "own.jinja"
    override.write_text("own {{ bos_token }}")
    assert ChatTemplate.from_tokenizer(tokenizer, str(override)).render([USER]) == "own "
    chatml = ChatTemplate.from_tokenizer(tokenizer, "chatml").render([USER])
    assert chatml == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"


@pytest.mark.parametrize("override", ["no-such-name", "/no/such/file.jinja", "."])
def test_an_unknown_override_lists_the_names(override):
    with pytest.raises(TemplateError, match=r"neither a built-in template .*chatml") as caught:
        ChatTemplate.from_tokenizer(byte_tokenizer("x"), override)
    assert caught.value.param == "chat_template"


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("llama2", "<s>[INST] <<SYS>>\nSYS\n<</SYS>>\n\nhi [/INST] yo </s><s>[INST] q [/INST]"),
        ("mistral", "<s>[INST] SYS\n\nhi[/INST] yo</s>[INST] q[/INST]"),
        ("vicuna", "<s>SYS USER: hi ASSISTANT: yo</s>USER: q ASSISTANT:"),
        (
            "zephyr",
            "<|system|>\nSYS</s>\n<|user|>\nhi</s>\n<|assistant|>\nyo</s>\n"
            "<|user|>\nq</s>\n<|assistant|>\n",
        ),
        (
            "phi3",
            "<|system|>\nSYS<|end|>\n<|user|>\nhi<|end|>\n<|assistant|>\nyo<|end|>\n"
            "<|user|>\nq<|end|>\n<|assistant|>\n",
        ),
        (
            "gemma",
            "<s><start_of_turn>user\nSYS\n\nhi<end_of_turn>\n<start_of_turn>model\n"
            "yo<end_of_turn>\n<start_of_turn>user\nq<end_of_turn>\n<start_of_turn>model\n",
        ),
    ],
)
def test_built_in_templates(name, expected):
    assert ChatTemplate.from_tokenizer(byte_tokenizer(), name).render(CHAT) == expected


def test_built_in_names():
    wanted = "chatml gemma llama llama2 llama3 mistral phi3 vicuna zephyr"
    assert builtin_names() == wanted.split()


# --- content, continuation, variables ---------------------------------------------------------


def test_parts_are_joined_for_templates_that_know_only_text():
    message = {"role": "user", "content": PARTS}
    assert ChatTemplate(TEXT_TEMPLATE).render([message]) == "<user>one\ntwo"
    concatenating = ChatTemplate("{% for m in messages %}{{ '>' + m.content }}{% endfor %}")
    assert concatenating.render([message]) == ">one\ntwo"
    image = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}
    assert "image_url" in message_of(ChatTemplate(TEXT_TEMPLATE), [image])


def test_templates_that_know_only_parts_get_text_as_a_part():
    template = ChatTemplate(PARTS_ONLY_TEMPLATE)
    assert template.render([{"role": "user", "content": PARTS}]) == "[one][two]"
    assert template.render([USER]) == "[hi]"


def test_a_final_message_is_continued_to_its_last_character():
    chat = [USER, {"role": "assistant", "content": "1, 2, "}]
    options = {"add_generation_prompt": False, "continue_final_message": True}
    closing = ChatTemplate("{% for m in messages %}<{{ m.content }}>{% endfor %}")
    trimming = ChatTemplate("{% for m in messages %}<{{ m.content|trim }}>{% endfor %}")
    dropping = ChatTemplate("{{ messages[0].content }}")
    assert closing.render(chat, **options) == "<hi><1, 2, "
    assert trimming.render(chat, **options) == "<hi><1, 2,"
    assert chat[-1]["content"] == "1, 2, "
    assert "cannot be continued" in message_of(dropping, chat, **options)
    assert "text to continue" in message_of(closing, [{"role": "assistant"}], **options)
    assert "exclude each other" in message_of(closing, chat, continue_final_message=True)


def test_arguments_are_not_changed():
    chat = [{"role": "assistant", "content": [dict(part) for part in PARTS], "name": None}]
    before = json.dumps(chat)
    template = ChatTemplate(PARTS_ONLY_TEMPLATE)
    template.render(chat, add_generation_prompt=False, continue_final_message=True)
    assert json.dumps(chat) == before


NAMED_ARGUMENTS = {"add_generation_prompt", "continue_final_message", "documents", "tools"}


@pytest.mark.parametrize("name", [*sorted(RESERVED_KWARGS - NAMED_ARGUMENTS), "__class__", "range"])
def test_reserved_variables_are_refused(name):
    with pytest.raises(TemplateError, match="reserved") as caught:
        ChatTemplate("x").render([USER], **{name: True})
    assert caught.value.param == "chat_template_kwargs"


def test_variables_reach_the_template():
    template = ChatTemplate("{{ enable_thinking }}{{ self_ }}", {"bos_token": "<s>"})
    assert template.render([USER], enable_thinking=False, self_=1) == "False1"


def test_errors_in_a_template_name_the_line_and_no_python_class():
    template = ChatTemplate("a\n{{ messages[0].content + 1 }}")
    message = message_of(template)
    assert message.startswith("chat template, line 2: ")
    assert "Error" not in message


# --- B10: hostile templates -------------------------------------------------------------------

FORBIDDEN = [
    "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "{{ cycler.__init__.__globals__ }}{{ cycler.__init__.__globals__.os }}",
    "{{ lipsum.__globals__.os.popen('touch pwned').read() }}",
    "{{ messages.append(1) }}",
    "{{ messages[0].update({'role': 'system'}) }}",
    "{{ dict.update(messages[0], {'role': 'system'}) }}",
    "{{ messages|attr('append')(1) }}",
    "{{ '{0.__class__.__mro__}'.format(1) }}",
    "{{ '{a.__class__.__mro__}'.format_map({'a': 1}) }}",
    "{{ ['{0.__class__.__init__}']|map('format', 1)|map(attribute='__class__')|first.x }}",
    "{{ namespace(__html__=1) }}",
    "{% set ns = namespace() %}{% set ns.__class__ = 1 %}",
    "{{ raise_exception.__globals__ }}{{ strftime_now.__globals__.x }}",
    "{% include '/etc/passwd' %}",
    "{{ self._TemplateReference__context.x }}",
]


@pytest.mark.parametrize("source", FORBIDDEN)
def test_nothing_outside_the_sandbox_is_reached(source, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    messages = [dict(USER)]
    template = ChatTemplate.from_tokenizer(byte_tokenizer("{{ messages[0].content }}" + source))
    with pytest.raises(TemplateError):
        template.render(messages)
    assert messages == [USER]
    assert list(tmp_path.iterdir()) == []


DOUBLING = "{% set x = 'xxxxxxxxxxxxxxxx' %}"
OVERSIZED = [
    "{{ 'x' * 10**9 }}",
    "{{ 10**9 * 'x' }}",
    "{{ [0] * 10**9 }}",
    "{{ 9 ** 99999999 }}",
    DOUBLING + "{% set x = x + x %}" * 40 + "{{ x|length }}",
    DOUBLING + "{% set x = x ~ x %}" * 40 + "{{ x|length }}",
    DOUBLING + "{% set x = [x, x] %}" * 40 + "{{ x }}",
    DOUBLING + "{% set x = [x, x] %}" * 40 + "{{ x|tojson }}",
    DOUBLING + "{% set x %}{{ x }}{{ x }}{% endset %}" * 40 + "{{ x|length }}",
    "{% set x = namespace() %}{% set x.a = 'y' * 9999999 %}" + "{{ x.a }}" * 30,
    "{{ ('x' * 9999).replace('x', 'y' * 9999) }}",
    "{{ ('x' * 9999)|replace('x', 'y' * 9999) }}",
    "{{ ('y' * 99999).join('x' * 9999) }}",
    "{{ ('x' * 9999)|join('y' * 9999) }}",
    "{{ 'x'.center(10**9) }}",
    "{{ 'x'.ljust(10**9) }}",
    "{{ ('\t' * 9999).expandtabs(99999) }}",
    "{{ '%999999999d' % 1 }}",
    "{{ '%*d' % (999999999, 1) }}",
    "{{ '%999999999d'|format(1) }}",
    "{{ ('%s' * 9999) % ('x' * 9999) }}",
    "{{ '{:999999999}'.format(1) }}",
    "{{ '{:{w}}'.format('x', w='999999999') }}",
    "{{ 'x'|indent(10**9, true) }}",
    "{{ 1.5|round(10**9) }}",
    "{{ range(99999)|map('string')|map('indent', 99999, true)|list|length }}",
    "{{ messages|tojson(indent=10**9) }}",
    "{{ (5).to_bytes(10**9, 'little') }}",
    "{{ range(10**9)|list }}",
    "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}",
    "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
    "x" * (2**20 + 1),
]


@pytest.mark.parametrize("source", OVERSIZED, ids=[source[-60:] for source in OVERSIZED])
def test_oversized_values_are_never_made(source):
    start = time.monotonic()
    assert message_of(ChatTemplate.from_tokenizer(byte_tokenizer(source)))
    assert time.monotonic() - start < 5


ENDLESS = [
    "{% for i in range(99999) %}{% for j in range(99999) %}x{% endfor %}{% endfor %}",
    "{% for i in range(99999) %}{% for j in range(99999) %}{% set y = 1 %}{% endfor %}{% endfor %}",
    "{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}{% endmacro %}{{ m(60) }}",
]


@pytest.mark.parametrize("source", ENDLESS)
def test_rendering_stops_in_time(source, short_timeout):
    start = time.monotonic()
    assert "longer than 0.3 s" in message_of(ChatTemplate.from_tokenizer(byte_tokenizer(source)))
    assert time.monotonic() - start < 3


def test_large_texts_are_limited_by_time_not_refused_by_size(short_timeout):
    quadratic = ChatTemplate(
        "{% set ns = namespace(text='') %}{% for c in messages[0].content %}"
        "{% set ns.text = ns.text + c %}{% endfor %}{{ ns.text }}"
    )
    assert quadratic.render([USER]) == "hi"
    assert message_of(quadratic, [{"role": "user", "content": "x" * 5_000_000}])
    text = "x\n" * 1_000_000
    assert ChatTemplate(TEXT_TEMPLATE).render([{"role": "user", "content": text}]).endswith(text)


def test_a_stuck_rendering_does_not_hold_up_others(short_timeout):
    template = ChatTemplate(
        "{% if messages[0].content == 'stuck' %}" + ENDLESS[1] + "{% endif %}"
        "{{ messages[0].content }}"
    )
    stuck = [{"role": "user", "content": "stuck"}]
    threads = [threading.Thread(target=message_of, args=(template, stuck)) for _ in range(3)]
    for thread in threads:
        thread.start()
    assert [template.render([USER]) for _ in range(20)] == ["hi"] * 20
    for thread in threads:
        thread.join(timeout=10)
        assert not thread.is_alive()


def test_text_is_replaced_in_a_loop_that_sets_variables():
    source = "{% for m in messages %}{% set x = m.content.replace('a', 'b') %}{{ x }}{% endfor %}"
    assert ChatTemplate(source).render([{"role": "user", "content": "banana"}]) == "bbnbnb"
