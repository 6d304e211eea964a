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
KEY = "aB3dE6gH9jK2mN5pQ8sT" + "uV1wX4yZ7aB3dE6"
PASSWORD_FLAGS = ["--password", "--db-password", "--api-key", "--wandb_api_key", "--client-secret", "-password"]


@pytest.fixture(scope="module")
def secrets_corpus() -> ModuleType:
    return import_benchmark("secrets_corpus")


def test_no_secret_of_the_corpus_survives_in_any_place(secrets_corpus: ModuleType) -> None:
    checks = list(secrets_corpus.checks(0))
    assert len(checks) >= 1000 and len({check.kind for check in checks}) >= 40
    assert [(check.kind, check.place, check.text, check.clean) for check in checks if check.is_leak] == []


def test_harmless_lines_of_the_corpus_stay(secrets_corpus: ModuleType) -> None:
    assert len(secrets_corpus.HARMLESS) >= 100
    assert len(secrets_corpus.changed_lines()) <= 1


def test_the_corpus_finds_leaks(secrets_corpus: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(secrets_corpus.REDACTIONS, "text", lambda text: text)
    assert {check.place for check in secrets_corpus.checks() if check.is_leak} >= {"pw", "JSON", "diff", "colored"}


@pytest.mark.parametrize(
    "words",
    [
        "train.py --max-token 512 --max-tokens 512",
        "train.py --pad_token_id=50256 --pad-token <pad>",
        "train.py --tokenizer bert-base-uncased-whole-word-2019",
        "train.py --use-auth-token true --author somebody123456789",
        "train.py --lr 3e-4 model.token_embedding=learned_positions_2d --key value",
        "train.py --password --verbose",
        "PWD=/work/run --pass forward backward_pass=second_order",
        "Authorization: token or password",
        "password=${PW} --api-key $KEY",
        "hf_hub_download_with_retries npm_config_registry_mirror sk-learn-compatible-estimators-2023",
        "http://host:8080/a@v2/x",
        "/scratch/datasets/imagenet /data/home/x /work/run",
        "q@k.T x@w.t x@w.t() q@k.mT / 8 x@w.to(device) x@w.to q@k.transpose(-2, -1) x@self.net x@w.is_cuda",
        "h@weights.io[0] x@layer.weight user@decorator @torch.no_grad() +@click.group() mAP@0.5 torch@2.1.0.dev",
        "gcc@11.2.0 image@sha256:abcd package@git+https://github.com/org/repo.git git@github.com:org/repo",
    ],
)
def test_ordinary_text_stays(words: str) -> None:
    assert redact_text(words) == words
    assert redact_argv(words.split(" ")) == words.split(" ")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("key AKIAABCDEFGHIJKLMNOP here", "key *** here"),
        ("postgres://ada:p@ss/w@db.org/x", "postgres://***"),
        ("redis://:pa/s@h:6379/0", "redis://***"),
        ("Authorization: ApiKey abc-12_3x!", "Authorization: ApiKey ***!"),
        ('password="a, b; c)", x=1', 'password="***", x=1'),
        ("password: str = 'abc'", "password: str = '***'"),
        ("train.py --password swordfish data", "train.py --password *** data"),
        ("--db-pass=hunter2x smtp_pass=hunter2x PWD=hunter2x", "--db-pass=*** smtp_pass=*** PWD=***"),
        ("by ada@example.org.", "by ***."),
        ("<ADA@EXAMPLE.COM> mailto:ada_l-1@mail.example.co.uk", "<***> mailto:***"),
        ("/mnt/GoogleDrive-ada%40example.org/x.py", "/mnt/***/x.py"),
        ("jürgen@müller.de: ada@163.com", "***: ***"),
        ('File "/srv/ada@example.org/train.py", line 3', 'File "/srv/***/train.py", line 3'),
        ("/home/grace/x, '/Users/grace/x' C:\\Users\\grace\\x", "~/x, '~/x' ~\\x"),
        ("ls /home/ada && ls", "ls ~ && ls"),
        ("/tmp/torchinductor_ada/ab/x.py", "/tmp/torchinductor/ab/x.py"),
    ],
)
def test_what_goes_and_what_stays_around_it(text: str, expected: str) -> None:
    assert redact_text(text) == expected
    assert redact_text(expected) == expected


def test_a_private_key_goes_whole() -> None:
    key = "-----BEGIN RSA PRIVATE KEY-----\nMIIabc\n-----END RSA PRIVATE KEY-----"
    assert redact_text(f"before\n{key}\nafter") == f"before\n{REDACTED}\nafter"
    assert "MIIabc" not in redact_text(key.removesuffix("-----END RSA PRIVATE KEY-----"))


@pytest.mark.parametrize(
    ("user", "text", "expected"),
    [
        ("ada", "/scratch/ada/runs/ada --out=/mnt/ada", "/scratch/user/runs/user --out=/mnt/user"),
        ("ada", "src/ada/model.py, https://github.com/ada/x, /mnt/adam/x", None),
        ("root", "/mnt/root/x", None),
    ],
)
def test_the_name_of_the_user_in_paths(
    monkeypatch: pytest.MonkeyPatch, user: str, text: str, expected: str | None
) -> None:
    monkeypatch.setattr(redact.getpass, "getuser", lambda: user)
    redact._user.cache_clear()
    assert redact_text(text) == (expected or text)
    redact._user.cache_clear()


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("https://github.com/org/repo.git", "https://github.com/org/repo.git"),
        ("https://me:abc@github.com/org/repo.git", "https://github.com/org/repo.git"),
        ("https://oauth2:abc@gitlab.example/org/repo?token=1#x", "https://gitlab.example/org/repo"),
        ("ssh://git@example.org:22/org/repo", "ssh://example.org:22/org/repo"),
        ("git@github.com:org/repo.git", "git@github.com:org/repo.git"),
        ("ada@example.org:org/repo.git", "***@example.org:org/repo.git"),
        ("/home/ada/work/repo", "repo"),
        ("file:///home/ada/work/repo", "repo"),
    ],
)
def test_remotes(url: str, expected: str) -> None:
    assert redact_remote(url) == expected


def test_own_home_and_the_name_of_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Path, "home", lambda: Path("/srv/people/ada"))
    assert redact_text('File "/srv/people/ada/train.py", /srv/people/adam/x') == 'File "~/train.py", /srv/people/adam/x'
    for host, text, expected in (
        ("gpu-node-17", "on gpu-node-17:29500", "on localhost:29500"),
        ("train", "the train loop", "the train loop"),
    ):
        monkeypatch.setattr(redact.socket, "gethostname", lambda host=host: host)
        redact._distinctive_host.cache_clear()
        assert redact_text(text) == expected
    redact._distinctive_host.cache_clear()


def test_only_allowed_variables_without_addresses() -> None:
    environment = {
        "TORCH_LOGS": "graph",
        "OMP_NUM_THREADS": "4",
        "RANK": "0",
        "CUDNN_VERSION": "8.9.7.29",
        "NCCL_COMM_ID": "10.0.0.1:29500",
        "TORCH_HUB_TOKEN": "short",
        "HF_TOKEN": "hf_" + KEY,
        "HOME": "/home/ada",
        "MASTER_ADDR": "10.0.0.1",
    }
    kept = {name: environment[name] for name in ("CUDNN_VERSION", "OMP_NUM_THREADS", "RANK", "TORCH_LOGS")}
    assert select_variables(environment) == {**kept, "NCCL_COMM_ID": REDACTED}


def test_in_source_literals_and_comments_are_redacted() -> None:
    code = "y = q@k.com + x@net.org  # ada@example.org\n@user.org\ndef f(to='ada@example.org'): ..."
    hidden = "y = q@k.com + x@net.org  # ***\n@user.org\ndef f(to='***'): ..."
    assert redact_source(code) == hidden
    frame = f'  File "train.py", line 3, in f\n    {code.splitlines()[0]}'
    assert redact_text(frame) == f'  File "train.py", line 3, in f\n    {hidden.splitlines()[0]}'
    code = "password = ask() if given is None else given\npassphrase = first if flag else second"
    assert redact_source(code) == code
    assert redact_source("# passphrase: correct-horse-battery") == "# passphrase: ***"


NAMED = st.sampled_from(["token=", "--api-key ", "password: ", "https://u:", "HF_TOKEN=", '"secret": "'])
AROUND = st.text(ALPHANUMERIC + " \n\"'=:-/@", max_size=60)


@settings(max_examples=100)
@given(
    st.one_of(st.text(), st.text("ab.@+-_%4(=0 com org", max_size=60), st.tuples(AROUND, NAMED, AROUND).map("".join))
)
def test_redacting_twice_is_redacting_once(text: str) -> None:
    once = redact_text(text)
    assert redact_text(once) == once


@settings(max_examples=50)
@given(
    st.sampled_from(PASSWORD_FLAGS),
    st.text(ALPHANUMERIC, min_size=8, max_size=40).filter(lambda value: not value.isdigit()),
    st.booleans(),
)
def test_a_password_never_survives(flag: str, value: str, joined: bool) -> None:
    argv = ["train.py", f"{flag}={value}"] if joined else ["train.py", flag, value]
    assert value not in " ".join(redact_argv(argv)[1:]).replace(flag, "")


@settings(max_examples=50)
@given(st.integers(), st.floats(allow_nan=False), st.text("0123456789abcdef", min_size=40, max_size=40))
def test_numbers_and_hashes_stay(number: int, rate: float, commit: str) -> None:
    argv = ["--max-tokens", str(number), "--lr", str(rate), "--commit", commit, f"eos_token_id={number}"]
    assert redact_argv(argv) == argv


@pytest.mark.parametrize("prefix", ["a.", "a-", "_"])
def test_a_secret_behind_a_long_chain_of_words_goes(prefix: str) -> None:
    chain = prefix * 10_000  # a search that takes time by the square would not come back
    assert redact_text(chain) == chain
    assert redact_text(f"{chain}password=hunter2x") == f"{chain}password={REDACTED}"


@pytest.mark.parametrize(
    "unit", ["a.", "/", "\\", "\n", "eyJ", "xoxb-", "sk-a", "://a:", "token=", "/home/", '"', "-a ", "a@b."]
)
@pytest.mark.parametrize("redacted", [redact_text, redact_source])
def test_a_long_line_takes_linear_time(unit: str, redacted: Callable[[str], str]) -> None:
    redacted(unit)  # reads the shapes of keys
    start = time.process_time()
    redacted((unit * 100_000)[:100_000])
    assert time.process_time() - start < 3  # half a second on an idle machine, minutes by the square
