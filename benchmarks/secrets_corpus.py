"""Secrets in the places where they leak, and harmless lines that look alike: what redaction is measured with.

    python benchmarks/secrets_corpus.py [--seed N] [--json FILE]

Secrets are made from a seed in the formats that services document, none is real. Each is put into each place that
gives it away: one with a shape of its own into all, one without (a password, a hexadecimal key) behind a name.
A leak is a check after which eight characters of the secret, those that its format leaves open, can still be read.

**Fields**: the types of the files say which texts there are (`reprokit.grammar`). A snapshot, a reduction and an event
are made with something in every field; a secret and a line of source stand in each of their texts. After `private` no
secret may be left under any policy, and no line of source under ``none``.
"""

from __future__ import annotations

import base64
import random
import string
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, fields, is_dataclass, replace
from enum import StrEnum
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

import torch
from command import new_parser, print_json

from reprokit import grammar
from reprokit.grammar import Kind, mapped, text_fields
from reprokit.program.ir import OPAQUE, Call, Device, Ref, Slice, Symbol
from reprokit.series.events import TrainingEvent
from reprokit.shrink.reduction import Reduction
from reprokit.snapshot.format import Snapshot
from reprokit.snapshot.privacy import private
from reprokit.snapshot.redact import redact_argv, redact_remote, redact_source, redact_text, select_variables
from reprokit.snapshot.source import SOURCES
from reprokit.words import quoted

SMALL, LARGE, DIGITS = string.ascii_lowercase, string.ascii_uppercase, string.digits
ALNUM, HEX = SMALL + LARGE + DIGITS, DIGITS + "abcdef"
WORD, BASE64, PUNCTUATED = ALNUM + "_-", ALNUM + "+/", ALNUM + "!#%*+-.^_~@/"
QUOTABLE = PUNCTUATED + "$&(),:;<=>?[]{|}"
READABLE = 8

# service -> format; `a20` is twenty letters or digits, other letters say other alphabets, `'...'` stands for itself
KINDS = {"a": ALNUM, "h": HEX, "w": WORD, "b": BASE64, "U": LARGE + DIGITS, "l": SMALL + DIGITS, "d": DIGITS}
SHAPED: dict[str, tuple[str, ...]] = {
    "Airtable": ("'pat'", "a14", "'.'", "h64"),
    "Anthropic": ("'sk-ant-api03-'", "w93", "'AA'"),
    "AWS access key": ("'AKIA'", "U16"),
    "AWS temporary key": ("'ASIA'", "U16"),
    "Azure client secret": ("a3", "'8Q~'", "a34"),
    "Brevo": ("'xkeysib-'", "h64", "'-'", "a16"),
    "CircleCI": ("'CCIPAT_'", "a22", "'_'", "h40"),
    "Contentful": ("'CFPAT-'", "w43"),
    "Databricks": ("'dapi'", "h32"),
    "DeepSeek": ("'sk-'", "h32"),
    "DigitalOcean": ("'dop_v1_'", "h64"),
    "Discord webhook": ("'https://discord.com/api/webhooks/'", "d18", "'/'", "w68"),
    "Docker Hub": ("'dckr_pat_'", "w27"),
    "Doppler": ("'dp.pt.'", "a43"),
    "Dropbox": ("'sl.'", "w130"),
    "Figma": ("'figd_'", "w40"),
    "GitHub": ("'ghp_'", "a36"),
    "GitHub app": ("'ghs_'", "a36"),
    "GitHub fine-grained": ("'github_pat_'", "a22", "'_'", "a59"),
    "GitLab": ("'glpat-'", "w20"),
    "Google API": ("'AIza'", "w35"),
    "Google OAuth": ("'ya29.'", "w60"),
    "Google OAuth secret": ("'GOCSPX-'", "w28"),
    "Grafana": ("'glsa_'", "a32", "'_'", "h8"),
    "Groq": ("'gsk_'", "a20", "'WGdyb3FY'", "a24"),
    "Heroku": ("'HRKU-'", "w60"),
    "Hugging Face": ("'hf_'", "a34"),
    "JSON web token": ("'eyJhbGciOiJIUzI1NiJ9.eyJ'", "w60", "'.'", "w43"),
    "Linear": ("'lin_api_'", "a40"),
    "Llama Cloud": ("'llx-'", "a48"),
    "Mailchimp": ("h32", "'-us6'"),
    "Netlify": ("'nfp_'", "a36"),
    "New Relic": ("'NRAK-'", "U27"),
    "Notion": ("'ntn_'", "d11", "a35"),
    "npm": ("'npm_'", "a36"),
    "NVIDIA": ("'nvapi-'", "w64"),
    "OpenAI": ("'sk-'", "a20", "'T3BlbkFJ'", "a20"),
    "OpenAI project": ("'sk-proj-'", "w74", "'T3BlbkFJ'", "w74"),
    "OpenRouter": ("'sk-or-v1-'", "h64"),
    "Perplexity": ("'pplx-'", "a48"),
    "PlanetScale": ("'pscale_tkn_'", "w43"),
    "Postman": ("'PMAK-'", "h24", "'-'", "h34"),
    "Pulumi": ("'pul-'", "h40"),
    "PyPI": ("'pypi-AgEIcHlwaS5vcmc'", "w150"),
    "Replicate": ("'r8_'", "a37"),
    "RubyGems": ("'rubygems_'", "h48"),
    "SendGrid": ("'SG.'", "w22", "'.'", "w43"),
    "Sentry": ("'sntryu_'", "h64"),
    "Shopify": ("'shpat_'", "h32"),
    "Slack": ("'xoxb-'", "d12", "'-'", "d12", "'-'", "a24"),
    "Slack webhook": ("'https://hooks.slack.com/services/T'", "U8", "'/B'", "U8", "'/'", "a24"),
    "Square": ("'sq0csp-'", "w43"),
    "Stripe": ("'sk_live_'", "a24"),
    "Supabase": ("'sbp_'", "h40"),
    "Tailscale": ("'tskey-auth-'", "a16", "'-'", "a32"),
    "Tavily": ("'tvly-'", "a32"),
    "Telegram": ("d10", "':AA'", "w33"),
    "Terraform": ("a14", "'.atlasv1.'", "w67"),
    "Together": ("'tgp_v1_'", "w43"),
    "Twilio": ("'SK'", "h32"),
    "Vault": ("'hvs.'", "w95"),
    "xAI": ("'xai-'", "a80"),
}
NAMELESS: dict[str, tuple[str, ...]] = {  # what only its place gives away
    "AWS secret key": ("b40",),
    "Cohere": ("a40",),
    "Comet": ("a25",),
    "Datadog": ("h32",),
    "Mistral": ("a32",),
    "W&B": ("h40",),
}

# place -> form and template; forms are the functions of redaction, and what a text, a source or an argument is to them
NAMED: dict[str, tuple[str, str]] = {
    "flag": ("argv", "train.py|--hub-token|{}|--epochs|3"),
    "flag=": ("argv", "train.py|--api-key={}|--lr|3e-4"),
    "hydra": ("argv", "train.py|+wandb.api_key={}|model=resnet50"),
    "flag in a line": ("text", "python train.py --hf-token {} --max-tokens 512"),
    "flag in quotes": ("text", "command: train.py --auth-token '{}' --lr 0.1"),
    "export": ("text", "export WANDB_API_KEY={}"),
    ".env": ("text", "AWS_SECRET_ACCESS_KEY={}\nAWS_REGION=eu-central-1"),
    "JSON": ("text", '{{"lr": 0.1, "api_key": "{}", "epochs": 3}}'),
    "JSON in JSON": ("text", '{{"config": "{{\\"token\\": \\"{}\\", \\"lr\\": 1}}"}}'),
    "YAML": ("text", "hub:\n  token: {}\n  repo: org/model"),
    "TOML": ("text", '[hub]\naccess_token = "{}"'),
    "dict": ("source", "config = {{'lr': 0.1, 'secret_key': '{}'}}"),
    "literal": ("source", 'HF_TOKEN = "{}"'),
    "typed literal": ("source", 'token: str = "{}"'),
    "environ": ("source", 'os.environ["OPENAI_API_KEY"] = "{}"'),
    "setdefault": ("source", 'os.environ.setdefault("HF_TOKEN", "{}")'),
    "argument": ("source", "wandb.login(key='{}')"),
    "comment": ("source", "loss = model(x)  # token: {}"),
    "traceback": ("text", '  File "train.py", line 3, in <module>\n    login(token="{}")\nValueError: nan'),
    "exception": ("text", "HTTPError: 401 for api_key={}: Unauthorized"),
    "repr": ("text", "Namespace(lr=0.1, hub_token='{}', epochs=3)"),
    "log": ("text", "2024-05-01 12:00:00,123 INFO hub: using token: {}"),
    "query": ("text", "GET https://api.example.org/v1/models?token={}&limit=5"),
    "bearer": ("text", "Authorization: Bearer {}"),
    "curl": ("text", "curl -H 'Authorization: token {}' https://example.org"),
    "header": ("text", "X-Api-Key: {}"),
    "headers": ("source", 'headers = {{"Authorization": f"Bearer {}"}}'),
    "diff": ("text", '@@ -1,2 +1,2 @@\n-API_KEY = None\n+API_KEY = "{}"'),
    "variable": ("env", "TORCH_EXTRA|access_token={}"),
}
ANYWHERE: dict[str, tuple[str, str]] = {  # for secrets with a shape
    "positional": ("argv", "train.py|{}|data"),
    "text": ("text", "could not log in with {}."),
    "exception text": ("text", "RuntimeError: rejected {}, see the documentation"),
    "call": ("source", 'connect("{}")'),
    "list": ("source", "keys = ['{}', None]"),
    "remark": ("source", "x = x / n  # {}"),
    "frame": ("text", '  File "a.py", line 7, in f\n    hub = Hub("{}")'),
    "removed": ("text", "--- a/x.py\n+++ b/x.py\n-{}\n+none"),
    "colored": ("text", "\x1b[31m{}\x1b[0m"),
    "path": ("text", "/mnt/runs/{}/model.pt"),
    "address": ("text", "https://{}@example.org/repo"),
    "remote": ("remote", "https://oauth2:{}@gitlab.example.org/org/repo.git"),
    "value": ("env", "TORCH_EXTRA|{}"),
}
PASSWORDS: dict[str, tuple[str, str]] = {
    "--password": ("argv", "train.py|--password|{}"),
    "--db-password=": ("argv", "train.py|--db-password={}"),
    "pw": ("text", "pw: {}"),
    "passwd": ("text", "passwd={} user=ada"),
    "JSON password": ("text", '{{"user": "ada", "password": "{}"}}'),
    "YAML password": ("text", "db:\n  user: ada\n  password: {}\n"),
    "literal password": ("source", "password = '{}'"),
    "address password": ("text", "cannot reach postgres://ada:{}@db.example.org:5432/runs"),
    "connection": ("text", "Server=db;User=ada;Password={};Timeout=30"),
    "remote password": ("remote", "https://ada:{}@example.org/org/repo.git"),
}


@dataclass(frozen=True, slots=True)
class Check:
    """One secret in one place, and what redaction makes of it."""

    kind: str
    place: str
    secret: tuple[str, ...]  # the parts that its format leaves open
    text: str
    clean: str

    @property
    def is_leak(self) -> bool:
        """True if eight characters of the secret in a row are in the result."""
        starts = ((part, start) for part in self.secret for start in range(max(1, len(part) - READABLE + 1)))
        return any(part[start : start + READABLE] in self.clean for part, start in starts)


def checks(seed: int = 0) -> Iterator[Check]:
    """Every secret in every place that gives it away."""
    draw = random.Random(seed)
    for kinds, places in ((SHAPED, ANYWHERE | NAMED), (NAMELESS, NAMED)):
        for kind, form in kinds.items():
            for place in places:
                if not (kind.endswith("webhook") and place in ("address", "remote", "path")):  # it is an address itself
                    yield _check(kind, place, places[place], *_made(form, draw))
    for place, template in PASSWORDS.items():
        for length in (8, 12, 20, 32):
            is_quoted = any(f"{quote}{{}}{quote}" in template[1] for quote in "\"'")
            password = _password(draw, length, QUOTABLE if is_quoted else PUNCTUATED)
            yield _check("password", place, template, password, (password,))
    for length in (12, 24):
        login = base64.b64encode(f"ada:{_password(draw, length)}".encode()).decode()
        yield _check("basic", "header", ("text", "Authorization: Basic {}"), login, (login,))
        yield _check("basic", "text", ("text", "sent Basic {}"), login, (login,))


def changed_lines() -> list[str]:
    """The harmless lines that redaction changes."""
    return [line for line in HARMLESS if redact_text(line) != line or " ".join(redact_argv(line.split(" "))) != line]


def _check(kind: str, place: str, template: tuple[str, str], text: str, secret: tuple[str, ...]) -> Check:
    form, text = template[0], template[1].format(text)
    return Check(kind, place, secret, text, REDACTIONS[form](text))


def _made(form: tuple[str, ...], draw: random.Random) -> tuple[str, tuple[str, ...]]:
    """A secret, and those of its parts that are long enough to be one."""
    parts = [part[1:-1] if part[0] == "'" else _drawn(draw, KINDS[part[0]], int(part[1:])) for part in form]
    is_open = [part[0] not in "'d" and len(text) >= READABLE for part, text in zip(form, parts, strict=True)]
    return "".join(parts), tuple(text for text, kept in zip(parts, is_open, strict=True) if kept)


def _drawn(draw: random.Random, alphabet: str, length: int) -> str:
    """Random characters, the first and last of them no punctuation."""
    return "".join(draw.choice(alphabet if 0 < i < length - 1 else alphabet[:16]) for i in range(length))


def _password(draw: random.Random, length: int, alphabet: str = PUNCTUATED) -> str:
    """A letter, a digit and punctuation in each, as sites demand it."""
    inner = [*_drawn(draw, alphabet, length - 4), draw.choice(DIGITS), draw.choice("!#*_@/")]
    draw.shuffle(inner)
    return draw.choice(LARGE) + "".join(inner) + draw.choice(SMALL)


REDACTIONS: dict[str, Callable[[str], str]] = {
    "argv": lambda text: " ".join(redact_argv(text.split("|"))),
    "text": redact_text,
    "source": redact_source,
    "remote": redact_remote,
    "env": lambda text: str(select_variables(dict([text.split("|", 1)]))),
}

# -- every text field there is -----------------------------------------------------------------------------------------

FILES: tuple[type, ...] = (Snapshot, Reduction, TrainingEvent)
LINE = "recipe_of_{0} = mixed_{0}(x, margin)"  # of source, by the number of the text


@dataclass(frozen=True, slots=True)
class Planted:
    """A text of a file: its field, its kind, the parts of the secret in it, and the number in its line of source."""

    field: str
    kind: str
    secret: tuple[str, ...]
    number: int


class Planting:
    """Puts a secret and a line of source into each text that it is given."""

    def __init__(self, seed: int = 0) -> None:
        self._draw = random.Random(seed)
        self._forms = list(SHAPED.values())
        self.texts: list[tuple[str, tuple[str, ...]]] = []

    def text(self, kind: Kind, text: str) -> str:
        """The text that takes the place of another of its kind."""
        if kind in (grammar.digest, grammar.rows, grammar.link):  # the grammar lets no other text in
            return text
        number = len(self.texts)
        key, parts = _made(self._forms[number % len(self._forms)], self._draw)
        self.texts.append((kind.__name__, parts))
        return self._form(kind, LINE.format(number), key, number)

    def _form(self, kind: Kind, line: str, key: str, number: int) -> str:
        if kind in (grammar.code, grammar.statement, grammar.listing):
            return f"{line}  # '{key}' of /home/ada/recipes"
        if kind in (grammar.text, grammar.line):
            of_traceback = f'\n  File "train.py", line 3, in f\n    {line}\nend' * (kind is grammar.text)
            return f"it failed at train.py:3{quoted(f': {line}')}, with {key} in /home/ada/x{of_traceback}"
        if kind is grammar.path:
            return f"/home/ada/{key}/train.py"
        return f"batch {key}" if kind is grammar.constants or number % 2 else line


def planted(cls: type, seed: int = 0) -> tuple[Any, list[Planted]]:
    """A file's content in which every text has a secret and a line of source, and the list of them."""
    planting = Planting(seed)
    content = mapped(cls, sample_of(cls), planting.text, lambda _, after: after)
    found = []
    for number, (kind, parts) in enumerate(planting.texts):
        marks = (*parts, f"recipe_of_{number} ")
        found.append(Planted(_field_of(content, marks), kind, parts, number))
    return content, found


def field_leaks(seed: int = 0) -> Iterator[str]:
    """What `private` leaves of the secrets and lines of source in every field, and the fields without a text."""
    for cls in FILES:
        content, texts = planted(cls, seed)
        wanted = {f"{owner.__name__}.{name}" for (owner, name), kinds in text_fields(cls).items() if kinds & _FREE}
        yield from (f"{cls.__name__}: no text in {field}" for field in sorted(wanted - {one.field for one in texts}))
        for policy in SOURCES:
            left = repr(private(content, policy))
            for one in texts:
                if Check(one.kind, one.field, one.secret, "", left).is_leak:
                    yield f"{policy}: a secret in {one.field} ({one.kind})"
                if policy == "none" and f"recipe_of_{one.number} " in left:
                    yield f"{policy}: a line of source in {one.field} ({one.kind})"
            if "/home/ada" in left:
                yield f"{policy}: a home folder in {cls.__name__}"


_FREE = grammar.TEXTS - {grammar.digest, grammar.rows, grammar.link} | {grammar.constants}


def sample_of(hint: Any, depth: int = 0) -> Any:
    """A value of a type with something in each of its fields."""
    origin, args = get_origin(hint), get_args(hint)
    if isinstance(hint, type) and issubclass(hint, StrEnum):
        return next(iter(hint))
    if origin is Literal:
        return args[0]
    if origin is Annotated:
        return _sample_of_kind(hint, args[0], depth)
    if origin in (Union, UnionType):
        arms = [arg for arg in args if arg is not NoneType]
        is_deep = depth > 8 and any(is_dataclass(arm) for arm in arms)
        texts = [arm for arm in arms if grammar.text_kind(arm) is not None]
        return None if is_deep else sample_of((texts or arms)[0], depth)
    if origin is tuple and Ellipsis not in args:
        return tuple(sample_of(arg, depth) for arg in args)
    if origin in (tuple, list):
        return origin([sample_of(args[0], depth)])
    if origin is not None:
        return {sample_of(args[0], depth): sample_of(args[1], depth)}
    if is_dataclass(hint):
        return _sample_of_fields(hint, depth + 1)
    return {int: 1, float: 1.0, bool: False, torch.Tensor: torch.zeros(1)}[hint]


def _sample_of_kind(hint: Any, plain: Any, depth: int) -> Any:
    kind = grammar.text_kind(hint)
    if isinstance(kind, grammar.one_of):
        return min(kind.words)
    if kind in (grammar.digest, grammar.rows):
        return "0f" if kind is grammar.digest else "row 0"
    if kind is grammar.constants:
        return ["words", Symbol("words"), Device("words"), Slice("words", "words", "words"), Ref(1)]
    return "words" if plain is str else sample_of(plain, depth)


def _sample_of_fields(cls: Any, depth: int) -> Any:
    hints = get_type_hints(cls, include_extras=True)
    made = cls(**{item.name: sample_of(hints[item.name], depth) for item in fields(cls) if item.init})
    if hasattr(made, "calls") and hasattr(made, "modules"):
        custom = Call(OPAQUE, (), {"name": "words", "source": "words"})
        return replace(made, calls=(*made.calls, custom))
    return made


def _field_of(content: Any, marks: tuple[str, ...], place: str = "") -> str:
    """The field that holds one of some texts."""
    if is_dataclass(content) and not isinstance(content, type):
        for item in fields(content):
            value = getattr(content, item.name)
            if any(mark in repr(value) for mark in marks):
                return _field_of(value, marks, f"{type(content).__name__}.{item.name}")
    if isinstance(content, dict):
        if any(mark in repr(list(content)) for mark in marks):
            return place
        content = list(content.values())
    if isinstance(content, (list, tuple)):
        inner = next((part for part in content if any(mark in repr(part) for mark in marks)), None)
        return place if isinstance(inner, str) or inner is None else _field_of(inner, marks, place)
    return place


HARMLESS = r"""
python -u train.py --max-tokens 512 --lr 3e-4 --batch-size 32
python train.py -p 0.5 -u --epochs 3
python -m torch.distributed.run --nproc-per-node 2 --master-port 29500 train.py
python serve.py -p 8080 --host 0.0.0.0
python train.py -p resnet50 --lr 0.1
sbatch -p gpu-a100x2 job.sh
docker run -p 8080:80 -u 1000:1000 --gpus all nvcr.io/nvidia/pytorch:24.05-py3
mkdir -p runs/exp1/checkpoints && cp -r src runs/exp1
psql -h localhost -p 5432 -U postgres runs
sbatch -p gpu --gres=gpu:4 --time=24:00:00 job.sh
train.py model=resnet50 +trainer.precision=bf16-mixed seed=1234
accelerate launch --mixed_precision fp16 --num_processes 8 run_clm.py --model_name_or_path meta-llama/Llama-3.1-8B
ssh -p 22 gpu17 nvidia-smi
train.py --token-dropout 0.15 --pad-token <pad> --tokenizer bert-base-uncased
train.py --commit 3f2c9a7be01d4c58a6b7e9f0123456789abcdef0 --key value
next_token = "bert-base-uncased"
pad_token = "<pad>"
pad_token_id = 50256; max_tokens = 512; eos_token = '</s>'
token = "roberta-large-mnli-v2"
tokenizer = AutoTokenizer.from_pretrained("bert-large-uncased-whole-word-masking-finetuned-squad")
secret = attn[:, 0]
key = self.key(x).view(b, n, self.heads, -1)
scores = query @ key.transpose(-2, -1) / math.sqrt(d_k)
key, query, value = self.qkv(x).chunk(3, dim=-1)
def forward(self, token, key=None, secret=None, *, signature=None):
token_embeddings = self.token_embedding(input_ids) + self.position_embedding(positions)
batch["token"], batch["key"] = token_ids, key_states
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, betas=(0.9, 0.95), weight_decay=0.1)
loss = F.cross_entropy(logits.view(-1, vocab_size), targets.view(-1), ignore_index=-100)
password_head = nn.Linear(768, 2)
key_padding_mask = src_key_padding_mask.to(torch.bool)
for key, value in state_dict.items():
assert key in state_dict, f"missing key: {key}"
x = x @ self.weight.T + self.bias
from sklearn.linear_model import Ridge  # sk-learn-compatible-estimators-only
model.load_state_dict(torch.load("checkpoints/Llama-2-7b-chat-hf/pytorch_model-00001-of-00002.bin"))
self.register_buffer("inv_freq", 1.0 / (base ** (torch.arange(0, dim, 2).float() / dim)), persistent=False)
with torch.autocast("cuda", dtype=torch.bfloat16):
@torch.compile(mode="max-autotune", fullgraph=True)
class Wav2Vec2ForSequenceClassification(Wav2Vec2PreTrainedModel):
config = LlamaConfig(hidden_size=4096, num_key_value_heads=8, rope_theta=500000.0)
auth = request.headers.get("Authorization")
token = os.environ["HF_TOKEN"]
api_key = os.getenv("OPENAI_API_KEY")
parser.add_argument("--password", type=str, default=None, help="the password of the database")
parser.add_argument("--hub-token", type=str, help="token to use for the hub")
password: str | None = None
def login(user: str, password: str) -> None:
logger.info("backward pass: %s", name)
grad = torch.autograd.grad(loss, params, create_graph=True)
mask = tokens.ne(tokenizer.pad_token_id)
next_tokens = torch.multinomial(probs, num_samples=1).squeeze(1)
key_cache: torch.Tensor = self.key_cache[layer_idx]
sort_key = lambda item: item.score
"key": "layers.0.attention.wq.weight",
"hidden_act": "gelu_pytorch_tanh",
"_commit_hash": "8f2c9a7be01d4c58a6b7e9f0123456789abcdef01",
"transformers_version": "4.45.2",
"bos_token_id": 128000, "eos_token_id": 128009,
"tokenizer_class": "PreTrainedTokenizerFast"
"architectures": ["LlamaForCausalLM"], "torch_dtype": "bfloat16"
learning_rate: 3.0e-4
tokenizer: google/gemma-2-9b-it
token: <unk>
pass: 3
key: value
cookie_policy: strict
auth: none
strategy: ddp_find_unused_parameters_true
precision: 16-mixed
image: pytorch/pytorch@sha256:0a3b4c5d6e7f8091a2b3c4d5e6f708192a3b4c5d6e7f8091a2b3c4d5e6f70819
commit 4b2b40e35ba4085c0712dbfe68b17ab09f16621e
Merge pull request #1234 from org/fix-token-type-ids
index 83db48f..bf269f4 100644
epoch 3 step 1200 | loss 2.3412 | lr 3.00e-04 | tok/s 51234 | grad norm 1.02
[rank0]:W0501 12:00:00.123000 140234 torch/_dynamo/convert_frame.py:906] [0/8] hit config.recompile_limit (8)
2024-05-01 12:00:00,123 INFO trainer: first pass: 12.5ms, second pass: 11.9ms
INFO: 127.0.0.1:52314 - "GET /health HTTP/1.1" 200 OK
Token indices sequence length is longer than the specified maximum sequence length for this model (1024 > 512).
Setting `pad_token_id` to `eos_token_id`:50256 for open-end generation.
Special tokens have been added in the vocabulary, make sure the associated word embeddings are fine-tuned or trained.
wandb: Run data is saved locally in wandb/run-20240501_120000-3x8f2k1p
wandb: Syncing run dulcet-sunset-42
NCCL version 2.20.5+cuda12.4
gpu-0: NVIDIA H100 80GB HBM3, 81559MiB, compute capability 9.0
fx graph cache hit for key fysqyh5lyzdm4pbvw6tqjyrxgkbwhvc3f7ybfzqgmq2zqvqnhxwk
triton_poi_fused__to_copy_add_clone_mul_native_layer_norm_12
sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64_warpgroupsize1x1x1
Cijk_Ailk_Bljk_HHS_BH_MT128x128x16_MI16x16x16x1_SN_1LDSB0_APM1_ABV0_ACED0_AF0EM8
undefined symbol: _ZN3c105ErrorC2ENS_14SourceLocationENSt7__cxx1112basic_stringIcSt11char_traitsIcESaIcEEE
frame #7: torch::autograd::Engine::evaluate_function(std::shared_ptr<torch::autograd::GraphTask>&) + 0x5f2
RuntimeError: The size of tensor a (512) must match the size of tensor b (768) at non-singleton dimension 2
KeyError: 'model.layers.0.self_attn.q_proj.weight'
RuntimeError: Error(s) in loading state_dict for GPT2LMHeadModel: Missing key(s) in state_dict: "lm_head.weight".
ValueError: Unrecognized configuration class <class 'transformers.models.bert.configuration_bert.BertConfig'>
torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.11 GiB
IndexError: index out of range in self
TypeError: forward() got an unexpected keyword argument 'token_type_ids'
OSError: You are trying to access a gated repo. Make sure to have access to it and pass a token with permission.
requests.exceptions.HTTPError: 401 Client Error: Unauthorized for url: https://huggingface.co/api/models/org/model
  File "/usr/lib/python3.11/threading.py", line 1038, in _bootstrap_inner
  File "torch/nn/modules/linear.py", line 125, in forward
https://github.com/pytorch/pytorch/issues/12345#issuecomment-1234567890
https://download.pytorch.org/whl/cu124/torch-2.5.1%2Bcu124-cp311-cp311-linux_x86_64.whl
git+https://github.com/huggingface/transformers.git@main
git@github.com:org/repo.git
s3://bucket/datasets/imagenet/train-00001-of-01024.tar
/data/imagenet/train/n01440764/n01440764_10026.JPEG
/scratch/datasets/imagenet/val
TORCH_LOGS=+dynamo,graph_breaks TORCH_CUDA_ARCH_LIST=8.0;9.0 OMP_NUM_THREADS=8
CUDA_VISIBLE_DEVICES=0,1,2,3 NCCL_DEBUG=INFO NCCL_SOCKET_IFNAME=eth0
Python 3.11.9 (main, Apr 19 2024, 16:48:06) [GCC 11.2.0] on linux
numpy==1.26.4 torch==2.5.1+cu124 transformers==4.45.2
basic block 3: BasicBlock(64, 128, stride=2), Basic training configuration
the bearer of the token type ids must match the key of the batch
""".strip("\n").splitlines()


def main() -> int:
    """Print the leaks and changed lines, and how many checks were made."""
    parser = new_parser(__doc__)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    made = list(checks(arguments.seed))
    leaks, changed = [check for check in made if check.is_leak], changed_lines()
    for check in leaks:
        print(f"leak: {check.kind} in {check.place}: {check.text!r} -> {check.clean!r}", file=sys.stderr)
    for line in changed:
        print(f"changed: {line} -> {redact_text(line)}", file=sys.stderr)
    of_fields = list(field_leaks(arguments.seed))
    for words in of_fields:
        print(f"leak: {words}", file=sys.stderr)
    num_fields = sum(len(planted(cls)[1]) for cls in FILES)
    numbers = {"checks": len(made), "kinds": len({check.kind for check in made}), "harmless": len(HARMLESS)}
    numbers["texts of fields"] = num_fields * len(SOURCES)
    found = [asdict(check) for check in leaks]
    print_json({**numbers, "changed": changed, "leaks": found, "leaks of fields": of_fields}, arguments.json)
    return 1 if leaks or of_fields or len(changed) > 1 else 0


if __name__ == "__main__":
    sys.exit(main())
