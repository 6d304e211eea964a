"""Redaction hides secrets and personal names and leaves ordinary text alone."""

from __future__ import annotations

import string
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reprokit.snapshot import redact
from reprokit.snapshot.redact import (
    REDACTED,
    redact_argv,
    redact_remote,
    redact_source,
    redact_text,
    select_variables,
)
from tests.conftest import import_benchmark

ALPHANUMERIC = string.ascii_letters + string.digits
HEX_KEY = "0123456789abcdef0123456789abcdef01234567"
HF_TOKEN = "hf_" + "aB3dE6gH9jK2mN5pQ8sT"
PASSWORD_FLAGS = ["--password", "--db-password", "--api-key", "--wandb_api_key", "--client-secret", "-password"]


@pytest.fixture(scope="module")
def secrets_corpus() -> ModuleType:
    return import_benchmark("secrets_corpus")


@pytest.mark.parametrize(
    "argv",
    [
        ["train.py", "--max-tokens", "512"],
        ["train.py", "--max-token", "512"],
        ["train.py", "--pad_token_id=50256", "--pad-token", "<pad>"],
        ["train.py", "--commit", "0123456789abcdef0123456789abcdef01234567"],
        ["train.py", "--tokenizer", "bert-base-uncased-whole-word-2019"],
        ["train.py", "--token-dropout", "0.15", "--secret-weight", "0.5"],
        ["train.py", "--use-auth-token", "true", "--author", "somebody123456789"],
        ["train.py", "--lr", "3e-4", "model.token_embedding=learned_positions_2d", "--key", "value"],
        ["train.py", "--password", "--verbose"],
    ],
)
def test_ordinary_command_lines_stay(argv: list[str]) -> None:
    assert redact_argv(argv) == argv


@pytest.mark.parametrize(
    "argv",
    [
        ["train.py", "--hub-token", HEX_KEY],
        ["train.py", f"--hub_token={HEX_KEY}"],
        ["train.py", f"hub.token={HEX_KEY}"],
        ["train.py", f"+wandb.api_key={HEX_KEY}"],
        ["train.py", "--note", f"HF_TOKEN={HEX_KEY}"],
        ["train.py", "--config", f'{{"token": "{HEX_KEY}"}}'],
        ["train.py", "--header", f"Authorization: Bearer {HEX_KEY}"],
        ["train.py", "--data", f"https://me:{HEX_KEY}@example.org/data"],
    ],
)
def test_keys_in_command_lines_go(argv: list[str]) -> None:
    clean = " ".join(redact_argv(argv))
    assert HEX_KEY not in clean
    assert REDACTED in clean


def test_a_known_key_format_needs_no_name() -> None:
    assert redact_text(f"login({HF_TOKEN})") == f"login({REDACTED})"
    assert redact_text("key AKIAABCDEFGHIJKLMNOP here") == f"key {REDACTED} here"


KEY = "aB3dE6gH9jK2mN5pQ8sT" + "uV1wX4yZ7aB3dE6"


@pytest.mark.parametrize(
    "pattern",
    [
        "https://hooks.slack.com/services/T0/{}",
        "https://discord.com/api/webhooks/12345/{}",
        "https://api.telegram.org/bot12345678:AA{}/send",
        "ya29.{}",
        "GOCSPX-{}",
        "SG.{0}.{0}",
        "Authorization: token {}",
        'wandb.login("{}")',
    ],
)
def test_keys_that_their_place_gives_away(pattern: str) -> None:
    clean = redact_text(pattern.format(KEY))
    assert KEY not in clean and REDACTED in clean
    assert redact_text(clean) == clean


@pytest.mark.parametrize("argument", ["--pwd hunter2x", "--db-pass=hunter2x", "smtp_pass=hunter2x", "PWD=hunter2x"])
def test_short_names_of_passwords(argument: str) -> None:
    assert "hunter2x" not in redact_text(argument)
    assert "hunter2x" not in " ".join(redact_argv(["train.py", *argument.split()]))


@pytest.mark.parametrize(
    "text",
    [
        "PWD=/work/run",
        "--pass forward",
        "backward_pass=second_order",
        "user_passes = many",
        'login("somebody")',
        "Authorization: token or password",
    ],
)
def test_words_near_passwords_stay(text: str) -> None:
    assert redact_text(text) == text


@pytest.mark.parametrize(
    ("user", "text", "expected"),
    [
        ("ada", "/scratch/ada/runs/ada --out=/mnt/ada", "/scratch/user/runs/user --out=/mnt/user"),
        ("ada", "src/ada/model.py, https://github.com/ada/x, /mnt/adam/x", None),
        ("root", "/mnt/root/x", None),
        ("Ada Lovelace", "/mnt/runs/Ada Lovelace/x.pt", "/mnt/runs/user/x.pt"),
    ],
)
def test_the_name_of_the_user_in_paths(
    monkeypatch: pytest.MonkeyPatch, user: str, text: str, expected: str | None
) -> None:
    monkeypatch.setattr(redact.getpass, "getuser", lambda: user)
    redact._user.cache_clear()
    assert redact_text(text) == (expected or text)
    redact._user.cache_clear()


def test_private_keys_go_whole() -> None:
    key = "-----BEGIN RSA PRIVATE KEY-----\nMIIabc\n-----END RSA PRIVATE KEY-----"
    assert redact_text(f"before\n{key}\nafter") == f"before\n{REDACTED}\nafter"
    assert "MIIabc" not in redact_text(key.removesuffix("-----END RSA PRIVATE KEY-----"))


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("https://github.com/org/repo.git", "https://github.com/org/repo.git"),
        ("https://me:abc@github.com/org/repo.git", "https://github.com/org/repo.git"),
        ("https://oauth2:abc@gitlab.example/org/repo?token=1#x", "https://gitlab.example/org/repo"),
        ("ssh://git@example.org:22/org/repo", "ssh://example.org:22/org/repo"),
        ("git@github.com:org/repo.git", "git@github.com:org/repo.git"),
        ("ada@example.org:org/repo.git", "***@example.org:org/repo.git"),
        ("https://ada%40example.org:abc@github.com/org/repo.git", "https://github.com/org/repo.git"),
        ("https://example.org/ada@example.org/repo.git", "https://example.org/***/repo.git"),
        ("/home/ada/ada@example.org", "***"),
        ("/home/ada/work/repo", "repo"),
        ("file:///home/ada/work/repo", "repo"),
    ],
)
def test_remotes(url: str, expected: str) -> None:
    assert redact_remote(url) == expected


def test_home_folders(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Path, "home", lambda: Path("/srv/people/ada"))
    assert redact_text('File "/srv/people/ada/train.py"') == 'File "~/train.py"'
    assert redact_text("/home/grace/x and /Users/grace/x") == "~/x and ~/x"
    assert redact_text("/data/home/x stays") == "/data/home/x stays"
    assert redact_text("/tmp/torchinductor_ada/ab/x.py") == "/tmp/torchinductor/ab/x.py"
    assert redact_text("/srv/people/adam/x") == "/srv/people/adam/x"


@pytest.mark.parametrize(
    ("host", "text", "expected"),
    [
        ("gpu-node-17", "on gpu-node-17:29500", "on localhost:29500"),
        ("train", "the train loop", "the train loop"),
    ],
)
def test_the_name_of_the_machine(monkeypatch: pytest.MonkeyPatch, host: str, text: str, expected: str) -> None:
    monkeypatch.setattr(redact.socket, "gethostname", lambda: host)
    redact._distinctive_host.cache_clear()
    assert redact_text(text) == expected
    redact._distinctive_host.cache_clear()


def test_only_allowed_variables() -> None:
    environment = {
        "TORCH_LOGS": "graph",
        "OMP_NUM_THREADS": "4",
        "RANK": "0",
        "PYTHONHASHSEED": "0",
        "TORCH_HUB_TOKEN": "short",
        "HF_TOKEN": HF_TOKEN,
        "HOME": "/home/ada",
        "MASTER_ADDR": "10.0.0.1",
    }
    assert list(select_variables(environment)) == ["OMP_NUM_THREADS", "PYTHONHASHSEED", "RANK", "TORCH_LOGS"]


NAMED = st.sampled_from(["token=", "--api-key ", "password: ", "https://u:", "HF_TOKEN=", '"secret": "'])
AROUND = st.text(ALPHANUMERIC + " \n\"'=:-/@", max_size=60)


@settings(max_examples=100)
@given(
    st.one_of(
        st.text(),
        st.text("ab.@+-_%4(=0 com org", max_size=60),
        st.tuples(AROUND, NAMED, AROUND).map("".join),
    )
)
def test_redacting_twice_is_redacting_once(text: str) -> None:
    once = redact_text(text)
    assert redact_text(once) == once


@given(
    st.sampled_from(PASSWORD_FLAGS),
    st.text(ALPHANUMERIC, min_size=8, max_size=40).filter(lambda value: not value.isdigit()),
    st.booleans(),
)
def test_a_password_never_survives(flag: str, value: str, joined: bool) -> None:
    argv = ["train.py", f"{flag}={value}"] if joined else ["train.py", flag, value]
    assert value not in " ".join(redact_argv(argv)[1:]).replace(flag, "")


@given(st.integers(), st.floats(allow_nan=False), st.text("0123456789abcdef", min_size=40, max_size=40))
def test_numbers_and_hashes_stay(number: int, rate: float, commit: str) -> None:
    argv = ["--max-tokens", str(number), "--lr", str(rate), "--commit", commit, f"eos_token_id={number}"]
    assert redact_argv(argv) == argv


ADDRESSES = [
    "ada@example.org",
    "ada.lovelace+ml@cs.uni-bonn.de",
    "ADA@EXAMPLE.COM",
    "Ada@Example.Com",
    "self@example.org",
    "ada@self.com",
    "ada_l-1@mail.example.co.uk",
    "j\u00fcrgen@m\u00fcller.de",
    "ada@163.com",
    "ada%40example.org",
    "root@gpu17.local",
]
SURROUNDINGS = [
    "{}",
    "by {}.",
    "<{}>",
    "mailto:{}",
    "--user={}",
    "/mnt/GoogleDrive-{}/x.py",
    "runs/{}/train.py",
    "+# {}",
    "cannot reach {}: refused",
    'File "/srv/{}/train.py", line 3, in f',
    "{}:/data/x",
]


@pytest.mark.parametrize("address", ADDRESSES)
@pytest.mark.parametrize("around", SURROUNDINGS)
def test_addresses_go(address: str, around: str) -> None:
    text = around.format(address)
    clean = redact_text(text)
    assert address not in clean and REDACTED in clean
    assert redact_text(clean) == clean
    assert address not in redact_argv(["train.py", "--user", text])[-1]
    assert address not in select_variables({"TORCH_HOME": text})["TORCH_HOME"]


@pytest.mark.parametrize(
    "text",
    [
        "q@k.T",
        "x@w.t",
        "x@w.t()",
        "q@k.mT / 8",
        "a@b.mH",
        "x@w.to(device)",
        "x@w.to",
        "q@k.transpose(-2, -1)",
        "q@k.T.to(dtype)",
        "x@self.net",
        "self.q@self.k.name",
        "x@w.is_cuda",
        "h@w_q.io",
        "h@weights.io[0]",
        "x@layer.weight",
        "user@decorator",
        "@torch.no_grad()",
        "+@click.group()",
        "+@torch.compile",
        "mAP@0.5 recall@5 precision@k",
        "torch@2.1.0.dev",
        "gcc@11.2.0",
        "image@sha256:abcd",
        "package@git+https://github.com/org/repo.git",
        "git@github.com:org/repo",
        "model@encoder.layers=vit model@ema.net=resnet",
    ],
)
def test_what_looks_like_an_address_stays(text: str) -> None:
    assert redact_text(text) == text
    assert redact_argv(text.split()) == text.split()


def test_in_source_an_address_is_in_a_string_or_comment() -> None:
    code = "y = q@k.com + x@net.org  # ada@example.org\n@user.org\ndef f(to='ada@example.org'): ..."
    hidden = "y = q@k.com + x@net.org  # ***\n@user.org\ndef f(to='***'): ..."
    assert redact_source(code) == hidden
    frame = f'  File "train.py", line 3, in f\n    {code.splitlines()[0]}'
    assert redact_text(frame) == f'  File "train.py", line 3, in f\n    {hidden.splitlines()[0]}'


LOCAL = st.from_regex(r"[a-z0-9][a-z0-9._+-]{1,20}[a-z0-9]", fullmatch=True).filter(
    lambda who: who not in ("git", "hg", "svn") and who.partition(".")[0] != "self"
)
LABEL = st.from_regex(r"[a-z][a-z0-9-]{1,12}[a-z0-9]", fullmatch=True).filter(lambda label: label != "self")
END = st.sampled_from(["com", "org", "net", "edu", "de", "io", "ai", "co.uk", "ac.jp", "dev", "local"])
NAME = st.from_regex(r"[A-Za-z][A-Za-z0-9]{0,8}", fullmatch=True)
ATTRIBUTE = st.sampled_from(
    ["T", "t", "t()", "mT", "H", "weight", "data", "grad", "to(device)", "real", "to(x).net(0)"]
)


@given(
    LOCAL,
    LABEL,
    END,
    st.sampled_from(["", " ", "<", "'", "=", ":", "/", "("]),
    st.sampled_from(["", " ", ">", ",", "/x"]),
)
def test_no_address_survives(who: str, label: str, end: str, before: str, after: str) -> None:
    clean = redact_text(f"{before}{who}@{label}.{end}{after}")
    assert f"@{label}" not in clean and REDACTED in clean
    assert redact_text(clean) == clean


@given(NAME, NAME, ATTRIBUTE)
def test_products_survive(left: str, right: str, attribute: str) -> None:
    for text in (f"{left}@{right}.{attribute}", f"out = ({left}@{right}.{attribute}) / 8"):
        assert redact_text(text) == text


@given(NAME, NAME, st.one_of(NAME, END, ATTRIBUTE))
def test_code_outside_strings_survives(left: str, right: str, attribute: str) -> None:
    code = f"@{left}.{right}\ndef f(x): return x@{left}.{attribute} + {left}@{right}"
    assert redact_source(code) == code


@pytest.mark.parametrize("prefix", ["a.", "a-", "_"])
def test_a_secret_behind_a_long_chain_of_words_goes(prefix: str) -> None:
    chain = prefix * 10_000  # a search that takes time by the square would not come back
    assert redact_text(chain) == chain
    assert redact_text(f"{chain}password=hunter2x") == f"{chain}password={REDACTED}"


def test_no_secret_survives_in_any_place(secrets_corpus: ModuleType) -> None:
    checks = list(secrets_corpus.checks(0))
    assert len(checks) >= 1000 and len({check.kind for check in checks}) >= 40
    assert [(check.kind, check.place, check.text, check.clean) for check in checks if check.is_leak] == []


def test_harmless_lines_stay(secrets_corpus: ModuleType) -> None:
    assert len(secrets_corpus.HARMLESS) >= 100
    assert len(secrets_corpus.changed_lines()) <= 1


def test_the_corpus_finds_leaks(secrets_corpus: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(secrets_corpus.REDACTIONS, "text", lambda text: text)
    assert {check.place for check in secrets_corpus.checks() if check.is_leak} >= {"netrc", "JSON", "diff", "colored"}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("postgres://ada:p@ss/w@db.org/x", "postgres://***@db.org/x"),
        ("redis://:pa/s@h:6379/0", "redis://***@h:6379/0"),
        ("http://host:8080/a@v2/x", None),
        ("machine h login u password p", "machine h login u password ***"),
        ("curl -b 'sid=abc' --user ada:pw", "curl -b '***' --user ***"),
        ("Set-Cookie: a=b; Path=/", "Set-Cookie: ***"),
        ("Authorization: ApiKey abc-12_3x!", "Authorization: ApiKey ***!"),
        ("NCCL_COMM_ID=10.0.0.1:29500", "NCCL_COMM_ID=***"),
        ('password="a, b; c)", x=1', 'password="***", x=1'),
        ("password=${PW} --api-key $KEY", None),
        ("password: str = 'abc'", "password: str = '***'"),
        ("mkdir -p exp12345", None),
        ("python train.py -p resnet50 --lr 0.1", None),
        ("python train.py -p hunter2 -p swordfish -p convnext2tiny -p Llama-2-7b", None),
        ("sbatch -p gpu-a100x2 job.sh", None),
        ('run(["python", "train.py", "-p", "resnet50"])', None),
        ('run(["tool", "-p", "hunter2"])', 'run(["tool", "-p", "***"])'),
        ('add_argument("-p", "--port2", default="-p"); ["-p", "8080", "-p", "bfloat16"]', None),
        ("python train.py -p Tr0ub4dor&3", "python train.py -p ***"),
        ("expect x.exp -p hunter22", "expect x.exp -p ***"),
        ("train.py --password swordfish data", "train.py --password *** data"),
        ("--password: required for the database", None),
        ("passphrase is None if mode == 0", None),
        ("password: list[str] | None = None", None),
        ("passphrase_dropout: 0.1", None),
        ("-p 0.5 -p 8080 -p bfloat16 -p float8_e4m3fn -p data/imagenet2012 -u 1000:1000", None),
        ("hf_hub_download_with_retries npm_config_registry_mirror", None),
        ("sk-learn-compatible-estimators-2023", None),
    ],
)
def test_places_of_passwords(text: str, expected: str | None) -> None:
    assert redact_text(text) == (expected or text)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("/scratch/grace/runs", "/scratch/user/runs"),
        ("gpu:/cluster/home/grace", "gpu:/cluster/home/user"),
        ("file:///gpfs/scratch/g/grace/x", "file:///gpfs/scratch/user/x"),
        ("/scratch/datasets/imagenet /data/imagenet /work/run", None),
        ("https://example.org/users/grace", None),
        ("/home/Ada Lovelace/x.py", "~/x.py"),
        ("'/Users/ada lovelace/x.py'", "'~/x.py'"),
        (r"C:\Users\ada lovelace\x.py", r"~\x.py"),
        (r"/Users/ada\ lovelace/x.py", "~/x.py"),
        ("ls /home/ada && ls", "ls ~ && ls"),
    ],
)
def test_names_in_folders(text: str, expected: str | None) -> None:
    assert redact_text(text) == (expected or text)


def test_variables_hide_addresses() -> None:
    environment = {
        "NCCL_COMM_ID": "10.0.0.1:29500",
        "NCCL_HOSTID": "node17",
        "TORCH_STORE": "node17:29500",
        "CUDNN_VERSION": "8.9.7.29",
        "PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:1024",
        "CUDAHOSTCXX": "g++",
    }
    hidden = {"NCCL_COMM_ID": "***", "NCCL_HOSTID": "***", "TORCH_STORE": "***:29500"}
    assert select_variables(environment) == dict(sorted((environment | hidden).items()))


@pytest.mark.parametrize(
    "unit",
    [
        *("a.", "/", "\\", "\n", "eyJ", "xoxb-", "sk-a", "ATBB", "://a:", "token=", "/home/", '"', "-a "),
        "--a b ",
    ],
)
@pytest.mark.parametrize("redacted", [redact_text, redact_source])
def test_a_long_line_takes_linear_time(unit: str, redacted: Callable[[str], str]) -> None:
    redacted(unit)  # reads the shapes of keys
    start = time.process_time()
    redacted((unit * 100_000)[:100_000])
    assert time.process_time() - start < 3  # half a second on an idle machine, minutes by the square


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("train.py -p bf16-mixed data", None),
        ("mkdir -p exp12345 data", None),
        ("train.py -p hunter2 data", None),
        ("expect -p hunter2 data", "expect -p *** data"),
        ("train.py -p Qx7!kd#2 data", "train.py -p *** data"),
        ("train.py --password hunter2 data", "train.py --password *** data"),
    ],
)
def test_flags_of_a_script(words: str, expected: str | None) -> None:
    assert " ".join(redact_argv(words.split())) == (expected or words)


def test_a_password_in_source_is_a_literal() -> None:
    code = "password = ask() if given is None else given\npassphrase = first if flag else second"
    assert redact_source(code) == code
    assert redact_source("# passphrase: correct-horse-battery") == "# passphrase: ***"
