"""The page's Markdown: what it makes of a text, and that it makes nothing else."""

import json

import pytest

CASES = {
    "plain": ("a < b & c", "<p>a &lt; b &amp; c</p>"),
    "paragraphs": ("a\nb\n\nc  \nd", "<p>a<br>b</p><p>c<br>d</p>"),
    "windows line ends": ("a\r\nb\r\n\r\nc", "<p>a<br>b</p><p>c</p>"),
    "markup": ("<b>x</b>", "<p>&lt;b&gt;x&lt;/b&gt;</p>"),
    "line break tag": ("a<br>b<br />c", "<p>a<br>b<br>c</p>"),
    "emphasis": (
        "*a* _b_ **c** __d__ ***e*** ~~f~~",
        "<p><em>a</em> <em>b</em> <strong>c</strong> <strong>d</strong> "
        "<em><strong>e</strong></em> <del>f</del></p>",
    ),
    "emphasis in emphasis": (
        "**a *b* c** *a **b***",
        "<p><strong>a <em>b</em> c</strong> <em>a <strong>b</strong></em></p>",
    ),
    "bold, then italic": (
        "***a:** b* ***c* d**",
        "<p><em><strong>a:</strong> b</em> <strong><em>c</em> d</strong></p>",
    ),
    "more opened than closed": (
        "**a*\n\n***b**\n\n***c*",
        "<p>*<em>a</em></p><p>*<strong>b</strong></p><p>**<em>c</em></p>",
    ),
    "no emphasis": (
        "2 * 3 * 4 a_b_c **open ** a b",
        "<p>2 * 3 * 4 a_b_c **open ** a b</p>",
    ),
    "escapes": (r"\*a\* \` \[x\]", "<p>*a* ` [x]</p>"),
    "inline code": (
        "`a*b*` ``c`d`` `<i>` **`e**`**",
        "<p><code>a*b*</code> <code>c`d</code> <code>&lt;i&gt;</code> "
        "<strong><code>e**</code></strong></p>",
    ),
    "open code": ("`a **b**", "<p>`a <strong>b</strong></p>"),
    "heading": ("# One\n## Two ##\n###### Six\n#none", None),
    "rule": ("a\n\n---\n***\nb", "<p>a</p><hr><hr><p>b</p>"),
    "quote": ("> a\n> > b\n\nc", None),
    "bullets": ("- a\n- *b*\n* c", "<ul><li>a</li><li><em>b</em></li><li>c</li></ul>"),
    "numbers": ("3. a\n4. b", '<ol start="3"><li>a</li><li>b</li></ol>'),
    "list in list": (
        "1. a\n   - b\n  - c\n2. d",
        "<ol><li>a<ul><li>b</li><li>c</li></ul></li><li>d</li></ol>",
    ),
    "loose list": ("- a\n\n- b", "<ul><li><p>a</p></li><li><p>b</p></li></ul>"),
    "list after text": (
        "a:\n- b\n1984. c",
        '<p>a:</p><ul><li>b</li></ul><ol start="1984"><li>c</li></ol>',
    ),
    "year in text": ("in\n1984. was", "<p>in<br>1984. was</p>"),
    "lazy item": ("- a\nb\n\nc", "<ul><li>a<br>b</li></ul><p>c</p>"),
    "table": (
        "| a | b |\n|:-|-:|\n| **c** | d \\| e |\n| f |\n\ng",
        '<div class="table"><table><thead><tr><th scope="col" class="start">a</th>'
        '<th scope="col" class="end">b</th></tr></thead><tbody><tr><td class="start">'
        '<strong>c</strong></td><td class="end">d | e</td></tr><tr><td class="start">f</td>'
        '<td class="end"></td></tr></tbody></table></div><p>g</p>',
    ),
    "no table": ("a | b\n- x | -\nc", None),
    "image": ("![a](https://x.org/i.png)", None),
    "no link": (
        "[a](javascript:x) [b](/c) [d] [e](f",
        "<p>[a](javascript:x) [b](/c) [d] [e](f</p>",
    ),
}
LINK = '<a href="{}" target="_blank" rel="noopener noreferrer nofollow">{}</a>'
CASES["heading"] = (
    CASES["heading"][0],
    '<h3 data-level="1">One</h3><h4 data-level="2">Two</h4><h6 data-level="6">Six</h6><p>#none</p>',
)
CASES["quote"] = (
    CASES["quote"][0],
    "<blockquote><p>a</p><blockquote><p>b</p></blockquote></blockquote><p>c</p>",
)
CASES["no table"] = (CASES["no table"][0], "<p>a | b</p><ul><li>x | -<br>c</li></ul>")
CASES["image"] = (CASES["image"][0], f"<p>{LINK.format('https://x.org/i.png', 'a')}</p>")
CASES["links"] = (
    '[a *b*](https://x.org/a_(b) "title") <mailto:a@x.org> (see https://x.org/c.)',
    f"<p>{LINK.format('https://x.org/a_(b)', 'a <em>b</em>')} "
    f"{LINK.format('mailto:a@x.org', 'a@x.org')} "
    f"(see {LINK.format('https://x.org/c', 'https://x.org/c')}.)</p>",
)


@pytest.fixture
async def show(page, tab):
    """Returns a function that shows a text and returns the markup it became."""
    await tab.evaluate(
        "import('/page/markdown.js').then((module) => { window.showMarkdown = (text) => {"
        " const box = document.createElement('div'); module.showMarkdown(box, text);"
        " return box; }; window.module = module; })"
    )

    async def go(text):
        return await tab.evaluate(f"showMarkdown({json.dumps(text)}).innerHTML")

    return go


async def test_texts_and_their_markup(show):
    for name, (text, expected) in CASES.items():
        assert await show(text) == expected, name


async def test_code_blocks(show, tab):
    text = (
        "```python\nx = '<b>'\n\n  y\n```\nafter\n~~~\n```\n~~~\n- a\n  ```\n  in\n    item\n  ```"
    )
    blocks = await tab.evaluate(
        f"[...showMarkdown({json.dumps(text)}).querySelectorAll('figure')].map((figure) =>"
        " [figure.querySelector('span').textContent, figure.querySelector('code').textContent])"
    )
    assert blocks == [["python", "x = '<b>'\n\n  y"], ["text", "```"], ["text", "in\n  item"]]
    open_block = "showMarkdown('a\\n```js\\nlet *x*').querySelector('code').textContent"
    assert await tab.evaluate(open_block) == "let *x*"


async def test_finished_blocks_stay_the_same_elements(show, tab):
    text = "# a\n\nb *c*\n\n- d\n- e\n\n```\nf\n```\n\n| g | h |\n|---|---|\n| i | j |\n\nend"
    kept = await tab.evaluate(
        f"(() => {{ const text = {json.dumps(text)}; const box = document.createElement('div');"
        " let changed = 0; let before = [];"
        " for (let end = 1; end <= text.length; end += 1) {"
        "  module.showMarkdown(box, text.slice(0, end));"
        "  for (const [i, block] of before.slice(0, -1).entries())"
        "   if (box.children[i] !== block) changed += 1;"
        "  before = [...box.children]; }"
        " return [changed, box.innerHTML === showMarkdown(text).innerHTML]; })()"
    )
    assert kept == [0, True]


ELEMENTS = (
    *("P", "H3", "H4", "H5", "H6", "HR", "BR", "EM", "STRONG", "DEL", "CODE", "A"),
    *("PRE", "FIGURE", "FIGCAPTION", "SPAN", "BUTTON", "UL", "OL", "LI", "BLOCKQUOTE"),
    *("DIV", "TABLE", "THEAD", "TBODY", "TR", "TH", "TD"),
)
ATTRIBUTES = (
    *("class", "data-level", "type", "aria-label", "start", "scope"),
    *("href", "target", "rel"),
)


async def test_no_text_becomes_any_other_markup(show, tab):
    """Random texts of what Markdown and HTML are made of; the seed is fixed."""
    found = await tab.evaluate(
        """(() => {
          const parts = ['*', '**', '_', '~~', '`', '```', '\\n', '\\n\\n', '- ', '1. ', '  ',
            '> ', '# ', '|', '\\n|a|b|\\n|-|-|\\n|', '[', ']', '(', ')', '![', '<script>',
            '<img src=x onerror=alert(1)>', 'javascript:alert(1)', 'https://x.org/"onclick="',
            '<https://', '<svg onload=', '&lt;', '\\\\', 'data:text/html,x', 'a', ' ', '"', "'",
            '\\t', '\\r\\n', '\\u2028', '\\0'];
          let seed = 1;
          const next = () => (seed = (seed * 48271) % 2147483647);
          const found = new Set();
          for (let round = 0; round < 3000; round += 1) {
            let text = '';
            for (let size = next() % 40; size > 0; size -= 1) text += parts[next() % parts.length];
            for (const element of showMarkdown(text).querySelectorAll('*')) {
              found.add(element.tagName);
              for (const attribute of element.attributes) found.add(attribute.name);
              if (element.href && !/^(https?|mailto):/.test(element.href)) found.add(element.href);
            }
          }
          return [...found];
        })()"""
    )
    assert set(found) - {*ELEMENTS, *ATTRIBUTES} == set()
    # The texts were worth trying.
    assert {"EM", "CODE", "A", "TABLE", "LI", "BLOCKQUOTE", "FIGURE"} <= set(found)


async def test_no_text_takes_long(show, tab):
    took_ms = {}
    for part in (
        *(
            "*a ",
            "**a ",
            "_a ",
            "***a",
            "*a **b ",
            "***a** b ",
            "~~a ",
            "_ * `",
            "* ",
            "`",
            "`` a ` ",
        ),
        *(
            "[",
            "[a](",
            "((",
            "<",
            "http://",
            "\\",
            " ",
            "# ",
            "#",
            "> ",
            "- ",
            "  - a\n",
            "- a\n\n",
        ),
        *("| ", "|-", "|a|\n|-|\n", "a\n", "-\n", "```\n", "~"),
    ):
        text = json.dumps(part * (30_000 // len(part)))
        took_ms[part] = await tab.evaluate(
            f"(() => {{ const start = performance.now(); showMarkdown({text});"
            " return performance.now() - start; })()"
        )
    assert {part: ms for part, ms in took_ms.items() if ms > 5000} == {}
