"""The page in headless Chromium: tokens and digits as on the host, refusals, focus, no request elsewhere."""

import dataclasses
import json
import re
import shutil
from pathlib import Path

import numpy as np
import onnx_stub
import pytest
import tokenizers
import torch
import torch_xla
from chromium import GENERATE, WEB, chromium, isolated_server, load_folder, loaded, missing, plain_server, until
from onnx_stub import write_classifier, write_language_model, write_model_json
from processes import run
from run_files import summary_in
from test_tokenizer import trained

from browser import onnx_generate
from browser.export import chat_of
from browser.onnx_files import check_chat, open_session
from browser.onnx_generate import Mulberry32, choose
from images.mnist import load_digits
from images.mnist_files import load_mnist
from language.data.chat import FORMATS, prompt_of_chat
from language.data.tokenizer import Bytes, load_tokenizer
from language.generation import decoding
from language.generation.sampling import SamplingOptions
from language.weights import sources
from tools import convert_hf, generate
from tools.generate import GenerateConfig
from tpu_utils.base.errors import InputError, NonFiniteError

needs = pytest.mark.skipif(bool(missing()), reason=f"THE PAGE IN browser/page/ WAS NOT TESTED: {missing()}")
pytestmark = needs
onnxruntime = pytest.importorskip("onnxruntime", reason="pip install -r requirements-dev.txt brings onnxruntime")

GREEDY = dict(numTokens=200, temperature=0, topK=0, topP=1, seed=0)
SAMPLED = [
    dict(numTokens=60, temperature=0.9, topK=0, topP=1, seed=7),
    dict(numTokens=60, temperature=1.3, topK=20, topP=0.8, seed=4294967295),
]


@pytest.fixture(scope="module")
def browser():
    with chromium() as started:
        yield started


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """The folder that the isolated server has for models."""
    folder = tmp_path_factory.mktemp("models")
    for kind in onnx_stub.KINDS:
        write_language_model(folder / kind, kind)
    for kind in ("good", "slow"):
        talks = shutil.copytree(folder / kind, folder / f"{kind}_chat")
        model = json.loads((talks / "model.json").read_text()) | dict(chat=chat_of("plain", Bytes()))
        write_model_json(talks, model)
    return folder


@pytest.fixture(scope="module")
def address(models):
    with isolated_server(models) as found:
        yield found


@pytest.fixture
def page(browser, address):
    """A page of its own; whatever it asks for, and its errors, are looked at when the test is over."""
    context = browser.new_context(viewport=dict(width=1000, height=900), service_workers="block")
    made, asked, errors = context.new_page(), [], []
    context.on("request", lambda request: asked.append(request.url))
    made.on("pageerror", lambda error: errors.append(str(error)))
    made.goto(address)
    yield made
    context.close()
    assert asked and not [url for url in asked if not url.startswith((address, "data:", "blob:"))]
    assert not errors


def opened(page, name: str) -> str:
    """What the page says of models/NAME."""
    page.goto(f"{page.url.partition('?')[0]}?model=models/{name}")
    return loaded(page)


# ---------------------------------------------------------------------------------------- the same numbers as the host
def on_host(folder, prompt: list[int], options: dict) -> list[int]:
    """The tokens by onnxruntime in Python, without the one that ends them."""
    model = onnx_generate.OnnxModel(folder)
    names = dict(num_tokens="numTokens", temperature="temperature", top_k="topK", top_p="topP", seed="seed")
    config = SamplingOptions(**{name: options[theirs] for name, theirs in names.items()})
    stops, begin = set(model.facts["stops"]), model.facts["start"]
    prompt = [*([] if begin is None else [begin]), *prompt]
    found = onnx_generate.generate(model, prompt, config, lambda tokens: tokens[-1] in stops)
    return found[:-1] if found[-1] in stops else found


def in_page(page, name: str, prompt: str, options: list[dict]) -> list[dict]:
    return page.evaluate(GENERATE, [f"models/{name}", [[prompt, one] for one in options]])


def test_a_graph_gives_the_same_tokens_as_on_the_host(page, models):
    options = [GREEDY, *SAMPLED]
    found = in_page(page, "good", "A question", options)
    assert [one["threads"] for one in found] == [min(8, page.evaluate("navigator.hardwareConcurrency"))] * 3
    for one, wanted in zip(found, options, strict=True):
        assert one["tokens"] == on_host(models / "good", list(b"A question"), wanted)
        assert one["text"] == bytes(one["tokens"]).decode(errors="replace") and one["count"] == len(one["tokens"])
    assert len({str(one["tokens"]) for one in found}) == 3


def test_sampling_is_that_of_the_host(page):
    """Ties, zeros of both signs, minus infinity, whole vocabularies."""
    random = np.random.default_rng(0)
    cases, expected = [], []
    for number in range(60):
        size = int(random.choice([1, 2, 5, 300, 5000]))
        logits = np.round(random.normal(size=size) * 4, int(random.integers(0, 3))).astype(np.float32)
        logits[random.random(size) < 0.1] = -0.0
        logits[1:][random.random(size - 1) < 0.1] = -np.inf
        options = dict(temperature=float(random.choice([0, 0.5, 1, 3])), topK=int(random.choice([0, 1, 4])))
        options["topP"] = float(random.choice([1, 0.9, 0.1]))
        cases.append([[None if np.isinf(x) else float(x) for x in logits], options, number])
        uniform = Mulberry32(number).next()
        expected.append(choose(logits, uniform, options["temperature"], options["topK"], options["topP"]))
    found = page.evaluate(
        """async (cases) => {
          const { choose, Random } = await import("/sampling.js");
          return cases.map(([logits, options, seed]) =>
            choose(Float32Array.from(logits, (x) => x ?? -Infinity), options, new Random(seed).next()));
        }""",
        cases,
    )
    assert found == expected


def test_logits_that_are_not_finite_are_no_answer_as_on_the_host(page, models):
    for kind, options in (("nan", GREEDY), ("nan", SAMPLED[1]), ("infinite", GREEDY), ("minus_infinite", SAMPLED[1])):
        config = SamplingOptions(num_tokens=options["numTokens"], temperature=options["temperature"])
        with pytest.raises(NonFiniteError, match="infinite or not a number") as on_host:
            onnx_generate.generate(onnx_generate.OnnxModel(models / kind), [256, *b"To be"], config)
        with pytest.raises(Exception, match=re.escape(str(on_host.value))):  # playwright's, of the page's
            in_page(page, kind, "To be", [options])


def test_a_digit_of_logits_that_are_not_finite_is_no_answer(page, models):
    for value in (np.nan, -np.inf):
        offset = np.zeros(10, np.float32)
        offset[3] = value
        folder = models / f"digits_{value}"
        write_classifier(folder, np.zeros((64, 10), np.float32), offset, 8)
        assert "the logits of the image are infinite or not a number; expected numbers" in opened(page, folder.name)
    folder = models / "digits_mean"
    write_classifier(folder, np.zeros((64, 10), np.float32), np.zeros(10, np.float32), 8)
    write_model_json(folder, json.loads((folder / "model.json").read_text()) | dict(mean=[0.5]))
    assert "mean is [0.5]; expected [0]" in opened(page, folder.name)


# how Llama 3 and Qwen3 split a text into words
PATTERN = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
PATTERN += r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


def sentencepiece_tokenizer(folder: Path) -> Path:
    """A tokenizer.json as Llama 2's: no pre-tokenizer, spaces as a letter, bytes of what it has no letter for."""
    made = tokenizers.Tokenizer(tokenizers.models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    normal, decode = tokenizers.normalizers, tokenizers.decoders
    made.normalizer = normal.Sequence([normal.Prepend("\u2581"), normal.Replace(" ", "\u2581")])
    made.decoder = decode.Sequence(
        [decode.Replace("\u2581", " "), decode.ByteFallback(), decode.Fuse(), decode.Strip(" ", 1, 0)]
    )
    special = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=400, special_tokens=special, show_progress=False)
    made.train_from_iterator(["to be or not to be, that is the question " * 9], trainer)
    folder.mkdir()
    content = json.loads(made.to_str())
    content["added_tokens"] = content["added_tokens"][:3]  # the bytes are words like others
    (folder / "tokenizer.json").write_text(json.dumps(content))
    return folder


@pytest.mark.parametrize("kind", ["bytes", "byte-level", "as Llama 3's", "as Llama 2's"])
def test_tokenizers_are_those_of_the_host(page, tmp_path, kind):
    if kind == "as Llama 2's":
        folder = sentencepiece_tokenizer(tmp_path / "tokenizer")
    elif kind != "bytes":
        folder = trained(tmp_path / "tokenizer", begins=True)
    if kind == "as Llama 3's":
        content = json.loads((folder / "tokenizer.json").read_text())
        split = {"type": "Split", "pattern": {"Regex": PATTERN}, "behavior": "Isolated", "invert": False}
        level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
        content["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [split, level]}
        content["normalizer"] = {"type": "NFC"}
        (folder / "tokenizer.json").write_text(json.dumps(content))
    ours = load_tokenizer("bytes" if kind == "bytes" else str(folder))
    random = np.random.default_rng(0)
    letters = [*"abeot hnqsu,.:'\n\t  019", *"caf\u00e9 \u4f60 \U0001f600 don't to be <|end|> </s> e\u0301".split()]
    texts = [*TEXTS, "", " ", *("".join(random.choice(letters, int(random.integers(1, 30)))) for _ in range(60))]
    tokens = [[int(x) for x in random.integers(0, ours.vocab_size, int(random.integers(0, 30)))] for _ in range(60)]
    made = ["bytes", ""] if kind == "bytes" else ["tokenizer.json", (folder / "tokenizer.json").read_text()]
    encoded, decoded = page.evaluate(
        """async ([kind, content, texts, tokens]) => {
          const { makeTokenizer } = await import("/tokenizer.js");
          const tokenizer = await makeTokenizer({ tokenizer: kind }, new TextEncoder().encode(content));
          return [texts.map((text) => tokenizer.encode(text)), tokens.map((some) => tokenizer.decode(some))];
        }""",
        [*made, texts, tokens],
    )
    for text, found in zip(texts, encoded, strict=True):
        assert found == ours.encode(text), text
    for some, found in zip(tokens, decoded, strict=True):
        assert found == ours.decode(some), some


def small_source(kind: str, folder: Path) -> Path:
    """A run or a Hugging Face folder of a language model with a context of 256, as browser.export takes it."""
    if kind == "hf":
        from test_llama_parity import STRETCHED, hugging_face_model  # transformers takes seconds to import

        trained(folder, begins=True)
        hugging_face_model(dataclasses.replace(STRETCHED, num_layers=2, sequence_length=256)).save_pretrained(folder)
        return folder
    folder.mkdir()
    (folder / "input.txt").write_text("To be, or not to be: that is the question.\n" * 400)
    size = ["--embedding_dim=64", "--num_layers=2", "--sequence_length=256", "--global_batch_size=4"]
    data = ["--dataset=text", "--data_dir", folder, "--train_data=input.txt", "--run_dir", folder / "run"]
    done = run(
        "transformer_tpu.py", "--device=cpu", *data, *size, "--num_steps=30", "--warmup_steps=2", "--eval_batches=1"
    )
    assert done.returncode == 0, done.stderr
    return folder / "run"


def export(source: Path, folder: Path, *options: str) -> Path:
    done = run("browser.export", source, folder, *options)
    assert done.returncode == 0, done.stderr
    return folder


TEXTS = ["ROMEO: to be", " question", "The  naive\tcaf\u00e9\n\n\U0001f600 12345 don't"]
TEXTS += ["a<|end|>b <|im_start|>", "\u4f60\u597d"]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["gpt", "hf"])
def test_the_same_tokens_in_browser_and_on_host_and_by_xla(page, models, tmp_path, kind):
    """200 greedy tokens in float32 three ways, sampled ones two ways; texts are the same tokens in both tokenizers."""
    source = small_source(kind, tmp_path / kind)
    exported = export(source, models / kind)
    config = GenerateConfig(**{"hf" if kind == "hf" else "run_dir": str(source)}, temperature=0.0, num_tokens=200)
    opened = generate.source_of(config)
    begins = [] if opened.start is None else [opened.start]
    encode = opened.tokenizer.encode
    device = torch_xla.device()
    (by_xla,) = decoding.generate(sources.load(opened, device), [begins + encode(TEXTS[0])], config, device)

    found = in_page(page, kind, TEXTS[0], [GREEDY, *SAMPLED])
    stops = opened.tokenizer.stops
    assert len(by_xla) == 200 and not stops & {*by_xla}
    assert found[0]["tokens"] == by_xla
    for one, wanted in zip(found, [GREEDY, *SAMPLED], strict=True):
        assert one["tokens"] == on_host(exported, encode(TEXTS[0]), wanted)
        whole = opened.tokenizer.decode(encode(TEXTS[0]) + one["tokens"])
        assert TEXTS[0] + one["text"] == whole
    options = [GREEDY | {"numTokens": 3}]
    for text in TEXTS[1:]:
        assert in_page(page, kind, text, options)[0]["tokens"] == on_host(exported, encode(text), options[0]), text


@pytest.mark.slow
def test_digits_are_read_as_in_training(page, models, tmp_path):
    """All test digits on the host, thirty in the page; the export itself has compared logits with PyTorch's."""
    done = run("distributed_mnist_tpu.py", "--device=cpu", "--num_epochs=3", "--run_dir", tmp_path / "run")
    assert done.returncode == 0, done.stderr
    session, data = open_session(export(tmp_path / "run", models / "trained") / "classifier.onnx"), load_digits()

    def read(image) -> int:
        pixels = (image[None, None] / 255).astype(np.float32)
        return int(session.run(["logits"], {"image": pixels})[0].argmax())

    found = [read(image) for image in data.test_images]
    assert np.mean(found == data.test_labels) == pytest.approx(summary_in(tmp_path / "run")["test_accuracy"])
    assert "ready" in opened(page, "trained")
    assert all(digit == read(seen) for digit, seen in read_in_page(page, data.test_images[:30]))


# ------------------------------------------------------------------------------------------------------------ the page
def status(page) -> str:
    return page.inner_text("#text-status")


def finished(page) -> str:
    """What the text panel says at the end."""
    until(page, lambda: status(page).startswith("Done") or page.is_visible("#text-problem"))
    return status(page) or page.inner_text("#text-problem")


def test_by_keyboard_alone(page):
    """Focus goes to what can be used, and is seen; a status is said once, not for every token."""
    assert opened(page, "slow") == "slow is ready: a language model."
    page.evaluate(
        """() => {
          globalThis.said = [];
          const status = document.getElementById("text-status");
          const all = { childList: true, characterData: true, subtree: true };
          new MutationObserver(() => said.push(status.textContent)).observe(status, all);
        }"""
    )
    active = "document.activeElement.id"
    for name in ("folder", "prompt", "num-tokens", "temperature", "top-k", "top-p", "seed", "generate"):
        page.keyboard.press("Tab")
        assert page.evaluate(active) == name
        shown = "document.querySelector('.button')" if name == "folder" else "document.activeElement"
        assert page.evaluate(f"getComputedStyle({shown}).outline").endswith("solid 3px"), name
        if name == "prompt":
            page.keyboard.press("Control+a")
            page.keyboard.type("to be")
        if name == "num-tokens":
            page.keyboard.type("100")  # what is focused by Tab is selected
    page.keyboard.press("Enter")
    until(page, lambda: page.inner_text("#generated"))
    assert page.evaluate(active) == "stop", "Generate is disabled, the focus went on"
    page.keyboard.press("Enter")
    assert re.fullmatch(r"Done, \d+ tokens: stopped.", finished(page))
    assert page.evaluate(active) == "generate" and page.inner_text("#given") == "to be"
    count = int(re.search(r"\d+", status(page))[0])
    assert 1 <= count < 100
    assert page.evaluate("said") == ["Generating", f"Done, {count} tokens: stopped."]
    before = page.inner_text("#generated")

    for _ in range(5):  # a second time, although a step of the first is still under way
        page.keyboard.press("Shift+Tab")
    assert page.evaluate(active) == "num-tokens"
    page.keyboard.type("2")
    page.keyboard.press("Enter")
    assert finished(page) == "Done, 2 tokens."
    again = page.inner_text("#generated")  # the same seed; the first was stopped somewhere
    assert before.startswith(again) or again.startswith(before)
    assert re.fullmatch(r"[\d.]+ tokens/s, 2 tokens, \d threads?", page.inner_text("#speed"))


def test_a_form_says_what_it_expects(page):
    assert "ready" in opened(page, "good")
    assert page.inner_text("#text-model").startswith("good: gpt2, float32, context 256, ")
    for name, value, told in (
        ("num-tokens", "0", "Tokens is 0; expected a whole number from 1"),
        ("temperature", "-1", "Temperature is -1; expected a number, 0 or more"),
        ("temperature", "", "Temperature is empty or no number; expected"),
        ("top-k", "1.5", "Top-k is 1.5; expected a whole number"),
        ("top-p", "0", "Top-p is 0; expected above 0, at most 1"),
        ("seed", "4294967296", "Seed is 4294967296; expected a whole number from 0"),
        ("num-tokens", "251", "the prompt has 7 tokens and 251 are to follow, but the context is 256; shorten the"),
    ):
        before = page.input_value(f"#{name}")
        page.fill(f"#{name}", value)
        page.click("#generate")
        until(page, lambda: page.is_visible("#text-problem"))
        assert told in page.inner_text("#text-problem"), name
        page.fill(f"#{name}", before)
    page.fill("#num-tokens", "5")
    page.click("#generate")
    assert finished(page).startswith("Done, 5 tokens")
    assert page.is_hidden("#text-problem")


def test_what_a_folder_says_is_text_and_no_script_runs(page, models):
    """Neither of a folder nor of a page that somebody has changed: the policy forbids it."""
    page.add_init_script(
        """globalThis.broken = [];
        addEventListener("securitypolicyviolation", (event) => broken.push(event.violatedDirective));"""
    )
    html = "<img src=x onerror=ran=1><script>ran=1</script>"
    folder = shutil.copytree(models / "good", models / "html", dirs_exist_ok=True)
    model = json.loads((folder / "model.json").read_text()) | dict(source=html, family=html)
    write_model_json(folder, model)
    assert "ready" in opened(page, "html")
    page.fill("#prompt", html)
    page.click("#generate")
    assert finished(page).startswith("Done")
    assert page.inner_text("#text-model").count(html) == 2 and page.inner_text("#given") == html
    assert page.evaluate("document.querySelectorAll('img, main script').length") == 0
    assert not page.evaluate("broken")
    done = page.evaluate(
        """async () => {
          await new Promise((resolve) => setTimeout(resolve)); // a driver may eval until its first wait
          const script = document.createElement("script"), button = document.createElement("button");
          script.textContent = "globalThis.ran = 1";
          button.setAttribute("onclick", "globalThis.ran = 1");
          document.body.append(script, button);
          button.click();
          const style = document.createElement("style");
          style.textContent = "body { display: none }";
          document.body.append(style);
          const refused = [];
          const elsewhere = () => fetch("https://example.com/"), data = () => import("data:text/javascript,1");
          for (const way of [() => (0, eval)("1"), () => new Function("return 1")(), elsewhere, data]) {
            try { await way(); } catch (error) { refused.push(error.name); }
          }
          return [globalThis.ran ?? "nothing ran", refused, getComputedStyle(document.body).display];
        }"""
    )
    assert done == ["nothing ran", ["EvalError", "EvalError", "TypeError", "TypeError"], "block"]
    refused = "script-src-elem script-src-attr script-src connect-src style-src-elem"
    assert set(page.evaluate("broken")) >= set(refused.split())
    meta = re.search(r'Content-Security-Policy" content="(.*?)"', (WEB / "index.html").read_text())[1]
    assert meta in (WEB.parent / "serve.py").read_text().replace('"\n    "', ""), "one policy, in both places"


CONTRAST = """() => {
  const parse = (text) => (text.match(/[\\d.]+/g) ?? []).map(Number);
  const linear = (c) => (c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4);
  const light = (text) => {
    const [r, g, b] = parse(text).map((c) => linear(c / 255));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b + 0.05;
  };
  const isClear = (one) => parse(getComputedStyle(one).backgroundColor)[3] === 0;
  const hasText = (one) => [...one.childNodes].some((node) => node.nodeType === 3 && node.textContent.trim());
  const found = [], check = (one, ground) => {
    const [a, b] = [light(getComputedStyle(one).color), light(getComputedStyle(ground).backgroundColor)];
    const ratio = Math.max(a, b) / Math.min(a, b);
    if (ratio < 4.5) found.push(`${one.tagName} ${one.id} ${one.textContent.slice(0, 30)}: ${ratio.toFixed(2)}`);
  };
  for (const one of document.querySelectorAll("body *")) {
    if (!hasText(one) && !["INPUT", "TEXTAREA"].includes(one.tagName)) continue;
    let ground = one;
    while (isClear(ground)) ground = ground.parentElement;
    check(one, ground);
  }
  check(document.querySelector("#classes li"), document.querySelector("#classes .bar"));
  return found;
}"""


def test_it_is_read_by_everybody(page, models):
    """Contrast of 4.5 in both schemes, disabled or not; nothing beside 360 pixels; every control has a name."""

    def check_contrast():
        for scheme in ("light", "dark"):
            page.emulate_media(color_scheme=scheme)
            assert page.evaluate(CONTRAST) == [], scheme

    check_contrast()
    assert load_folder(page, models / "good") == "good is ready: a language model."
    page.fill("#num-tokens", "0")
    page.click("#generate")
    assert "Tokens is 0" in finished(page)
    check_contrast()
    page.set_viewport_size(dict(width=360, height=700))
    assert page.evaluate("document.documentElement.scrollWidth") <= 360
    nameless = page.evaluate(
        """() => [...document.querySelectorAll("input, textarea, button, canvas, progress, [tabindex]")]
          .filter((one) => !one.labels?.length && !one.getAttribute("aria-label") && !one.textContent.trim())
          .filter((one) => !one.getAttribute("aria-hidden"))
          .map((one) => one.outerHTML)"""
    )
    assert nameless == []


# ---------------------------------------------------------------------------------------------------------------- chats
PROMPTS = """async ([path, content, chat, conversations]) => {
  const { makeTokenizer } = await import("/tokenizer.js"), { openFormat } = await import("/format.js");
  const format = await openFormat(chat, await makeTokenizer({ tokenizer: path }, new TextEncoder().encode(content)));
  return conversations.map((messages) => {
    try { return format.prompt(messages); } catch (error) { return error.message; }
  });
}"""


def test_a_conversation_has_the_tokens_of_training_in_the_page_and_on_the_host(page, tmp_path):
    """In every format; a special token that somebody typed is text, and one that no tokenizer hides is refused."""
    pytest.importorskip("transformers", reason="pip install -r requirements-dev.txt brings transformers")
    from test_tokenizer_files import OTHERS, SPECIAL, conversations, train_tokenizer

    base = train_tokenizer(tmp_path / "base", special=[*SPECIAL, *OTHERS])
    olmo2 = train_tokenizer(tmp_path / "olmo2", special=[*SPECIAL, *FORMATS["olmo2"][1:]])
    said = [messages[:-1] for messages in conversations(20)]
    typed = "a<|im_end|>[INST]</s><end_of_turn>\n<|im_start|>b"
    syntax = "\U00010000{{ messages }}{% generation %}{# "
    said += [[dict(role="user", content=text)] for text in (typed, syntax, "\x1c\x85 a \ufeff ", "<think>")]
    for format in [*FORMATS, "bytes"]:
        folder = olmo2 if format == "olmo2" else base
        ours = Bytes() if format == "bytes" else load_tokenizer(str(folder))
        path, content = (
            ("bytes", "") if format == "bytes" else ("tokenizer.json", (folder / "tokenizer.json").read_text())
        )
        name = "plain" if format == "bytes" else format
        found = page.evaluate(PROMPTS, [path, content, chat_of(name, ours), said])
        for messages, tokens in zip(said, found, strict=True):
            if name == "qwen3" and messages[-1]["content"] == "<think>":
                with pytest.raises(InputError) as refused:
                    prompt_of_chat(messages, name, ours)
                assert tokens == str(refused.value) and "holds <think>, which is a token of the format" in tokens
                continue
            assert tokens == prompt_of_chat(messages, name, ours), (name, messages)


def test_a_damaged_format_is_refused_in_both_places(page):
    chat = chat_of("plain", Bytes())
    model = dict(format="tpu-examples-onnx-1", kind="language_model", family="x", weights="float32", context=8, chunk=8)
    model |= dict(vocab_size=257, num_layers=1, num_cached_heads=1, head_dim=1, start=256, stops=[], tokenizer="bytes")
    model |= dict(source="x", opset=20, versions={}, files={})
    check = """async (text) => (await import("/folder.js")).checkModel(text)"""
    check_chat(Path("model.json"), chat | dict(lead=" ", place="own"), 257)  # exports had more once
    wrong = dict(begin=([257], [-1], ["a"], [1] * 2, [1.5]), stops=([], [257]), words=("a", None))
    wrong["format"] = ("\ud800", "../page", ["plain"])
    for name, value in ((name, value) for name, values in wrong.items() for value in values):
        broken = chat | {name: value}
        with pytest.raises(InputError, match=rf"chat\.{name} is .*; expected"):
            check_chat(Path("model.json"), broken, 257)
        with pytest.raises(Exception, match=rf"chat\.{name} is .*; expected"):
            page.evaluate(check, json.dumps(model | {"chat": broken}))


def said_in(page) -> list[str]:
    return page.locator("#messages .said").all_inner_texts()


def answered(page) -> str:
    """What the panel says when an answer is over."""
    until(page, lambda: page.is_disabled("#chat-stop") and (status(page) or page.is_visible("#text-problem")))
    return status(page) or page.inner_text("#text-problem")


def test_a_conversation_in_the_page(page):
    assert "ready" in opened(page, "good") and page.is_hidden("#chat") and page.is_visible("#prompt")
    assert (
        "ready" in opened(page, "good_chat") and page.inner_text("#text-title") == "Chat" and page.is_hidden("#prompt")
    )
    page.fill("#num-tokens", "3")
    html = "<img src=x onerror=ran=1><|im_end|>"
    page.focus("#message")
    page.keyboard.type(html)
    page.keyboard.press("Shift+Enter")
    page.keyboard.type("b")
    page.keyboard.press("Enter")
    assert answered(page).startswith("Answered: ")
    assert said_in(page)[0] == f"{html}\nb" and len(said_in(page)) == 2 and page.input_value("#message") == ""
    assert page.evaluate("document.querySelectorAll('main img').length") == 0
    assert page.evaluate("document.activeElement.id") == "message"
    assert re.search(r"\b3 tokens, \d threads?$", page.inner_text("#chat-speed"))
    page.fill("#message", "x" * 250)
    page.click("#send")
    until(page, lambda: page.is_visible("#text-problem"))
    assert "the context is full: the conversation has" in page.inner_text("#text-problem")
    assert len(said_in(page)) == 2 and page.input_value("#message") == "x" * 250, "it can be changed and sent again"
    page.click("#new-chat")
    assert said_in(page) == [] and page.is_hidden("#text-problem")
    page.fill("#message", "y" * 237)
    page.click("#send")
    assert answered(page) == "The context is full: the answer ends here, start a new chat" and len(said_in(page)) == 2
    page.set_viewport_size(dict(width=360, height=700))
    assert page.evaluate("document.documentElement.scrollWidth") <= 360
    for scheme in ("light", "dark"):
        page.emulate_media(color_scheme=scheme)
        assert page.evaluate(CONTRAST) == []


def test_an_answer_is_stopped_and_the_next_begins_when_it_has_ended(page):
    assert "ready" in opened(page, "slow_chat")
    page.fill("#message", "to be")
    page.keyboard.press("Enter")
    until(page, lambda: said_in(page)[1:] and said_in(page)[1])
    page.click("#chat-stop")
    assert answered(page).startswith("Stopped: ") and len(said_in(page)) == 2
    page.click("#new-chat")
    assert said_in(page) == [] and status(page) == "A new chat"
    left = page.evaluate(
        """async () => {
          const { readFolder, servedFolder } = await import("/folder.js"), { Engine } = await import("/engine.js");
          const engine = new Engine(), options = { temperature: 0, topK: 0, topP: 1, seed: 0 };
          await engine.load(await readFolder(servedFolder("models/slow"), () => {}, new AbortController().signal));
          let heard;
          const first = new Promise((resolve) => (heard = resolve));
          engine.generate("a", { ...options, numTokens: 200 }, heard);
          await first;
          engine.stop();
          await engine.generate("b", { ...options, numTokens: 2 }, () => {});
          const left = engine.requests.size;
          engine.end("done");
          return left;
        }"""
    )
    assert left == 0, "the first one had ended before"


@pytest.mark.slow
@pytest.mark.parametrize("format", ["qwen3", "gemma"])  # a run has the first, the template of a folder the second
def test_a_chat_of_two_turns_is_the_same_in_four_places(page, models, tmp_path, format):
    """transformers, XLA, onnxruntime on the host, the page: the same tokens, and the same one ends them."""
    transformers = pytest.importorskip("transformers", reason="pip install -r requirements-dev.txt brings transformers")
    from test_tokenizer_files import OTHERS, SPECIAL, by_heart, config_of, save_run, train_tokenizer

    base = train_tokenizer(tmp_path / "base", special=[*SPECIAL, *OTHERS])
    save_run(tmp_path / "run", config_of(base, format), by_heart(base).state_dict())
    convert_hf.export(tmp_path / "run", tmp_path / "out", torch.float32)
    name = f"talks_{format}"
    exported = export(tmp_path / "out" if format == "gemma" else tmp_path / "run", models / name, "--chunk=8")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    template = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    config = GenerateConfig(run_dir=str(tmp_path / "run"), temperature=0.0, num_tokens=40)
    source, device = generate.source_of(config), torch_xla.device()
    ours, onnx = sources.load(source, device), onnx_generate.OnnxModel(exported)
    chat = onnx.facts["chat"]
    assert chat["format"] == format
    messages, conversations, expected, texts = [dict(role="system", content="Be brief.")], [], [], []
    for question in ("Say be.", "Who?"):
        messages.append(dict(role="user", content=question))
        conversations.append(list(messages))
        prompt = template.apply_chat_template(messages, add_generation_prompt=True)
        assert prompt == prompt_of_chat(messages, format, source.tokenizer)
        by_theirs = theirs.generate(torch.tensor([prompt]), max_new_tokens=40, do_sample=False)[0, len(prompt) :]
        stops = set(chat["stops"])
        ends = lambda tokens: tokens[-1] in stops  # noqa: B023, E731
        by_xla = decoding.generate(ours, [prompt], config, device, ends)[0]
        assert by_theirs.tolist() == by_xla == onnx_generate.generate(onnx, prompt, config, ends)
        assert by_xla[-1] in stops and len(by_xla) < 40, "it has ended by itself"
        expected.append(by_xla)
        texts.append(source.tokenizer.decode(by_xla[:-1]))
        messages.append(dict(role="assistant", content=texts[-1]))
    assert texts[1] == "Me, a question."

    assert "ready" in opened(page, name)
    found = page.evaluate(GENERATE, [f"models/{name}", [[messages, GREEDY] for messages in conversations]])
    assert [[*one["tokens"], one["end"]] for one in found] == expected
    lengths = [len(prompt_of_chat(messages, format, source.tokenizer)) for messages in conversations]
    assert found[0]["read"] == lengths[0] and found[1]["read"] < lengths[1], "what the cache has is not read again"
    page.fill("#temperature", "0")
    page.fill("#system", "Be brief.")
    for number, question in enumerate(("Say be.", "Who?")):
        page.fill("#message", question)
        page.keyboard.press("Enter") if page.evaluate("document.activeElement.id") == "message" else page.click("#send")
        until(page, lambda count=2 * number + 2: len(said_in(page)) == count)
        assert answered(page) == f"Answered: {texts[number]}".rstrip()
    assert said_in(page) == ["Say be.", texts[0], "Who?", texts[1]]
    asked = run("browser.onnx_generate", "--onnx", exported, "--chat", "Who?", "--temperature=0")
    there = run("tools.generate", "--run_dir", tmp_path / "run", "--chat", "Who?", "--temperature=0")
    assert asked.returncode == 0 and asked.stdout == there.stdout, asked.stderr + there.stderr


# -------------------------------------------------------------------------------------------------------------- digits
READ = """async ([side, images]) => {
  const element = (id) => document.getElementById(id), said = () => element("digits-status").textContent, found = [];
  const context = element("ink").getContext("2d"), size = 280 / side;
  for (const values of images) {
    element("clear").click();
    if (said()) throw new Error(said());
    values.forEach((value, place) => {
      context.fillStyle = `rgb(${value}, ${value}, ${value})`;
      if (value) context.fillRect((place % side) * size, Math.floor(place / side) * size, size, size);
    });
    element("read").click();
    while (!said()) await new Promise((resolve) => setTimeout(resolve));
    const { data } = element("seen").getContext("2d").getImageData(0, 0, side, side);
    const seen = Array.from(data).filter((_, place) => place % 4 === 0);
    found.push([said(), document.querySelector("#classes li.best").innerText, seen]);
  }
  return found;
}"""
SEEN = "Array.from(document.getElementById('seen').getContext('2d').getImageData(0, 0, 8, 8).data)"


def read_in_page(page, images: np.ndarray) -> list[tuple[int, np.ndarray]]:
    """(what the model reads, the image that it got) of each image, rendered on the paper and read by the button."""
    found = []
    for said, best, seen in page.evaluate(READ, [images.shape[1], images.reshape(len(images), -1).tolist()]):
        digit, share = re.fullmatch(r"The model reads (\d), with ([\d.]+ %).", said).groups()
        assert best.split(maxsplit=1) == [digit, share]
        found.append((int(digit), np.array(seen).reshape(images.shape[1:])))
    return found


def nearest_mean(images: np.ndarray, labels: np.ndarray, folder):
    """A classifier that reads digits by their distance to the mean of each class: its function, written to folder."""
    x = (images / 255).reshape(len(images), -1).astype(np.float32)
    means = np.stack([x[labels == digit].mean(0) for digit in range(10)])
    table, offset = means.T.copy(), -(means**2).sum(1) / 2
    write_classifier(folder, table, offset.astype(np.float32), images.shape[1])
    return lambda images: ((images / 255).reshape(len(images), -1) @ table + offset).argmax(1)


def test_digits_are_read_as_on_the_host(page, models):
    """Test digits rendered on the paper; then one drawn by keyboard and one by mouse."""
    digits = load_digits()
    read = nearest_mean(digits.train_images, digits.train_labels, models / "digits")
    assert opened(page, "digits") == "digits is ready: a model that reads digits."
    test, expected = digits.test_images[:15], read(digits.test_images[:15])
    found = read_in_page(page, test)
    for got, seen in found:
        assert got == read(seen[None])[0]
    assert sum(got == wanted for (got, _), wanted in zip(found, expected, strict=True)) >= 14

    page.click("#clear")
    page.click("#read")
    until(page, lambda: page.inner_text("#digits-status") == "There is nothing drawn yet.")
    page.focus("#pen")
    page.keyboard.press(" ")
    assert page.inner_text("#digits-status") == "Pen down"
    for _ in range(10):
        page.keyboard.press("ArrowDown")
    page.keyboard.press("Enter")
    until(page, lambda: page.inner_text("#digits-status").startswith("The model reads 1,"))
    page.keyboard.press("Delete")
    assert page.inner_text("#digits-status") == "Cleared" and not any(page.evaluate(SEEN))
    box = page.locator("#pen").bounding_box()
    at = [
        (box["x"] + box["width"] * (0.5 + 0.22 * np.cos(a)), box["y"] + box["height"] * (0.5 + 0.35 * np.sin(a)))
        for a in np.linspace(0, 2 * np.pi, 40)
    ]
    page.mouse.move(*at[0])
    page.mouse.down()
    for x, y in at[1:]:
        page.mouse.move(x, y)
    page.mouse.up()
    until(page, lambda: page.inner_text("#digits-status").startswith("The model reads 0,"))


def test_a_digit_of_mnist_is_scaled_and_centred_as_it_was(page, models, mnist_dir):
    """Rendered on the paper, images of MNIST come back exactly: there is one way to scale and centre them."""
    mnist = load_mnist(mnist_dir, download=False)
    read = nearest_mean(mnist.train_images, mnist.train_labels, models / "mnist")
    assert "ready" in opened(page, "mnist")
    for image, (got, seen) in zip(mnist.test_images, read_in_page(page, mnist.test_images[:10]), strict=False):
        assert got == read(image[None])[0] and (seen == image).all()


# ------------------------------------------------------------------------------------------------------------ refusals
def forged(folder, model: dict) -> None:
    """As if model.json had always said so: hashes of what is there."""
    write_model_json(folder, {name: value for name, value in model.items() if name != "files"})


def damages(good):
    """(name, what to do to a copy of a good folder, what the page says); the first ones need no worker to see it."""
    model = json.loads((good / "model.json").read_text())
    graph = (good / "decode.onnx").read_bytes()
    yield "no model.json", lambda to: (to / "model.json").unlink(), "has no model.json"
    yield "no weights", lambda to: (to / "weights.bin").unlink(), "has no weights.bin"
    contents = {b"{": "is no JSON", b"[]": "format is nothing", b" " * 2**21: "more than 1048576 bytes"}
    for content, said in contents.items():
        yield f"json {content[:3]}", lambda to, it=content: (to / "model.json").write_bytes(it), said
    for name, value, said in (
        ("format", "other", 'format is "other"; expected "tpu-examples-onnx-1"'),
        ("kind", "toString", 'kind is "toString"'),
        ("context", 2**40, "context is 1099511627776"),
        ("context", 2**24, "the cache of keys and values needs 2,147 MB; expected at most 1,074 MB: export with"),
        ("stops", [257], "token 257 is outside the vocabulary of 257"),
        ("tokenizer", "../tokenizer.json", "expected bytes, numbers or tokenizer.json"),
    ):
        yield f"{name} {value}", lambda to, it=(name, value): forged(to, model | dict([it])), said
    large = model["files"] | {"weights.bin": model["files"]["weights.bin"] | dict(bytes=2**31)}
    large = json.dumps(model | dict(files=large))
    other_file = json.dumps(model | dict(files=model["files"] | {"run.js": model["files"]["weights.bin"]}))
    yield "another", lambda to: (to / "model.json").write_text(other_file), 'names a file "run.js"'
    yield "large", lambda to: (to / "model.json").write_text(large), "2147483648; expected 1 to 2147483647"
    for name in ("decode.onnx", "weights.bin"):
        flip = bytearray((good / name).read_bytes())
        flip[len(flip) // 2] ^= 1
        yield f"{name} altered", lambda to, n=name, it=bytes(flip): (to / n).write_bytes(it), f"{name} has SHA-256"
        yield f"{name} short", lambda to, n=name, it=bytes(flip[:-9]): (to / n).write_bytes(it), "model.json says"

    def replaced(content, name="decode.onnx"):
        return lambda to: ((to / name).write_bytes(content), forged(to, model))

    yield "an opset to come", replaced(onnx_stub.graph("good", 1, 99).SerializeToString()), "cannot be loaded"
    yield "another size", lambda to: forged(to, model | dict(vocab_size=300)), "outputs are logits float32 [1,257]"
    yield "half a graph", replaced(graph[: len(graph) // 2]), "decode.onnx cannot be loaded"
    yield "a graph of another", replaced((good / "prefill.onnx").read_bytes()), "files of two models are mixed"
    yield "weights outside", replaced(graph.replace(b"weights.bin", b"/etc/passwd")), "decode.onnx cannot be loaded"
    yield "few weights", replaced((good / "weights.bin").read_bytes()[:1000], "weights.bin"), "cannot be loaded"


@pytest.mark.parametrize("which", ["first", pytest.param("last", marks=pytest.mark.slow)])
def test_a_damaged_folder_gets_a_message(page, models, tmp_path, which):
    cases = list(damages(models / "good"))
    first = 2 + [name for name, *_ in cases].index("an opset to come")
    for number, (name, damage, said) in enumerate(cases[:first] if which == "first" else cases[first:]):
        folder = shutil.copytree(models / "good", tmp_path / str(number))
        damage(folder)
        told = load_folder(page, folder)
        assert said in told, (name, told)
        assert page.is_disabled("#generate") and page.is_visible("#loader-problem"), name


def test_an_address_leads_to_models_alone_and_what_is_not_there_is_named(page):
    assert "expected models/NAME" in opened(page, "../page.js")
    assert "models/absent/model.json: the server answered 404" in opened(page, "absent")
    for path, told in (
        ("jinja/dist/index.js", "@huggingface/jinja is not beside the page: run npm ci --ignore-scripts --prefix"),
        ("*.jinja", "chat_templates/plain.jinja is not beside the page: copy it from language/data"),
        ("*.wasm", "onnxruntime-web is not beside the page: run npm ci --ignore-scripts --prefix browser/page"),
    ):
        page.route(f"**/{path}", lambda route: route.fulfill(status=404))
        assert told in opened(page, "good_chat")
        page.unroute(f"**/{path}")


def test_a_load_that_never_ends_is_cancelled(page):
    page.goto(f"{page.url}?model=models/endless")
    until(page, lambda: "Starting the model" in page.inner_text("#loader-status"))
    page.click("#cancel")
    assert loaded(page) == "Loading was cancelled."


@pytest.mark.slow
def test_a_model_that_never_answers_is_ended(page):
    assert "ready" in opened(page, "endless_later")
    page.click("#generate")
    until(page, lambda: page.inner_text("#generated"))
    page.click("#stop")
    assert re.fullmatch(r"Done, \d tokens: stopped.", finished(page)), "at once for the page"
    until(page, lambda: page.is_visible("#text-problem"))
    assert "did not stop within 5 seconds and was ended; load it again" in page.inner_text("#text-problem")
    assert page.is_disabled("#generate")


# --------------------------------------------------------------------------------------------------------- the servers
def test_it_runs_from_pythons_own_server_with_one_thread(browser, models):
    with plain_server() as plain:
        opened = browser.new_page()
        opened.goto(plain)
        assert load_folder(opened, models / "good") == "good is ready: a language model."
        assert opened.inner_text("#text-model").endswith("1 thread. From a stub.")
        opened.fill("#num-tokens", "3")
        opened.click("#generate")
        assert finished(opened).startswith("Done, 3 tokens")
        opened.close()


def test_what_is_beside_the_page_is_pinned():
    """npm ci installs what the lock has, where it fits package.json."""
    wanted = json.loads((WEB / "package.json").read_text())["dependencies"]
    assert all(re.fullmatch(r"\d+\.\d+\.\d+", version) for version in wanted.values())
    lock = json.loads((WEB / "package-lock.json").read_text())["packages"]
    assert all(package["integrity"].startswith("sha512-") for name, package in lock.items() if name)
