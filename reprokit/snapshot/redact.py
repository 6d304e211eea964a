"""Taking secrets and personal names out of what is stored or printed: text, command lines, remotes, variables.

A value is a secret if it has the shape of a key, or if the word or flag before it names a secret *and* the value could
be one: ``--max-tokens 512``, ``pad_token_id`` and a git hash are none. In source code only literals and comments are
secrets: a variable may be called ``token`` or ``key``. E-mail addresses and home folders go as well. Redacting twice
gives the same as once. What other programs take as a password (``-p``, ``-u user:password``, cookies, netrc) is not
known here.

``key_shapes.toml`` has the formats of keys, taken from a maintained set of rules. A key of any other service is a long
run in which small letters, capitals and digits take turns as in no word or identifier.
"""

from __future__ import annotations

import fnmatch
import functools
import getpass
import re
import socket
import tomllib
from collections.abc import Callable, Mapping, Sequence, Set
from importlib import resources
from pathlib import Path
from urllib.parse import urlsplit, urlunsplit

from reprokit.words import change_quotations, quoted, with_code, without_code

_LONG = re.compile(r"[A-Za-z0-9_+/=.-]{14}")  # the shortest shape, a Slack token, has 15
_REST = re.compile(r"[A-Za-z0-9_-]*={0,2}")
_CANDIDATE = re.compile(r"[A-Za-z0-9_+/-]{20,}={0,2}")
_RUN = re.compile(r"[A-Za-z0-9]{20,}")
_TURN = re.compile(r"(?=[a-z][A-Z0-9]|[A-Z][a-z0-9]|[0-9][A-Za-z])")
_ALONE = re.compile(r"(?<![a-z0-9])[a-z](?![a-z])")
_LONG_RUN = 32  # with / and + inside, as in paths
_WORD = (  # atomic: without it, a long text that is none would take exponential time
    r"(?>[A-Z]?[a-z]+(?:[A-Z]{1,4}[a-z]{2,})*[0-9]{0,4}[A-Za-z]?|[A-Z]{1,12}[0-9]{0,4}[a-z]?|v?[0-9]{1,8}[A-Za-z]{0,2})"
)
_LETTERS = re.compile(r"[A-Z]?[a-z]+|[A-Z]+")
_WORDS = re.compile(rf"{_WORD}(?:[-_./:+ ]{_WORD})*")


def hide_keys(text: str, hidden: str) -> str:
    """Text with ``hidden`` in the place of each key."""
    if not _LONG.search(text):
        return text
    patterns = dict.fromkeys([pattern for part, pattern in _shapes() if part in text])
    for pattern in patterns:
        text = _replaced(text, pattern, "value", lambda key: not (is_words(key) and key.islower()), hidden)
    return _replaced(text, _CANDIDATE, 0, _is_random, hidden)


def is_words(text: str) -> bool:
    """True if ``text`` consists of words, numbers and names as models have: `bert-base-uncased`, `Llama-2-7b`.

    With capitals in it, at least half of the letters are in words of four and more.
    """
    if not _WORDS.fullmatch(text):
        return False
    words = [len(word) for word in _LETTERS.findall(text)]
    return text == text.lower() or sum(length for length in words if length >= 4) >= 0.5 * sum(words)


@functools.cache
def _shapes() -> list[tuple[str, re.Pattern[str]]]:
    """Texts, one of which is in every key of a shape, and its pattern."""
    text = resources.files("reprokit.snapshot").joinpath("key_shapes.toml").read_text(encoding="utf-8")
    shapes = [(shape["contains"], re.compile(shape["pattern"])) for shape in tomllib.loads(text)["shape"]]
    return [(part, pattern) for contains, pattern in shapes for part in contains]


def _replaced(text: str, pattern: re.Pattern[str], group: str | int, is_key: Callable[[str], bool], hidden: str) -> str:
    pieces, end = [], 0
    for match in pattern.finditer(text):
        start, stop = match.span(group)
        if start >= end and is_key(match[group]):
            pieces += [text[end:start], hidden]
            end = _REST.match(text, stop).end()  # type: ignore[union-attr]  # it matches the empty text
    return "".join((*pieces, text[end:]))


def _is_random(text: str) -> bool:
    if text.startswith("_Z"):  # a C++ symbol
        return False
    runs = _RUN.findall(text)
    return any(map(_is_mixed, [*runs, text] if len(text) >= _LONG_RUN else runs))


def _is_mixed(run: str) -> bool:
    """True if kinds of characters change at least every second time or small letters stand alone: no CamelCase."""
    kinds = all(re.search(kind, run) for kind in ("[a-z]", "[A-Z]", "[0-9]"))
    return kinds and (len(_ALONE.findall(run)) >= 2 or len(_TURN.findall(run)) >= 0.55 * len(run))


REDACTED = "***"
_NOBODYS_LOGIN = frozenset(("git", "hg", "svn"))

ALLOWED_VARIABLES = (
    *("ACCELERATE_*", "CUBLAS_*", "CUDA*", "CUDNN_*", "NCCL*", "NVIDIA_TF32_OVERRIDE", "NVIDIA_VISIBLE_DEVICES"),
    *("HIP_*", "HSA_*", "MIOPEN_*", "ROCR_*", "XLA_FLAGS"),
    *("GOMP_*", "KMP_*", "MKL_*", "OMP_*", "OPENBLAS_*"),
    *("PYTORCH_*", "TORCH*", "TRITON_*", "PYTHONHASHSEED", "TOKENIZERS_PARALLELISM"),
    *("LOCAL_RANK", "LOCAL_WORLD_SIZE", "RANK", "WORLD_SIZE"),
)

_ADDRESS_VARIABLES = re.compile(r"COMM_ID|HOST_?(?:ID|NAME|HASH)|ADDR|ENDPOINT|RDZV|_(?:IP|URL|USER|PROXY)(?:_|$)")
_PRIVATE_KEY = re.compile(r"-----BEGIN ([A-Z0-9 ]*PRIVATE KEY(?: BLOCK)?)-----.*?(?:-----END \1-----|\Z)", re.DOTALL)
_USERINFO = re.compile(
    r"(?<=://)(?:[^\s/:@'\"<>]{0,64}:"  # a password may have @ and / in it, but a number there is a port
    r"(?!\d{1,5}(?:[/,?#]|$))[^\s'\"<>]{1,256}@(?=[\w.-]+(?::\d+)?(?:[^\w.:@-]|$))|[^\s/@'\"]{0,256}@)"
)
# An address with a login that is neither a page nor a repository is a connection string. Its host and its database are
# as private as the password: `postgres://ada:pw@db.example.org:5432/sales`.
_CONNECTION = re.compile(
    rf"(?i)(?P<scheme>(?<![\w+.-])(?!https?:|(?:git\+|hg\+|svn\+)?(?:ssh|https?):|git:|s?ftp:)[a-z][a-z0-9+.-]{{1,30}}://)"
    rf"{re.escape(REDACTED)}@[^\s'\"<>`\\]*[^\s'\"<>`\\.,:;!?)\]}}]"
)
_AUTHORIZATION = re.compile(
    r"(?i)(?:\b(?P<named>authorization)\\*[\"']?\s*[:=,]\s*\\*[\"']?(?:(?:basic|bearer|token|digest|(?:api)?key)\s+)?|\b(?:bearer|basic)\s+)"
    r"(?P<value>(?!(?:basic|bearer|token|digest|(?:api)?key)\b)[A-Za-z0-9._~+/=:-]{6,})"
)
_MAIL = re.compile(  # `q@k.T` is a product, `git@` is no person, `torch@2.1.0.dev` a version
    r"(?i)(?<!\w)(?!(?:git|hg|svn|self)@)\w[\w.+%-]{1,63}(?:@|%40)(?!(?:\d+\.){2}|self\.)(?:[\w-]+\.)+"
    r"(?:com|dev|edu|gov|info|local|mil|net|org|[a-z]{2}|xn--[a-z0-9-]+)(?![\w(\[=-]|\.\w)"
)

_KEY_OWNERS = (
    "access|account|api|auth|consumer|deploy|encryption|license|master|private|secret|service|shared|signing|ssh"
    "|storage|subscription|wandb"
)
_PASS_OWNERS = "admin|db|ftp|http|login|mongo|mysql|pg|postgres|proxy|redis|smtp|ssh|sudo|user"
_STRONG_WORDS = (
    rf"(?<![A-Za-z])dsn(?![A-Za-z])|password|passwd|passphrase|passcode|secret|credentials?|(?:{_KEY_OWNERS})[_-]?key"
    rf"|(?:{_PASS_OWNERS})[_-]?pass(?![A-Za-z])|(?<![A-Za-z])(?:pwd|pswd|pw)"
)
_WEAK_WORDS = "token|authorization|auth|signature|sig|pat|pass|jwt|bearer|cookie|session(?:[_-]?id)?|sid"
_BARE_WORD = "key"  # of a dictionary as often as of a service
_KEY = (
    rf"(?:(?P<strong>{_STRONG_WORDS})|(?<![A-Za-z])(?:{_WEAK_WORDS}|(?P<bare>{_BARE_WORD}))"
    r"|(?-i:(?<=[a-z])(?:Token|Auth|Signature)))"
)
_QUOTED = r"[rbfu]{0,2}(?P<quote>\\*[\"'])(?P<quoted>(?:(?!(?P=quote))(?:\\.|[^\n\\]))+)"
_UNQUOTED = r"(?P<value>(?:[^\s\"',;&)}\]\\]|[,;&)}\]\\](?![\s\"',;&)}\]]|$|[\w.-]+[=:]))+)"
_SEPARATOR = r"\\*[\"']?\]?[ \t]*(?:[:=]?=>?|:|%3[AD])[ \t]*"
_ASSIGNED = re.compile(
    rf"{_KEY}(?:(?:{_SEPARATOR}|\\*[\"'][ \t]*,[ \t]*|[ \t]*:[ \t]*[A-Za-z_][\w.\[\]| ]{{0,40}}=[ \t]*){_QUOTED}"
    rf"|(?::[ \t]*[|>][+-]?[ \t]*\n[ \t]+|{_SEPARATOR}){_UNQUOTED})",
    re.IGNORECASE | re.MULTILINE,
)
_FLAG = re.compile(rf"--?[\w.-]{{0,80}}?{_KEY}", re.IGNORECASE)
_FLAGGED = re.compile(
    r"(?<!\S)(?<!mkdir )(?P<flag>--?[A-Za-z][\w.-]{0,80})(?:[ \t]+|=)"
    r"(?P<quote>[\"'])?(?P<value>(?(quote)(?:(?!(?P=quote))[^\n])+|[^\s\"'-][^\s\"']*))"
)
_NOT_SECRET = re.compile(
    r"(?i)none|null|true|false|yes|no|auto|required|optional|missing|\*+|[-+]?[0-9.]{1,5}(?:e[-+]?[0-9]+)?"
    r"|<[^>]*>|\[[^\]]*\]?|\{[^}]*\}?|\$\{?[A-Z_][A-Z0-9_]*\}?|\$\(.*|%[sdr]|%\(\w+\)s|--?[a-z][a-z_-]*"
)
_EXPRESSION = re.compile(  # `tensor(nan`, `q[:`, a type
    r"(?i)(?:self|torch|np|os|F|nn)(?:\.[a-z_]\w*)+.*|[a-z_][\w.]*[(\[].*|str|bytes|int|float|bool"
)
_TOKEN_SHAPE = re.compile(r"(?=[^A-Za-z]*[A-Za-z])[A-Za-z0-9_\-+/=.~%:]{12,}")
_KEY_SHAPE = re.compile(r"(?=[^A-Za-z]*[A-Za-z])[A-Za-z0-9_\-+/=]{20,}")
_SHORT = 5  # characters of a literal that holds no secret, quotes among them
_LITERAL = re.compile(
    r"""(?P<ticks>\"{3}|'{3}).*?(?:(?P=ticks)|\Z) | "(?:\\.|[^"\\\n])*"? | '(?:\\.|[^'\\\n])*'? | \#[^\n]*""",
    re.DOTALL | re.VERBOSE,
)
# What a message marks as source. A traceback indents it below its place, Dynamo's `from user code:` too. TorchScript
# puts `~~~ <--- HERE` into a function that it quotes from the first column, and indented lines follow.
_PLACE = r"(?m)^(?P<place>(?P<indent>[ \t|]*)File \"[^\"\n]*\", line [0-9]+.*)"
_TRACEBACK_SOURCE = re.compile(_PLACE + r"(?:\n(?P=indent)[ \t]+(?!File \")\S.*)+")
_SCRIPT_SOURCE = re.compile(_PLACE + r"\n(?:(?![ \t]*File \").*\n)*?[ \t]*~+ <--- HERE(?:\n[ \t]+(?!File \")\S.*)*")
# pytest makes a message of an asserted expression: `assert 3 == f(7)`, and ` +  where 3 = a.shape[0]` below.
# `cannot assert that` in a sentence stays.
_ASSERTED = re.compile(r"(?m)(^|\bAssertionError: )(?P<code>assert\b.*(?:\n[ \t]+.*)*)")

_LIBRARIES = re.compile(r"(?<![\w.~/\\-])(?:[A-Za-z]:)?[/\\][^\s\"':;,)>\]]*[/\\](?:site|dist)-packages[/\\]")
_ABSOLUTE = re.compile(r"(?<![\w.~:/*%<)\]-])/(?:[\w.+@-]+/)+(?P<last>[\w.+@-]+)")
_PUBLIC_FOLDERS = ("/usr/", "/lib/", "/lib64/", "/bin/", "/opt/", "/proc/", "/sys/", "/etc/", "/dev/")
_COMPILER_CACHE = re.compile(r"(?<=[/\\]torchinductor)_[\w.@-]+")  # torch names it after the user
_FOLDERS = re.compile(r"(?:(?<![\w~./-])|(?<=file://))(?:/[\w.+@-]+)+")
_NOBODY = frozenset(("admin", "jovyan", "nobody", "root", "runner", "ubuntu", "user", "vscode"))
_HOMES = re.compile(r"(?<![\w.~-])(?:/home/|/Users/|[A-Za-z]:[/\\]+Users[/\\]+)(?!\.)[^/\\\s\"':;,)>\]]+")


def redact_text(text: str) -> str:
    """Free text without credentials, home folders and this machine's name; lines of code in a traceback are source."""
    return with_code(redact_sentence(text))


def redact_sentence(text: str) -> str:
    """The same, with the marks of `quoted` around all source in it: in files, where it may be cut out later."""
    return change_quotations(quote_source(text), _redact_words, redact_source)


def without_source(text: str, lines: Set[str] = frozenset()) -> str:
    """Free text without the source that it quotes (a traceback's, TorchScript's, pytest's) and without ``lines``."""
    text = without_code(quote_source(text))
    if not lines:
        return text
    return "\n".join(line for line in text.split("\n") if line.strip() not in lines)


def quote_source(text: str) -> str:
    """A message of Python, torch or pytest with marks around the source in it, as sentences of our own have them.

    A message that has such marks keeps them.
    """
    return change_quotations(text, _quote_source, lambda code: code)


def _quote_source(message: str) -> str:
    for pattern in (_SCRIPT_SOURCE, _TRACEBACK_SOURCE):
        message = pattern.sub(_quoted_behind_place, message)
    # an asserted expression has values in it, so that a secret may stand there without a name
    return _ASSERTED.sub(lambda found: found[1] + quoted(_redact_words(found["code"])), message)


def _quoted_behind_place(found: re.Match[str]) -> str:
    return found["place"] + quoted(found[0][len(found["place"]) :])


def redact_source(code: str) -> str:
    """Python source without credentials: names stay whatever they are, literals and comments are redacted."""
    code = _ASSIGNED.sub(lambda match: _hide_assigned(match) if match["quote"] else match[0], _hide_known(code))
    code = _LITERAL.sub(lambda m: _redact_words(m[0]) if len(m[0]) > _SHORT else m[0], hide_keys(code, REDACTED))
    return _hide_places(code)


def shorten_paths(text: str) -> str:
    """Text whose absolute paths are cut to their last part, those of the system's own folders left as they are."""

    def short(match: re.Match[str]) -> str:
        return match[0] if match[0].startswith(_PUBLIC_FOLDERS) else match["last"]

    return _ABSOLUTE.sub(short, text)


def _redact_words(text: str) -> str:
    text = hide_keys(_ASSIGNED.sub(_hide_assigned, _hide_known(text)), REDACTED)
    return _hide_places(_FLAGGED.sub(_hide_flagged, _MAIL.sub(REDACTED, text)))


def _hide_known(text: str) -> str:
    """Hide what its place gives away."""
    text = _USERINFO.sub(f"{REDACTED}@", _PRIVATE_KEY.sub(REDACTED, text))
    text = _CONNECTION.sub(rf"\g<scheme>{REDACTED}", text)
    return _AUTHORIZATION.sub(_hide_authorization, text)


def _hide_authorization(match: re.Match[str]) -> str:
    """Hide anything but a word in a header, and anything but words after `bearer` alone."""
    value = match["value"]
    is_word = (value.isalpha() or match["named"] is None) and is_words(value)
    return match[0] if is_word or _NOT_SECRET.fullmatch(value) else match[0][: -len(value)] + REDACTED


def redact_argv(argv: Sequence[str]) -> list[str]:
    """A command line without credentials: ``--token VALUE``, ``--token=VALUE`` and ``hub.token=VALUE`` alike."""
    flags = ["", *argv]
    return [
        REDACTED if not word.startswith("-") and _names_secret(flag, word) else redact_text(word)
        for flag, word in zip(flags, argv, strict=False)
    ]


def redact_remote(url: str) -> str:
    """A remote's address without user name, password and query; a local folder becomes its last part."""
    parts = urlsplit(_USERINFO.sub("", url))
    if not parts.scheme:
        login, _, place = url.rpartition("@") if ":" in url else ("", "", Path(url).name)
        who = f"{login if login in _NOBODYS_LOGIN else REDACTED}@" if login else ""
        return who + redact_text(place)
    if parts.scheme == "file":
        return redact_text(Path(parts.path).name)
    host = parts.netloc.rpartition("@")[2]
    return redact_text(urlunsplit((parts.scheme, host, parts.path, "", "")))


def select_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """The environment variables that may matter to a run and hold nothing private, sorted by name."""
    return {
        name: REDACTED if _ADDRESS_VARIABLES.search(name) else redact_text(value)
        for name, value in sorted(environment.items())
        if any(fnmatch.fnmatchcase(name, allowed) for allowed in ALLOWED_VARIABLES) and not _FLAG.fullmatch(f"--{name}")
    }


def _hide_assigned(match: re.Match[str]) -> str:
    if match["quote"] is None:
        secret, value = _could_be_secret(match["value"], match), match["value"]
        return match[0][: -len(value)] + REDACTED if secret else match[0]
    value = match["quoted"]
    if match["strong"]:
        clean = REDACTED if _could_be_secret(value, match) else value
    else:  # words such as `Bearer` may stand before a token
        clean = re.sub(r"\S+", lambda word: REDACTED if _could_be_secret(word[0], match) else word[0], value)
    return match[0][: -len(value)] + clean


def _hide_flagged(match: re.Match[str]) -> str:
    value = match["value"]
    return match[0][: -len(value)] + REDACTED if _names_secret(match["flag"], value) else match[0]


def _names_secret(flag: str, value: str) -> bool:
    """True if ``value`` after ``flag`` may be the secret that this names."""
    name = _FLAG.fullmatch(flag)
    return name is not None and _could_be_secret(value, name)


def _could_be_secret(value: str, name: re.Match[str]) -> bool:
    """True if ``value`` may be what its name promises; after a weak word such as ``token`` it must look like a key."""
    if _NOT_SECRET.fullmatch(value) or (not name.groupdict().get("quote") and _EXPRESSION.fullmatch(value)):
        return False
    strong = (name["strong"] or "").lower()
    if strong == "pwd" and re.match(r"[~.]?[/\\]|[A-Za-z]:\\", value):
        return False  # the shell's working folder
    shape = _KEY_SHAPE if name["bare"] else _TOKEN_SHAPE
    return bool(strong) or (shape.fullmatch(value) is not None and not is_words(value))


def _hide_places(text: str) -> str:
    """Home folders as ``~``, the machine's name as ``localhost``, files of libraries below their folder."""
    text = _LIBRARIES.sub("", text)
    home = str(Path.home())
    if len(home) > 1:
        text = re.sub(rf"(?<![\w.~/\\-]){re.escape(home)}(?![\w.-])", "~", text)
    text = _COMPILER_CACHE.sub("", _HOMES.sub("~", text))
    if user := _user():
        folder = rf"(?<=[/\\]){re.escape(user)}(?=[/\\]|$)"
        text = _FOLDERS.sub(lambda match: re.sub(folder, "user", match[0]), text)
    host = _distinctive_host()
    return re.sub(rf"(?<![\w-]){re.escape(host)}(?![\w-])", "localhost", text) if host else text


@functools.cache
def _user() -> str | None:
    """Who runs this, where that is a name; ``root`` and the users of container images are nobody's."""
    try:
        name = getpass.getuser()
    except (OSError, KeyError, ImportError):
        return None
    return name if len(name) >= 2 and name not in _NOBODY else None


@functools.cache
def _distinctive_host() -> str | None:
    """This machine's name, or ``None`` when it is a plain word that may well stand in a text by itself."""
    host = socket.gethostname()
    is_distinctive = len(host) >= 4 and not host.startswith("localhost") and re.search(r"[0-9.-]", host)
    return host if is_distinctive else None
