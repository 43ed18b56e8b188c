"""One tiny model, its tokenizer, heads that really draft well on it, and the bundle built from them, once a session."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import onnx_ir as ir
import pytest
import tokenizers
import torch
import transformers
from tokenizers import decoders, pre_tokenizers, trainers

from speccompile.compiler import build as building
from speccompile.compiler.build import build
from speccompile.compiler.checkpoint import read_model
from speccompile.compiler.cli import main
from speccompile.compiler.medusa_heads import MedusaHeads, head_offset, write_heads
from speccompile.compiler.prove import PROMPTS, eager_logits
from speccompile.graphs.manifest import GraphInfo
from speccompile.graphs.tree import TokenTree
from speccompile.runtime import Decoder, load
from speccompile.runtime.backends import ort
from speccompile.runtime.bundle import Bundle
from tests.tiny.models import VOCAB, tiny_model

Cli = Callable[..., tuple[int, str, str]]

HEADS = 3
TREE = TokenTree.from_paths([[0], [1], [2], [0, 0], [0, 1], [1, 0], [0, 0, 0]])
RANK_SHARES, RANK_WEIGHTS = (0.65, 0.2, 0.1, 0.05), (0.5, 0.25, 0.15, 0.1)
EOS_IDS = [2, 4]  # </s> and <|im_end|>
SPECIAL_TOKENS = ("<pad>", "<s>", "</s>", "<|im_start|>", "<|im_end|>")
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TEXTS = (*PROMPTS, "the fox and the crow", "Why is the sky blue?", "user assistant system")
# What the heads are trained to continue: every text of these tests, and some more.
DRAFTED = (*TEXTS, "Hello", "a b c", "one two three four", "The quick brown fox jumps over the lazy dog.")


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    """The models are too small for more, and other tests may run beside these."""
    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def threads_of_ones_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """This process is not the command line's alone, even where a test runs its commands."""
    monkeypatch.setattr(ort, "share_threads", lambda threads=None: None)


def write_tokenizer(folder: Path, chat_template: str | None = CHAT_TEMPLATE) -> transformers.PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer of at most VOCAB tokens, trained on TEXTS."""
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(TEXTS, trainer)
    assert tokenizer.get_vocab_size() <= VOCAB
    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<s>", eos_token="</s>"
    )
    fast.chat_template = chat_template
    fast.save_pretrained(folder)
    return fast


def save_tiny_model(folder: Path, seed: int = 0) -> Path:
    """A checkpoint as a user has it: weights, config, generation config, tokenizer, chat template."""
    model = tiny_model("llama", seed)
    model.generation_config.eos_token_id = EOS_IDS
    model.save_pretrained(folder)
    write_tokenizer(folder)
    return folder


@pytest.fixture(scope="session")
def tiny_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random llama of 3 layers, 64 wide, 320 tokens."""
    return save_tiny_model(tmp_path_factory.mktemp("checkpoint") / "tiny")


@pytest.fixture(scope="session")
def other_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same architecture with other weights."""
    return save_tiny_model(tmp_path_factory.mktemp("checkpoint") / "other", seed=1)


def random_heads(hidden_size: int = 64, seed: int = 0, target_fingerprint: str | None = None) -> MedusaHeads:
    """Heads of layout B that draft nothing of use."""
    generator = torch.Generator().manual_seed(seed)
    blocks = tuple(
        ((torch.randn(hidden_size, hidden_size, generator=generator) / 8, torch.zeros(hidden_size)),)
        for _ in range(HEADS)
    )
    return MedusaHeads(hidden_size, blocks, target_fingerprint=target_fingerprint)


@pytest.fixture(scope="session")
def tiny_heads(tmp_path_factory: pytest.TempPathFactory, tiny_checkpoint: Path) -> Path:
    """Random heads (layout B) that name `tiny_checkpoint` as their target."""
    folder = tmp_path_factory.mktemp("heads") / "random"
    write_heads(random_heads(target_fingerprint=read_model(tiny_checkpoint).fingerprint), folder)
    return folder


@pytest.fixture(scope="session")
def tuned_heads(tmp_path_factory: pytest.TempPathFactory, tiny_checkpoint: Path) -> Path:
    """Heads with their own lm_head (layout A), trained for a second on what the model really continues with."""
    source = read_model(tiny_checkpoint)
    tokenizer = source.tokenizer
    prompts = [tokenizer.encode(text) for text in DRAFTED]
    prompts += [
        tokenizer.apply_chat_template([{"role": "user", "content": text}], add_generation_prompt=True)["input_ids"]
        for text in DRAFTED
    ]
    features, labels = [], []
    for prompt in prompts:
        text = prompt[-60:]
        with torch.no_grad():
            out = source.model.generate(
                torch.tensor([text]), do_sample=False, max_new_tokens=100 - len(text), eos_token_id=None
            )
        ids = out[0].tolist()
        _, hidden = eager_logits(source, ids)
        places = range(len(text) - 1, len(ids) - head_offset(HEADS - 1))
        features.append(torch.from_numpy(hidden[places.start : places.stop].copy()))
        labels += [[ids[place + head_offset(head)] for head in range(HEADS)] for place in places]
    heads = fit_heads(torch.cat(features), torch.tensor(labels).T, source.fingerprint)
    folder = tmp_path_factory.mktemp("heads") / "tuned"
    write_heads(heads, folder, dtype=torch.float32)
    return folder


def fit_heads(features: torch.Tensor, labels: torch.Tensor, fingerprint: str) -> MedusaHeads:
    """Heads that know features [N,F] -> labels [HEADS,N] by heart, but not always as their first guess.

    The right token is put at a rank drawn from RANK_SHARES, below decoys, so that every branch is accepted at times.
    """
    generator = torch.Generator().manual_seed(0)
    shares, weights = torch.tensor(RANK_SHARES), torch.tensor(RANK_WEIGHTS)
    guesses = torch.randint(0, VOCAB, (*labels.shape, len(weights)), generator=generator)
    ranks = torch.multinomial(shares, labels.numel(), replacement=True, generator=generator).view(labels.shape)
    guesses.scatter_(2, ranks[..., None], labels[..., None])
    wanted = torch.zeros(*labels.shape, VOCAB).scatter_add_(2, guesses, weights.expand(guesses.shape))

    width = features.shape[1]
    weight = torch.zeros(HEADS, width, width, requires_grad=True)
    bias = torch.zeros(HEADS, 1, width, requires_grad=True)
    matrix = (torch.randn(HEADS, VOCAB, width, generator=generator) * 0.02).requires_grad_()
    optimizer = torch.optim.Adam([weight, bias, matrix], lr=0.01)
    for _ in range(150):
        states = features + torch.nn.functional.silu(features @ weight.mT + bias)
        logits = states @ matrix.mT
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(logits.flatten(0, 1), wanted.flatten(0, 1)).backward()
        optimizer.step()
    blocks = tuple(((weight[head].detach(), bias[head, 0].detach()),) for head in range(HEADS))
    return MedusaHeads(width, blocks, tuple(matrix.detach()), target_fingerprint=fingerprint)


@pytest.fixture(scope="session")
def tiny_bundle(tmp_path_factory: pytest.TempPathFactory, tiny_checkpoint: Path, tuned_heads: Path) -> Path:
    """The proved bundle of `tiny_checkpoint` with `tuned_heads` and TREE. Do not change it: copy it."""
    out = tmp_path_factory.mktemp("bundle") / "tiny.bundle"
    build(tiny_checkpoint, out, heads=tuned_heads, tree=TREE, draft_precision="fp32")
    return out


@pytest.fixture(scope="session")
def tiny_decoder(tiny_bundle: Path) -> Decoder:
    """`tiny_bundle`, loaded on one thread."""
    return load(tiny_bundle, threads=1)


@pytest.fixture
def speccompile(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Iterator[Cli]:
    """The command line, in this process: arguments -> (exit status, stdout, stderr)."""
    terminated = signal.getsignal(signal.SIGTERM)

    def call(*arguments: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["speccompile", *map(str, arguments)])
        capsys.readouterr()
        try:
            main()
            status = 0
        except SystemExit as end:
            status = int(end.code or 0)
        return status, *capsys.readouterr()

    yield call
    signal.signal(signal.SIGTERM, terminated)


@pytest.fixture
def untraced(monkeypatch: pytest.MonkeyPatch, tiny_bundle: Path) -> None:
    """Builds take seconds less: the graphs of `tiny_bundle` are written again instead of traced anew."""
    graphs = Bundle.open(tiny_bundle).manifest.graphs

    def copy(name: str, folder: Path) -> GraphInfo:
        ir.save(ir.load(tiny_bundle / f"{name}.onnx"), folder / f"{name}.onnx", external_data=f"{name}.onnx.data")
        return graphs[name]

    monkeypatch.setattr(building, "write_target", lambda _source, _found, _tail, plan: copy("target", plan.folder))

    def copy_heads(_source: object, _heads: object, _tree: object, plan: building.Plan) -> GraphInfo:
        for folder in (plan.folder, plan.exact):
            copy("medusa", folder)
        return graphs["medusa"]

    monkeypatch.setattr(building, "write_heads_graph", copy_heads)
